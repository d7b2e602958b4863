"""Asks a trace what cache is worth having: every question whose answer a report shows."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

import numpy as np

from kvcm.optimizer.curves import CURVES, MOST_RATE, MOST_REPEATS, SampledCurve, sampled_curves
from kvcm.optimizer.errors import OptimizerError, OptionError, TraceError
from kvcm.optimizer.groups import replay_group
from kvcm.optimizer.live.traces import replay_all_in_manager
from kvcm.optimizer.locality import Locality, PrefixTree, locality_of, valuable_prefixes
from kvcm.optimizer.options import (
    ALLOWED_CAPACITIES,
    DEFAULT_CAPACITIES,
    PolicySpec,
    parse_capacities,
    parse_policies,
    parse_policy,
)
from kvcm.optimizer.pooling import DEFAULT_ROUTING, Engines, PoolingStudy, Routing, Topology, compare_pooling
from kvcm.optimizer.replay import Job, Mode, replay_all
from kvcm.optimizer.results import Curve, Replay
from kvcm.optimizer.roi import (
    PRESETS,
    Deployment,
    FirstTokens,
    Grid,
    Rank,
    Returns,
    Service,
    Split,
    Swing,
    block_bytes,
    first_tokens,
    grid,
    rank_services,
    returns,
    sensitivity,
    split_budget,
)
from kvcm.optimizer.roi.returns import NEARLY
from kvcm.optimizer.tiers import (
    BestSplit,
    SplitCurve,
    SplitHits,
    Tier,
    TierReplay,
    best_split,
    block_bytes_of,
    parse_tiers,
    replay_tiers,
    split_curve,
)  # fmt: skip
from kvcm.optimizer.tiers.tier import FloatColumn
from kvcm.optimizer.trace import Int64Column, Trace

__all__ = [
    "BOUND",
    "Estimate",
    "Progress",
    "Recommendation",
    "Sampling",
    "Services",
    "Splits",
    "Study",
    "StudyMode",
    "StudyOptions",
    "Tiering",
    "display_name",
    "estimates_of",
    "parse_sampling",
    "pooling_of",
    "recommended",
    "replays_of",
    "rows_of",
    "services_of",
    "study_of",
]

# Options of a study.

StudyMode = Mode | Literal["manager"]
"""How a cache is held to its capacity: as in `Mode`, or as a manager does it (`kvcm.optimizer.live.traces`)."""

_DEFAULT_POLICIES = "lru,leaf_lru,belady,lfu,fifo,sieve,s3fifo"
_ENDINGS = re.compile(r"(?<!^)(\.(jsonl?|ndjson|log|txt|gz))+$")
Progress = Callable[[str, int, int], None]
"""Called with the name of a step, how much of it is done, and of how much."""


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """Options of a study.

    Attributes:
        policies: to replay.
        capacities: in blocks, or in % of the unique blocks of each trace, with commas.
        mode: of the replays.
        workers: threads; None for one per processor.
        deployment: in which hits are worth something.
        deployment_name: for people.
        tiers: of a hierarchy, as `parse_tiers` reads them; empty for those that are assumed.
        engines: to spread requests over, with memory of their own or one pool.
        routing: policies that spread them.
        engine_capacity: of each engine's own memory, as `capacities`; empty for its part of the pool.
        pool_capacity: of the pool, as `capacities`; empty for the recommended one, or 10 % where there is none.
    """

    policies: tuple[PolicySpec, ...] = field(default_factory=lambda: parse_policies(_DEFAULT_POLICIES))
    capacities: str = DEFAULT_CAPACITIES
    mode: StudyMode = "block"
    workers: int | None = None
    deployment: Deployment = PRESETS["deepseek_v3"]
    deployment_name: str = "deepseek_v3"
    tiers: str = ""
    engines: int = 4
    routing: tuple[Routing, ...] = DEFAULT_ROUTING
    engine_capacity: str = ""
    pool_capacity: str = ""


def display_name(name: str) -> str:
    """Return the name of a trace's file without the endings that say what it consists of."""
    return _ENDINGS.sub("", name) or name


def _ignore_progress(_what: str, _done: int, _total: int) -> None:
    """Watch nothing."""


# Which policy and how much cache to take.

BOUND = "belady"
"""Knows the future: what it returns is a bound, and nothing to recommend."""


_OF_THE_MANAGER = "leaf_lru"
"""The default policy of groups."""


@dataclass(frozen=True, slots=True, eq=False)
class Recommendation:
    """A setting.

    Attributes:
        returns: of the policy.
        place: of the capacity among those.
    """

    returns: Returns
    place: int

    @property
    def policy(self) -> str:
        """Return its label."""
        return self.returns.policy

    @property
    def capacity_blocks(self) -> int:
        """Return how large a cache; 0 where none pays."""
        return int(self.returns.capacity_blocks[self.place])

    @property
    def pays(self) -> bool:
        """Whether any cache returns more than it costs."""
        return self.capacity_blocks > 0


def recommended(returns: Mapping[str, Returns]) -> Recommendation | None:
    """Return a policy within 1 % of the greatest net value, at the smallest capacity within 1 % of its best.

    The last per cent of value often takes half of the capacity, and changing a policy for less is not worth it: of
    several the manager's own is taken, else the first. None where there is no policy but the bound.
    """
    live = [each for label, each in returns.items() if label.split(":")[0] != BOUND]
    if not live:
        return None
    greatest = max(float(each.net_per_hour[each.best]) for each in live)
    good = [each for each in live if each.net_per_hour[each.best] >= greatest * (1 - NEARLY)]
    best = next((each for each in good if each.policy == _OF_THE_MANAGER), good[0])
    return Recommendation(best, best.nearly_best)


# Policies at capacities for traces whose requests do more than read a prefix: query modes, masks, location specs.


def _grouped_rows(
    trace: Trace, options: StudyOptions, capacities: Sequence[int], progress: Progress
) -> tuple[Replay, ...]:
    """Return what each policy counts at each capacity, with all instances in one group.

    Hits are the blocks of the answers and those that engines said they have. Which requests a bound would serve is not
    known where they read in different ways: it is left out unless it was asked for by name.

    Raises:
        OptionError: a policy cannot be replayed like this.
    """
    if options.mode == "manager":
        raise OptionError(
            f"--mode is 'manager' and {trace.name} has requests with query modes, masks or location specs; allowed: "
            "block, request"
        )
    is_default = ",".join(spec.label for spec in options.policies) == _DEFAULT_POLICIES
    policies = [spec for spec in options.policies if not (is_default and spec.name == BOUND)]
    jobs = list(product(policies, capacities))
    found = []
    for done, (spec, capacity) in enumerate(jobs):
        progress("replays", done, len(jobs))
        found.append(replay_group(trace, spec, capacity, mode=options.mode))
    progress("replays", len(jobs), len(jobs))
    return tuple(found)


# Policies at capacities: replayed, or read from a one-pass curve where that is the same for less.


def replays_of(trace: Trace, options: StudyOptions, progress: Progress) -> tuple[Replay, ...]:
    """Return what each policy counts at each capacity, policies first.

    Raises:
        OptionError: a policy or capacity is none, or cannot be replayed on this trace.
    """
    capacities = parse_capacities(options.capacities, trace.unique_blocks)
    if not trace.is_plain:
        return _grouped_rows(trace, options, capacities, progress)
    labels = [spec.label for spec in options.policies if spec.label in CURVES]
    # One pass costs more than one replay, and holds block by block.
    is_worth_it = options.mode == "block" and len(capacities) > 1
    curves = _all_curves(trace, labels if is_worth_it else (), progress)
    return rows_of(trace, options, capacities, curves, progress)


def _all_curves(trace: Trace, labels: Iterable[str], progress: Progress) -> dict[str, Curve]:
    """Return the curves of policies, of those whose curve one pass gives for this trace."""
    wanted, found = tuple(labels), {}
    for done, label in enumerate(wanted):
        progress("curves", done, len(wanted))
        try:
            found[label] = CURVES[label](trace)
        except OptionError:  # it is replayed
            continue
    progress("curves", len(wanted), len(wanted))
    return found


def rows_of(
    trace: Trace,
    options: StudyOptions,
    capacities: Sequence[int],
    curves: Mapping[str, Curve],
    progress: Progress,
    *,
    keep_requests: bool = False,
) -> tuple[Replay, ...]:
    """Return what each policy counts at each capacity; those that have a curve are not replayed.

    Raises:
        OptionError: a policy cannot be replayed on this trace.
    """
    replayed = [spec for spec in options.policies if spec.label not in curves]
    jobs = [Job(spec, capacity, _mode_of(options), keep_requests) for spec in replayed for capacity in capacities]
    done = _replay_all(trace, jobs, options, lambda done, total: progress("replays", done, total))
    by_label = {curve.policy: [curve.at(capacity) for capacity in capacities] for curve in curves.values()}
    for place, spec in enumerate(replayed):
        by_label[spec.label] = done[place * len(capacities) : (place + 1) * len(capacities)]
    return tuple(replay for spec in options.policies for replay in by_label[spec.label])


def _mode_of(options: StudyOptions) -> Mode:
    return "request" if options.mode == "manager" else options.mode  # as the policies that no manager has


def _replay_all(
    trace: Trace, jobs: Sequence[Job], options: StudyOptions, progress: Callable[[int, int], None] | None = None
) -> list[Replay]:
    replay_jobs = replay_all_in_manager if options.mode == "manager" else replay_all
    return replay_jobs(trace, jobs, workers=options.workers, progress=progress)


# Policies at capacities, estimated from samples of a trace instead of replayed.

_RANGES = {"repeats": (2, MOST_REPEATS), "seed": (0, (1 << 32) - 1)}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How samples are drawn.

    Attributes:
        rate: share of the blocks in each.
        repeats: samples.
        seed: of the first.
    """

    rate: float
    repeats: int = 8
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Estimate:
    """One policy at one capacity.

    Attributes:
        policy: its label.
        capacity_blocks: of the cache.
        hit_rate: hits per block read.
        error: how far the true rate may lie from it, by the differences between samples (`SampledCurve.errors`).
        of: which hits: `prefix`, those of leading resident blocks, or `object`, those of resident blocks wherever they
            stand, of which a sample does not show the leading ones.
        rate: share of the blocks in each sample.
        repeats: samples.
    """

    policy: str
    capacity_blocks: int
    hit_rate: float
    error: float
    of: Literal["prefix", "object"]
    rate: float
    repeats: int

    def row(self) -> dict[str, str | int | float]:
        """Return what `--json` writes."""
        return {
            "policy": self.policy,
            "capacity_blocks": self.capacity_blocks,
            "hit_rate": self.hit_rate,
            "low": max(0.0, self.hit_rate - self.error),
            "high": min(1.0, self.hit_rate + self.error),
            "of": self.of,
            "rate": self.rate,
            "repeats": self.repeats,
        }


def parse_sampling(text: str) -> Sampling:
    """Return how to sample, from a rate and options behind colons, such as `0.05:repeats=8:seed=3`.

    Raises:
        OptionError: the text says something else.
    """
    rate, *options = text.split(":")
    whole = dict(_whole(option) for option in options)
    try:
        number = float(rate)
    except ValueError:
        number = 0.0
    if not 0 < number <= MOST_RATE:
        raise OptionError(f"--sample: rate {rate!r} is out of range; allowed: above 0, up to {MOST_RATE}")
    return Sampling(number, **whole)


def _whole(option: str) -> tuple[str, int]:
    name, _, value = option.partition("=")
    if name not in _RANGES:
        raise OptionError(f"--sample: there is no {option!r}; allowed: {', '.join(f'{each}=N' for each in _RANGES)}")
    least, most = _RANGES[name]
    if not value.isdecimal() or not least <= int(value) <= most:
        raise OptionError(f"--sample: {option!r} is out of range; allowed: {name}={least} to {most}")
    return name, int(value)


def estimates_of(trace: Trace, options: StudyOptions, sampling: Sampling, progress: Progress) -> tuple[Estimate, ...]:
    """Return estimates of each policy at each capacity, policies first.

    Raises:
        OptionError: mode request, a capacity that is none, or a trace or capacity too small for such samples.
    """
    if options.mode != "block":
        raise OptionError(f"--mode is {options.mode!r}; allowed with --sample: block")
    capacities = parse_capacities(options.capacities, trace.unique_blocks)
    try:
        curves = sampled_curves(
            trace,
            options.policies,
            rate=sampling.rate,
            repeats=sampling.repeats,
            seed=sampling.seed,
            capacities=capacities,
            workers=options.workers,
            progress=lambda done, total: progress("samples", done, total),
        )
    except OptionError as error:
        raise OptionError(f"--sample: {trace.name}: {error}") from None
    return tuple(estimate for curve in curves for estimate in _estimates(curve, capacities))


def _estimates(curve: SampledCurve, capacities: Sequence[int]) -> list[Estimate]:
    """Return those at capacities in the order in which they were asked for."""
    places = {capacity: place for place, capacity in enumerate(curve.capacities.tolist())}
    return [_estimate(curve, places[capacity]) for capacity in capacities]


def _estimate(curve: SampledCurve, place: int) -> Estimate:
    return Estimate(
        policy=curve.policy,
        capacity_blocks=int(curve.capacities[place]),
        hit_rate=float(curve.hit_rates[place]),
        error=float(curve.errors[place]),
        of="prefix" if curve.is_prefix_rate else "object",
        rate=curve.rate,
        repeats=curve.repeats,
    )


# What it is worth that engines share one pool, and that requests go where their KV is.

_USUAL_POOL = "10%"


def pooling_of(trace: Trace, options: StudyOptions, recommended_blocks: int = 0) -> PoolingStudy:
    """Replay engines behind each policy of the gateway, and compare their memory with one pool.

    Args:
        trace: that is replayed.
        options: how many engines there are, how much they and the pool hold, and what spreads requests.
        recommended_blocks: capacity of the pool where the options give none; 0 for none.

    Raises:
        OptionError: a number of engines or a capacity that is none.
        TraceError: requests read otherwise than a prefix.
    """
    pool_blocks = recommended_blocks
    if options.pool_capacity or not pool_blocks:
        pool_blocks = _one_capacity("--pool-capacity", options.pool_capacity or _USUAL_POOL, trace)
    engine_blocks = max(1, pool_blocks // max(1, options.engines))
    if options.engine_capacity:
        engine_blocks = _one_capacity("--engine-capacity", options.engine_capacity, trace)
    deployment = options.deployment
    engines = Engines(
        count=options.engines,
        local_blocks=engine_blocks,
        # Without capacities of their own, both sides have as much in total.
        pool_blocks=pool_blocks if options.pool_capacity or options.engine_capacity else None,
        throughput_tokens_per_second=deployment.prefill_tokens_per_second,
        kv_bytes_per_token=deployment.kv_bytes_per_token,
        load_bytes_per_second=deployment.bandwidth_bytes_per_second * deployment.usable_share,
        load_latency_seconds=deployment.latency_seconds,
        seconds_per_output_token=deployment.output_token_seconds,
    )
    topologies = (Topology.LOCAL, Topology.BOTH)
    found = compare_pooling(trace, engines, routing=options.routing, topologies=topologies, workers=options.workers)
    # A pool alone finds the same whatever spreads the requests.
    alone = compare_pooling(trace, engines, routing=options.routing[:1], topologies=(Topology.POOL,))
    return PoolingStudy(found.engines, (*found.rows, *alone.rows))


def _one_capacity(option: str, text: str, trace: Trace) -> int:
    try:
        (blocks,) = parse_capacities(text, trace.unique_blocks)
    except (OptionError, ValueError):
        raise OptionError(f"{option} is {text!r}; allowed: {ALLOWED_CAPACITIES}") from None
    return blocks


# What a hierarchy of caches gives, and how to split capacity and money among its levels.

_DEFAULT_TIERS = "host:5%,ssd:20%,pool:25%"
_SHARES = 41
_BUDGET_STEPS = 7
_MOST_SPLITS, _MOST_COUNTED_RUNS = 3000, 200_000_000  # of a search: seconds, on a trace of any length


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """T levels that share their capacity and money differently.

    Attributes:
        shares: [S] of the capacity that the fastest level has, the others sharing the rest as they do now.
        hits: of these splits, [S, T] each.
        saved_seconds: [S] of prefill, less loading.
        budgets: per month, ascending; none where no level has a price.
        best: the best split of each.
    """

    shares: FloatColumn
    hits: SplitHits
    saved_seconds: FloatColumn
    budgets: tuple[float, ...]
    best: tuple[BestSplit, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Tiering:
    """A hierarchy.

    Attributes:
        replay: of the levels as they are.
        splits: of their capacity; None where requests read without writing, for which one pass does not suffice.
    """

    replay: TierReplay
    splits: Splits | None


def _tiering_of(trace: Trace, options: StudyOptions) -> Tiering:
    """Replay the hierarchy that is asked for.

    Raises:
        OptionError: a tier is none.
        TraceError: requests read otherwise than a prefix.
    """
    tiers = parse_tiers(options.tiers or _DEFAULT_TIERS, trace.unique_blocks)
    kv_bytes = max(1, round(options.deployment.kv_bytes_per_token))
    found = replay_tiers(trace, tiers, kv_bytes_per_token=kv_bytes)
    try:
        curve = split_curve(trace)
    except OptimizerError:
        return Tiering(found, None)
    per_token = 1 / options.deployment.prefill_tokens_per_second
    return Tiering(
        found,
        _splits(
            trace=trace,
            curve=curve,
            tiers=tiers,
            block_bytes=block_bytes_of(trace, kv_bytes),
            per_token=per_token,
            workers=options.workers,
        ),
    )


def _splits(
    trace: Trace,
    curve: SplitCurve,
    tiers: tuple[Tier, ...],
    block_bytes: int,
    per_token: float,
    workers: int | None,
) -> Splits:
    shares = np.linspace(0, 1, _SHARES)
    capacities = _capacities(tiers, shares)
    saved = curve.saved_seconds(tiers, capacities, block_bytes=block_bytes, recompute_seconds_per_token=per_token)
    budgets = _budgets(trace, tiers, block_bytes)
    with ThreadPoolExecutor(workers) as pool:
        best = tuple(pool.map(lambda budget: _best(curve, tiers, budget, block_bytes, per_token), budgets))
    return Splits(shares, curve.at(capacities), saved, budgets, best)


def _capacities(tiers: tuple[Tier, ...], shares: FloatColumn) -> Int64Column:
    total = sum(tier.capacity_blocks for tier in tiers)
    slower = np.array([tier.capacity_blocks for tier in tiers[1:]], np.float64)
    first = np.floor(shares * total)
    if not slower.sum():
        return first[:, None].astype(np.int64)
    rest = np.floor((total - first)[:, None] * (slower / slower.sum()))
    return np.column_stack([first, rest]).astype(np.int64)


def _budgets(trace: Trace, tiers: tuple[Tier, ...], block_bytes: int) -> tuple[float, ...]:
    """Return budgets up to what it costs to hold everything in the dearest level."""
    dearest = max(replace(tier, capacity_blocks=trace.unique_blocks).price_per_month(block_bytes) for tier in tiers)
    return tuple(np.geomspace(dearest / 4 ** (_BUDGET_STEPS - 1), dearest, _BUDGET_STEPS).tolist()) if dearest else ()


def _best(curve: SplitCurve, tiers: tuple[Tier, ...], budget: float, block_bytes: int, per_token: float) -> BestSplit:
    # Without capacities of their own levels may have as much as the budget pays for; free ones stay as they are.
    open_ended = [replace(tier, capacity_blocks=0) if tier.price_per_gib_month else tier for tier in tiers]
    most = max(30, min(_MOST_SPLITS, _MOST_COUNTED_RUNS // max(1, len(curve.runs.counts))))
    return best_split(
        curve, open_ended, budget, block_bytes=block_bytes, recompute_seconds_per_token=per_token, most_splits=most
    )


# What policies and services return in GPUs and money.

_BUDGET_SHARES = (0.1, 0.25, 0.5, 1.0)
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


def _returns_of(
    trace: Trace, options: StudyOptions, replays: Sequence[Replay], curves: Mapping[str, Curve]
) -> dict[str, Returns]:
    """Return what each policy returns: at every capacity where there is a curve, else where replayed."""
    labels = dict.fromkeys([replay.policy for replay in replays] + list(curves))
    return {
        label: returns(_hits_of(trace, options, label, replays, curves), trace, options.deployment) for label in labels
    }


def _hits_of(
    trace: Trace, options: StudyOptions, label: str, replays: Sequence[Replay], curves: Mapping[str, Curve]
) -> Hits:
    """Return the hits of a policy in a form that gives their worth: a curve, or replays that kept requests.

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
    jobs = [Job(parse_policy(label), capacity, _mode_of(options), keep_requests=True) for capacity in capacities]
    return _replay_all(trace, jobs, options)


def services_of(named: Mapping[str, Returns]) -> Services:
    """Return which of several services gains most from capacity, and how to split it.

    Args:
        named: what the recommended policy of each returns.
    """
    services = [Service(name, found) for name, found in named.items()]
    ranks = rank_services(services)
    wanted = sum(rank.best_bytes for rank in ranks)
    budgets = tuple(wanted * share for share in _BUDGET_SHARES) if wanted else ()
    return Services(ranks, budgets, tuple(split_budget(services, budget) for budget in budgets))


# Asks a trace everything that a report shows.

_PREFIXES = 25
_STEPS = 6
_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """The findings.

    Attributes:
        trace: that was asked.
        options: of the study.
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
        return display_name(self.trace.name)

    @property
    def bytes_per_block(self) -> float:
        """Return the KV bytes of a block in the deployment."""
        return block_bytes(self.trace, self.options.deployment)

    @property
    def unlimited(self) -> Replay:
        """Return what a cache counts that holds everything."""
        return self.over_time[-1]


def study_of(trace: Trace, options: StudyOptions, progress: Progress = _ignore_progress) -> Study:
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
    curves = _all_curves(trace, CURVES if options.mode == "block" else (), progress)
    replays = rows_of(trace, options, capacities, curves, progress, keep_requests=True)
    progress("studying", 0, _STEPS)
    worth = _returns_of(trace, options, replays, curves)
    recommendation = recommended(worth)
    over_time = _over_time(trace, options, recommendation)
    progress("studying", 1, _STEPS)
    nodes = max(1, math.ceil(max(each.nodes_without for each in worth.values())))
    waits = first_tokens(trace, over_time, options.deployment, nodes=nodes)
    progress("studying", 2, _STEPS)
    swings, cells = _sensitivity_of(trace, options, recommendation, replays, curves)
    progress("studying", 3, _STEPS)
    locality = locality_of(trace, curves.get("lru"))
    progress("studying", 4, _STEPS)
    tiering = _tiering_of(trace, options)
    progress("studying", 5, _STEPS)
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
        pooling=pooling_of(trace, options, recommendation.capacity_blocks if recommendation else 0),
    )
    progress("studying", _STEPS, _STEPS)
    return found


def _over_time(trace: Trace, options: StudyOptions, recommendation: Recommendation | None) -> tuple[Replay, ...]:
    policy = parse_policy(recommendation.policy if recommendation else "lru")
    most = max(1, trace.unique_blocks)
    asked = [recommendation.capacity_blocks] if recommendation and recommendation.pays else []
    capacities = [each for each in dict.fromkeys([*asked, max(1, most // 10)]) if each < most]
    jobs = [Job(policy, each, _mode_of(options), keep_requests=True) for each in capacities]
    jobs.append(Job(parse_policy("lru"), most, _mode_of(options), keep_requests=True))
    return tuple(_replay_all(trace, jobs, options))


def _sensitivity_of(
    trace: Trace,
    options: StudyOptions,
    recommendation: Recommendation | None,
    replays: Sequence[Replay],
    curves: Mapping[str, Curve],
) -> tuple[tuple[Swing, ...], Grid | None]:
    if recommendation is None:
        return (), None
    hits = _hits_of(trace, options, recommendation.policy, replays, curves)
    deployment = options.deployment
    bandwidths = [deployment.bandwidth_bytes_per_second * factor for factor in _FACTORS]
    prices = [deployment.price_per_gib_month * factor for factor in (*_FACTORS[1:], 16.0)]
    return sensitivity(hits, trace, deployment), grid(hits, trace, deployment, bandwidths=bandwidths, prices=prices)
