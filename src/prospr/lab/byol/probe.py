"""How good a network's features are: a Linear layer is trained on them, the network is not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from prospr.lab.byol.network import find_classifier, without
from prospr.lab.data import Dataset, Split
from prospr.meta.loss import evaluation_mode

BATCH = 1000


def linear_probe(network: nn.Module, data: Dataset[Split], *, decay: float = 1e-3, iterations: int = 200) -> float:
    """The test accuracy (0 to 1) of a Linear layer on the frozen features of `network`, trained on all of `data.train`.

    The features are what the network's own classifier takes, computed once, without augmentation, and standardised.
    Norm layers use statistics of the training images, so that a network that was never trained is not at a
    disadvantage. The problem is convex (cross-entropy and `decay` / 2 times the squared weights) and solved by L-BFGS
    from zero: nothing is random. The network is not changed.

    >>> from prospr.lab.data import digits
    >>> from prospr.lab.models import build
    >>> linear_probe(build("small_convnet", seed=0), digits()) > 0.5
    True
    """
    device = next(network.parameters()).device
    data = data.to(device)
    encoder, _ = without(network, find_classifier(network, data.train.inputs(0, 2)))
    _measure_norms(encoder, data.train)
    train, test = features(encoder, data.train), features(encoder, data.test)
    mean, deviation = train.mean(0), train.std(0)
    deviation = torch.where(deviation > 0, deviation, 1.0)
    layer = _fit((train - mean) / deviation, data.train.labels, data.num_classes, decay, iterations)
    with torch.no_grad():
        right = (layer((test - mean) / deviation).argmax(1) == data.test.labels).float().mean()
    return right.item()


@torch.no_grad()
def features(encoder: nn.Module, part: Split) -> Tensor:
    """What `encoder` gives for every image of `part`, in eval mode, which it is left out of again."""
    with evaluation_mode(encoder):
        pieces = [encoder(part.inputs(start, start + BATCH)).float() for start in range(0, len(part), BATCH)]
    return torch.cat(pieces)


@torch.no_grad()
def _measure_norms(encoder: nn.Module, part: Split) -> None:
    """Set the running statistics of batch norms to their mean over the images of `part`."""
    norms = [m for m in encoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
    encoder.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over the batches
        norm.train()
    last = max(1, len(part) // BATCH) * BATCH  # a few images left over would weigh as much as a batch
    for start in range(0, min(last, len(part)), BATCH):
        encoder(part.inputs(start, start + BATCH))


def _fit(inputs: Tensor, labels: Tensor, classes: int, decay: float, iterations: int) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, inputs.shape[1], classes, device=inputs.device)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=iterations, line_search_fn="strong_wolfe")

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(layer(inputs), labels) + decay / 2 * layer.weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(evaluate)
    return layer
