"""Options of `kvcm optimize`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from kvcm.optimizer.capacities import DEFAULT_CAPACITIES
from kvcm.optimizer.errors import OptionError

__all__ = ["Asking", "Outputs", "Reading"]

_FILE = "FILE"
_READING, _ASKING, _OUTPUTS = "Traces", "Questions", "Results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How traces are read."""

    trace_format: Annotated[
        str,
        typer.Option(
            "--format",
            rich_help_panel=_READING,
            metavar="FORMAT",
            help="Of all traces; found from their first lines otherwise.",
        ),
    ] = ""
    block_tokens: Annotated[
        int,
        typer.Option(
            "--block-tokens",
            "--block-size",
            rich_help_panel=_READING,
            metavar="N",
            help="Tokens per block; 0 to infer them.",
        ),
    ] = 0
    no_cache: Annotated[
        bool,
        typer.Option(
            "--no-cache", rich_help_panel=_READING, help="Neither read nor write the binary form beside a trace."
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """What is asked of them."""

    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            rich_help_panel=_ASKING,
            metavar="LIST",
            help="Names with options behind colons, such as ttl:seconds=60; or all.",
        ),
    ] = "lru,leaf_lru,belady,lfu,fifo,sieve,s3fifo"
    capacities: Annotated[
        str,
        typer.Option(
            "--capacities",
            rich_help_panel=_ASKING,
            metavar="LIST",
            help="In blocks, or in % of the unique blocks of a trace.",
        ),
    ] = DEFAULT_CAPACITIES
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            rich_help_panel=_ASKING,
            metavar="MODE",
            help="block: room is made before each block; request: once behind each request.",
        ),
    ] = "block"
    deployment: Annotated[
        str,
        typer.Option(
            "--deployment",
            rich_help_panel=_ASKING,
            metavar="TEXT",
            help="What hits are worth in: a preset, and inputs that differ: qwen3_coder_480b,gpu_hour=2.5.",
        ),
    ] = "deepseek_v3"
    tiers: Annotated[
        str,
        typer.Option(
            "--tiers",
            rich_help_panel=_ASKING,
            metavar="LIST",
            help="A hierarchy, the fastest first, such as gpu:1%,host:5%:bandwidth=50e9:price=2.5,ssd:20%.",
        ),
    ] = ""
    engines: Annotated[
        int,
        typer.Option(
            "--engines",
            rich_help_panel=_ASKING,
            metavar="N",
            help="Engines whose local caches are compared with one pool.",
        ),
    ] = 4
    workers: Annotated[
        int,
        typer.Option(
            "--workers", rich_help_panel=_ASKING, metavar="N", help="Threads that replay; 0 for one per core."
        ),
    ] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Where results go."""

    report: Annotated[
        Path | None,
        typer.Option("--report", rich_help_panel=_OUTPUTS, metavar="FILE.html", help="For people: one HTML file."),
    ] = None
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", rich_help_panel=_OUTPUTS, metavar=_FILE, help="For programs: a list, one row per replay."
        ),
    ] = None
    csv_file: Annotated[
        Path | None, typer.Option("--csv", rich_help_panel=_OUTPUTS, metavar=_FILE, help="The same rows as CSV.")
    ] = None
    csv_original: Annotated[
        Path | None,
        typer.Option(
            "--csv-original",
            rich_help_panel=_OUTPUTS,
            metavar="DIR",
            help="Files <instance>_hit_rates.csv as the original optimizer writes them, of one trace.",
        ),
    ] = None
    original_config: Annotated[
        Path | None,
        typer.Option(
            "--original-config",
            rich_help_panel=_OUTPUTS,
            metavar=_FILE,
            help="For --csv-original: the original's configuration; one policy and one capacity otherwise.",
        ),
    ] = None

    @property
    def written(self) -> tuple[Path, ...]:
        """Return the files, those that are asked for."""
        return tuple(path for path in (self.report, self.json_file, self.csv_file) if path is not None)

    def or_default(self, traces: Sequence[Path]) -> Outputs:
        """Return these; where there are none, all three, named like the trace, or like the command for several.

        Raises:
            OptionError: one of them cannot be written, or is a trace.
        """
        from kvcm.optimizer.study import shown_name

        found = self
        if not (self.written or self.csv_original):
            stem = shown_name(traces[0].name) if len(traces) == 1 else "optimize"
            report, json_file, csv_file = (Path(f"{stem}.{ending}") for ending in ("html", "json", "csv"))
            found = replace(self, report=report, json_file=json_file, csv_file=csv_file)
        # Hours of replays are not to end with a file that has no folder.
        for path in found.written:
            if not path.parent.is_dir():
                raise OptionError(f"{path}: there is no folder {path.parent}; allowed: a file in one that is there")
            if path.is_dir():
                raise OptionError(f"{path}: is a folder; allowed: a file")
            if [each.resolve() for each in found.written].count(path.resolve()) > 1:
                raise OptionError(f"{path}: is given for two results; allowed: a file for each")
            if path.resolve() in {trace.resolve() for trace in traces}:
                raise OptionError(f"{path}: is the trace, which would be written over; allowed: another file")
        return found
