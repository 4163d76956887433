"""Bootstrap your own latent (Grill et al., 2020): a network predicts what a slower copy of it makes of another view."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prospr.errors import ModelError
from prospr.lab.seeds import derive
from prospr.meta.loss import evaluation_mode, unwrap


class Byol(nn.Module):
    """An encoder, a projector and a predictor, and the target: an encoder and a projector that follow by a moving mean.

    network: any network whose last layer is Linear. A copy of it without that layer is the encoder; what was given is
        not changed.
    example: an input it can take; it is run once, to see which Linear layer comes last.
    embedding, hidden: what the projector gives, and the width inside the projector and the predictor.
    momentum: how much of itself the target keeps at a step; see `momentum_at`.
    seed: of the projector's and the predictor's weights.

    Calling it gives the prediction of one view; `loss` takes a pair of them. The target is frozen, so `prospr.prune`
    and `prospr.meta` leave it alone. The encoder's parameters are called `encoder.` and their name in `network`.

    >>> from prospr.lab.models import build
    >>> byol = Byol(build("resnet20", seed=0, width=4), torch.zeros(2, 3, 32, 32), hidden=32)
    >>> views = torch.randn(2, 8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    >>> byol(views[0]).shape, 0 <= loss(byol, views).item() <= 8
    (torch.Size([8, 64]), True)
    """

    def __init__(
        self,
        network: nn.Module,
        example: Tensor,
        embedding: int = 64,
        hidden: int = 512,
        momentum: float = 0.99,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum is {momentum}; the target keeps a share of itself, 0 to 1")
        self.momentum = momentum
        self.classifier = find_classifier(network, example)
        self.encoder, features = without(network, self.classifier)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive("byol", seed))
            self.projector = _mlp(features, hidden, embedding)
            self.predictor = _mlp(embedding, hidden, embedding)
        place = next(self.encoder.parameters())
        self.projector.to(place)
        self.predictor.to(place)
        self.target = copy.deepcopy(nn.Sequential(self.encoder, self.projector)).requires_grad_(False)

    def forward(self, view: Tensor) -> Tensor:
        return self.predictor(self.projector(self.encoder(view)))

    def momentum_at(self, done: float) -> float:
        """The target's momentum when the share `done` of the training is over: from `momentum` to 1 by a cosine.

        >>> byol = Byol(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.zeros(1, 2), momentum=0.9)
        >>> [round(byol.momentum_at(done), 3) for done in (0, 0.5, 1)]
        [0.9, 0.95, 1.0]
        """
        return 1 - (1 - self.momentum) * (math.cos(math.pi * done) + 1) / 2

    @torch.no_grad()
    def follow(self, momentum: float | None = None) -> None:
        """Move the target: `momentum` times itself and the rest of the encoder and the projector.

        Running statistics of norm layers are the target's own: it sees the views too.
        """
        share = 1 - (self.momentum if momentum is None else momentum)
        online: list[Tensor] = [*self.encoder.parameters(), *self.projector.parameters()]
        target: list[Tensor] = list(self.target.parameters())
        torch._foreach_lerp_(target, online, share)

    def network(self, like: nn.Module, seed: int) -> nn.Module:
        """A copy of `like`, the network this was made from, with the encoder's weights and a classifier drawn anew.

        The classifier depends on the seed alone, not on the device.
        """
        result = copy.deepcopy(like)
        missing, unexpected = result.load_state_dict(self.encoder.state_dict(), strict=False)
        strange = [*(name for name in missing if not name.startswith(f"{self.classifier}.")), *unexpected]
        if strange:
            raise ModelError(f"{strange[0]}: the encoder and the network differ; give the network it was made from")
        classifier = result.get_submodule(self.classifier)
        assert isinstance(classifier, nn.Linear)
        fresh = copy.deepcopy(classifier).cpu()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive("classifier", seed))
            fresh.reset_parameters()
        classifier.load_state_dict(fresh.state_dict())
        return result


def loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a `Byol` for a pair of views, as `prospr.prune(..., loss=loss)` and `prospr.meta.pure_loss` take it.

    The squared distance of the normalised prediction of each view to the normalised target of the other, 0 to 4 each
    (equation 2 of the paper and its mirror image); no gradient goes through the target.
    """
    byol = unwrap(model)
    if not isinstance(byol, Byol):
        raise TypeError(f"this loss is of a Byol, not of a {type(byol).__name__}; make one with Byol(network, example)")
    first, second = batch[0], batch[1]
    with torch.no_grad():
        targets = byol.target(second), byol.target(first)
    return distance(model(first), targets[0]) + distance(model(second), targets[1])


def distance(predictions: Tensor, targets: Tensor) -> Tensor:
    """The mean squared distance of the rows, each scaled to length 1.

    >>> distance(torch.tensor([[3.0, 0.0], [1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 5.0]]))    # 0 and 2
    tensor(1.)
    """
    a, b = F.normalize(predictions.float(), dim=-1), F.normalize(targets.float(), dim=-1)
    return (2 - 2 * (a * b).sum(-1)).mean()


@torch.no_grad()
def find_classifier(network: nn.Module, example: Tensor) -> str:
    """The name of the Linear layer that runs last and whose output is the network's.

    >>> from prospr.lab.models import build
    >>> find_classifier(build("resnet18", width=4), torch.zeros(1, 3, 32, 32))
    'fc'
    """
    called: list[tuple[str, Tensor, Tensor]] = []
    place = next(network.parameters())

    def watch(name: str, module: nn.Module):
        return module.register_forward_hook(lambda _, inputs, output: called.append((name, inputs[0], output)))

    handles = [watch(name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    try:
        with evaluation_mode(network):
            result = network(example.to(place.device))
    finally:
        for handle in handles:
            handle.remove()
    kind = type(network).__name__
    if not called:
        raise ModelError(
            f"{kind}: no Linear layer runs, so there is no classifier to take off; use a classifier network"
        )
    name, features, output = called[-1]
    if features.dim() != 2 or not isinstance(result, Tensor) or not torch.equal(output, result):
        raise ModelError(
            f"{kind}: its last Linear layer {name!r} is no classifier: it takes {tuple(features.shape)}, or its output "
            "is not the network's; use a network that ends in a Linear layer of (images, features)"
        )
    if not name:
        raise ModelError(f"{kind}: it is the classifier itself, so nothing is left to pretrain; use a deeper network")
    return name


def without(network: nn.Module, classifier: str) -> tuple[nn.Module, int]:
    """A copy of `network` that gives what the layer `classifier` takes, and how many numbers that are."""
    encoder = copy.deepcopy(network)
    layer = encoder.get_submodule(classifier)
    assert isinstance(layer, nn.Linear)
    parent, _, attribute = classifier.rpartition(".")
    setattr(encoder.get_submodule(parent), attribute, nn.Identity())
    return encoder, layer.in_features


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.BatchNorm1d(hidden), nn.ReLU(inplace=True), nn.Linear(hidden, outputs)
    )
