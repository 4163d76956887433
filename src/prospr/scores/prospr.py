"""ProsPr: how much a weight matters after a few steps of training (Alizadeh et al., ICLR 2022)."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from prospr.errors import BatchError, DerivativeError, SettingError
from prospr.meta.curvature import check_kappa, stable_lr
from prospr.meta.loss import training_mode
from prospr.meta.metagrad import Order, Trace, adjoint, check_order
from prospr.meta.optimizers import SGD, Optimizer
from prospr.meta.products import Mode, Products
from prospr.meta.trajectory import Store, trajectory
from prospr.scores.base import Problem, Score, Scores

__all__ = ["ProsPr", "Snip"]


@dataclass(frozen=True)
class ProsPr(Score):
    """|dL(w_M, D_M) / dc|, where w_0 = c w_init and w_M comes from M steps of SGD; equation 10 of the paper.

    method="prospr", the default of `prospr.prune`, uses it in 20 rounds, each with the initial weights in another
    order, on scores as shares of their layer. In one shot what scores highest sits in few channels of few layers, and
    trains worse: on ResNet-20 by 0.8, 0.9, 2.8 and 3.8 points at 73.8, 89.3, 95.6 and 98.2 %. Shares count for less in
    convolutions of small feature maps, which on VGG-16 brings 1.2 points at 98.2 %, and no output of the network or
    entry of an embedding is left out for being rare, which lowers a small GPT's loss from 2.37 to 2.14 (scope="mapped";
    docs/findings.md). Given as it is, this score is used once: method=ProsPr() is "prospr-one-shot".

    steps: M; M + 1 batches are read. 0 is SNIP.
    lr: of the inner steps; "auto" is kappa / |lambda|, lambda the Hessian's largest eigenvalue in size. With kappa = 1
        the derivative was measured hardly to grow on its way back (ResNet-20, one seed: by 5 % a step, against 77 % at
        lr = 0.1), so the ranking is not that of one direction; see docs/measurements.md.
    momentum, dampening, nesterov, weight_decay: as in torch.optim.SGD.
    order: "exact", or "first": the M steps are taken, all curvature is dropped.
    detach_first: cut the first momentum buffer, as the published code does.
    same_batch: all steps see the first batch, as in the paper's table on the number of steps.
    optimizer: inner steps by another optimizer, such as prospr.meta.AdamW(lr=1e-3), in place of SGD.
    store, mode, micro_batch, capture, trace: see prospr.meta.metagrad.

    >>> import torch, prospr
    >>> batches = [(torch.randn(8, 5), torch.randint(0, 3, (8,))) for _ in range(4)]
    >>> scores = prospr.score(torch.nn.Linear(5, 3), batches, method=prospr.ProsPr(steps=3, lr=0.1, momentum=0.9))
    >>> round(sum(s.sum().item() for s in scores.values()), 4)
    1.0
    """

    steps: int = 3
    lr: float | Literal["auto"] = "auto"
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    order: Order = "exact"
    detach_first: bool = False
    same_batch: bool = False
    kappa: float = 1.0
    optimizer: Optimizer | None = None
    store: Store = "device"
    mode: Mode = "auto"
    micro_batch: int | None = None
    capture: bool = True
    trace: Trace | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.steps, int) or self.steps < 0:
            raise SettingError(f"ProsPr(steps={self.steps!r}): use a whole number, 0 or more")
        if isinstance(self.lr, str) and self.lr != "auto":
            raise SettingError(f"ProsPr(lr={self.lr!r}): use a number or 'auto'")
        # What takes these settings checks them: now, not after the scoring.
        check_kappa(self.kappa)
        check_order(self.order)
        trajectory(self.store, 0, lambda *_: None)  # ty: ignore[invalid-argument-type]
        Products(lambda *_: torch.zeros(()), mode=self.mode, micro_batch=self.micro_batch)
        self._optimizer(0.1 if self.lr == "auto" else self.lr)

    def saliency(self, problem: Problem) -> Scores:
        loss = problem.pure_loss()
        params = problem.start(loss)
        batches: Iterable[Any] = problem.data()
        first = list(itertools.islice(batches, 1))
        if not first:
            raise BatchError("batches is empty; pass at least one batch (was it an iterator that is used up?)")
        batches = first * (self.steps + 1) if self.same_batch else itertools.chain(first, batches)
        with training_mode(problem.model):
            lr = self.lr
            if lr == "auto":
                lr = self._stable_lr(loss, params, first[0], problem) if self.steps > 0 else 0.0
            products = problem.products(loss, mode=self.mode, micro_batch=self.micro_batch, capture=self.capture)
            lam, _ = adjoint(
                products,
                params,
                batches,
                self._optimizer(lr),
                steps=self.steps,
                order=self.order,
                store=self.store,
                trace=self.trace,
            )
        # c enters at w_0 = c w_init alone, so dL/dc = w_init dL/dw_0
        weights = problem.weights()
        return {name: weights[name] * lam[name] for name in problem.names}

    def _optimizer(self, lr: float) -> Optimizer:
        if self.optimizer is not None:
            return self.optimizer
        return SGD(lr, self.momentum, self.dampening, self.weight_decay, self.nesterov, self.detach_first)

    def _stable_lr(self, loss, params: dict[str, Tensor], batch: Any, problem: Problem) -> float:
        if self.optimizer is not None:
            return 0.0  # it has its own
        settings = {"mode": self.mode, "micro_batch": self.micro_batch, "seed": problem.seed, "team": problem.team}
        try:
            return stable_lr(loss, params, batch, kappa=self.kappa, **settings)
        except DerivativeError as error:
            raise DerivativeError(f'lr="auto" measures curvature: {error}. Or give a number, as in lr=0.1') from error


@dataclass(frozen=True)
class Snip(Score):
    """|w dL/dw| (Lee et al., ICLR 2019): ProsPr with no steps.

    batches: dL/dw is the mean over so many batches (SNIP-MB for more than one).

    >>> import torch, prospr
    >>> net, batch = torch.nn.Linear(5, 3), (torch.randn(8, 5), torch.randint(0, 3, (8,)))
    >>> a = prospr.score(net, [batch], method="snip")
    >>> b = prospr.score(net, [batch], method=prospr.ProsPr(steps=0))
    >>> torch.equal(a["weight"], b["weight"])
    True
    """

    batches: int = 1
    micro_batch: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.batches, int) or self.batches < 1:
            raise SettingError(f"Snip(batches={self.batches!r}): use a whole number, 1 or more")

    def saliency(self, problem: Problem) -> Scores:
        one, parts = ProsPr(steps=0, micro_batch=self.micro_batch), []
        for read in range(self.batches):
            if read and problem.batches is not None and not problem.batches.more():
                raise BatchError(f"batches holds {read}, and Snip(batches={self.batches}) reads {self.batches}")
            parts.append(one.saliency(problem))
        return {name: torch.stack([part[name] for part in parts]).mean(0) for name in parts[0]}
