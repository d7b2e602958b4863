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
_REQUESTS = 64  # different ones
_WINDOW = 1500  # requests; it lasts several of the rounds in which reads are written down
# Of requests of one key in a window, and ten times as many as of writes. In shorter windows a figure would be mostly
# what the manager does anyway.
_MOST_READS = 2000


def scaling(is_quick: bool) -> list[Row]:
    """Measure both."""
    rounds, share = (1, 0.02) if is_quick else (5, 1.0)
    with site() as running:
        rows = per_key(running, rounds, share)
    with site() as running:
        sizes, window = (RESIDENT[:2], 64) if is_quick else (RESIDENT, _WINDOW)
        return rows + per_resident(running, sizes, rounds, window)


def per_key(running: Site, rounds: int, share: float) -> list[Row]:
    """Measure requests of more and more keys, less what a request of one key costs, with that share of the requests
    that belong into a window."""
    for instance in ("read", "written"):
        running.manager.register(instance, 1)
    for first in range(0, KEYS[-1], _CHAIN):
        running.manager.store("read", [key_of(number) for number in range(first, first + _CHAIN)])

    def read(keys: int) -> float:
        unit = [_match("read", [key_of(number) for number in range(keys)])]
        return running.client.send(running.manager, "grpc", [unit], _count(keys, share), 1).cpu_us

    def write(keys: int) -> float:
        count = max(2, _count(keys, share) // 10)
        return running.client.write(running.manager, "grpc", "written", keys, count, 1).cpu_us

    # What 256 keys cost is a tenth of what a request costs anyway.
    return _per_key_rows("match", read, 3 * rounds) + _per_key_rows("start + finish", write, rounds)


def _count(keys: int, share: float) -> int:
    """Return how many reads of so many keys make a window: it takes much the same time for any number of keys."""
    return max(4, int(share * _MOST_READS / (1 + keys / MIDDLE)))


def _per_key_rows(what: str, measure: Callable[[int], float], rounds: int) -> list[Row]:
    measure(MIDDLE)
    costs: dict[int, list[float]] = {keys: [] for keys in (1, *KEYS)}
    for _ in range(rounds):
        for keys, found in costs.items():
            found.append(measure(keys))
    each = {keys: _median_of_differences(costs[keys], costs[1]) / (keys - 1) for keys in KEYS}
    rows = [Row(f"{what}, 1 key", "server CPU per request", statistics.median(costs[1]), "us")]
    for keys, cost in each.items():
        ratio = cost / each[MIDDLE]
        is_flat = 1 - FLAT <= ratio <= 1 + FLAT
        metric, target = "server CPU per further key", f"value/that at {MIDDLE:,} within 1 +- {FLAT}"
        rows.append(Row(f"{what}, {keys:,} keys", metric, cost, "us", each[MIDDLE], ratio, target, is_flat))
    return rows


def _median_of_differences(values: Sequence[float], fixed: Sequence[float]) -> float:
    """Return how much more one thing costs than another of the same rounds: machines change their pace over minutes."""
    return statistics.median(value - base for value, base in zip(values, fixed, strict=True))


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
