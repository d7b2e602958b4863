"""Writes traces to files: in another format, or with nothing in them that tells whose they are."""

from __future__ import annotations

from kvcm.optimizer.writers.anonymiser import Anonymised, anonymise
from kvcm.optimizer.writers.output import refuse_taken, write_whole
from kvcm.optimizer.writers.pseudonyms import Pseudonyms
from kvcm.optimizer.writers.registry import WRITERS, lost_in, write_trace
from kvcm.optimizer.writers.rows import write_csv

__all__ = [
    "WRITERS",
    "Anonymised",
    "Pseudonyms",
    "anonymise",
    "lost_in",
    "refuse_taken",
    "write_csv",
    "write_trace",
    "write_whole",
]
