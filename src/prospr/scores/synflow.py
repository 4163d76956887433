"""SynFlow: how much of the network's whole flow passes through a weight, without data (Tanaka et al., NeurIPS 2020)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from prospr.errors import SettingError
from prospr.meta.batches import map_tensors
from prospr.meta.loss import Call, evaluation_mode, one_sample
from prospr.scores.base import Problem, Score, Scores, outputs

__all__ = ["SynFlow"]


@dataclass(frozen=True)
class SynFlow(Score):
    """w dR/dw, R the sum of the outputs for an input of ones with every parameter replaced by its size; equation 4.

    In eval mode and float64: the products of many layers leave float32. A network that insists on its own kind of
    numbers has them. Only the shape of one sample is looked at, or of the batch where the network does not take one
    (integer inputs, such as tokens, are used as they are). Meant for many rounds (method="synflow" takes 100): in one
    shot it empties layers.

    scale: the input is ones times this. It changes nothing for ReLU and layers without bias. Activations that saturate
        (ReLU6, Hardswish) pass no gradient where every weight is positive and signals add up; a small scale, such as
        1e-20, keeps them in the range where they are linear.

    >>> import torch, prospr
    >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.ReLU(), torch.nn.Linear(8, 2, bias=False))
    >>> scores = prospr.score(net, [(torch.randn(1, 4), torch.tensor([0]))], method=prospr.SynFlow())
    >>> [round(s.sum().item(), 4) for s in scores.values()]             # what flows in flows out: the layers are equal
    [0.5, 0.5]
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise SettingError(f"SynFlow(scale={self.scale!r}): use a positive number")

    def saliency(self, problem: Problem) -> Scores:
        whole, failed = problem.known_call("SynFlow"), []
        for double in (True, False):
            for call in (one_sample(whole), whole):
                try:
                    return self._through(problem, call, double)
                except (RuntimeError, TypeError, ValueError, IndexError) as error:
                    failed.append(error)
        raise failed[0]

    def _through(self, problem: Problem, call: Call, double: bool) -> Scores:
        wide = _double if double else lambda t: t
        args, kwargs = map_tensors(call, lambda t: torch.full_like(wide(t), self.scale) if _real(t) else t)

        def flow_of(model, _):
            out = model(*args, **kwargs)
            return torch.stack([t.sum() for t in outputs(out)]).sum()

        pure = problem.pure_loss(flow_of)
        params = {name: wide(p).abs().requires_grad_() for name, p in problem.start(pure).items()}
        frozen = {n: wide(p.detach()).abs() for n, p in pure.model.named_parameters() if n not in params}
        with torch.enable_grad(), evaluation_mode(pure.model), pure.swapped({**params, **frozen}):
            for module in pure.model.modules():
                for key, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[key] = wide(buffer)
            flow = pure.evaluate(None)
            wanted = [params[name] for name in problem.names]
            grads = torch.autograd.grad(flow, wanted, allow_unused=True, materialize_grads=True)
        sizes = {name: w.double().abs() for name, w in problem.weights().items()}
        return {name: sizes[name] * g for name, g in zip(problem.names, grads, strict=True)}


def _real(t: Tensor) -> bool:
    return t.is_floating_point()


def _double(t: Tensor) -> Tensor:
    return t.double() if _real(t) else t
