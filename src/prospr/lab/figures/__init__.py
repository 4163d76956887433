"""Figures of runs for a paper: PDF, SVG or PNG, one figure a file. They need matplotlib; nothing here imports torch.

The same runs give the same bytes, with the same release of matplotlib.
"""

from prospr.lab.figures.write import FORMATS, KINDS, write_figures

__all__ = ["FORMATS", "KINDS", "write_figures"]
