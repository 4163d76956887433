"""Imported once, by the process that the ranks are forked from."""

__all__: list[str] = []
