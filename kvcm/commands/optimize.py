"""`kvcm optimize`: what capacity, policy and tiers would give on a recorded trace, and what that is worth."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvcm.commands.connection import Connection
from kvcm.commands.optimize_live import Live, tune
from kvcm.commands.optimize_options import Asking, Outputs, Reading
from kvcm.commands.optimize_original import write_original
from kvcm.commands.optimize_sample import Sample, estimate, print_estimates, sampling_of
from kvcm.commands.options import with_options
from kvcm.commands.shown import print_below, print_table
from kvcm.optimizer.errors import OptionError
from kvcm.refusals import CANNOT_RUN, refusals, refuse_to_run
from kvcm.refusals import asking as asking_manager

if TYPE_CHECKING:
    from kvcm.optimizer.replay import Mode
    from kvcm.optimizer.results import Replay
    from kvcm.optimizer.study import Progress as Told
    from kvcm.optimizer.study import Sampling, Study, StudyOptions
    from kvcm.optimizer.trace import Trace

__all__ = ["optimize"]

_SHOWN_BAD_LINES = 5
_MOST_WORKERS = 1024


@with_options
def optimize(
    reading: Reading,
    asking: Asking,
    sample: Sample,
    outputs: Outputs,
    live: Live,
    connection: Connection,
    traces: Annotated[
        list[Path] | None, typer.Argument(metavar="TRACE", help="Recorded accesses, plain or .gz; several.")
    ] = None,
) -> None:
    """Replay traces, and say what cache is worth having: policy, capacity, tiers, pooling, GPUs and money.

    With --from, say which settings would suit a running manager better, by the accesses that it keeps.
    """
    if bool(traces) == bool(live.url):
        refuse_to_run("give traces, or --from URL of a running manager; kvcm optimize -h shows how")
    if live.url:
        _tune(connection, live, asking, sample, outputs)
        return
    if live.apply:
        refuse_to_run("--apply changes a running manager; allowed: together with --from URL")
    traces = traces or []
    with refusals(CANNOT_RUN):
        _require_optimizer()
        if sample.sample:
            _estimate(traces, reading, _options(asking), *sampling_of(sample, outputs, traces))
            return
        outputs = outputs.or_default(traces)
        options = _options(asking)
        if outputs.csv_original is not None or outputs.original_config is not None:
            write_original(traces, reading, options, outputs)
        if not outputs.written:
            return
        with _bar() as told:
            loaded = _loaded(traces, reading, told)
            if outputs.report is not None:
                counted = _report(loaded, options, outputs.report, told)
            else:
                counted = _rows(loaded, options, told)
        _write_rows(counted, outputs)
    for trace, replays in counted:
        _print_rows(trace, replays)
    _print_written(outputs)


def _tune(connection: Connection, live: Live, asking: Asking, sample: Sample, outputs: Outputs) -> None:
    if sample.sample:
        refuse_to_run(f"--sample {sample.sample}: nothing is estimated with --from; allowed: with traces")
    if outputs.csv_original:
        refuse_to_run("--from writes no rows of the original; allowed: --report, --json and --csv")
    with asking_manager():
        client = connection.at(live.url)
        tune(client, live, _workers(asking.workers), outputs)


def _estimate(
    paths: Sequence[Path], reading: Reading, options: StudyOptions, sampling: Sampling, outputs: Outputs
) -> None:
    with _bar() as told:
        found = estimate(_loaded(paths, reading, told), options, sampling, outputs, told)
    for trace, estimates in found:
        print_estimates(trace, estimates, sampling)
    _print_written(outputs)


def _print_written(outputs: Outputs) -> None:
    print_below(*(f"wrote {path}" for path in outputs.written))


def _require_optimizer() -> None:
    try:
        import matplotlib as _matplotlib  # noqa: F401 - whether it is there
        import numba as _numba  # noqa: F401 - whether it is there
    except ModuleNotFoundError as missing:
        refuse_to_run(f"{missing.name} is not installed; this needs: pip install 'kvcm[optimizer]'")


def _options(asking: Asking) -> StudyOptions:
    from kvcm.optimizer.policy_spec import parse_policies
    from kvcm.optimizer.roi import parse_deployment
    from kvcm.optimizer.study import StudyOptions

    return StudyOptions(
        policies=parse_policies(asking.policies),
        capacities=asking.capacities,
        mode=_mode(asking.mode),
        workers=_workers(asking.workers),
        deployment=parse_deployment(asking.deployment),
        deployment_name=asking.deployment,
        tiers=asking.tiers,
        engines=asking.engines,
    )


def _mode(text: str) -> Mode:
    if text == "block":
        return "block"
    if text == "request":
        return "request"
    raise OptionError(f"--mode is {text!r}; allowed: block, request")


def _workers(wanted: int) -> int:
    if not 0 <= wanted <= _MOST_WORKERS:
        raise OptionError(f"--workers is {wanted}; allowed: 1 to {_MOST_WORKERS}, or 0 for one per core")
    return wanted or len(os.sched_getaffinity(0))


def _loaded(paths: Sequence[Path], reading: Reading, told: Told) -> list[Trace]:
    return _named_apart([_load(path, reading, told) for path in paths], paths)


def _load(path: Path, reading: Reading, told: Told) -> Trace:
    from kvcm.optimizer.readers import read_trace

    if reading.block_tokens < 0:
        raise OptionError(f"--block-tokens is {reading.block_tokens}; allowed: 1 or more, or 0 to infer it")
    trace = read_trace(
        path,
        format=reading.trace_format or None,
        block_tokens=reading.block_tokens or None,
        use_cache=not reading.no_cache,
        progress=lambda done, total: told(f"loading {path.name}", done, total),
    )
    for bad in trace.bad_lines[:_SHOWN_BAD_LINES]:
        typer.echo(f"kvcm: {path}:{bad.number}: {bad.reason}", err=True)
    for sentence in trace.assumed:
        typer.echo(f"kvcm: {path}: {sentence}", err=True)
    if trace.bad_line_count:
        typer.echo(f"kvcm: {path}: bad lines left out: {trace.bad_line_count:,}", err=True)
    return trace


def _named_apart(traces: Sequence[Trace], paths: Sequence[Path]) -> list[Trace]:
    """Return the traces, those with the name of another one called by their paths."""
    names = [trace.name for trace in traces]
    if len(set(paths)) < len(paths):
        raise OptionError(f"TRACE: {', '.join(map(str, paths))} has one of them twice; allowed: each once")
    return [
        trace if names.count(trace.name) == 1 else replace(trace, name=str(path))
        for trace, path in zip(traces, paths, strict=True)
    ]


def _rows(traces: Sequence[Trace], options: StudyOptions, told: Told) -> list[tuple[Trace, tuple[Replay, ...]]]:
    from kvcm.optimizer.study import replays_of

    return [(trace, replays_of(trace, options, told)) for trace in traces]


def _report(
    traces: Sequence[Trace], options: StudyOptions, path: Path, told: Told
) -> list[tuple[Trace, tuple[Replay, ...]]]:
    from kvcm.optimizer.report import page
    from kvcm.optimizer.study import study_of
    from kvcm.optimizer.writers import write_whole

    studies: list[Study] = [study_of(trace, options, told) for trace in traces]
    write_whole(path, page(studies, told))
    return [(study.trace, study.replays) for study in studies]


def _write_rows(counted: Sequence[tuple[Trace, Sequence[Replay]]], outputs: Outputs) -> None:
    from kvcm.optimizer.report import rows_of, write_json
    from kvcm.optimizer.writers import write_csv

    rows = rows_of([(trace.name, replays) for trace, replays in counted])
    if outputs.json_file is not None:
        write_json(rows, outputs.json_file)
    if outputs.csv_file is not None:
        write_csv(rows, outputs.csv_file)


@contextmanager
def _bar() -> Iterator[Told]:
    """Yield what is told what is done, and how much of it: a bar each where somebody watches, nothing elsewhere."""
    watched = Console(stderr=True)
    if not watched.is_terminal:
        yield lambda _what, _done, _total: None
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=watched, transient=True) as shown:
        tasks = {}

        def told(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=None)
            shown.update(tasks[what], completed=done, total=total)

        yield told


def _print_rows(trace: Trace, replays: Sequence[Replay]) -> None:
    typer.echo(f"{trace.name}: {len(trace):,} requests, {trace.accesses:,} accesses, {trace.unique_blocks:,} blocks")
    print_table(
        ("policy", "blocks", "of unique", "blocks hit", "tokens hit", "whole requests", "accesses/s"),
        [
            (
                replay.policy,
                f"{replay.capacity_blocks:,}",
                f"{replay.capacity_blocks / max(1, trace.unique_blocks):.1%}",
                f"{replay.block_hit_rate:.2%}",
                f"{replay.token_hit_rate:.2%}",
                f"{replay.hits.full_requests:,}",
                f"{replay.accesses / replay.seconds / 1e6:,.1f} M" if replay.seconds else "",
            )
            for replay in replays
        ],
    )
