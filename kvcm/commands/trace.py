"""`kvcm trace`: files of recorded accesses: their contents, conversion and anonymisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import DownloadColumn

from kvcm.commands.options import AsJson, first_line, noun, with_options
from kvcm.commands.output import print_fields, print_json, step_progress
from kvcm.terminal.exit_codes import CANNOT_RUN, exit_cannot_run, exit_on_errors

if TYPE_CHECKING:
    from kvcm.optimizer.trace import BadLine, Trace

__all__ = ["trace_app", "warn_of_bad_lines"]

trace_app = noun("trace", "Files of recorded accesses, which `kvcm optimize` replays: look into them, convert them.")
_SHOWN_BAD_LINES = 5
Source = Annotated[Path, typer.Argument(metavar="IN", help="The trace to read, plain or .gz.")]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, compressed where it ends in .gz.")]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT where it exists.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a trace is read."""

    trace_format: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="Of the trace; found from its first lines otherwise.")
    ] = ""
    block_tokens: Annotated[
        int,
        typer.Option("--block-tokens", "--block-size", metavar="N", min=0, help="Tokens per block; 0 to infer them."),
    ] = 0


@trace_app.command("info")
@with_options
def info(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The trace to look into, plain or .gz.")],
    reading: Reading,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Neither read nor write the binary form of the trace.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a trace: requests, blocks, duration, and bad lines."""
    with exit_on_errors(CANNOT_RUN):
        facts = _facts(_read(file, reading, use_cache=not no_cache))
    if as_json:
        print_json(facts)
    else:
        print_fields((name.replace("_", " "), _format(value)) for name, value in facts.items())


@trace_app.command("convert")
@with_options
def convert(
    source: Source,
    target: Target,
    to: Annotated[
        str,
        typer.Option(metavar="FORMAT", help="One of mooncake, qwen_bailian, publisher_log and optimizer_schema."),
    ],
    reading: Reading,
    force: Force = False,
) -> None:
    """Write a trace in another format. Blocks become numbers; fields that the format does not have are reported."""
    with exit_on_errors(CANNOT_RUN):
        from kvcm.optimizer.formats import check_format
        from kvcm.optimizer.writers import check_target_is_free, lost_in, write_trace

        check_format(to)  # before the file is read, which may take minutes
        check_target_is_free(target, force=force)
        trace = _read(source, reading, use_cache=False)
        write_trace(trace, target, to, force=force)
        lost = lost_in(trace, to)
    if lost:
        typer.echo(f"kvcm: {to} does not hold {' and '.join(lost)}: left out", err=True)
    typer.echo(f"wrote {target}: {len(trace):,} requests")


@trace_app.command("anonymise")
@with_options
def anonymise(
    source: Source,
    target: Target,
    reading: Reading,
    salt_file: Annotated[
        Path | None,
        typer.Option(help="File with one secret line: files made with the same one fit together. Drawn otherwise."),
    ] = None,
    force: Force = False,
) -> None:
    """Write a trace that does not identify its owner, in the same format.

    Keys, sessions and names of instances and specs are replaced, tokens are dropped, times count from the first one.
    Lengths, the gaps between times and which blocks are the same stay: they are what a replay needs.
    """
    with exit_on_errors(CANNOT_RUN):
        from kvcm.optimizer.writers import Pseudonyms
        from kvcm.optimizer.writers import anonymise as write_anonymous

        salt = None if salt_file is None else first_line(salt_file, "salt file").strip().encode()
        names = Pseudonyms(salt)
        with _bar(f"anonymising {source.name}") as show:
            done = write_anonymous(
                source,
                target,
                names,
                format_name=reading.trace_format or None,
                block_tokens=reading.block_tokens or None,
                force=force,
                progress=show,
            )
    warn_of_bad_lines(source, done.bad_lines, done.bad_line_count)
    typer.echo(f"wrote {target}: {done.lines:,} lines of {done.format}")


def _read(path: Path, reading: Reading, *, use_cache: bool) -> Trace:
    try:
        from kvcm.optimizer.readers import read_trace
    except ModuleNotFoundError as missing:
        exit_cannot_run(f"{missing.name} is not installed; this needs: pip install 'kvcm[optimizer]'")
    with _bar(f"reading {path.name}") as show:
        trace = read_trace(
            path,
            format=reading.trace_format or None,
            block_tokens=reading.block_tokens or None,
            use_cache=use_cache,
            progress=show,
        )
    for sentence in trace.assumed:
        typer.echo(f"kvcm: {path}: {sentence}", err=True)
    warn_of_bad_lines(path, trace.bad_lines, trace.bad_line_count)
    return trace


def warn_of_bad_lines(path: Path, first: Sequence[BadLine], count: int) -> None:
    """Print the first bad lines of a trace and their number to stderr."""
    for bad in first[:_SHOWN_BAD_LINES]:
        typer.echo(f"kvcm: {path}:{bad.number}: {bad.reason}", err=True)
    if count:
        typer.echo(f"kvcm: {path}: bad lines left out: {count:,}", err=True)


def _facts(trace: Trace) -> dict[str, int | float | str | bool]:
    totals = trace.totals
    return {
        "name": trace.name,
        "requests": len(trace),
        "reads": totals.requests,
        "writes": int(trace.writes.sum()),
        "accesses": trace.accesses,
        "unique_blocks": trace.unique_blocks,
        "block_tokens": trace.block_tokens,
        "prompt_tokens": totals.tokens,
        "generated_tokens": int(trace.output_tokens.sum()),
        "span_seconds": trace.span_seconds,
        "sessions": int(trace.sessions.max()) + 1,
        "instances": len(trace.instance_names),
        "is_prefix_tree": trace.has_one_parent,
        "bad_lines": trace.bad_line_count,
    }


def _format(value: float | str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else f"{value:,}"


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows bytes done and in all."""
    with step_progress(DownloadColumn()) as show:
        yield partial(show, what)
