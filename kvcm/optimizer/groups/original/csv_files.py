"""The CSV files of the original: one per instance that reads, one row per read.

Fields are separated by a comma and a space, numbers have six significant digits. `CachedBlocksPerInstance` lists all
instances in the order of the configuration; there, that order is arbitrary.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from kvcm.model.names import path_component
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups.original.config import OriginalConfig
from kvcm.optimizer.groups.original.replay import OriginalReplay, Row
from kvcm.optimizer.trace import Trace

__all__ = ["HEADER", "write_original_csv"]

HEADER = (
    "TimestampUs,CachedBlocksCurrentInstance,CachedBlocksPerInstance,CachedBlocksAllInstance,InternalReadBlocks,"
    "ExternalReadBlocks,TotalReadBlocks,InternalHitBlocks,InternalHitRate,ExternalHitBlocks,ExternalHitRate,HitRate,"
    "AccInternalHitRate,AccExternalHitRate,AccHitRate"
)


def write_original_csv(trace: Trace, config: OriginalConfig, directory: Path) -> list[Path]:
    """Replay a trace and write `<instance_id>_hit_rates.csv` of each instance that reads.

    Names of files are those of the instances, percent-encoded as in design.md, decision 12.

    Args:
        trace: to be replayed.
        config: of the original.
        directory: made if it is not there.

    Returns:
        The files, in the order of the first read of each.

    Raises:
        OptionError: no instance of the trace is configured, or the files cannot be written.
    """
    replay = OriginalReplay(trace, config)
    files: dict[str, TextIO] = {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as open_files:
            for instance_id, row in replay.rows():
                if instance_id not in files:
                    path = directory / f"{path_component(instance_id)}_hit_rates.csv"
                    files[instance_id] = open_files.enter_context(path.open("w", encoding="utf-8", newline="\n"))
                    files[instance_id].write(f"{HEADER}\n")
                files[instance_id].write(_line(row))
    except OSError as error:
        raise OptionError(f"output: {directory}: {error.strerror}; allowed: a folder that can be written") from error
    return [Path(file.name) for file in files.values()]


def _line(row: Row) -> str:
    total = row.internal_read + row.external_read
    internal, external, reads = row.accumulated
    fields = (
        str(row.timestamp_us),
        str(row.cached_here),
        ";".join(map(str, row.cached)),
        str(sum(row.cached)),
        str(row.internal_read),
        str(row.external_read),
        str(total),
        str(row.internal_hits),
        _rate(row.internal_hits, total),
        str(row.external_hits),
        _rate(row.external_hits, total),
        _rate(row.internal_hits + row.external_hits, total),
        _rate(internal, reads),
        _rate(external, reads),
        _rate(internal + external, reads),
    )
    return ", ".join(fields) + "\n"


def _rate(hits: int, blocks: int) -> str:
    return f"{hits / blocks:.6g}"
