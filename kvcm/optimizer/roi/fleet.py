"""How many nodes keep the time to the first token under a target, with and without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.results import Replay
from kvcm.optimizer.roi.deployment import Deployment
from kvcm.optimizer.roi.first_token import Spread, Work, spread_of, work_of
from kvcm.optimizer.roi.formulas import Floats
from kvcm.optimizer.roi.queueing import Dispatch, Queueing, simulate
from kvcm.optimizer.trace import Trace

__all__ = ["FirstTokens", "Target", "first_tokens", "smallest_fleet"]


@dataclass(frozen=True, slots=True)
class Target:
    """So many per cent of the requests have their first token within so many seconds.

    Raises:
        OptionError: one of them is out of its range.
    """

    percent: float
    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise OptionError(f"target: percent is {self.percent}; allowed: above 0, up to 100")
        if not 0 <= self.seconds < 1e12:
            raise OptionError(f"target: seconds is {self.seconds}; allowed: from 0")

    def is_met(self, seconds: Floats) -> bool:
        """Return whether times to the first token meet it, to a billionth; none do."""
        if not len(seconds):
            return True
        reached = float(np.percentile(seconds, self.percent, method="inverted_cdf"))
        return reached <= self.seconds + 1e-9 * max(1.0, self.seconds)


@dataclass(frozen=True, slots=True, eq=False)
class FirstTokens:
    """The time to the first token with a cache of one capacity.

    Attributes:
        policy: label; "none" without a cache.
        capacity_blocks: 0 without a cache.
        unqueued: how it is spread when no request waits for another.
        queued: what requests met on the nodes.
        nodes_for_target: the fewest that meet the target; None where no number does, or none was set.
    """

    policy: str
    capacity_blocks: int
    unqueued: Spread
    queued: Queueing
    nodes_for_target: int | None

    def as_json(self) -> dict[str, object]:
        """Return the figures by name."""
        return {
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "unqueued_seconds": self.unqueued.as_json(),
            "queued": self.queued.as_json(),
            "nodes_for_target": self.nodes_for_target,
        }


def first_tokens(
    trace: Trace,
    replays: Sequence[Replay],
    deployment: Deployment,
    *,
    nodes: int,
    dispatch: Dispatch = "least_loaded",
    target: Target | None = None,
) -> tuple[FirstTokens, ...]:
    """Return the time to the first token without a cache, and with that of each replay.

    Args:
        trace: that was replayed.
        replays: with their requests kept.
        deployment: what loads and prefills take.
        nodes: that the requests meet.
        dispatch: how they are sent to them.
        target: to find the fewest nodes for.

    Raises:
        OptionError: a replay kept no requests, or an input is out of its range.
    """
    found = []
    for replay in (None, *replays):
        if replay is not None and replay.request_hits is None:
            raise OptionError(f"replays: {replay.policy} kept no requests; allowed: replays with keep_requests")
        work = work_of(trace, deployment, None if replay is None else replay.request_hits)
        found.append(
            FirstTokens(
                policy="none" if replay is None else replay.policy,
                capacity_blocks=0 if replay is None else replay.capacity_blocks,
                unqueued=spread_of(work.unqueued_seconds),
                queued=simulate(work, nodes=nodes, dispatch=dispatch),
                nodes_for_target=None if target is None else smallest_fleet(work, target, dispatch=dispatch),
            )
        )
    return tuple(found)


def smallest_fleet(
    work: Work, target: Target, *, dispatch: Dispatch = "least_loaded", most_nodes: int = 4096
) -> int | None:
    """Return the fewest nodes that meet a target; None where so many do not.

    Doubles and halves, so it assumes that a number of nodes that is too small is so for all smaller ones.
    """
    if not target.is_met(work.unqueued_seconds):
        return None
    enough = 1
    while not target.is_met(simulate(work, nodes=enough, dispatch=dispatch).seconds):
        if enough == most_nodes:
            return None
        enough = min(2 * enough, most_nodes)
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        if target.is_met(simulate(work, nodes=middle, dispatch=dispatch).seconds):
            enough = middle
        else:
            too_few = middle
    return enough
