"""`kvcm optimize --sample`: hit rates that are estimated from samples of a trace instead of replayed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcm.commands.optimize_options import Outputs
from kvcm.commands.shown import print_below, print_table
from kvcm.optimizer.errors import OptionError

if TYPE_CHECKING:
    from kvcm.optimizer.study import Estimate, Progress, Sampling, StudyOptions
    from kvcm.optimizer.trace import Trace

__all__ = ["Sample", "estimate", "print_estimates", "sampling_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Whether rates are estimated, and from what."""

    sample: Annotated[
        str,
        typer.Option(
            "--sample",
            rich_help_panel="Questions",
            metavar="RATE",
            help="Estimate hit rates, with error bars, from samples of the blocks: 0.05, or 0.05:repeats=8:seed=1.",
        ),
    ] = ""


def sampling_of(sample: Sample, outputs: Outputs, traces: Sequence[Path]) -> tuple[Sampling, Outputs]:
    """Return how to sample, and the files to write.

    Raises:
        OptionError: samples cannot be drawn like that, or files are asked for that need replays.
    """
    from kvcm.optimizer.study import parse_sampling

    sampling = parse_sampling(sample.sample)
    if outputs.report or outputs.csv_original or outputs.original_config:
        raise OptionError(
            f"--sample {sample.sample}: writes neither a report nor the original's rows; allowed: --json and --csv"
        )
    return sampling, replace(outputs.or_default(traces), report=None)


def estimate(
    traces: Sequence[Trace], options: StudyOptions, sampling: Sampling, outputs: Outputs, told: Progress
) -> list[tuple[Trace, tuple[Estimate, ...]]]:
    """Estimate the rates of traces, and write them.

    Raises:
        OptionError: these cannot be estimated.
        OSError: a file cannot be written.
    """
    from kvcm.optimizer.report import rows_of, write_json
    from kvcm.optimizer.study import estimates_of
    from kvcm.optimizer.writers import write_csv

    found = [(trace, estimates_of(trace, options, sampling, told)) for trace in traces]
    rows = rows_of([(trace.name, estimates) for trace, estimates in found])
    if outputs.json_file is not None:
        write_json(rows, outputs.json_file)
    if outputs.csv_file is not None:
        write_csv(rows, outputs.csv_file)
    return found


def print_estimates(trace: Trace, estimates: Sequence[Estimate], sampling: Sampling) -> None:
    """Print a table, and what its bars are."""
    typer.echo(
        f"{trace.name}: {len(trace):,} requests, {trace.accesses:,} accesses, {trace.unique_blocks:,} blocks; "
        f"estimates from {sampling.repeats} samples of {sampling.rate:.3g} of the blocks"
    )
    print_table(
        ("policy", "blocks", "of unique", "estimate", "bar", "of hits"),
        [
            (
                each.policy,
                f"{each.capacity_blocks:,}",
                f"{each.capacity_blocks / max(1, trace.unique_blocks):.1%}",
                f"{each.hit_rate:.2%}",
                f"± {each.error:.2%}",
                each.of,
            )
            for each in estimates
        ],
        words=("of hits",),
    )
    print_below(
        "bar: how far samples differ (95 % t interval) and coarseness in size; what all samples miss is not in it"
    )
