"""Structured pruning: which channels go together, which of them go, and the smaller network without them."""

from prospr.channels.groups import Groups, groups
from prospr.channels.plan import Plan
from prospr.channels.shrink import plan, shrink
from prospr.channels.size import Size

__all__ = ["Groups", "Plan", "Size", "groups", "plan", "shrink"]
