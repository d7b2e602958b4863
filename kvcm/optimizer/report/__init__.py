"""What a study found: for people one HTML file, for programs rows as JSON and CSV."""

from __future__ import annotations

from kvcm.optimizer.report.page import page
from kvcm.optimizer.report.rows import Row, rows_of, write_json

__all__ = ["Row", "page", "rows_of", "write_json"]
