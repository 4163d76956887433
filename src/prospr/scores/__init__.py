"""What a weight is worth: one file a score."""

from prospr.scores.base import Problem, Score, Scores, prunable
from prospr.scores.magnitude import Magnitude
from prospr.scores.prospr import ProsPr, Snip
from prospr.scores.random import Random

__all__ = ["Magnitude", "Problem", "ProsPr", "Random", "Score", "Scores", "Snip", "prunable"]
