"""Claim: knowing what a thousand engines hold costs a manager a microsecond for each block that comes or goes, and 32
bytes for each that is there; a router's question costs it a millisecond.

A manager process gets the reports of 1,000 simulated engines over gRPC: first what fills their memory, then blocks that
come and go. Its CPU is that of the whole process, gRPC included. A plain dict of sets does the same work beside it, in
this process and without gRPC. Scores are made in this process, from the bytes of the request to those of the answer,
since the CPU of single calls counts there. Lookups are those of the same manager before and after it knows of engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from match import registration, store
from numpy.typing import NDArray
from report import Row, arguments, publish
from service_client import META, Exchange
from service_site import Manager, Site, site

from kvcm.app import Manager as ManagerApp
from kvcm.config import Settings
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.residency.scoring import Costs
from kvcm.service.calls import Call, Caller, CallRecorder
from kvcm.service.meta_api import MetaApi
from kvcm.service.request_limits import RequestLimits
from kvcm.service.residency_api import ResidencyApi
from kvcm.telemetry.logs import LEVELS, configure_logs
from kvcm.telemetry.metrics import ApiMetrics

INSTANCE: Final = "bench"
SERVICE: Final = "/kvcm.v1.ResidencyService/"
ENGINES: Final = 1000
BATCH: Final = 4096  # keys of a report
IN_FLIGHT: Final = 8
RATE: Final = 126_000  # blocks per second of a thousand engines
MOST_US: Final = 1.0
MOST_EVENT_US: Final = 3.0
MOST_BYTES: Final = 32.0
MOST_SCORE_MS: Final = 1.0
SWEEP_SECONDS: Final = 8.0
"""After which a rebuild of the table that the last reports began has ended: that is their cost, not that of lookups."""
MOST_LOOKUP_RATIO: Final = 1.02
Keys = NDArray[np.int64]


def keys_of(rng: np.random.Generator, count: int) -> Keys:
    """Return keys that look like hashes."""
    return rng.integers(-(2**63), 2**63 - 1, count, np.int64)


@dataclass(slots=True)
class Fleet:
    """Simulated engines, each with the keys that it holds, oldest first."""

    rng: np.random.Generator
    sequences: list[int]
    held: list[deque[Keys]]

    @classmethod
    def of(cls, engines: int, seed: int) -> Fleet:
        """Return engines that hold nothing."""
        return cls(np.random.default_rng(seed), [0] * engines, [deque() for _ in range(engines)])

    def report(self, engine: int, added: Keys, removed: Keys | None = None, **more: Any) -> bytes:
        """Return an encoded report."""
        self.sequences[engine] += 1
        request = pb.ReportResidencyRequest(
            instance_id=INSTANCE, engine=name_of(engine), stream="run", sequence=self.sequences[engine], **more
        )
        gone = b"" if removed is None else removed.tobytes()
        request.changes.add(medium=pb.MEDIUM_GPU, added_keys=added.tobytes(), removed_keys=gone)
        return request.SerializeToString()

    def fill(self, blocks: int) -> Iterator[bytes]:
        """Yield reports of so many blocks, and what completes each engine's first snapshot."""
        each = blocks // len(self.held)
        whole = pb.SnapshotPart(first=True, last=True)
        for engine in range(len(self.held)):
            yield self.report(engine, keys_of(self.rng, 0), snapshot=whole)
        for start in range(0, each, BATCH):
            for engine in range(len(self.held)):
                added = keys_of(self.rng, min(BATCH, each - start))
                self.held[engine].append(added)
                yield self.report(engine, added)

    def churn(self, reports: int, batch: int) -> Iterator[bytes]:
        """Yield reports in which half of `batch` blocks come and the oldest ones go."""
        for number in range(reports):
            engine = number % len(self.held)
            removed = self.held[engine].popleft()
            gone, kept = removed[: batch // 2], removed[batch // 2 :]
            if len(kept):
                self.held[engine].appendleft(kept)
            added = keys_of(self.rng, len(gone))
            self.held[engine].append(added)
            yield self.report(engine, added, gone)


def name_of(engine: int) -> str:
    """Return the address of an engine."""
    return f"10.0.{engine // 250}.{engine % 250}:8000"


def send(manager: Manager, method: str, bodies: Iterable[bytes], answer: type[Any]) -> tuple[float, float, float]:
    """Send prepared requests over one connection, some at a time, and refuse answers that are no success.

    Returns:
        The manager's CPU seconds, those that passed, and how many were sent.
    """
    prepared = list(bodies)
    with grpc.insecure_channel(f"127.0.0.1:{manager.ports['grpc']}") as channel:
        call = channel.unary_unary(method, response_deserializer=answer.FromString)
        manager.call("GetClusterInfo", meta.GetClusterInfoRequest(), meta.GetClusterInfoResponse)
        waiting: deque[Any] = deque()
        begin = manager.spent()
        for body in prepared:
            if len(waiting) >= IN_FLIGHT:
                check(waiting.popleft().result())
            waiting.append(call.future(body, timeout=600, wait_for_ready=True))
        while waiting:
            check(waiting.popleft().result())
        seconds = time.monotonic() - begin.at
        return manager.spent_since(begin).server, seconds, len(prepared)


def check(answer: Any) -> None:
    """Refuse an answer that is no success."""
    assert answer.header.status.code == meta.OK, answer.header


def resident_bytes(pid: int) -> int:
    """Return the memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def reporting(running: Site, blocks: int, reports: int) -> Iterator[Row]:
    """Measure reports and memory with a manager process."""
    manager, fleet = running.manager, Fleet.of(ENGINES, 1)
    before = resident_bytes(manager.pid)
    cpu, seconds, _ = send(manager, f"{SERVICE}ReportResidency", fleet.fill(blocks), pb.ReportResidencyResponse)
    listed = manager.call(
        f"{SERVICE}ListReporters", pb.ListReportersRequest(instance_id=INSTANCE), pb.ListReportersResponse
    )
    assert len(listed.reporters) == ENGINES
    known = listed.blocks
    case = f"{known:,} blocks of {ENGINES:,} engines"
    dict_us, dict_bytes = plain_dict()
    yield _cost(f"{case} come", "CPU per block, packed report", cpu / known * 1e6, dict_us, MOST_US)
    rate = known / seconds
    yield Row(case, "reported blocks per second of one sender", rate, "1/s", RATE, rate / RATE)
    own = listed.memory_bytes / known
    whole = (resident_bytes(manager.pid) - before) / known
    yield _cost(case, "memory per (block, engine)", own, dict_bytes, MOST_BYTES, "bytes")
    yield Row(case, "growth of the process per (block, engine)", whole, "bytes", dict_bytes, whole / dict_bytes)
    for batch in (BATCH, 256):
        bodies = fleet.churn(reports * BATCH // batch if batch == BATCH else reports * 4, batch)
        cpu, seconds, sent = send(manager, f"{SERVICE}ReportResidency", bodies, pb.ReportResidencyResponse)
        us = cpu / (sent * batch) * 1e6
        most = MOST_US if batch == BATCH else 0.0
        yield _cost(f"{case}, {batch:,} come or go per report", "CPU per block, packed report", us, dict_us, most)


def _cost(case: str, metric: str, value: float, baseline: float, most: float, unit: str = "us") -> Row:
    target = f"value <= {most:g} {unit}" if most else ""
    return Row(case, metric, value, unit, baseline, value / baseline, target, value <= most if most else None)


def plain_dict(blocks: int = 400_000) -> tuple[float, float]:
    """Return microseconds and bytes per block of a dict from keys to sets of engines, shared where they are equal."""
    keys = keys_of(np.random.default_rng(9), blocks).tolist()
    tracemalloc.start()
    begin_bytes, sets = tracemalloc.get_traced_memory()[0], [frozenset((engine,)) for engine in range(ENGINES)]
    held: dict[int, frozenset[int]] = {}
    held.update(zip(keys, repeat(sets[0]), strict=False))
    grown = tracemalloc.get_traced_memory()[0] - begin_bytes
    tracemalloc.stop()
    held.clear()
    begin = time.process_time()
    none: frozenset[int] = frozenset()
    for position in range(0, blocks, BATCH):
        engine = sets[position // BATCH % ENGINES]
        for key in keys[position : position + BATCH]:
            held[key] = held.get(key, none) | engine
    # tracemalloc counts the table; the keys, which the list shares here, are numbers of 32 bytes of their own.
    return (time.process_time() - begin) / blocks * 1e6, grown / blocks + 32


# Scores, in this process.


@contextlib.asynccontextmanager
async def data_calls(directory: str) -> AsyncIterator[tuple[dict[str, Call], Caller]]:
    """Yield the data plane of a manager without its listeners."""
    async with ManagerApp(Settings(data_dir=directory)).opened() as components:
        limits = RequestLimits()
        own = ResidencyApi(components.cache, components.residency, limits, costs=Costs())
        calls = [*MetaApi(components.cache, components.registry, components.leadership, limits).calls(), *own.calls()]
        yield {call.name: call for call in calls}, Caller(CallRecorder(ApiMetrics()), lambda _: None, lambda _: {})


async def scoring(rounds: int, blocks: int) -> list[Row]:
    """Measure scores: the prompt's storage prefix is half of it, and each engine holds a random part of it."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvcm-residency-") as directory:
        async with data_calls(directory) as (calls, caller):
            rng = np.random.default_rng(2)
            prompt = keys_of(rng, 16_384).tolist()
            await store(calls, caller, INSTANCE, 1, prompt[:512])
            fleet = Fleet.of(ENGINES, 3)
            for body in [*fleet.fill(blocks), *_prefixes(fleet, prompt)]:
                answer = await caller.answer(calls["ReportResidency"], pb.ReportResidencyRequest.FromString(body))
                check(answer.complete())
            for engines in (8, 125, 1000):
                for keys in (1024, 16_384):
                    names = [name_of(engine) for engine in range(engines)]
                    asked = pb.ScoreRequest(instance_id=INSTANCE, block_keys=prompt[:keys], engines=names)
                    looked = meta.GetCacheLocationRequest(
                        instance_id=INSTANCE, block_keys=prompt[:keys], query_type=meta.QT_PREFIX_MATCH
                    )
                    times = await _timed(calls["Score"], caller, asked, rounds)
                    beside = await _timed(calls["GetCacheLocation"], caller, looked, rounds)
                    rows += _score_rows(times, beside, keys, engines)
    return rows


def _prefixes(fleet: Fleet, prompt: Sequence[int]) -> Iterator[bytes]:
    """Yield reports after which one engine in eight holds a random prefix, as routing by scores leaves it."""
    for engine in range(0, ENGINES, 8):
        held = int(fleet.rng.integers(1, 1024))
        yield fleet.report(engine, np.array(prompt[:held], np.int64))


async def _timed(call: Call, caller: Caller, request: Any, rounds: int) -> list[float]:
    """Return CPU seconds of a call, from its bytes to those of the answer, in order."""
    body = request.SerializeToString()
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        encoded = (await caller.answer(call, call.request_type.FromString(body))).encoded()
        times.append(time.thread_time() - begin)
    check(call.response_type.FromString(encoded))
    return sorted(times)


def _score_rows(times: Sequence[float], beside: Sequence[float], keys: int, engines: int) -> Iterator[Row]:
    """Yield the rows of a case; the baseline is a lookup of the same blocks, of which storages have the first 512."""
    case = f"score of {keys:,} keys over {engines:,} engines"
    median, lookup = (statistics.median(each) * 1e3 for each in (times, beside))
    yield Row(case, "CPU, median", median, "ms", lookup, median / lookup)
    p99 = times[int(len(times) * 0.99)] * 1e3
    is_bound = (keys, engines) == (1024, 125)
    target = f"value <= {MOST_SCORE_MS:g} ms" if is_bound else ""
    yield Row(case, "CPU, p99", p99, "ms", target=target, ok=p99 <= MOST_SCORE_MS if is_bound else None)


# Lookups of a manager that knows of no engine, and of the same when it does.


def lookups(running: Site, rounds: int) -> float:
    """Return the manager's CPU per lookup of 1,024 blocks, us; the median of windows."""
    request = meta.GetCacheLocationRequest(
        instance_id=INSTANCE, query_type=meta.QT_PREFIX_MATCH, block_keys=range(1, 1025)
    )
    unit = [Exchange(f"{META}GetCacheLocation", request.SerializeToString())]
    costs = [running.client.rush(running.manager, "grpc", [unit], 200, 4) for _ in range(rounds)]
    return statistics.median(costs)


def paired_lookups(running: Site, without: Site, number: int) -> tuple[float, float]:
    """Return `lookups` of both; the sides take turns to be first, since the first of a pair costs a little more."""
    if number % 2:
        other = lookups(without, 1)
        return lookups(running, 1), other
    return lookups(running, 1), lookups(without, 1)


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    configure_logs(LEVELS["ERROR"])
    quick = options.quick
    blocks, reports, rounds = (200_000, 20, 20) if quick else (10_000_000, 2000, 500)
    windows = 3 if quick else 60
    rows: list[Row] = []
    with site(["kvcm.limits.max_queue_ms=0"]) as running, site(["kvcm.limits.max_queue_ms=0"]) as without:
        for each in (running, without):
            each.manager.call("RegisterInstance", registration(INSTANCE, 1), meta.RegisterInstanceResponse)
            each.manager.store(INSTANCE, range(1, 1025))
        rows += reporting(running, blocks, reports)
        time.sleep(0 if quick else SWEEP_SECONDS)
        pairs = [paired_lookups(running, without, number) for number in range(windows)]
        ratio = statistics.median(knowing / other for knowing, other in pairs)
        knowing, other = (statistics.median(side) for side in zip(*pairs, strict=True))
        case = "prefix match, 1,024 hits, beside the residency of all these blocks"
        target = f"value / baseline <= {MOST_LOOKUP_RATIO}"
        rows.append(Row(case, "CPU", knowing, "us", other, ratio, target, ratio <= MOST_LOOKUP_RATIO))
    rows += asyncio.run(scoring(rounds, blocks // 10))
    met = publish("residency: reports, memory and scores", rows, options.json)
    return 0 if met or quick else 1


if __name__ == "__main__":
    sys.exit(main())
