"""What the number of keys in a request and the number of resident blocks cost: the part `--scaling` of service.py."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

from report import Row
from service_client import META, Exchange, key_of
from service_site import Site, site

from kvcm.protocol import meta_service_pb2 as pb

__all__ = ["scaling"]

KEYS = (256, 1024, 4096, 16384)
MIDDLE = 1024
FLAT = 0.3  # a key costs so much more or less than with 1,024 keys in the request
RESIDENT = (10_000, 100_000, 1_000_000, 5_000_000)
MOST_CHAIN, MOST_SCATTERED = 1.7, 2.5
_CHAIN = 2048  # blocks that are written together
_REQUESTS = (
    64  # different ones, so many in a window that it lasts several of the rounds in which reads are written down
)
_WINDOW = 1500


def scaling(is_quick: bool) -> list[Row]:
    """Measure both."""
    rounds, count = (1, 10) if is_quick else (5, 200)
    with site() as running:
        rows = per_key(running, rounds, count)
    with site() as running:
        sizes, window = (RESIDENT[:2], 64) if is_quick else (RESIDENT, _WINDOW)
        return rows + per_resident(running, sizes, rounds, window)


def per_key(running: Site, rounds: int, count: int) -> list[Row]:
    """Measure requests of more and more keys, less what a request of one key costs."""
    for instance in ("read", "written"):
        running.manager.register(instance, 1)
    for first in range(0, KEYS[-1], _CHAIN):
        running.manager.store("read", [key_of(number) for number in range(first, first + _CHAIN)])

    def read(keys: int) -> float:
        unit = [_match("read", [key_of(number) for number in range(keys)])]
        return running.client.send(
            running.manager, "grpc", [unit], max(4, count * MIDDLE // max(keys, MIDDLE)), 1
        ).cpu_us

    def write(keys: int) -> float:
        windows = max(2, count // 4 * MIDDLE // max(keys, MIDDLE))
        return running.client.write(running.manager, "grpc", "written", keys, windows, 1).cpu_us

    rows = _per_key_rows("match", read, rounds)
    rows += _per_key_rows("start + finish", write, rounds)
    return rows


def _per_key_rows(what: str, measure: Callable[[int], float], rounds: int) -> list[Row]:
    measure(MIDDLE)
    costs: dict[int, list[float]] = {keys: [] for keys in (1, *KEYS)}
    for _ in range(rounds):
        for keys, found in costs.items():
            found.append(measure(keys))
    fixed = statistics.median(costs[1])
    each = {keys: (statistics.median(costs[keys]) - fixed) / (keys - 1) for keys in KEYS}
    rows = [Row(f"{what}, 1 key", "server CPU per request", fixed, "us")]
    for keys, cost in each.items():
        ratio = cost / each[MIDDLE]
        is_flat = 1 - FLAT <= ratio <= 1 + FLAT
        metric, target = "server CPU per further key", f"value/that at {MIDDLE:,} within 1 +- {FLAT}"
        rows.append(Row(f"{what}, {keys:,} keys", metric, cost, "us", each[MIDDLE], ratio, target, is_flat))
    return rows


def per_resident(running: Site, sizes: Sequence[int], rounds: int, count: int) -> list[Row]:
    """Measure matches of 1,024 blocks of one chain, and of as many from anywhere, as blocks get more."""
    running.manager.register("many", 1)
    choice, resident, rows = random.Random(7), 0, []
    first: dict[str, float] = {}
    for size in sizes:
        requests = -(-(size - resident) // _CHAIN)
        running.client.fill(running.manager, "many", _CHAIN, resident, requests)
        resident += requests * _CHAIN
        for what, most, units in (
            ("of one chain", MOST_CHAIN, [[_match("many", _chain(choice, resident))] for _ in range(_REQUESTS)]),
            ("scattered", MOST_SCATTERED, [[_match("many", _any(choice, resident))] for _ in range(_REQUESTS)]),
        ):
            running.client.send(running.manager, "grpc", units, _REQUESTS, 1)
            runs = [running.client.send(running.manager, "grpc", units, count, 1) for _ in range(rounds)]
            assert len(pb.GetCacheLocationResponse.FromString(runs[-1].answers[0]).locations) == MIDDLE
            cost = statistics.median(run.cpu_us for run in runs)
            base = first.setdefault(what, cost)
            name, metric = f"1,024 hits {what}, {resident:,} resident blocks", "server CPU per request"
            target = f"value/that of the fewest <= {most}"
            rows.append(Row(name, metric, cost, "us", base, cost / base, target, cost / base <= most))
    return rows


def _chain(choice: random.Random, resident: int) -> list[int]:
    first = choice.randrange(resident // _CHAIN) * _CHAIN
    return [key_of(number) for number in range(first, first + MIDDLE)]


def _any(choice: random.Random, resident: int) -> list[int]:
    return [key_of(number) for number in choice.sample(range(resident), MIDDLE)]


def _match(instance: str, keys: Sequence[int]) -> Exchange:
    request = pb.GetCacheLocationRequest(
        trace_id="bench", instance_id=instance, query_type=pb.QT_PREFIX_MATCH, block_keys=keys
    )
    return Exchange(f"{META}GetCacheLocation", request.SerializeToString())
