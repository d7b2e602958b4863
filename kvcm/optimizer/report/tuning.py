"""Proposals to a running manager, as a page of their own."""

from __future__ import annotations

from collections.abc import Sequence

from kvcm.model.groups import InstanceGroup
from kvcm.optimizer.live.proposals import ManagerState, Proposal, settings_of
from kvcm.optimizer.live.rehearsal import Trial
from kvcm.optimizer.report import html
from kvcm.optimizer.report.charts import Chart, Pane, Table, figure, share_axis
from kvcm.optimizer.report.html import INK, MUTED, Section, document, joined, policy_style, rendered, table, tag

__all__ = ["tuning_page"]

_TITLE = "What would suit a manager better"
_COLUMNS = ("group", "measured", "unlimited", "now", "proposed", "predicted", "gain")
_GIB = 1 << 30


def tuning_page(situation: ManagerState, proposals: Sequence[Proposal]) -> str:
    """Return a report on a running manager, as HTML.

    Args:
        situation: the manager as it was looked at.
        proposals: what came of it.
    """
    coverage = situation.recording.coverage
    text = (
        f"{html.count(situation.recording.lookups)} lookups in {coverage.seconds:,.0f} s were rehearsed with other "
        f"settings; {html.count(coverage.dropped_accesses)} older accesses had been pushed out before."
    )
    sections = [rendered(_section(each, f"g{number}")) for number, each in enumerate(proposals)]
    return document(_TITLE, _TITLE, tag("p", text), table(_COLUMNS, [_row(each) for each in proposals]), *sections)


def _row(proposal: Proposal) -> tuple[str, ...]:
    return (
        proposal.state.group.name,
        html.percent(proposal.measured_hit_rate, 2),
        html.percent(proposal.attainable_hit_rate, 2),
        _settings_text(proposal.present.group),
        _settings_text(proposal.proposed.group) if proposal.is_change else "as it is",
        html.percent(proposal.proposed.outcome.hit_rate, 2),
        f"{100 * proposal.gain:+.2f} points",
    )


def _settings_text(group: InstanceGroup) -> str:
    settings = settings_of(group)
    age = f" for {settings['ttl_seconds']} s" if settings["ttl_seconds"] else ""
    own = "".join(f"; {name}: {policy}" for name, policy in settings["instance_policies"].items())
    return f"{settings['policy']}{age}, {html.size(settings['quota_bytes'])}{own}"


def _section(proposal: Proposal, key: str) -> Section:
    group = proposal.state.group
    change = _settings_text(proposal.proposed.group) if proposal.is_change else "Nothing better was found"
    lead = (
        f"{change}: {html.percent(proposal.proposed.outcome.hit_rate, 2)} of the blocks asked for are predicted to "
        f"be found, {html.percent(proposal.present.outcome.hit_rate, 2)} with the present settings; "
        f"confidence is {proposal.confidence}."
    )
    warnings = tag("ul", *(tag("li", warning) for warning in proposal.warnings))
    return Section(key, f"Group {group.name}", lead, (joined(warnings), figure(_chart(proposal, f"{key}-rates"))))


def _chart(proposal: Proposal, key: str) -> Chart:
    return Chart(
        key,
        "Hit rate over quota",
        "Each point is a rehearsal of the accesses that were kept; the ring marks the present settings, the star those "
        "that are proposed.",
        lambda pane: _draw(proposal, pane),
        _table(proposal),
    )


def _by_policy(proposal: Proposal) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for trial in proposal.trials:
        found.setdefault(trial.group.policy_of("").name, {})[trial.group.quota.capacity] = trial.outcome.hit_rate
    return found


def _draw(proposal: Proposal, pane: Pane) -> None:
    axes = pane.axes[0]
    for policy, points in _by_policy(proposal).items():
        color, dashes, marker = policy_style(policy)
        quotas = sorted(points)
        rates = [points[quota] for quota in quotas]
        axes.plot([quota / _GIB for quota in quotas], rates, dashes, color=color, marker=marker, label=policy)
    for trial, mark in ((proposal.present, "o"), (proposal.proposed, "*")):
        place = trial.group.quota.capacity / _GIB, trial.outcome.hit_rate
        axes.plot(*place, mark, markersize=15, markerfacecolor="none", markeredgecolor=INK, zorder=4)
    axes.axhline(proposal.attainable_hit_rate, color=MUTED, linewidth=1)
    axes.set_xlabel("quota in GiB")
    share_axis(axes, "blocks found", min(1.0, max(0.05, proposal.attainable_hit_rate * 1.15)))
    pane.legend()


def _table(proposal: Proposal) -> Table:
    trials = sorted({_place(each): each for each in (*proposal.trials, proposal.proposed)}.items())
    columns = ("policy", "quota", "blocks found", "mean use", "evicted blocks", "refused blocks")
    return Table(columns, [_trial_row(trial) for _, trial in trials])


def _place(trial: Trial) -> tuple[int, str]:
    return trial.group.quota.capacity, _settings_text(trial.group)


def _trial_row(trial: Trial) -> tuple[str, ...]:
    outcome = trial.outcome
    return (
        trial.group.policy_of("").name,
        html.size(trial.group.quota.capacity),
        html.percent(outcome.hit_rate, 2),
        html.size(int(outcome.mean_used_bytes)),
        html.count(outcome.evicted_blocks),
        html.count(outcome.refused_blocks),
    )
