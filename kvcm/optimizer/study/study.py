"""Asks a trace everything that a report shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcm.optimizer.capacities import parse_capacities
from kvcm.optimizer.curves import CURVES
from kvcm.optimizer.errors import TraceError
from kvcm.optimizer.locality import Locality, PrefixTree, locality_of, valuable_prefixes
from kvcm.optimizer.policy_spec import parse_policy
from kvcm.optimizer.pooling import PoolingStudy
from kvcm.optimizer.replay import Job, replay_all
from kvcm.optimizer.results import Curve, Replay
from kvcm.optimizer.roi import FirstTokens, Grid, Returns, Swing, block_bytes, first_tokens, grid, sensitivity
from kvcm.optimizer.study.options import Progress, StudyOptions, nobody, shown_name
from kvcm.optimizer.study.pools import pooling_of
from kvcm.optimizer.study.recommendation import Recommendation, recommended
from kvcm.optimizer.study.rows import all_curves, rows_of
from kvcm.optimizer.study.tiering import Tiering, tiering_of
from kvcm.optimizer.study.worth import hits_of, returns_of
from kvcm.optimizer.trace import Trace

__all__ = ["Study", "study_of"]

_PREFIXES = 25
_STEPS = 6
_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """What was found.

    Attributes:
        trace: that was asked.
        options: what was asked.
        replays: of each policy at each capacity.
        curves: exact at every capacity, in mode block, by label; those that this trace has.
        over_time: replays that kept their requests: at the recommended capacity, a tenth of the unique blocks, and all.
        locality: how blocks are used again.
        prefixes: that save most.
        returns: in GPUs and money, by label.
        recommendation: what to do; None where no policy was asked that could be.
        first_tokens: times to the first token, without a cache and with those of `over_time`, on as many nodes as are
            needed without one.
        swings: of the recommended policy when inputs of the deployment are off, the widest first.
        grid: the same for bandwidths and prices.
        tiering: what a hierarchy gives.
        pooling: what it is worth that engines share one pool.
    """

    trace: Trace
    options: StudyOptions
    replays: tuple[Replay, ...]
    curves: Mapping[str, Curve]
    over_time: tuple[Replay, ...]
    locality: Locality
    prefixes: PrefixTree
    returns: Mapping[str, Returns]
    recommendation: Recommendation | None
    first_tokens: tuple[FirstTokens, ...]
    swings: tuple[Swing, ...]
    grid: Grid | None
    tiering: Tiering
    pooling: PoolingStudy

    @property
    def name(self) -> str:
        """Return what the trace is called, without the endings of a file."""
        return shown_name(self.trace.name)

    @property
    def bytes_per_block(self) -> float:
        """Return the KV bytes of a block in the deployment."""
        return block_bytes(self.trace, self.options.deployment)

    @property
    def unlimited(self) -> Replay:
        """Return what a cache counts that holds everything."""
        return self.over_time[-1]


def study_of(trace: Trace, options: StudyOptions, progress: Progress = nobody) -> Study:
    """Ask a trace everything.

    Raises:
        OptionError: a policy, capacity or tier is none, or cannot be replayed on this trace.
        TraceError: there is nothing to ask about.
    """
    if not trace.totals.blocks:
        raise TraceError(f"{trace.name}: no request reads a block, so there is nothing to report")
    if not trace.is_plain:
        raise TraceError(
            f"{trace.name}: has requests with query modes, masks or location specs, on which there is no report; "
            "allowed: --json, --csv and --csv-original"
        )
    capacities = parse_capacities(options.capacities, trace.unique_blocks)
    curves = all_curves(trace, CURVES if options.mode == "block" else (), progress)
    replays = rows_of(trace, options, capacities, curves, progress, keep_requests=True)
    progress("studying", 0, _STEPS)
    worth = returns_of(trace, options, replays, curves)
    recommendation = recommended(worth)
    over_time = _over_time(trace, options, recommendation)
    progress("studying", 1, _STEPS)
    nodes = max(1, math.ceil(max(each.nodes_without for each in worth.values())))
    waits = first_tokens(trace, over_time, options.deployment, nodes=nodes)
    progress("studying", 2, _STEPS)
    swings, cells = _doubts(trace, options, recommendation, replays, curves)
    progress("studying", 3, _STEPS)
    locality = locality_of(trace, curves.get("lru"))
    progress("studying", 4, _STEPS)
    tiering = tiering_of(trace, options)
    progress("studying", 5, _STEPS)
    room = recommendation.capacity_blocks if recommendation and recommendation.pays else trace.unique_blocks // 10
    found = Study(
        trace=trace,
        options=options,
        replays=replays,
        curves=curves,
        over_time=over_time,
        locality=locality,
        prefixes=valuable_prefixes(trace, _PREFIXES),
        returns=worth,
        recommendation=recommendation,
        first_tokens=waits,
        swings=swings,
        grid=cells,
        tiering=tiering,
        pooling=pooling_of(trace, options, room),
    )
    progress("studying", _STEPS, _STEPS)
    return found


def _over_time(trace: Trace, options: StudyOptions, recommendation: Recommendation | None) -> tuple[Replay, ...]:
    policy = parse_policy(recommendation.policy if recommendation else "lru")
    most = max(1, trace.unique_blocks)
    asked = [recommendation.capacity_blocks] if recommendation and recommendation.pays else []
    capacities = [each for each in dict.fromkeys([*asked, max(1, most // 10)]) if each < most]
    jobs = [Job(policy, each, options.mode, keep_requests=True) for each in capacities]
    jobs.append(Job(parse_policy("lru"), most, options.mode, keep_requests=True))
    return tuple(replay_all(trace, jobs, workers=options.workers))


def _doubts(
    trace: Trace,
    options: StudyOptions,
    recommendation: Recommendation | None,
    replays: Sequence[Replay],
    curves: Mapping[str, Curve],
) -> tuple[tuple[Swing, ...], Grid | None]:
    if recommendation is None:
        return (), None
    hits = hits_of(trace, options, recommendation.policy, replays, curves)
    deployment = options.deployment
    bandwidths = [deployment.bandwidth_bytes_per_second * factor for factor in _FACTORS]
    prices = [deployment.price_per_gib_month * factor for factor in (*_FACTORS[1:], 16.0)]
    return sensitivity(hits, trace, deployment), grid(hits, trace, deployment, bandwidths=bandwidths, prices=prices)
