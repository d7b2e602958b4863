"""The engines that benchmarks/fleet.py simulates: which requests each one sends and when, and what it sees.

Every instance replays a window of the trace, another one for each, so that together they cover all of it. A request is
a lookup of its block keys; for the blocks that missed, a write session starts, and finishes after the prefill. Blocks
have 64 tokens: a longer block of the trace is split. An engine asks for all blocks, whatever its own memory would hold.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt

from kvcm.gateway.policies import ConsistentHash, EngineLoad, Prompt
from kvcm.optimizer.pooling import affinities_of
from kvcm.optimizer.readers import trace_of_lines
from kvcm.optimizer.trace import Int32Column, Int64Column, Trace
from kvcm.protocol import meta_service_pb2 as pb

__all__ = ["Chains", "Engine", "Fleet", "Pace", "Piece", "Plan", "Request", "Seen", "made_up_trace", "planned"]

BLOCK_TOKENS: Final = 64
MOST_KEYS: Final = 2048
"""Of a request; the rest of a longer prompt is neither looked up nor written."""
MOVED: Final = 0.1
"""Part of the requests that any engine of the instance serves instead of that of their session, as routers decide."""
PREFILL_TOKENS_PER_SECOND: Final = 32_200
"""Of an engine of eight GPUs, published for DeepSeek-V3."""
CALLS: Final = ("GetCacheLocation", "StartWriteCache", "FinishWriteCache")

_CALL_SECONDS = 60.0
_SESSION_SECONDS = 120
_DEEPEST = 64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The shape of a fleet.

    Attributes:
        engines: in all.
        instances: models; each has the same number of engines.
    """

    engines: int
    instances: int

    @property
    def engines_each(self) -> int:
        """Engines of an instance."""
        return self.engines // self.instances


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request of an engine.

    Attributes:
        at: seconds of the trace's clock since the window began.
        instance: index of its instance.
        engine: index of the engine within the instance.
        keys: of its blocks.
        known: how many of the first ones an unlimited cache would have.
        stored: how many of the first ones it has had since before the window.
    """

    at: float
    instance: int
    engine: int
    keys: Int64Column
    known: int
    stored: int


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Blocks that one write stored before the window.

    Attributes:
        instance: index of their instance.
        keys: of the blocks, in the order of their chain.
        parent: key of the block before, None for the first of a chain.
    """

    instance: int
    keys: Int64Column
    parent: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Everything that a fleet does in a window.

    Attributes:
        fleet: its shape.
        trace_seconds: length of the window on the trace's clock.
        requests: in the order of their times.
        pieces: that requests of the window need, and that were written before; parents first.
    """

    fleet: Fleet
    trace_seconds: float
    requests: Sequence[Request]
    pieces: Sequence[Piece]

    @property
    def requests_per_second(self) -> float:
        """Return the rate on the trace's clock."""
        return len(self.requests) / self.trace_seconds

    @property
    def stored_blocks(self) -> int:
        """Return how many blocks were written before."""
        return sum(len(piece.keys) for piece in self.pieces)

    @property
    def unlimited_hit_rate(self) -> float:
        """Return the hit rate of a cache that is never full and knows a block at once."""
        return sum(each.known for each in self.requests) / sum(len(each.keys) for each in self.requests)

    def of_engine(self) -> dict[tuple[int, int], list[Request]]:
        """Return the requests of each engine that has any, by its instance and its index."""
        found: dict[tuple[int, int], list[Request]] = {}
        for request in self.requests:
            found.setdefault((request.instance, request.engine), []).append(request)
        return found


class Chains:
    """Block keys of a trace's requests.

    Args:
        trace: turns of dialogues, with blocks of one size.
    """

    def __init__(self, trace: Trace) -> None:
        assert trace.block_tokens > 0, "instances of the trace differ in their blocks"
        self._trace = trace
        self._split = max(1, trace.block_tokens // BLOCK_TOKENS)
        self._tokens = trace.block_tokens // self._split

    @cached_property
    def _first_requests(self) -> Int64Column:
        """By block: the first request that has it. A block names its whole prefix, so that request had all before."""
        accesses = np.unique(self._trace.blocks, return_index=True)[1]
        return np.searchsorted(self._trace.offsets, accesses, side="right").astype(np.int64) - 1

    def numbers(self, request: int) -> Int64Column:
        """Return the numbers of a request's blocks, whole ones only: the last one of a prompt is not stored."""
        blocks = self._trace.request_blocks(request).astype(np.int64)
        split = (blocks[:, None] * self._split + np.arange(self._split)).ravel()
        return split[: min(int(self._trace.input_tokens[request]) // self._tokens, MOST_KEYS)]

    def first_requests(self, numbers: Int64Column) -> Int64Column:
        """Return for each block the first request that has it."""
        return self._first_requests[numbers // self._split]

    def leading(self, numbers: Int64Column, before: int) -> int:
        """Return how many of the first blocks some request before that one had."""
        is_new = self.first_requests(numbers) >= before
        return int(is_new.argmax()) if is_new.any() else len(numbers)

    def parent(self, number: int) -> int | None:
        """Return the number of the block before, None for the first of a chain."""
        if number % self._split:
            return number - 1
        block = int(self._trace.parents[number // self._split])
        return None if block < 0 else (block + 1) * self._split - 1


def keys_of(numbers: Int64Column) -> Int64Column:
    """Return keys that look like hashes, another one for every number."""
    mixed: Int64Column = (numbers.astype(np.uint64) * _GOLDEN + np.uint64(1 << 63)).view(np.int64)
    return mixed


def spread_times(trace: Trace) -> npt.NDArray[np.float64]:
    """Return [R] seconds since the first request; those of one time come at random times until the next one.

    Mooncake's conversations are recorded with steps of three seconds: as bursts they would queue in the managers.
    """
    times, groups = np.unique(trace.times_us, return_inverse=True)
    step = float(np.median(np.diff(times))) if len(times) > 1 else 0.0
    steps = np.minimum(np.append(np.diff(times), step), step)  # a pause is no step
    parts = np.random.default_rng(1).random(len(trace))
    order = np.lexsort((parts, groups))  # requests of one group keep their order
    spread: npt.NDArray[np.float64] = (trace.times_us - times[0] + steps[groups] * parts[order]) / 1e6
    return spread


def planned(trace: Trace, fleet: Fleet, trace_seconds: float, moved: float = MOVED) -> Plan:
    """Return what a fleet does in a window of that length; the windows of the instances cover the trace evenly.

    Args:
        trace: turns of dialogues.
        fleet: its shape.
        trace_seconds: length of the window on the trace's clock.
        moved: part of the requests that any engine of the instance serves instead of that of their session.
    """
    times = spread_times(trace)
    spare = trace.span_seconds - trace_seconds
    assert spare >= 0, f"the trace has {trace.span_seconds:g} s, the window {trace_seconds:g} s"
    chains = Chains(trace)
    requests: list[Request] = []
    pieces: list[Piece] = []
    for instance in range(fleet.instances):
        begin = (instance + 0.5) / fleet.instances * spare
        first, end = np.searchsorted(times, [begin, begin + trace_seconds]).tolist()
        engines = _engines_of(trace, fleet.engines_each, instance, moved)
        found = [(number, chains.numbers(number)) for number in range(first, end) if trace.read_blocks[number]]
        requests += [
            Request(
                at=float(times[number] - begin),
                instance=instance,
                engine=int(engines[number]),
                keys=keys_of(numbers),
                known=chains.leading(numbers, number),
                stored=chains.leading(numbers, first),
            )
            for number, numbers in found
            if len(numbers)
        ]
        pieces += _pieces_of(chains, instance, [numbers for _, numbers in found], first)
    requests.sort(key=lambda request: request.at)
    return Plan(fleet, trace_seconds, requests, pieces)


def _engines_of(trace: Trace, engines: int, instance: int, moved: float) -> Int32Column:
    """Return the engine of each request: that of its session (of its first blocks), or now and then any."""
    names = [EngineLoad(f"{instance}-{engine}") for engine in range(engines)]
    numbers = {load.engine: engine for engine, load in enumerate(names)}
    keys = affinities_of(trace, _tokens_that_spread(trace, engines))
    homes = np.array([numbers[ConsistentHash().choose(Prompt(key), names)] for key in keys], np.int32)
    draw = np.random.default_rng(instance)
    is_moved = draw.random(len(trace)) < moved
    homes[is_moved] = draw.integers(0, engines, int(is_moved.sum()))
    return homes


def _tokens_that_spread(trace: Trace, engines: int) -> int:
    """Return how many first tokens keep requests together that name no session.

    They are so many that no engine gets more than its share for the sake of one prefix: where all requests begin with
    one system prompt, that keeps nothing apart.
    """
    unnamed = (trace.sessions < 0) & (np.diff(trace.offsets) > 0)
    for blocks in range(1, _DEEPEST):
        last = trace.offsets[:-1] + np.minimum(np.diff(trace.offsets), blocks) - 1
        prefixes = trace.blocks[last[unnamed]]
        if np.unique(prefixes, return_counts=True)[1].max(initial=0) * engines <= len(prefixes):
            return blocks * trace.block_tokens
    return _DEEPEST * trace.block_tokens


def _pieces_of(chains: Chains, instance: int, needed: Sequence[Int64Column], first: int) -> Iterator[Piece]:
    """Yield the blocks that are needed and were there before the first request, as the requests before wrote them."""
    if not needed:
        return
    numbers = np.unique(np.concatenate(needed))
    numbers = numbers[chains.first_requests(numbers) < first]
    # Blocks are numbered as they first appear: those of one request follow one another.
    writers = chains.first_requests(numbers)
    for part in np.split(numbers, np.flatnonzero(np.diff(writers)) + 1):
        if len(part):
            parent = chains.parent(int(part[0]))
            key = None if parent is None else int(keys_of(np.array([parent]))[0])
            yield Piece(instance, keys_of(part), key)


def made_up_trace(requests: int) -> Trace:
    """Return a trace where no published one is at hand: conversations that begin with one system prompt."""
    draw, lines, talks, unused = random.Random(7), [], [[0, 1]], 2
    for number in range(requests):
        talk = list(talks[-draw.randint(1, min(10, len(talks)))] if draw.random() < 0.6 else talks[0])
        grown = draw.randint(1, 20)
        talk += range(unused, unused + grown)
        unused += grown
        talks.append(talk)
        line = {"timestamp": number * 300, "input_length": 512 * len(talk), "output_length": 1, "hash_ids": talk}
        lines.append(json.dumps(line).encode())
    return trace_of_lines(lines, "mooncake", name="made up", block_tokens=512)


class Pace:
    """The trace's clock, which runs faster or slower than that of the wall.

    Args:
        speed: seconds of the trace in a second.
        now: a monotonic clock.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        speed: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._speed, self._now, self._sleep = speed, now, sleep
        self._begin = now()

    async def until(self, at: float) -> float:
        """Wait for a time of the trace; return by how many seconds of the wall it is missed."""
        due = self._begin + at / self._speed
        if (left := due - self._now()) > 0:
            await self._sleep(left)
        return max(0.0, self._now() - due)

    async def pause(self, seconds: float) -> None:
        """Wait for so many seconds of the trace."""
        await self._sleep(seconds / self._speed)


@dataclass(slots=True)
class Seen:
    """What all engines saw.

    Attributes:
        seconds: until the answer, by call.
        late: seconds by which a request was sent after its time.
        asked: blocks that were looked up.
        hit: those of them that were there.
        written: blocks that were stored.
        errors: calls that failed, in words.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {call: [] for call in CALLS})
    late: list[float] = field(default_factory=list)
    asked: int = 0
    hit: int = 0
    written: int = 0
    errors: list[str] = field(default_factory=list)


class Engine:
    """An engine.

    Args:
        instance: id of its instance.
        meta: calls of its manager.
        pace: the trace's clock.
        seen: where it counts.
    """

    def __init__(self, instance: str, meta: Any, pace: Pace, seen: Seen) -> None:
        self._instance, self._meta, self._pace, self._seen = instance, meta, pace, seen

    async def replay(self, requests: Sequence[Request]) -> None:
        """Serve requests, each from its time on, and return when all are served."""
        async with asyncio.TaskGroup() as serving:
            for request in requests:
                self._seen.late.append(await self._pace.until(request.at))
                serving.create_task(self._serve(request.keys.tolist()))

    async def match(self, keys: Sequence[int]) -> int | None:
        """Return how many of the first blocks are there, None if the call failed."""
        request = pb.GetCacheLocationRequest(
            trace_id="fleet", instance_id=self._instance, query_type=pb.QT_PREFIX_MATCH, block_keys=keys
        )
        answer = await self._call("GetCacheLocation", request)
        return None if answer is None else len(answer.locations)

    async def write(self, keys: Sequence[int], parent: int | None, prefill_seconds: float) -> None:
        """Store blocks; prefill takes so many seconds of the trace."""
        start = pb.StartWriteCacheRequest(
            trace_id="fleet", instance_id=self._instance, block_keys=keys, write_timeout_seconds=_SESSION_SECONDS
        )
        if parent is not None:
            start.parent_block_key = parent
        started = await self._call("StartWriteCache", start)
        if started is None:
            return
        if prefill_seconds:
            await self._pace.pause(prefill_seconds)
        finish = pb.FinishWriteCacheRequest(
            trace_id="fleet", instance_id=self._instance, write_session_id=started.write_session_id
        )
        finish.success_blocks.offset = len(started.locations)
        if await self._call("FinishWriteCache", finish) is not None:
            self._seen.written += len(started.locations)

    async def _serve(self, keys: Sequence[int]) -> None:
        hits = await self.match(keys)
        if hits is None:
            return
        self._seen.asked += len(keys)
        self._seen.hit += hits
        if missed := keys[hits:]:
            prefill_seconds = len(missed) * BLOCK_TOKENS / PREFILL_TOKENS_PER_SECOND
            await self.write(missed, keys[hits - 1] if hits else None, prefill_seconds)

    async def _call(self, name: str, request: Any) -> Any:
        """Return the answer, None for a failure."""
        begin = time.perf_counter()
        try:
            answer = await getattr(self._meta, name)(request, timeout=_CALL_SECONDS)
        except grpc.RpcError as error:
            self._seen.errors.append(f"{name}: {error!r}"[:500])
            return None
        self._seen.seconds[name].append(time.perf_counter() - begin)
        if answer.header.status.code != pb.OK:
            self._seen.errors.append(f"{name}: {answer.header.status}"[:500])
            return None
        return answer
