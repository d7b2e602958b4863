"""`kvcm optimize --csv-original`: what the original optimizer would write of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvcm.commands.optimize_options import Outputs, Reading
from kvcm.optimizer.errors import OptionError

if TYPE_CHECKING:
    from kvcm.optimizer.groups.original import OriginalConfig
    from kvcm.optimizer.study import StudyOptions
    from kvcm.optimizer.trace import Trace

__all__ = ["write_original"]


def write_original(traces: Sequence[Path], reading: Reading, options: StudyOptions, outputs: Outputs) -> None:
    """Write the files of the one trace.

    Raises:
        OptionError: there are several traces, no folder, or options that the original does not have.
        TraceError: the trace cannot be read.
        OSError: the configuration cannot be read.
    """
    from kvcm.optimizer.groups.original import OriginalConfig, write_original_csv
    from kvcm.optimizer.readers import read_trace

    if outputs.csv_original is None:
        raise OptionError("--original-config: is of no use alone; allowed: together with --csv-original DIR")
    if len(traces) != 1:
        raise OptionError(f"--csv-original: {len(traces)} traces were given; allowed: one")
    config = None
    if outputs.original_config is not None:
        config = OriginalConfig.parse(outputs.original_config.read_bytes())
    trace = read_trace(
        traces[0],
        format=reading.trace_format or (config.trace_type if config else None),
        block_tokens=config.block_sizes if config else reading.block_tokens or None,
        use_cache=not reading.no_cache,
    )
    for path in write_original_csv(trace, config or _plain(trace, options), outputs.csv_original):
        typer.echo(f"wrote {path}")


def _plain(trace: Trace, options: StudyOptions) -> OriginalConfig:
    from kvcm.optimizer.capacities import parse_capacities
    from kvcm.optimizer.groups.original import OriginalConfig

    capacities = parse_capacities(options.capacities, trace.unique_blocks)
    if len(options.policies) != 1 or len(capacities) != 1:
        raise OptionError(
            f"--csv-original: {len(options.policies)} policies and {len(capacities)} capacities were given; "
            "allowed: one "
            "of each, such as --policies lru --capacities 10%, or --original-config"
        )
    return OriginalConfig.plain(trace.instance_names, capacities[0], policy=options.policies[0].name)
