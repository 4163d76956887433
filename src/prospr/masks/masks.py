"""Masks: which weights are kept, by parameter name."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from prospr.errors import MaskError
from prospr.masks import enforce, interop, store
from prospr.meta.shards import is_shard

__all__ = ["Masks"]


class Masks(Mapping[str, Tensor]):
    """One boolean tensor a pruned parameter, True where the weight is kept.

    >>> import torch, prospr
    >>> net = torch.nn.Linear(4, 2)
    >>> masks = prospr.Masks({"weight": torch.tensor([[1, 0, 0, 1], [0, 0, 1, 0]], dtype=torch.bool)})
    >>> masks.sparsity, masks.kept, masks.total
    (0.625, 3, 8)
    >>> masks.apply(net)                     # pruned weights are zero now and stay zero while it trains
    >>> int(net.weight.count_nonzero())
    3
    >>> masks.remove(net)                    # the zeros stay, the mask goes
    >>> print(masks)
    layer   shape  kept  of  density
    weight  2x4       3   8   37.50%
    total             3   8   37.50%

    Of a model that FSDP2 has sharded they are shards, as its parameters are. What counts them, printing too, must then
    be done on all ranks.
    """

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        for name, mask in masks.items():
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
                raise MaskError(f"{name}: a mask must be a tensor of torch.bool, and is {kind}; use mask.bool()")
            if mask.numel() == 0:
                raise MaskError(f"{name}: a mask of shape {tuple(mask.shape)} has no entries; leave it out")
        if not masks:
            raise MaskError("there are no masks; make some with prospr.select(scores, sparsity)")
        self._masks = {name: mask.detach() for name, mask in masks.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._masks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    def __eq__(self, other: object) -> bool:
        """The same names with the same entries, wherever the tensors are."""
        if not isinstance(other, Mapping):
            return NotImplemented
        return list(self) == list(other) and all(
            m.shape == other[n].shape and torch.equal(m.cpu(), other[n].cpu()) for n, m in self.items()
        )

    __hash__ = None

    @property
    def kept(self) -> int:
        """The number of weights that stay."""
        return sum(_count(m) for m in self.values())

    @property
    def total(self) -> int:
        """The number of weights there were."""
        return sum(m.numel() for m in self.values())

    @property
    def density(self) -> float:
        return self.kept / self.total

    @property
    def sparsity(self) -> float:
        return 1 - self.density

    def densities(self) -> dict[str, float]:
        """The share of weights kept, layer by layer."""
        return {name: _count(m) / m.numel() for name, m in self.items()}

    def empty(self) -> list[str]:
        """The layers that keep nothing."""
        return [name for name, m in self.items() if not _count(m)]

    def overlap(self, other: Mapping[str, Tensor]) -> float:
        """The share of the weights kept here that `other` keeps too."""
        if set(self) != set(other):
            missing = sorted(set(self) ^ set(other))[0]
            raise MaskError(f"{missing}: only one of the two masks has this layer; they are of different networks")
        for name, m in self.items():
            if m.shape != other[name].shape:
                raise MaskError(f"{name}: masks of shape {tuple(m.shape)} and {tuple(other[name].shape)} differ")
        shared = sum(_count(m & other[name].to(m.device)) for name, m in self.items())
        return shared / max(1, self.kept)

    def digest(self) -> str:
        """A hash of names, shapes and entries: equal on every machine where the masks are equal."""
        self._refuse_shards("digest")
        h = hashlib.sha256()
        for name, m in self.items():
            h.update(f"{name}{tuple(m.shape)}".encode())
            h.update(store.raw_bytes(m))
        return h.hexdigest()

    def whole(self) -> "Masks":
        """Where they are shards of a model that FSDP2 has sharded: the whole masks. To be called on all ranks."""
        return Masks({name: cast(Any, m).full_tensor() if is_shard(m) else m for name, m in self.items()})

    def to(self, device: torch.device | str) -> "Masks":
        return Masks({name: m.to(device) for name, m in self.items()})

    def apply(self, model: nn.Module) -> None:
        """Zero the pruned weights of `model` and keep them zero while it trains, by any optimizer of torch.optim.

        Parameters keep their names and identity. Each pruned layer gets a buffer `weight_mask`, so the masks travel
        with state_dict, deepcopy and pickle. Masks that are on the model already are replaced.
        """
        enforce.apply(model, self)

    def remove(self, model: nn.Module) -> None:
        """Let go of the masks; the pruned weights are zero and may train again."""
        enforce.remove(model, self)

    @classmethod
    def of(cls, model: nn.Module) -> "Masks":
        """The masks that are on a model."""
        return cls(enforce.applied(model))

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any]) -> "Masks":
        """The masks in the state_dict of a pruned model: of a checkpoint, for a dense model of the same class.

        >>> import torch, prospr
        >>> net = torch.nn.Linear(4, 2)
        >>> masks = prospr.prune(net, None, sparsity=0.5, method="magnitude")
        >>> prospr.Masks.from_state_dict(net.state_dict()) == masks
        True
        """
        found = {}
        for name, weight in state_dict.items():
            mask = state_dict.get(f"{name}_mask")
            if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == weight.shape:
                found[name] = mask
        if not found:
            raise MaskError("there are no masks in this state_dict; it is of a model that was not pruned")
        return cls(found)

    def save(self, path: str | os.PathLike[str], **notes: str) -> None:
        """Write a safetensors file, whole or not at all. `notes` are kept beside the masks (method="snip", ...)."""
        self._refuse_shards("save")
        store.save(self, path, notes)

    def _refuse_shards(self, what: str) -> None:
        if any(is_shard(m) for m in self.values()):
            raise MaskError(
                f"masks.{what}: these are shards, a part on each rank; use masks.whole() on all ranks first"
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Masks":
        """Read a file that `save` wrote; nothing in it is executed."""
        return cls(store.load(path)[0])

    def to_torch(self, model: nn.Module) -> None:
        """Put the masks on as torch.nn.utils.prune does: `weight_orig`, `weight_mask` and a hook."""
        interop.to_torch(self, model)

    @classmethod
    def from_torch(cls, model: nn.Module) -> "Masks":
        """The masks that torch.nn.utils.prune has put on a model."""
        return cls(interop.from_torch(model))

    def __repr__(self) -> str:
        return f"Masks({len(self)} layers, {self.kept} of {self.total} kept, sparsity {self.sparsity:.4f})"

    def __str__(self) -> str:
        rows = [("layer", "shape", "kept", "of", "density")]
        for name, m in self.items():
            kept, n = _count(m), m.numel()
            rows.append((name, "x".join(map(str, m.shape)), f"{kept:,}", f"{n:,}", f"{kept / n:.2%}"))
        rows.append(("total", "", f"{self.kept:,}", f"{self.total:,}", f"{self.density:.2%}"))
        return table(rows, left=2)


def _count(mask: Tensor) -> int:
    """The number of entries kept; of a shard, on all ranks, which must all ask."""
    count: Any = mask.count_nonzero()
    return int(count.full_tensor() if is_shard(count) else count)


def table(rows: list[tuple[Any, ...]], left: int) -> str:
    """Columns of text; the first `left` of them start at the left."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            str(cell).ljust(width) if i < left else str(cell).rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
