"""The report of a comparison: one HTML page with everything in it."""

from prospr.lab.report.page import write_report

__all__ = ["write_report"]
