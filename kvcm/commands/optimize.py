"""`kvcm optimize`: the hit rates of policies, capacities and tiers on recorded traces, and their value in money.

With `--from`, it proposes settings for a running manager (`tune`); with `--sample`, it estimates instead of replaying;
with `--routing`, it replays engines behind policies of the gateway; with `--csv-original`, it writes the files of the
original optimizer. The packages that replay are imported on demand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import TaskProgressColumn

from kvcm.commands.connection import Connection
from kvcm.commands.options import Yes, confirm, with_options
from kvcm.commands.output import changes, print_below, print_changes, print_table, spinner, step_progress
from kvcm.commands.trace import warn_of_bad_lines
from kvcm.model.errors import KvcmError, NotReadyError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance
from kvcm.model.units import format_size
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.options import DEFAULT_CAPACITIES
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.service.translate import read
from kvcm.terminal.admin_client import AdminClient
from kvcm.terminal.exit_codes import (
    CANNOT_RUN,
    FAILED,
    NotAllowedError,
    exit_cannot_run,
    exit_on_call_errors,
    exit_on_errors,
)

if TYPE_CHECKING:
    from kvcm.optimizer.groups.original import OriginalConfig
    from kvcm.optimizer.live.proposals import ManagerState, Proposal
    from kvcm.optimizer.pooling import PoolingRow
    from kvcm.optimizer.results import Replay
    from kvcm.optimizer.study import Estimate, Progress, Sampling, Study, StudyMode, StudyOptions
    from kvcm.optimizer.trace import Trace

__all__ = [
    "Live",
    "LiveSituation",
    "Outputs",
    "ReadArguments",
    "Sample",
    "StudyArguments",
    "apply_proposals",
    "estimate",
    "optimize",
    "proposals_for",
    "read_situation",
    "tune",
]

# Options.

_FILE = "FILE"
_READING, _STUDY, _OUTPUTS = "Traces", "Questions", "Results"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadArguments:
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
        typer.Option("--no-cache", rich_help_panel=_READING, help="Neither read nor write the binary form of a trace."),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyArguments:
    """The study of the traces."""

    policies: Annotated[
        str,
        typer.Option(
            "--policies",
            rich_help_panel=_STUDY,
            metavar="LIST",
            help="Names with options behind colons, such as ttl:seconds=60; or all.",
        ),
    ] = "lru,leaf_lru,belady,lfu,fifo,sieve,s3fifo"
    capacities: Annotated[
        str,
        typer.Option(
            "--capacities",
            rich_help_panel=_STUDY,
            metavar="LIST",
            help="In blocks, or in % of the unique blocks of a trace.",
        ),
    ] = DEFAULT_CAPACITIES
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            rich_help_panel=_STUDY,
            metavar="MODE",
            help="block: eviction before each block; request: once behind each request; manager: as a manager does it.",
        ),
    ] = "block"
    deployment: Annotated[
        str,
        typer.Option(
            "--deployment",
            rich_help_panel=_STUDY,
            metavar="TEXT",
            help="Deployment that values hits: a preset, and inputs that differ: qwen3_coder_480b,gpu_hour=2.5.",
        ),
    ] = "deepseek_v3"
    tiers: Annotated[
        str,
        typer.Option(
            "--tiers",
            rich_help_panel=_STUDY,
            metavar="LIST",
            help="A hierarchy, the fastest first, such as gpu:1%,host:5%:bandwidth=50e9:price=2.5,ssd:20%.",
        ),
    ] = ""
    engines: Annotated[
        int,
        typer.Option(
            "--engines",
            rich_help_panel=_STUDY,
            metavar="N",
            help="Engines whose own memory is compared with one pool.",
        ),
    ] = 4
    routing: Annotated[
        str,
        typer.Option(
            "--routing",
            rich_help_panel=_STUDY,
            metavar="LIST",
            help="Replay engines behind policies of kvcm gateway: round_robin, least_loaded, consistent_hash, kvcm; "
            "or all. Rows are then of these.",
        ),
    ] = ""
    engine_capacity: Annotated[
        str,
        typer.Option(
            "--engine-capacity",
            rich_help_panel=_STUDY,
            metavar="SIZE",
            help="Of each engine's own memory, in blocks or %; its part of the pool's otherwise.",
        ),
    ] = ""
    pool_capacity: Annotated[
        str,
        typer.Option(
            "--pool-capacity",
            rich_help_panel=_STUDY,
            metavar="SIZE",
            help="Of the pool behind the engines; what a report recommends, or 10%, otherwise.",
        ),
    ] = ""
    workers: Annotated[
        int,
        typer.Option("--workers", rich_help_panel=_STUDY, metavar="N", help="Threads that replay; 0 for one per core."),
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
        """The files to write."""
        return tuple(path for path in (self.report, self.json_file, self.csv_file) if path is not None)

    def or_default(self, traces: Sequence[Path], *, has_report: bool = True) -> Outputs:
        """Return these outputs; without any, all, named like the trace, or like the command for several traces.

        Args:
            traces: that are read.
            has_report: whether the report is one of all.

        Raises:
            OptionError: one of them cannot be written, or is a trace.
        """
        from kvcm.optimizer.study import display_name

        found = self
        if not (self.written or self.csv_original):
            stem = display_name(traces[0].name) if len(traces) == 1 else "optimize"
            report, json_file, csv_file = (Path(f"{stem}.{ending}") for ending in ("html", "json", "csv"))
            found = replace(self, report=report if has_report else None, json_file=json_file, csv_file=csv_file)
        # Checked before hours of replays.
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


# `kvcm optimize --sample`: hit rates estimated from samples of a trace.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The sampling of estimates."""

    sample: Annotated[
        str,
        typer.Option(
            "--sample",
            rich_help_panel="Questions",
            metavar="RATE",
            help="Estimate hit rates, with error bars, from samples of the blocks: 0.05, or 0.05:repeats=8:seed=1.",
        ),
    ] = ""


def _sampling_of(sample: Sample, outputs: Outputs, traces: Sequence[Path]) -> tuple[Sampling, Outputs]:
    """Return the sampling and the files to write.

    Raises:
        OptionError: the sampling is malformed, or a file needs replays.
    """
    from kvcm.optimizer.study import parse_sampling

    sampling = parse_sampling(sample.sample)
    if outputs.report or outputs.csv_original or outputs.original_config:
        raise OptionError(
            f"--sample {sample.sample}: writes neither a report nor the original's rows; allowed: --json and --csv"
        )
    return sampling, outputs.or_default(traces, has_report=False)


def estimate(
    traces: Sequence[Trace], options: StudyOptions, sampling: Sampling, outputs: Outputs, progress: Progress
) -> list[tuple[Trace, tuple[Estimate, ...]]]:
    """Estimate the rates of traces, and write them.

    Raises:
        OptionError: these options cannot be estimated.
        OSError: a file cannot be written.
    """
    from kvcm.optimizer.study import estimates_of

    found = [(trace, estimates_of(trace, options, sampling, progress)) for trace in traces]
    _write_rows(found, outputs)
    return found


def _print_estimates(trace: Trace, estimates: Sequence[Estimate], sampling: Sampling) -> None:
    """Print a table, and the meaning of its error bars."""
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
        "bar: how far samples differ (95 % t interval) and coarseness in size; it leaves out what all samples miss"
    )


# `kvcm optimize --routing`: engines behind policies of the gateway.


def _check_routing(asking: StudyArguments, sample: Sample, outputs: Outputs) -> None:
    """Do nothing where the other options agree with `--routing`.

    Raises:
        OptionError: one of them does not.
    """
    for option, is_given in {"--sample": sample.sample, "--csv-original": outputs.csv_original}.items():
        if is_given:
            raise OptionError(f"--routing {asking.routing}: not together with {option}; allowed: one of them")


def _print_routed(trace: Trace, rows: Sequence[PoolingRow]) -> None:
    """Print where tokens came from by policy, and how load was spread."""
    first = next(row for row in rows if row.local_blocks)
    pool = max(row.pool_blocks for row in rows)
    typer.echo(
        f"{trace.name}: {len(trace):,} requests on {len(first.routed_requests)} engines of {first.local_blocks:,} "
        f"blocks, a pool of {pool:,}; {trace.unique_blocks:,} unique blocks"
    )
    columns = ("policy", "blocks in", "own memory", "pool", "computed", "most requests", "most computed", "wait")
    print_table(
        columns,
        [
            (
                row.routing.label,
                row.topology.value,
                f"{row.local_share:.1%}",
                f"{row.pool_share:.1%}" if row.pool_blocks else "",
                f"{row.computed_share:.1%}",
                f"{row.request_imbalance:.2f}",
                f"{row.imbalance:.2f}",
                f"{row.mean_wait_seconds:.3f} s",
            )
            for row in rows
        ],
        words=("blocks in",),
    )
    print_below(
        "own memory, pool, computed: of the prompts' tokens; the pool's come over the network",
        "most: of the busiest engine, 1 is even; wait: for prompts before, on average",
    )


# `kvcm optimize --csv-original`: the files of the original optimizer.


def _write_original(traces: Sequence[Path], reading: ReadArguments, options: StudyOptions, outputs: Outputs) -> None:
    """Write the files of the one trace.

    Raises:
        OptionError: there are several traces, no folder, or options that the original does not have.
        TraceError: the trace cannot be read.
        OSError: the configuration cannot be read.
    """
    from kvcm.optimizer.groups.original import OriginalConfig, write_original_csv
    from kvcm.optimizer.readers import read_trace

    if outputs.csv_original is None:
        raise OptionError("--original-config: has no effect alone; allowed: together with --csv-original DIR")
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
    from kvcm.optimizer.groups.original import OriginalConfig
    from kvcm.optimizer.options import parse_capacities

    capacities = parse_capacities(options.capacities, trace.unique_blocks)
    if len(options.policies) != 1 or len(capacities) != 1:
        raise OptionError(
            f"--csv-original: {len(options.policies)} policies and {len(capacities)} capacities were given; "
            "allowed: one "
            "of each, such as --policies lru --capacities 10%, or --original-config"
        )
    return OriginalConfig.plain(trace.instance_names, capacities[0], policy=options.policies[0].name)


# `kvcm optimize --from URL`: proposals of settings for a running manager, and `--apply` of them.

_ACCESSES_PATH = "/v1/events/recent"
_ACCESSES_SECONDS = 120.0
_PANEL = "Running manager"
_NOT_ALLOWED = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """A running manager to propose settings for."""

    url: Annotated[
        str,
        typer.Option(
            "--from",
            rich_help_panel=_PANEL,
            metavar="URL",
            help="HTTP address of the admin port of a manager that keeps recent accesses: what would suit it better.",
        ),
    ] = ""
    target: Annotated[
        float,
        typer.Option(
            "--target",
            rich_help_panel=_PANEL,
            metavar="PERCENT",
            help="Of the hits of an unlimited cache, that quotas are to reach; 0 leaves quotas as they are.",
        ),
    ] = 95.0
    apply: Annotated[
        bool, typer.Option("--apply", rich_help_panel=_PANEL, help="Change its groups as proposed, after a question.")
    ] = False
    yes: Yes = False


@dataclass(frozen=True, slots=True, eq=False)
class LiveSituation:
    """The state of a running manager.

    Attributes:
        situation: input of the proposals.
        messages: its groups as wire messages, by name: changes are applied to these.
    """

    situation: ManagerState
    messages: Mapping[str, pb.InstanceGroup]


def tune(client: AdminClient, live: Live, workers: int, outputs: Outputs) -> None:
    """Read the state of a manager, print and write proposals, and apply them if `live.apply`.

    Raises:
        KvcmError: the manager is unavailable, or refuses.
        NotAllowedError: the key is not valid, or lacks the permission.
        OptionError: the target is no percentage.
        TraceError: it keeps no accesses.
    """
    if not 0 <= live.target < 100:
        raise OptionError(f"--target is {live.target:g}; allowed: 0 to below 100")
    with spinner(f"asking {client.url}"):
        state = read_situation(client)
    with spinner("rehearsing other settings"):
        made = proposals_for(state.situation, live.target / 100, workers)
    _print_proposals(state.situation, made)
    _write_proposals(state.situation, made, outputs)
    if live.apply:
        apply_proposals(client, state, made, yes=live.yes)


def read_situation(client: AdminClient) -> LiveSituation:
    """Return the groups of a manager, their usage, and the accesses that it keeps.

    Raises:
        KvcmError, NotAllowedError, TraceError: as `tune`.
    """
    from kvcm.optimizer.live.proposals import GroupState, ManagerState
    from kvcm.optimizer.live.recording import read_recording

    listed = client.groups()
    usage = client.call("GetUsage", capacity_pb.GetUsageRequest(), capacity_pb.GetUsageResponse)
    used = {each.name: each.total.used_bytes for each in usage.groups}
    shared = {name: quota.name for quota in usage.global_quotas for name in quota.groups}
    messages = {each.name: each for each in listed}
    states = [
        GroupState(read(InstanceGroup, message), _block_bytes(client, name), used.get(name, 0), shared.get(name, ""))
        for name, message in messages.items()
    ]
    return LiveSituation(ManagerState(states, read_recording(_recorded_accesses(client).splitlines())), messages)


def _block_bytes(client: AdminClient, group_name: str) -> dict[str, int]:
    request = pb.ListInstanceInfoRequest(instance_group_name=group_name)
    listed = client.call("ListInstanceInfo", request, pb.ListInstanceInfoResponse)
    instances = [read(Instance, each) for each in listed.instance_info]
    return {each.instance_id: each.block_bytes for each in instances}


def _recorded_accesses(client: AdminClient) -> bytes:
    page = client.page(_ACCESSES_PATH, _ACCESSES_SECONDS)
    if page.status in _NOT_ALLOWED:
        raise NotAllowedError(
            f"{client.url} does not show its recent accesses to this key: they are for administrators"
        )
    if page.status != HTTPStatus.OK:
        raise NotReadyError(f"{client.url} answers {_ACCESSES_PATH} with HTTP {page.status}; is it an older manager?")
    return page.body


def proposals_for(situation: ManagerState, target: float, workers: int) -> list[Proposal]:
    """Return proposals of settings.

    Args:
        situation: the state of the manager.
        target: part of the attainable hits; 0 keeps the quotas.
        workers: processes, 0 for one per core.
    """
    from kvcm.optimizer.live.proposals import TuningGoal, propose
    from kvcm.optimizer.live.rehearsal import rehearsals

    with rehearsals(situation.recording, workers) as rehearse:
        return propose(situation, rehearse, TuningGoal(target=target or None))


def _print_proposals(situation: ManagerState, made: Sequence[Proposal]) -> None:
    coverage = situation.recording.coverage
    dropped = f", {coverage.dropped_accesses:,} older accesses were pushed out" if coverage.dropped_accesses else ""
    typer.echo(f"recorded: {situation.recording.lookups:,} lookups in {coverage.seconds:,.0f} s{dropped}")
    columns = ("group", "measured", "attainable", "now", "rehearsed", "proposed", "predicted", "gain", "confidence")
    print_table(columns, [_row(each) for each in made], words=("now", "proposed", "confidence"))
    print_below(*(f"{each.state.group.name}: {warning}" for each in made for warning in each.warnings))


def _row(proposal: Proposal) -> tuple[str, ...]:
    return (
        proposal.state.group.name,
        f"{proposal.measured_hit_rate:.2%}",
        f"{proposal.attainable_hit_rate:.2%}",
        _settings(proposal.present.group),
        f"{proposal.present.outcome.hit_rate:.2%}",
        _settings(proposal.proposed.group) if proposal.is_change else "as it is",
        f"{proposal.proposed.outcome.hit_rate:.2%}",
        f"{100 * proposal.gain:+.2f}",
        proposal.confidence,
    )


def _settings(group: InstanceGroup) -> str:
    from kvcm.optimizer.live.proposals import settings_of

    settings = settings_of(group)
    age = f" for {settings['ttl_seconds']} s" if settings["ttl_seconds"] else ""
    own = "".join(f"; {name}: {policy}" for name, policy in settings["instance_policies"].items())
    return f"{settings['policy']}{age}, {format_size(settings['quota_bytes'])}{own}"


def _write_proposals(situation: ManagerState, made: Sequence[Proposal], outputs: Outputs) -> None:
    from kvcm.optimizer.live.proposals import document_of, trial_rows
    from kvcm.optimizer.writers import write_atomic, write_csv

    if outputs.report is not None:
        write_atomic(outputs.report, _page(situation, made))
    if outputs.json_file is not None:
        write_atomic(outputs.json_file, json.dumps(document_of(situation, made), indent=1) + "\n")
    if outputs.csv_file is not None:
        write_csv(trial_rows(made), outputs.csv_file)
    _print_written(outputs)


def _page(situation: ManagerState, made: Sequence[Proposal]) -> str:
    try:
        from kvcm.optimizer.report.tuning import tuning_page
    except ModuleNotFoundError as missing:
        exit_cannot_run(f"{missing.name} is not installed; --report needs: pip install 'kvcm[optimizer]'")
    return tuning_page(situation, made)


def apply_proposals(client: AdminClient, state: LiveSituation, made: Sequence[Proposal], *, yes: bool) -> None:
    """Change groups as proposed, unless a group was changed since `state` was read.

    Raises:
        Exit: the user did not confirm, or some groups could not be changed, with the reason printed for each.
    """
    wanted = {each.state.group.name: each.proposed.group for each in made if each.is_change}
    if not wanted:
        print_below("nothing to change: no other settings are proposed")
        return
    changed = {name: _changed(state.messages[name], group) for name, group in wanted.items()}
    for name, message in changed.items():
        typer.echo(f"{name}:")
        print_changes(changes(state.messages[name], message), dry_run=False, as_json=False)
    confirm(f"Change {', '.join(changed)}?", yes=yes)
    failures = {name: reason for name, message in changed.items() if (reason := _failure(client, message))}
    for name in changed:
        typer.echo(
            f"{name}: not changed: {failures[name]}" if name in failures else f"{name}: changed", err=name in failures
        )
    if failures:
        raise typer.Exit(FAILED)


def _failure(client: AdminClient, message: pb.InstanceGroup) -> str:
    """Change one group; return the error, "" for none."""
    request = pb.UpdateInstanceGroupRequest(instance_group=message, current_version=message.version)
    request.instance_group.version += 1
    try:
        client.call("UpdateInstanceGroup", request, pb.CommonResponse)
    except (KvcmError, NotAllowedError) as error:
        return str(error)
    return ""


def _changed(message: pb.InstanceGroup, wanted: InstanceGroup) -> pb.InstanceGroup:
    """Return a group with quota, policy, age and policies of instances of `wanted`, and its other fields."""
    new = pb.InstanceGroup()
    new.CopyFrom(message)
    old = read(InstanceGroup, message)
    if wanted.quota.capacity != old.quota.capacity:
        new.quota.capacity = wanted.quota.capacity
    strategy, known = new.cache_config.reclaim_strategy, old.cache_config.reclaim_strategy
    if wanted.policy_of("") != old.policy_of(""):
        _write_policy(strategy.policy, wanted.policy_of(""))
    for override in wanted.cache_config.reclaim_strategy.instance_overrides:
        if override not in known.instance_overrides:
            same = (each for each in strategy.instance_overrides if each.instance_id == override.instance_id)
            own = next(same, None) or strategy.instance_overrides.add(instance_id=override.instance_id)
            _write_policy(own.policy, override.policy)
    return new


def _write_policy(message: Any, policy: Any) -> None:
    message.name, message.ttl_seconds, message.ttl_sliding = policy.name, policy.ttl_seconds, policy.ttl_sliding


# The command.

_MAX_WORKERS = 1024


@with_options
def optimize(
    reading: ReadArguments,
    asking: StudyArguments,
    sample: Sample,
    outputs: Outputs,
    live: Live,
    connection: Connection,
    traces: Annotated[
        list[Path] | None, typer.Argument(metavar="TRACE", help="Recorded accesses, plain or .gz; several.")
    ] = None,
) -> None:
    """Replay traces, and compare caches: policy, capacity, tiers, pooling, routing, GPUs and money.

    With --from, propose better settings for a running manager, by the accesses that it keeps.
    """
    if bool(traces) == bool(live.url):
        exit_cannot_run("give traces, or --from URL of a running manager; kvcm optimize -h shows how")
    if live.url:
        _tune(connection, live, asking, sample, outputs)
        return
    if live.apply:
        exit_cannot_run("--apply changes a running manager; allowed: together with --from URL")
    traces = traces or []
    with exit_on_errors(CANNOT_RUN):
        _require_optimizer()
        if asking.routing:
            _check_routing(asking, sample, outputs)
        if sample.sample:
            _estimate(traces, reading, _options(asking), *_sampling_of(sample, outputs, traces))
            return
        outputs = outputs.or_default(traces, has_report=not asking.routing)
        options = _options(asking)
        if outputs.csv_original is not None or outputs.original_config is not None:
            _write_original(traces, reading, options, outputs)
        if not outputs.written:
            return
        results: list[tuple[Trace, Sequence[Any]]]
        with step_progress(TaskProgressColumn()) as progress:
            loaded = _load_all(traces, reading, progress)
            studies = [] if outputs.report is None else _report(loaded, options, outputs.report, progress)
            if asking.routing:
                results = [*_routed(loaded, options, studies)]
            else:
                results = [(study.trace, study.replays) for study in studies] or [
                    *_replay_all(loaded, options, progress)
                ]
        _write_rows(results, outputs)
    for trace, rows in results:
        (_print_routed if asking.routing else _print_rows)(trace, rows)
    _print_written(outputs)


def _tune(connection: Connection, live: Live, asking: StudyArguments, sample: Sample, outputs: Outputs) -> None:
    if asking.routing:
        exit_cannot_run(f"--routing {asking.routing}: --from replays no engines; allowed: with traces")
    if sample.sample:
        exit_cannot_run(f"--sample {sample.sample}: --from estimates nothing; allowed: with traces")
    if outputs.csv_original:
        exit_cannot_run("--from writes no rows of the original; allowed: --report, --json and --csv")
    with exit_on_call_errors():
        client = connection.at(live.url)
        tune(client, live, _workers(asking.workers), outputs)


def _estimate(
    paths: Sequence[Path], reading: ReadArguments, options: StudyOptions, sampling: Sampling, outputs: Outputs
) -> None:
    with step_progress(TaskProgressColumn()) as progress:
        found = estimate(_load_all(paths, reading, progress), options, sampling, outputs, progress)
    for trace, estimates in found:
        _print_estimates(trace, estimates, sampling)
    _print_written(outputs)


def _print_written(outputs: Outputs) -> None:
    print_below(*(f"wrote {path}" for path in outputs.written))


def _require_optimizer() -> None:
    try:
        import matplotlib as _matplotlib  # noqa: F401 - is it installed?
        import numba as _numba  # noqa: F401 - is it installed?
    except ModuleNotFoundError as missing:
        exit_cannot_run(f"{missing.name} is not installed; this needs: pip install 'kvcm[optimizer]'")


def _options(asking: StudyArguments) -> StudyOptions:
    from kvcm.optimizer.options import parse_policies
    from kvcm.optimizer.pooling import parse_routing
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
        routing=parse_routing(asking.routing or "all"),
        engine_capacity=asking.engine_capacity,
        pool_capacity=asking.pool_capacity,
    )


def _mode(text: str) -> StudyMode:
    modes: dict[str, StudyMode] = {"block": "block", "request": "request", "manager": "manager"}
    if text in modes:
        return modes[text]
    raise OptionError(f"--mode is {text!r}; allowed: {', '.join(modes)}")


def _workers(wanted: int) -> int:
    if not 0 <= wanted <= _MAX_WORKERS:
        raise OptionError(f"--workers is {wanted}; allowed: 1 to {_MAX_WORKERS}, or 0 for one per core")
    return wanted or len(os.sched_getaffinity(0))


def _load_all(paths: Sequence[Path], reading: ReadArguments, progress: Progress) -> list[Trace]:
    return _with_unique_names([_load(path, reading, progress) for path in paths], paths)


def _load(path: Path, reading: ReadArguments, progress: Progress) -> Trace:
    from kvcm.optimizer.readers import read_trace

    if reading.block_tokens < 0:
        raise OptionError(f"--block-tokens is {reading.block_tokens}; allowed: 1 or more, or 0 to infer it")
    trace = read_trace(
        path,
        format=reading.trace_format or None,
        block_tokens=reading.block_tokens or None,
        use_cache=not reading.no_cache,
        progress=lambda done, total: progress(f"loading {path.name}", done, total),
    )
    for sentence in trace.assumed:
        typer.echo(f"kvcm: {path}: {sentence}", err=True)
    warn_of_bad_lines(path, trace.bad_lines, trace.bad_line_count)
    return trace


def _with_unique_names(traces: Sequence[Trace], paths: Sequence[Path]) -> list[Trace]:
    """Return the traces; those that share a name get their paths as names."""
    names = [trace.name for trace in traces]
    if len(set(paths)) < len(paths):
        raise OptionError(f"TRACE: {', '.join(map(str, paths))} has one of them twice; allowed: each once")
    return [
        trace if names.count(trace.name) == 1 else replace(trace, name=str(path))
        for trace, path in zip(traces, paths, strict=True)
    ]


def _replay_all(
    traces: Sequence[Trace], options: StudyOptions, progress: Progress
) -> list[tuple[Trace, tuple[Replay, ...]]]:
    from kvcm.optimizer.study import replays_of

    return [(trace, replays_of(trace, options, progress)) for trace in traces]


def _routed(
    traces: Sequence[Trace], options: StudyOptions, studies: Sequence[Study]
) -> list[tuple[Trace, list[PoolingRow]]]:
    """Return the rows of engines with memory of their own: those of the studies, if there are any."""
    from kvcm.optimizer.study import pooling_of

    found = [study.pooling for study in studies] or [pooling_of(trace, options) for trace in traces]
    return [
        (trace, [row for row in pooling.rows if row.local_blocks]) for trace, pooling in zip(traces, found, strict=True)
    ]


def _report(traces: Sequence[Trace], options: StudyOptions, path: Path, progress: Progress) -> list[Study]:
    from kvcm.optimizer.report import page
    from kvcm.optimizer.study import study_of
    from kvcm.optimizer.writers import write_atomic

    studies = [study_of(trace, options, progress) for trace in traces]
    write_atomic(path, page(studies, progress))
    return studies


def _write_rows(
    results: Sequence[tuple[Trace, Sequence[Replay] | Sequence[Estimate] | Sequence[PoolingRow]]], outputs: Outputs
) -> None:
    from kvcm.optimizer.report import rows_of, write_json
    from kvcm.optimizer.writers import write_csv

    rows = rows_of([(trace.name, found) for trace, found in results])
    if outputs.json_file is not None:
        write_json(rows, outputs.json_file)
    if outputs.csv_file is not None:
        write_csv(rows, outputs.csv_file)


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
