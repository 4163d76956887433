"""Imported once, by the process that the ranks are forked from."""

import ranks.jobs

__all__ = ["ranks"]
