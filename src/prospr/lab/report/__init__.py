"""The report of a comparison or of run folders: one HTML page with everything in it."""

from prospr.lab.report.page import write_report
from prospr.lab.report.runs import report_runs

__all__ = ["report_runs", "write_report"]
