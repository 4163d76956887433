"""Pruning inside other people's trainers. Each module needs its library, and is imported by name alone.

`prospr.integrations.huggingface` and `prospr.integrations.lightning` each have a `PruneAtStart`.
"""
