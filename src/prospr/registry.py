"""The registry: names of methods, each a product of a score and how it is used."""

from dataclasses import dataclass

from prospr.errors import SettingError
from prospr.masks.select import Scope
from prospr.scores import Magnitude, ProsPr, Random, Score, Snip

__all__ = ["Method", "find", "methods"]


@dataclass(frozen=True)
class Method:
    """A score and the scope it is compared in."""

    score: Score
    scope: Scope = "global"
    reference: str = ""
    cost: str = ""  # in training steps (one forward and backward pass)


_METHODS = {
    "prospr": Method(ProsPr(), reference="Alizadeh et al., ICLR 2022", cost="about 4 a meta-step"),
    "prospr-first": Method(ProsPr(order="first"), reference="Alizadeh et al., ICLR 2022", cost="1 a meta-step"),
    "prospr-published": Method(
        ProsPr(lr=0.5, momentum=0.9, detach_first=True),
        reference="the settings of the code published with the paper",
        cost="about 4 a meta-step",
    ),
    "snip": Method(Snip(), reference="Lee et al., ICLR 2019", cost="1"),
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


def find(method: "str | Score | Method") -> Method:
    """A method by name, or one made of a score."""
    if isinstance(method, Method):
        return method
    if isinstance(method, Score):
        return Method(method)
    if not isinstance(method, str) or method not in _METHODS:
        raise SettingError(f"method={method!r} is not known; use one of {', '.join(_METHODS)}, or a prospr.Score")
    return _METHODS[method]
