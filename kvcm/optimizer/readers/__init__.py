"""Reads traces from files of every format."""

from __future__ import annotations

from kvcm.optimizer.formats import FORMATS, Progress
from kvcm.optimizer.readers.reading import read_trace, trace_of_lines

__all__ = ["FORMATS", "Progress", "read_trace", "trace_of_lines"]
