"""Claim: a manager works for long under all kinds of requests at once without an error, a leak or a hiccup.

64 clients in other processes, half of them over gRPC and half over HTTP, look up, write, remove, pin and ask for five
minutes on each store (one minute with --quick), while blocks are evicted all the time and a storage is drained now and
then. Judged: every answer has one of the codes that its request may get; memory does not grow after a third of the
time; the event loop is not late; scrapes are complete, valid and do not grow; at the end nothing is left unfinished,
and what the store holds is consistent. What is in the manager's memory alone ends with it, so that store is not
verified.

Memory may grow by 2 % in the last two thirds of the time, which are 200 seconds by default. `--seconds 900` allows as
much in ten minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from report import Row, arguments, is_sound, publish
from service_site import STORES, Redis, Store
from soak_actions import MARKER
from soak_site import Drains, ports_of, set_up, settled, soaked, verified
from soak_talk import TRANSPORTS
from soak_watch import Watch, growth_per_second, lag_quantile, rss_bytes

from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb

CLIENTS, PROCESSES = 64, 4
SECONDS, QUICK_SECONDS = 300.0, 60.0
MOST_GROWTH = 0.02  # of the memory, after the warm-up
MOST_RSS_MB = 600.0
MOST_LAG_SECONDS = 0.05
WARM_UP = 1 / 3  # of the time


class RedisUse(NamedTuple):
    """What a Redis has used up to a moment, in monotonic seconds."""

    at: float
    cpu_seconds: float
    rss_bytes: int


@dataclass(slots=True)
class Soaked:
    """The figures of the soak.

    Attributes:
        store: where metadata was kept.
        seconds: that it lasted.
        watch: the observations meanwhile.
        warm: monotonic seconds at the end of the warm-up.
        drains: of a storage, done and given up.
        answers: by call, transport and code.
        times: in seconds, of all answers, by transport.
        failed: requests without an answer, or with a code that they may not get.
        failures: some of them, in words.
        unbalanced: groups whose parts are not their whole.
        exit_code: of the manager.
        left_tasks: that it left unfinished.
        defects: that it logged.
        findings: of `kvcm index verify`.
        redis: what a Redis had used before and after the clients' work; empty on other stores.
    """

    store: str
    seconds: float
    watch: Watch
    warm: float
    drains: Drains
    answers: Counter[str]
    times: dict[str, list[float]]
    failed: int
    failures: list[str]
    unbalanced: list[str]
    exit_code: int = -1
    left_tasks: int = -1
    defects: tuple[str, ...] = ()
    findings: str = ""
    redis: tuple[RedisUse, ...] = ()


async def soak(directory: Path, store: str, seconds: float) -> Soaked:
    """Run everything on a store."""
    with soaked(directory, store) as (manager, kept):
        wire = manager.connect()
        ports = ports_of(manager)
        await set_up(wire, directory)
        watch = Watch(manager.pid, ports["admin"]["http"], MARKER)
        drains, begin = Drains(manager), time.monotonic()
        redis_before = redis_use(kept)
        background = [asyncio.create_task(watch.run()), asyncio.create_task(drains.run(seconds / 16))]
        each = CLIENTS // PROCESSES
        jobs = [
            {"first": first, "clients": each, "seconds": seconds, "ports": ports} for first in range(0, CLIENTS, each)
        ]
        reported = await asyncio.gather(*map(client_process, jobs))
        redis_after = redis_use(kept)
        wrong = await ended(background)
        usage = await settled(wire)
        watch.scrape()
        await wire.close()
        found = Soaked(
            store,
            seconds,
            watch,
            begin + seconds * WARM_UP,
            drains,
            sum((Counter(done["answers"]) for done in reported), Counter()),
            {name: [each for done in reported for each in done["seconds"][name]] for name in TRANSPORTS},
            sum(done["failed"] for done in reported) + len(wrong),
            [*wrong, *(failure for done in reported for failure in done["failures"])],
            unbalanced(usage),
        )
        found.exit_code = manager.stop()
        found.left_tasks = sum(event["count"] for event in manager.events() if event["event"] == "tasks_left")
        found.defects = tuple(manager.failures())
        found.redis = redis_before + redis_after
        found.findings = verified(manager) if store != "memory" else ""
    return found


def redis_use(store: Store) -> tuple[RedisUse, ...]:
    """Return what a store's Redis has used so far, nothing for other stores."""
    if store.server is None:
        return ()
    redis = Redis(store.server.process.pid)
    return (RedisUse(time.monotonic(), redis.cpu_seconds(), rss_bytes(redis.pid)),)


async def client_process(job: dict[str, Any]) -> dict[str, Any]:
    """Run one process of clients and return what it did."""
    command = [sys.executable, str(Path(__file__).with_name("soak_client.py")), json.dumps(job)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, limit=1 << 24)
    output, _ = await process.communicate()
    assert process.returncode == 0, "a client process failed"
    done: dict[str, Any] = json.loads(output)
    return done


async def ended(tasks: Iterable[asyncio.Task[None]]) -> list[str]:
    """Cancel tasks, and return how some of them failed before."""
    wrong = []
    for task in tasks:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            try:
                await task
            except Exception as error:  # any error is reported
                wrong.append(repr(error))
    return wrong


def unbalanced(usage: capacity_pb.GetUsageResponse) -> list[str]:
    """Return the groups whose use is not the sum of what their instances use."""
    return [
        f"{group.name}: {group.total.used_bytes} bytes in all, {parts} in instances"
        for group in usage.groups
        if group.total.used_bytes != (parts := sum(instance.used_bytes for instance in group.instances))
    ]


def rows(found: Soaked, *, is_quick: bool) -> list[Row]:
    """Return the figures."""
    case = f"{found.store}: {CLIENTS} clients, {found.seconds:g} s"
    return [
        *_of_requests(case, found, is_quick=is_quick),
        *_of_memory(case, found, is_quick=is_quick),
        *_of_the_end(case, found),
    ]


def _none(case: str, metric: str, count: int, texts: Iterable[str] = ()) -> Row:
    """Return the row of something that may not be, and print it."""
    for text in texts:
        print(f"{metric}: {text}", file=sys.stderr)
    return Row(case, metric, count, "", target="= 0", ok=count == 0)


def _drains(case: str, done: int, *, is_quick: bool) -> Row:
    """Return the row of drains. In a short run they have seconds, which a busy machine may not have."""
    target, ok = ("", None) if is_quick else ("> 0", done > 0)
    return Row(case, "drains of a storage", done, "", target=target, ok=ok)


def _of_requests(case: str, found: Soaked, *, is_quick: bool) -> list[Row]:
    by_code: Counter[str] = Counter()
    for name, count in found.answers.items():
        by_code[name.rpartition(":")[2]] += count
    print(f"answers: {dict(by_code)}; {dict(sorted(found.answers.items()))}", file=sys.stderr)
    samples = found.watch.scrapes[-1].samples

    def total(metric: str) -> float:
        return sum(value for (name, _), value in samples.items() if name == metric)

    evicted = total("kvcm_evicted_keys_total")
    return [
        *(row for transport in TRANSPORTS for row in _times(f"{case}, {transport}", found, found.times[transport])),
        _none(case, "requests that failed", found.failed, found.failures),
        Row(case, "blocks evicted", evicted, "", target="> 0", ok=evicted > 0),
        _drains(case, found.drains.done, is_quick=is_quick),
        _none(case, "deletions that failed", int(total("kvcm_delete_failures_total"))),
        Row(case, "server CPU", _cpu_share(found), "of a core"),
        *_of_redis(case, found.redis),
    ]


def _of_redis(case: str, use: Sequence[RedisUse]) -> list[Row]:
    if not use:
        return []
    before, after = use
    cores = (after.cpu_seconds - before.cpu_seconds) / (after.at - before.at)
    return [
        Row(case, "redis CPU", cores, "of a core"),
        Row(case, "RSS of redis at the end", after.rss_bytes / 1e6, "MB"),
    ]


def _times(case: str, found: Soaked, times: list[float]) -> list[Row]:
    cuts = statistics.quantiles(times, n=100)
    return [
        Row(case, "requests answered", len(times) / found.seconds, "1/s"),
        Row(case, "time to the answer, p50", cuts[49], "s"),
        Row(case, "time to the answer, p99", cuts[98], "s"),
    ]


def _cpu_share(found: Soaked) -> float:
    first, last = found.watch.scrapes[0], found.watch.scrapes[-2]
    name = ("process_cpu_seconds_total", ())
    return (last.samples[name] - first.samples[name]) / (last.at - first.at)


def _of_memory(case: str, found: Soaked, *, is_quick: bool) -> list[Row]:
    scrapes = found.watch.after(found.warm)[:-1]  # the last one is after the load
    sizes = [scrape.rss_bytes for scrape in scrapes]
    growth = growth_per_second(scrapes) * (scrapes[-1].at - scrapes[0].at)
    share, rss_mb = growth / statistics.median(sizes), max(sizes) / 1e6
    lag = lag_quantile(scrapes[0], scrapes[-1], 0.99)
    new, most = found.watch.new_series(found.warm), f"<= {MOST_LAG_SECONDS:g} s"
    print(f"RSS in MB: {[round(scrape.rss_bytes / 1e6) for scrape in found.watch.scrapes[::30]]}", file=sys.stderr)
    # A line through seconds says nothing of minutes.
    target, ok = ("", None) if is_quick else (f"value/RSS <= {MOST_GROWTH}", share <= MOST_GROWTH)
    return [
        Row(
            case,
            "growth of RSS after the warm-up",
            growth / 1e6,
            "MB",
            statistics.median(sizes) / 1e6,
            share,
            target,
            ok,
        ),
        Row(case, "largest RSS", rss_mb, "MB", target=f"<= {MOST_RSS_MB:g} MB", ok=rss_mb <= MOST_RSS_MB),
        Row(case, "event-loop lag p99, upper bound", lag, "s", target=most, ok=lag <= MOST_LAG_SECONDS),
        Row(case, "scrapes", len(found.watch.scrapes), ""),
        Row(case, "scrape, longest", max(scrape.seconds for scrape in scrapes), "s"),
        Row(case, "series", len(scrapes[-1].samples), ""),
        _none(case, "scrapes not complete or not valid", len(found.watch.wrong), found.watch.wrong[:20]),
        _none(case, "series added after warm-up", len(new), map(str, new)),
    ]


def _of_the_end(case: str, found: Soaked) -> list[Row]:
    findings = [found.findings] if found.findings else []
    return [
        _none(case, "exit code", found.exit_code),
        _none(case, "tasks left at exit", found.left_tasks),
        _none(case, "defects in the log", len(found.defects), found.defects[:10]),
        _none(case, "groups that are not the sum of their instances", len(found.unbalanced), found.unbalanced),
        *([_none(case, "failed checks of `kvcm index verify`", len(findings), findings)] * (found.store != "memory")),
    ]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=0.0, help="on each store (default: 300, 60 with --quick)")
    parser.add_argument("--store", choices=STORES, nargs="+", default=STORES, help="where metadata is kept")
    options = parser.parse_args()
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    found: list[Row] = []
    for store in options.store:
        with tempfile.TemporaryDirectory(prefix="kvcm-soak-") as directory:
            found += rows(asyncio.run(soak(Path(directory), store, seconds)), is_quick=options.quick)
    is_met = publish("soak: mixed traffic for long", found, options.json)
    return 0 if is_met or (options.quick and is_sound(found)) else 1


if __name__ == "__main__":
    sys.exit(main())
