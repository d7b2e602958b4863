"""Settings that would have served the recorded accesses better, and how much that is to be believed.

Of each group the policies are rehearsed at several quotas around the present one; then, with the best policy at the
present quota, the smallest quota is searched that reaches the wanted part of what an unlimited cache would have found.
An instance of several gets a policy of its own, and blocks an age, where that helps. What gains less than
`Wish.least_gain` is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvcm.model.groups import EvictionPolicy, InstanceGroup, InstanceOverride
from kvcm.optimizer.live.recording import Lookup, Recording
from kvcm.optimizer.live.rehearsal import Rehearse, Trial, unlimited

__all__ = [
    "GroupState",
    "ManagerState",
    "Proposal",
    "TuningGoal",
    "document_of",
    "measured_hit_rate",
    "propose",
    "settings_of",
    "trial_rows",
    "with_quota",
]

# What a running manager reports of itself, as far as proposals use it.


@dataclass(frozen=True, slots=True)
class GroupState:
    """A group as it is.

    Attributes:
        group: its settings, with their version.
        block_bytes: of each of its instances, by id.
        used_bytes: what it uses.
        global_quota: name of the quota that it shares with others, "" where none limits it.
    """

    group: InstanceGroup
    block_bytes: Mapping[str, int]
    used_bytes: int
    global_quota: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ManagerState:
    """A manager as it is: its groups, and what engines did of late."""

    groups: Sequence[GroupState]
    recording: Recording


def with_quota(group: InstanceGroup, quota_bytes: int) -> InstanceGroup:
    """Return the group with another quota in total."""
    return replace(group, quota=replace(group.quota, capacity=quota_bytes))


def _with_policy(group: InstanceGroup, policy: EvictionPolicy, instance_id: str = "") -> InstanceGroup:
    """Return the group with another policy, or with one of an instance's own."""
    strategy = group.cache_config.reclaim_strategy
    if instance_id:
        others = tuple(each for each in strategy.instance_overrides if each.instance_id != instance_id)
        own = InstanceOverride(instance_id, policy, group.override_of(instance_id).weight)
        strategy = replace(strategy, instance_overrides=(*others, own))
    else:
        strategy = replace(strategy, policy=policy)
    return replace(group, cache_config=replace(group.cache_config, reclaim_strategy=strategy))


def measured_hit_rate(recording: Recording, instance_ids: Iterable[str]) -> float | None:
    """Return which part of the blocks asked for was found; None where nothing was asked for."""
    names = frozenset(instance_ids)
    numbers = {number for number, name in enumerate(recording.instance_names) if name in names}
    asked = found = 0
    for access in recording.accesses:
        if isinstance(access, Lookup) and access.instance in numbers:
            asked += len(access.blocks)
            found += access.found
    return found / asked if asked else None


def _unsupported_settings(state: GroupState) -> list[str]:
    """Return a sentence for each setting that a rehearsal passes over."""
    group, strategy = state.group, state.group.cache_config.reclaim_strategy
    unsupported = {
        "quotas of storage types limit it, too; they are not rehearsed": bool(group.quota.quota_config),
        f"it shares the global quota {state.global_quota!r} with other groups; it is rehearsed alone": bool(
            state.global_quota
        ),
        "its prefix classes are not rehearsed": bool(strategy.prefix_classes),
        "its step limits are not rehearsed": bool(strategy.reclaim_step_size or strategy.reclaim_step_percentage),
        "its limit of blocks per instance is not rehearsed": bool(group.cache_config.meta_indexer_config.max_key_count),
        "its pins are not rehearsed": bool(group.pin_budget_bytes),
    }
    return [sentence for sentence, is_so in unsupported.items() if is_so]


_POLICIES_WITH_AGE = ("leaf_lru", "lru", "fifo", "ttl")
_POLICIES = ("leaf_lru", "lru", "lfu", "lfu_aging", "fifo", "sieve", "s3fifo")
_MOST_INSTANCES = 8  # that are asked whether a policy of their own would help
_SEARCH_RATIO = 1.02  # how exactly the smallest quota is found
_AT_ONCE = 4  # quotas, beside each other
_LEAST_PART = 1 << 12  # of all bytes: the smallest quota that is thought of
_MARGINS = (1.0, 1.05, 1.1, 1.25, 1.5)
_SMALL_CHANGE = 0.05  # of a quota: not worth it
_MIB = 1 << 20
_FEW_LOOKUPS = 200
_LATE = 99.9  # per cent of the intervals between reads that an age has to outlast
_QUOTA_MARGIN_FOR_AGE = 1.5
_LEAST_AGES = 4  # in the recording, for an age to be believed
_FREED = 0.9  # of the bytes used: an age that frees less is not worth it
_OFF_BY = 0.01


@dataclass(frozen=True, slots=True)
class TuningGoal:
    """The goal of a proposal.

    Attributes:
        target: part of the attainable hits that the proposed quota is to reach; None leaves quotas as they are.
        quota_ratios: quotas to rehearse, relative to the present one.
        least_gain: in hit rate, for which a setting is changed.
    """

    target: float | None = 0.95
    quota_ratios: Sequence[float] = (0.5, 0.75, 1.0, 1.5, 2.0)
    least_gain: float = 0.005


@dataclass(frozen=True, slots=True)
class Proposal:
    """The proposal for one group.

    Attributes:
        state: the group as it is.
        measured_hit_rate: of the recorded lookups.
        attainable_hit_rate: of an unlimited cache.
        present: its settings, rehearsed.
        proposed: those that are proposed, likewise; the same where nothing is.
        trials: everything that was rehearsed around the present settings.
        confidence: `high`, `medium` or `low`.
        warnings: why it is no higher, and which settings were ignored.
    """

    state: GroupState
    measured_hit_rate: float
    attainable_hit_rate: float
    present: Trial
    proposed: Trial
    trials: Sequence[Trial] = ()
    confidence: str = "high"
    warnings: Sequence[str] = field(default_factory=tuple)

    @property
    def is_change(self) -> bool:
        """Whether anything is proposed."""
        return self.proposed.group != self.state.group

    @property
    def gain(self) -> float:
        """Return by how much the hit rate would be higher."""
        return self.proposed.outcome.hit_rate - self.present.outcome.hit_rate


def propose(situation: ManagerState, rehearse: Rehearse, goal: TuningGoal | None = None) -> list[Proposal]:
    """Return a proposal for each group whose instances were asked for anything.

    Args:
        situation: the manager as it is.
        rehearse: of its recording.
        goal: the goal.
    """
    made = []
    for state in situation.groups:
        measured = measured_hit_rate(situation.recording, state.block_bytes)
        if measured is not None:
            made.append(_Search(state, situation.recording, rehearse, goal or TuningGoal()).proposal(measured))
    return made


class _Search:
    def __init__(self, state: GroupState, recording: Recording, rehearse: Rehearse, goal: TuningGoal) -> None:
        self._state = state
        self._recording = recording
        self._rehearse = rehearse
        self._goal = goal

    def proposal(self, measured: float) -> Proposal:
        state, group = self._state, self._state.group
        rule = group.policy_of("")
        grid = self._rehearsed(
            [with_quota(_with_policy(group, each), quota) for quota in self._quotas() for each in self._rules()]
        )
        present, endless = self._rehearsed([group, unlimited(group)])
        attainable = endless.outcome.hit_rate
        same_quota = [trial for trial in grid if trial.group.quota.capacity == group.quota.capacity]
        proposed = self._better(present, max(same_quota, key=_hit_rate, default=present))
        proposed = self._with_own_policies(proposed)
        confidence, warnings = self._confidence(measured, present)
        if self._goal.target is not None and confidence != "low" and not group.quota.quota_config:
            proposed = self._with_quota(present, proposed, self._goal.target * attainable)
        if not rule.ttl_seconds:
            proposed = self._with_age(proposed)
        warnings += _unsupported_settings(state)
        return Proposal(
            state=state,
            measured_hit_rate=measured,
            attainable_hit_rate=attainable,
            present=present,
            proposed=proposed,
            trials=(present, *grid),
            confidence=confidence,
            warnings=tuple(warnings),
        )

    def _rehearsed(self, groups: Sequence[InstanceGroup]) -> list[Trial]:
        return self._rehearse(groups, self._state.block_bytes, self._state.used_bytes)

    def _quotas(self) -> list[int]:
        capacity = self._state.group.quota.capacity
        return sorted({max(1, int(capacity * ratio)) for ratio in self._goal.quota_ratios})

    def _rules(self) -> list[EvictionPolicy]:
        """Return the policies that the group may have; not all of them can have an age."""
        rule = self._state.group.policy_of("")
        allowed = _POLICIES_WITH_AGE if rule.ttl_seconds else _POLICIES
        return [replace(rule, name=name) for name in allowed]

    def _better(self, before: Trial, after: Trial) -> Trial:
        return after if after.outcome.hit_rate - before.outcome.hit_rate >= self._goal.least_gain else before

    def _with_own_policies(self, trial: Trial) -> Trial:
        """Try policies of their own for the instances that are asked for most."""
        asked = trial.outcome.asked_blocks
        busiest = sorted(asked, key=lambda name: -asked[name])[:_MOST_INSTANCES]
        for name in busiest if len(asked) > 1 else ():
            tried = self._rehearsed([_with_policy(trial.group, rule, name) for rule in self._rules()])
            trial = self._better(trial, max(tried, key=_hit_rate))
        return trial

    def _distinct_bytes(self) -> int:
        """Return the bytes of all blocks that were named."""
        sizes = [self._state.block_bytes.get(name, 0) for name in self._recording.instance_names]
        return sum(sizes[owner] for owner in self._recording.owners)

    def _with_quota(self, present: Trial, proposed: Trial, wanted: float) -> Trial:
        """Return the smallest quota that finds so much, unless it is nearly the present one. The best where capacity
        is short need not be where there is more: the present policy has its chance, too."""
        trials = [present] if proposed is present else [present, proposed]
        found = [smallest for trial in trials if (smallest := self._smallest_quota(trial, wanted)) is not None]
        if not found:
            return proposed
        best = min(found, key=lambda trial: trial.group.quota.capacity)
        capacity = present.group.quota.capacity
        return best if abs(best.group.quota.capacity - capacity) >= _SMALL_CHANGE * capacity else proposed

    def _smallest_quota(self, trial: Trial, wanted: float) -> Trial | None:
        """Return the smallest quota that finds so much, None where none does."""
        most = self._distinct_bytes()
        low, high = max(1, most // _LEAST_PART), max(2 * most, _MIB)
        best: Trial | None = None
        while high > low * _SEARCH_RATIO and high - low > _AT_ONCE:
            step = (high / low) ** (1 / (_AT_ONCE + 1))
            quotas = [int(low * step**number) for number in range(1, _AT_ONCE + 1)]
            for tried in self._rehearsed([with_quota(trial.group, quota) for quota in quotas]):
                if tried.outcome.hit_rate >= wanted:
                    best, high = tried, tried.group.quota.capacity
                    break
                low = tried.group.quota.capacity
        if best is None:
            return None
        # More capacity does not always find more, where engines walk in circles: it has to hold with more, too.
        capacity = best.group.quota.capacity
        quotas = [-(-int(capacity * ratio) // _MIB) * _MIB for ratio in _MARGINS]
        found = None
        for tried in reversed(self._rehearsed([with_quota(trial.group, quota) for quota in quotas])):
            if tried.outcome.hit_rate < wanted:
                break
            found = tried
        return found

    def _with_age(self, trial: Trial) -> Trial:
        """Try an age that nearly all reads keep within, where the recording is long enough for it."""
        rule = trial.group.policy_of("")
        seconds = self._late_interval()
        long_enough = self._recording.coverage.seconds >= _LEAST_AGES * seconds
        if rule.name not in _POLICIES_WITH_AGE or not seconds or not long_enough:
            return trial
        aged = replace(rule, ttl_seconds=seconds, ttl_sliding=not rule.orders_by_write)
        (tried,) = self._rehearsed([_with_policy(trial.group, aged)])
        before, after = trial.outcome, tried.outcome
        keeps_hits = after.hit_rate >= before.hit_rate - self._goal.least_gain / 5
        frees = after.mean_used_bytes <= _FREED * before.mean_used_bytes
        return tried if keeps_hits and frees else self._better(trial, tried)

    def _late_interval(self) -> int:
        """Return seconds in which nearly every block is read again, of those that are; 0 where none is."""
        names = self._recording.instance_names
        own = {number for number, name in enumerate(names) if name in self._state.block_bytes}
        last = np.full(len(self._recording.owners), -np.inf)
        intervals = []
        for access in self._recording.accesses:
            if isinstance(access, Lookup) and access.instance in own:
                since = access.at - last[list(access.blocks)]
                intervals.append(since[np.isfinite(since)])
                last[list(access.blocks)] = access.at
        found = np.concatenate(intervals) if intervals else np.empty(0)
        return int(np.ceil(_QUOTA_MARGIN_FOR_AGE * np.percentile(found, _LATE))) if len(found) else 0

    def _confidence(self, measured: float, present: Trial) -> tuple[str, list[str]]:
        """Return how far the recording reaches, and what speaks against it."""
        outcome, coverage = present.outcome, self._recording.coverage
        size = max(self._state.block_bytes.values(), default=0)
        quota = max(1, self._state.group.quota.capacity)
        turnover = outcome.written_blocks * size / quota
        has_all = not coverage.dropped_accesses
        longer = "let the manager serve for longer" if has_all else "raise kvcm.optimizer.recent_keys"
        low = {
            f"only {self._recording.lookups} lookups are recorded": self._recording.lookups < _FEW_LOOKUPS,
            f"what is recorded wrote {turnover:.0%} of the quota, so that reuse over longer times is not in it, and "
            f"the quota is left as it is: {longer}": turnover < 1,
        }
        medium = {
            f"what is recorded wrote {turnover:.1f} times the quota, more than 3 times are better: {longer}": 1
            <= turnover
            < 3,
            f"with the present settings {outcome.hit_rate:.2%} are rehearsed where {measured:.2%} were measured: they "
            "may have been changed meanwhile": abs(outcome.hit_rate - measured) > _OFF_BY,
            f"the {coverage.seconds:,.0f} s since the manager started are all that is known": has_all,
        }
        warnings = [text for text, is_so in {**low, **medium}.items() if is_so]
        level = "low" if any(low.values()) else "medium" if any(medium.values()) else "high"
        return level, warnings


def _hit_rate(trial: Trial) -> float:
    return trial.outcome.hit_rate


# Proposals as JSON and CSV have them.


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


def document_of(situation: ManagerState, proposals: Iterable[Proposal]) -> Mapping[str, Any]:
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
