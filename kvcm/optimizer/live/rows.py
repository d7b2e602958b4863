"""Proposals as JSON and CSV have them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvcm.model.groups import InstanceGroup
from kvcm.optimizer.live.proposals import Proposal
from kvcm.optimizer.live.situation import Situation
from kvcm.optimizer.live.trials import Trial

__all__ = ["document_of", "settings_of", "trial_rows"]


def settings_of(group: InstanceGroup) -> dict[str, Any]:
    """Return what proposals are about: quota, policy and age of a group, and what its instances do differently."""
    rule = group.policy_of("")
    overrides = group.cache_config.reclaim_strategy.instance_overrides
    return {
        "quota_bytes": group.quota.capacity,
        "policy": rule.name,
        "ttl_seconds": rule.ttl_seconds,
        "instance_policies": {each.instance_id: each.policy.name for each in overrides if each.policy.name},
    }


def _trial(trial: Trial) -> dict[str, Any]:
    outcome = trial.outcome
    return {
        **settings_of(trial.group),
        "hit_rate": outcome.hit_rate,
        "mean_used_bytes": int(outcome.mean_used_bytes),
        "written_blocks": outcome.written_blocks,
        "evicted_blocks": outcome.evicted_blocks,
        "refused_blocks": outcome.refused_blocks,
    }


def trial_rows(proposals: Iterable[Proposal]) -> list[dict[str, Any]]:
    """Return a row per rehearsal, without what single instances do differently."""
    rows = []
    for proposal in proposals:
        for trial in (*proposal.trials, proposal.proposed):
            row = {"group": proposal.state.group.name, **_trial(trial)}
            del row["instance_policies"]
            rows.append(row)
    return rows


def document_of(situation: Situation, proposals: Iterable[Proposal]) -> Mapping[str, Any]:
    """Return everything that is known, as one JSON object."""
    coverage = situation.recording.coverage
    return {
        "recorded": {
            "since_us": int(coverage.since * 1e6),
            "until_us": int(coverage.until * 1e6),
            "lookups": situation.recording.lookups,
            "dropped_accesses": coverage.dropped_accesses,
            "dropped_keys": coverage.dropped_keys,
        },
        "groups": [
            {
                "group": proposal.state.group.name,
                "version": proposal.state.group.version,
                "used_bytes": proposal.state.used_bytes,
                "measured_hit_rate": proposal.measured_hit_rate,
                "attainable_hit_rate": proposal.attainable_hit_rate,
                "present": _trial(proposal.present),
                "proposed": _trial(proposal.proposed),
                "gain": proposal.gain,
                "confidence": proposal.confidence,
                "warnings": list(proposal.warnings),
                "trials": [_trial(trial) for trial in proposal.trials],
            }
            for proposal in proposals
        ],
    }
