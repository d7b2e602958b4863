"""`kvcm optimize --from URL`: what other settings would have given a running manager, and `--apply` of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcm.admin_client import AdminClient
from kvcm.commands.changes import changes, print_changes
from kvcm.commands.optimize_options import Outputs
from kvcm.commands.options import Yes, confirm
from kvcm.commands.shown import print_below, print_table, waiting
from kvcm.model.errors import KvcmError, NotReadyError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance
from kvcm.optimizer.errors import OptionError
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import group_service_pb2 as group_pb
from kvcm.refusals import FAILED, NotAllowedError, refuse_to_run
from kvcm.service.translate import read
from kvcm.sizes import shown_size

if TYPE_CHECKING:
    from kvcm.optimizer.live.proposals import Proposal
    from kvcm.optimizer.live.situation import Situation

__all__ = ["Live", "Looked", "apply_proposals", "look", "proposals_for", "tune"]

_RECENT = "/v1/events/recent"
_RECENT_SECONDS = 120.0
_PANEL = "Running manager"
_NOT_ALLOWED = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """What is asked of a running manager."""

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
class Looked:
    """A manager as it was looked at.

    Attributes:
        situation: what proposals go by.
        messages: its groups as they came, by name: what is changed later is changed in these.
    """

    situation: Situation
    messages: Mapping[str, pb.InstanceGroup]


def tune(client: AdminClient, live: Live, workers: int, outputs: Outputs) -> None:
    """Look at a manager, print and write what is proposed, and apply it where that is wanted.

    Raises:
        KvcmError: the manager cannot be asked, or refuses.
        NotAllowedError: it does not know the key, or does not let it.
        OptionError: the target is no percentage.
        TraceError: it keeps no accesses.
    """
    if not 0 <= live.target < 100:
        raise OptionError(f"--target is {live.target:g}; allowed: 0 to below 100")
    with waiting(f"asking {client.url}"):
        looked = look(client)
    with _shown_work():
        made = proposals_for(looked.situation, live.target / 100, workers)
    _print_proposals(looked.situation, made)
    _write(looked.situation, made, outputs)
    if live.apply:
        apply_proposals(client, looked, made, yes=live.yes)


def _shown_work() -> AbstractContextManager[object]:
    return waiting("rehearsing other settings")


def look(client: AdminClient) -> Looked:
    """Return what a manager tells of its groups, and the accesses that it keeps.

    Raises:
        KvcmError, NotAllowedError, TraceError: as `tune`.
    """
    from kvcm.optimizer.live.recording import read_recording
    from kvcm.optimizer.live.situation import GroupState, Situation

    listed = client.call("ListInstanceGroup", group_pb.ListInstanceGroupRequest(), group_pb.ListInstanceGroupResponse)
    usage = client.call("GetUsage", capacity_pb.GetUsageRequest(), capacity_pb.GetUsageResponse)
    used = {each.name: each.total.used_bytes for each in usage.groups}
    shared = {name: quota.name for quota in usage.global_quotas for name in quota.groups}
    messages = {each.name: each for each in listed.instance_groups}
    states = [
        GroupState(read(InstanceGroup, message), _block_bytes(client, name), used.get(name, 0), shared.get(name, ""))
        for name, message in messages.items()
    ]
    return Looked(Situation(states, read_recording(_recent(client).splitlines())), messages)


def _block_bytes(client: AdminClient, group_name: str) -> dict[str, int]:
    request = pb.ListInstanceInfoRequest(instance_group_name=group_name)
    listed = client.call("ListInstanceInfo", request, pb.ListInstanceInfoResponse)
    instances = [read(Instance, each) for each in listed.instance_info]
    return {each.instance_id: each.block_bytes for each in instances}


def _recent(client: AdminClient) -> bytes:
    page = client.page(_RECENT, _RECENT_SECONDS)
    if page.status in _NOT_ALLOWED:
        raise NotAllowedError(
            f"{client.url} does not show its recent accesses to this key: they are for administrators"
        )
    if page.status != HTTPStatus.OK:
        raise NotReadyError(f"{client.url} answers {_RECENT} with HTTP {page.status}; is it an older manager?")
    return page.body


def proposals_for(situation: Situation, target: float, workers: int) -> list[Proposal]:
    """Return what is proposed.

    Args:
        situation: the manager as it is.
        target: part of the attainable hits; 0 leaves quotas as they are.
        workers: processes, 0 for one per core.
    """
    from kvcm.optimizer.live.proposals import Wish, propose
    from kvcm.optimizer.live.trials import rehearsals

    with rehearsals(situation.recording, workers) as rehearse:
        return propose(situation, rehearse, Wish(target=target or None))


def _print_proposals(situation: Situation, made: Sequence[Proposal]) -> None:
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
    from kvcm.optimizer.live.rows import settings_of

    settings = settings_of(group)
    age = f" for {settings['ttl_seconds']} s" if settings["ttl_seconds"] else ""
    own = "".join(f"; {name}: {policy}" for name, policy in settings["instance_policies"].items())
    return f"{settings['policy']}{age}, {shown_size(settings['quota_bytes'])}{own}"


def _write(situation: Situation, made: Sequence[Proposal], outputs: Outputs) -> None:
    from kvcm.optimizer.live.rows import document_of, trial_rows
    from kvcm.optimizer.writers import write_csv, write_whole

    if outputs.report is not None:
        write_whole(outputs.report, _page(situation, made))
    if outputs.json_file is not None:
        write_whole(outputs.json_file, json.dumps(document_of(situation, made), indent=1) + "\n")
    if outputs.csv_file is not None:
        write_csv(trial_rows(made), outputs.csv_file)
    print_below(*(f"wrote {path}" for path in outputs.written))


def _page(situation: Situation, made: Sequence[Proposal]) -> str:
    try:
        from kvcm.optimizer.report.tuning import tuning_page
    except ModuleNotFoundError as missing:
        refuse_to_run(f"{missing.name} is not installed; --report needs: pip install 'kvcm[optimizer]'")
    return tuning_page(situation, made)


def apply_proposals(client: AdminClient, looked: Looked, made: Sequence[Proposal], *, yes: bool) -> None:
    """Change groups as proposed, each unless somebody else has changed it since it was looked at.

    Raises:
        Exit: it was not confirmed, or some groups could not be changed, which is said of each.
    """
    wanted = {each.state.group.name: each.proposed.group for each in made if each.is_change}
    if not wanted:
        print_below("nothing to change: no other settings are proposed")
        return
    changed = {name: _changed(looked.messages[name], group) for name, group in wanted.items()}
    for name, message in changed.items():
        typer.echo(f"{name}:")
        print_changes(changes(looked.messages[name], message), dry_run=False, as_json=False)
    confirm(f"Change {', '.join(changed)}?", yes=yes)
    failures = {name: reason for name, message in changed.items() if (reason := _failure(client, message))}
    for name in changed:
        typer.echo(
            f"{name}: not changed: {failures[name]}" if name in failures else f"{name}: changed", err=name in failures
        )
    if failures:
        raise typer.Exit(FAILED)


def _failure(client: AdminClient, message: pb.InstanceGroup) -> str:
    """Change one group; return why it was not, "" when it was."""
    request = pb.UpdateInstanceGroupRequest(instance_group=message, current_version=message.version)
    request.instance_group.version += 1
    try:
        client.call("UpdateInstanceGroup", request, pb.CommonResponse)
    except (KvcmError, NotAllowedError) as error:
        return str(error)
    return ""


def _changed(message: pb.InstanceGroup, wanted: InstanceGroup) -> pb.InstanceGroup:
    """Return a group with quota, policy, age and policies of instances as wanted, and everything else as it was."""
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
