"""What a weight is worth: one file a score."""

from prospr.scores.base import Problem, Score, Scores, prunable
from prospr.scores.grasp import Grasp
from prospr.scores.magnitude import Magnitude
from prospr.scores.ntksap import NtkSap
from prospr.scores.phew import Phew
from prospr.scores.prospr import ProsPr, Snip
from prospr.scores.random import Random
from prospr.scores.synflow import SynFlow

__all__ = [
    "Grasp",
    "Magnitude",
    "NtkSap",
    "Phew",
    "Problem",
    "ProsPr",
    "Random",
    "Score",
    "Scores",
    "Snip",
    "SynFlow",
    "prunable",
]
