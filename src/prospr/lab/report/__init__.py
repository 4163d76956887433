"""The report of run folders: one HTML page with everything in it."""

from prospr.lab.report.runs import report_runs

__all__ = ["report_runs"]
