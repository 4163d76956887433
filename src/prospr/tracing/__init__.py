"""Channels followed through a network: which indices of its tensors are the same channel. Knows nothing of pruning."""

from prospr.tracing.trace import Trace, trace

__all__ = ["Trace", "trace"]
