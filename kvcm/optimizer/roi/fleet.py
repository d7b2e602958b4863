"""The time to the first token on nodes where requests wait for each other, with and without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.results import Replay
from kvcm.optimizer.roi.deployment import Deployment
from kvcm.optimizer.roi.first_token import Spread, spread_of, work_of
from kvcm.optimizer.roi.queueing import Queueing, simulate
from kvcm.optimizer.trace import Trace

__all__ = ["FirstTokens", "first_tokens"]


@dataclass(frozen=True, slots=True, eq=False)
class FirstTokens:
    """The time to the first token with a cache of one capacity.

    Attributes:
        policy: label; "none" without a cache.
        capacity_blocks: 0 without a cache.
        unqueued: how it is spread when no request waits for another.
        queued: what requests met on the nodes.
    """

    policy: str
    capacity_blocks: int
    unqueued: Spread
    queued: Queueing


def first_tokens(
    trace: Trace, replays: Sequence[Replay], deployment: Deployment, *, nodes: int
) -> tuple[FirstTokens, ...]:
    """Return the time to the first token without a cache, and with that of each replay.

    Args:
        trace: that was replayed.
        replays: with their requests kept.
        deployment: what loads and prefills take.
        nodes: that the requests meet.

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
                queued=simulate(work, nodes=nodes),
            )
        )
    return tuple(found)
