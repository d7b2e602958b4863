"""Replays traces as the original optimizer does, and writes what it writes (wire.md 12)."""

from __future__ import annotations

from kvcm.optimizer.groups.original.config import OriginalConfig, OriginalGroup, OriginalInstance, OriginalStorage
from kvcm.optimizer.groups.original.csv_files import HEADER, write_original_csv
from kvcm.optimizer.groups.original.replay import OriginalReplay, Row

__all__ = [
    "HEADER",
    "OriginalConfig",
    "OriginalGroup",
    "OriginalInstance",
    "OriginalReplay",
    "OriginalStorage",
    "Row",
    "write_original_csv",
]
