"""What policies and services return in GPUs and money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcm.optimizer.capacities import parse_capacities
from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.policy_spec import parse_policy
from kvcm.optimizer.replay import Job, replay_all
from kvcm.optimizer.results import Curve, Replay
from kvcm.optimizer.roi import Rank, Returns, Service, Split, rank_services, returns, split_budget
from kvcm.optimizer.study.options import StudyOptions
from kvcm.optimizer.trace import Trace

__all__ = ["Services", "hits_of", "returns_of", "services_of"]

_BUDGETS = (0.1, 0.25, 0.5, 1.0)

Hits = Curve | list[Replay]


@dataclass(frozen=True, slots=True)
class Services:
    """Several traces as services that could share one store.

    Attributes:
        ranks: by what a GiB saves, the most first.
        budgets: bytes.
        splits: of each budget.
    """

    ranks: tuple[Rank, ...]
    budgets: tuple[float, ...]
    splits: tuple[Split, ...]


def returns_of(
    trace: Trace, options: StudyOptions, replays: Sequence[Replay], curves: Mapping[str, Curve]
) -> dict[str, Returns]:
    """Return what each policy returns: at every capacity where there is a curve that tells it, else where replayed."""
    labels = dict.fromkeys([replay.policy for replay in replays] + list(curves))
    return {
        label: returns(hits_of(trace, options, label, replays, curves), trace, options.deployment) for label in labels
    }


def hits_of(
    trace: Trace, options: StudyOptions, label: str, replays: Sequence[Replay], curves: Mapping[str, Curve]
) -> Hits:
    """Return the hits of a policy as what they are worth can be told from: a curve, or replays that kept requests.

    What loads cost may depend on the hits of single requests, which not every curve knows.
    """
    if label in curves:
        try:
            returns(curves[label], trace, options.deployment)
        except OptionError:
            return _replayed(trace, options, label)
        return curves[label]
    return [replay for replay in replays if replay.policy == label]


def _replayed(trace: Trace, options: StudyOptions, label: str) -> list[Replay]:
    capacities = parse_capacities(options.capacities, trace.unique_blocks)
    jobs = [Job(parse_policy(label), capacity, options.mode, keep_requests=True) for capacity in capacities]
    return replay_all(trace, jobs, workers=options.workers)


def services_of(named: Mapping[str, Returns]) -> Services:
    """Return which of several services room is worth most to, and how to split it.

    Args:
        named: what the recommended policy of each returns.
    """
    services = [Service(name, found) for name, found in named.items()]
    ranks = rank_services(services)
    wanted = sum(rank.best_bytes for rank in ranks)
    budgets = tuple(wanted * share for share in _BUDGETS) if wanted else ()
    return Services(ranks, budgets, tuple(split_budget(services, budget) for budget in budgets))
