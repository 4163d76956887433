"""The registry: names of methods, each a product of a score and how it is used."""

from dataclasses import dataclass, replace

from prospr.errors import SettingError
from prospr.masks.patterns import Granularity
from prospr.masks.select import Scope
from prospr.schedules import Iterative
from prospr.scores import Grasp, Magnitude, NtkSap, Phew, ProsPr, Random, Score, Snip, SynFlow

__all__ = ["Method", "find", "methods"]


@dataclass(frozen=True)
class Method:
    """A product of independent choices: a score, when it prunes, what it compares, and what goes whole."""

    score: Score | Iterative
    scope: Scope = "global"
    granularity: Granularity = "weight"
    reference: str = ""
    cost: str = ""  # in training steps (one forward and backward pass)
    once: Score | None = None  # in one shot: what prospr.score gives, and what prunes channels, blocks and patterns
    once_cost: str = ""

    def suited(self, granularity: Granularity) -> "Method":
        """The method for what goes whole; `score` and `scope` may be for single weights alone."""
        if granularity == "weight" or self.once is None:
            return self
        once = self.in_one_shot()
        return replace(once, scope="balanced") if granularity == "channel" else once

    def in_one_shot(self) -> "Method":
        """The method by the score that it has for that, if it has one."""
        return (
            self
            if self.once is None
            else replace(self, score=self.once, scope="global", cost=self.once_cost, once=None)
        )

    @property
    def rule(self) -> Iterative:
        """One shot is one round."""
        return self.score if isinstance(self.score, Iterative) else Iterative(self.score, rounds=1)


_ONE_SHOT = "4 a meta-step, 20 for the learning rate"
_METHODS = {
    "prospr": Method(
        Iterative(ProsPr(), rounds=20, redraw=True),
        scope="mapped",
        reference="Alizadeh et al., ICLR 2022; here in 20 rounds, layers balanced by what they make, weights redrawn",
        cost="610",
        once=ProsPr(),
        once_cost=_ONE_SHOT,
    ),
    "prospr-one-shot": Method(ProsPr(), reference="Alizadeh et al., ICLR 2022", cost=_ONE_SHOT),
    "prospr-first": Method(
        ProsPr(order="first"), reference="Alizadeh et al., ICLR 2022", cost="1 a meta-step, 17 for the learning rate"
    ),
    "prospr-published": Method(
        ProsPr(lr=0.5, momentum=0.9, detach_first=True),
        reference="the settings of the code published with the paper",
        cost="4 a meta-step",
    ),
    "prospr-iterative": Method(Iterative(ProsPr(), rounds=20), reference="ProsPr's score, 20 rounds", cost="660"),
    "snip": Method(Snip(), reference="Lee et al., ICLR 2019", cost="1"),
    "snip-mb": Method(Snip(batches=10), reference="Lee et al., ICLR 2019, mean of ten batches", cost="10"),
    "iter-snip": Method(Iterative(Snip(), rounds=60), reference="de Jorge et al., ICLR 2021", cost="60"),
    "force": Method(Iterative(Snip(), rounds=60, recover=True), reference="de Jorge et al., ICLR 2021", cost="60"),
    "grasp": Method(Grasp(), reference="Wang et al., ICLR 2020", cost="4"),
    "grasp-mb": Method(Grasp(batches=10), reference="Wang et al., ICLR 2020, mean of ten batches", cost="40"),
    "3sp": Method(
        Snip(),
        granularity="channel",
        reference="van Amersfoort et al., 2020",
        cost="2",
    ),
    "synflow": Method(
        Iterative(SynFlow(), rounds=100), reference="Tanaka et al., NeurIPS 2020", cost="100 of one sample"
    ),
    "ntk-sap": Method(Iterative(NtkSap(), rounds=20), reference="Wang et al., ICLR 2023", cost="345"),
    "phew": Method(Phew(), reference="Patil and Dovrolis, ICML 2021", cost="3"),
    "magnitude": Method(Magnitude(), reference="Han et al., NeurIPS 2015, here at initialization", cost="0"),
    "random": Method(Random(), reference="the baseline", cost="0"),
    "erk": Method(Random(), scope="erk", reference="Evci et al., ICML 2020", cost="0"),
}


def methods() -> dict[str, Method]:
    """Every method by name.

    >>> import prospr
    >>> prospr.methods()["snip"].reference
    'Lee et al., ICLR 2019'
    """
    return dict(_METHODS)


def find(method: "str | Score | Iterative | Method") -> Method:
    """A method by name, or one made of a score."""
    if isinstance(method, Method):
        return method
    if isinstance(method, (Score, Iterative)):
        return Method(method)
    if not isinstance(method, str) or method not in _METHODS:
        raise SettingError(f"method={method!r} is not known; use one of {', '.join(_METHODS)}, or a prospr.Score")
    return _METHODS[method]
