"""A named data set, and how a validation part is taken from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from prospr.lab.seeds import generator


class Part(Protocol):
    """What `Split` (in memory) and `Files` (decoded as they are needed) have in common."""

    @property
    def labels(self) -> Tensor: ...
    @property
    def mean(self) -> Tensor | None: ...
    @property
    def std(self) -> Tensor | None: ...
    def __len__(self) -> int: ...
    def to(self, device: torch.device | str) -> Any: ...
    def select(self, chosen: Tensor) -> Any: ...


P = TypeVar("P", bound=Part)


@dataclass(frozen=True)
class Dataset(Generic[P]):
    """A named data set: a part to train on, a part to test on and, after `split_validation`, a part to choose by."""

    name: str
    train: P
    test: P
    num_classes: int
    validation: P | None = None
    classes: tuple[str, ...] = ()
    """The classes' names where they are known."""

    @property
    def mean(self) -> Tensor | None:
        """The mean of each channel, 0 to 255; None where the images are normalised already."""
        return self.train.mean

    @property
    def std(self) -> Tensor | None:
        """The deviation of each channel, 0 to 255; None where the images are normalised already."""
        return self.train.std

    def to(self, device: torch.device | str) -> Dataset[P]:
        return self._each(lambda part: part.to(device))

    def normalised_by(self, mean: Sequence[float], std: Sequence[float]) -> Dataset[P]:
        """The same data with another `mean` and `std`, 0 to 1 as papers give them."""
        if self.train.mean is None:
            raise ValueError(f"{self.name}: the images are normalised already; take a data set of uint8 images")
        if len(mean) != len(self.train.mean) or len(std) != len(self.train.mean) or min(std) <= 0:
            raise ValueError(
                f"{self.name}: mean {list(mean)} and std {list(std)}; give {len(self.train.mean)} numbers each, "
                "one a channel, std above 0"
            )
        device = self.train.mean.device
        values = {"mean": torch.tensor(mean, device=device) * 255, "std": torch.tensor(std, device=device) * 255}
        return self._each(lambda part: replace(part, **values))

    def split_validation(self, share: float | None = None, *, count: int | None = None, seed: int = 0) -> Dataset[P]:
        """The data set with `share` (or `count` images) of its training part as the validation part.

        Each class gives its share to within one image; which images depends on the seed alone. `mean` and `std` stay
        those of the whole training part. The test part is not touched.

        >>> from prospr.lab.data import digits
        >>> data = digits().split_validation(0.1, seed=0)
        >>> len(data.train), len(data.validation), len(data.test)
        (1293, 144, 360)
        """
        n = len(self.train)
        if (share is None) == (count is None):
            raise ValueError(f"share is {share} and count is {count}; give one of them")
        if share is not None:
            if not 0 < share < 1:
                raise ValueError(f"share is {share}; it must lie between 0 and 1")
            count = round(share * n)
        assert count is not None
        if not 0 < count < n:
            raise ValueError(f"{count} of {n} training images for validation; give at least 1 and fewer than {n}")
        rest, held_out = hold_out(self.train.labels, count, seed)
        return replace(self, train=self.train.select(rest), validation=self.train.select(held_out))

    def _each(self, change: Any) -> Dataset[P]:
        validation = None if self.validation is None else change(self.validation)
        return replace(self, train=change(self.train), test=change(self.test), validation=validation)


def hold_out(labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The positions left and the `count` positions held out, both ascending; classes in proportion, to within one.

    Label maps have no class of their own: their positions are drawn alike.

    >>> rest, held_out = hold_out(torch.tensor([0, 0, 0, 0, 1, 1]), count=3, seed=0)
    >>> torch.tensor([0, 0, 0, 0, 1, 1])[held_out]
    tensor([0, 0, 1])
    """
    labels = labels.cpu() if labels.dim() == 1 else torch.zeros(len(labels), dtype=torch.long)
    n = len(labels)
    classes, sizes = labels.unique(return_counts=True)
    whole = sizes * count // n
    # The images that the rounding left over go to the classes it took most from, the lower class first.
    lost = (sizes * count - whole * n).argsort(descending=True, stable=True)
    whole[lost[: count - int(whole.sum())]] += 1
    rng = generator("validation", seed)
    chosen = torch.zeros(n, dtype=torch.bool)
    for label, size, take in zip(classes, sizes, whole, strict=True):
        members = (labels == label).nonzero().flatten()
        chosen[members[torch.randperm(int(size), generator=rng)[: int(take)]]] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()
