"""What the number of keys in a request and the number of resident blocks cost: the part `--scaling` of service.py.

On every store, one after the other. Stores other than memory have fewer sizes and rounds, and no targets. Redis is
measured beside its manager, in rows of its own; the manager's search cache has the blocks after the first lookup.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from report import Row
from service_client import META, Exchange, key_of
from service_site import Run, Site, site

from kvcm.protocol import meta_service_pb2 as pb

__all__ = ["scaling"]

MIDDLE = 1024
FLAT = 0.3  # a key costs so much more or less than with 1,024 keys in the request
MOST_CHAIN, MOST_SCATTERED = 1.7, 2.5
_CHAIN = 2048  # blocks that are written together
_REQUESTS = 64  # different ones
_WINDOW = 1500  # requests; it lasts several of the rounds in which reads are written down
# Of requests of one key in a window, and ten times as many as of writes. In shorter windows a figure would be mostly
# what the manager does anyway.
_MOST_READS = 2000


class Plan(NamedTuple):
    """How much is measured on a store.

    Attributes:
        rounds: of each size.
        share: of the requests that belong into a window of requests of one key.
        keys: numbers of keys in a request; MIDDLE is one of them.
        resident: numbers of blocks.
        window: requests among so many blocks.
    """

    rounds: int
    share: float
    keys: Sequence[int]
    resident: Sequence[int]
    window: int


MEMORY = Plan(5, 1.0, (256, MIDDLE, 4096, 16384), (10_000, 100_000, 1_000_000, 5_000_000), _WINDOW)
OTHERS = Plan(3, 1.0, (256, MIDDLE, 4096), (10_000, 100_000, 1_000_000), _WINDOW)
QUICK = Plan(1, 0.02, (256, MIDDLE), (10_000, 20_000), 64)


class Cost(NamedTuple):
    """CPU of a request in us."""

    server: float
    store: float

    @classmethod
    def of(cls, run: Run) -> Cost:
        """Return what a request of a run cost."""
        return cls(run.cpu_us, run.store_us)


def scaling(stores: Sequence[str], is_quick: bool) -> list[Row]:
    """Measure both on every store."""
    rows: list[Row] = []
    for store in stores:
        plan = QUICK if is_quick else MEMORY if store == "memory" else OTHERS
        with site(store=store) as running:
            rows += per_key(running, plan)
        with site(store=store) as running:
            rows += per_resident(running, plan)
    return rows


def per_key(running: Site, plan: Plan) -> list[Row]:
    """Measure requests of more and more keys, less what a request of one key costs."""
    for instance in ("read", "written"):
        running.manager.register(instance, 1)
    for first in range(0, plan.keys[-1], _CHAIN):
        running.manager.store("read", [key_of(number) for number in range(first, first + _CHAIN)])

    def read(keys: int) -> Cost:
        unit = [_match("read", [key_of(number) for number in range(keys)])]
        return Cost.of(running.client.send(running.manager, "grpc", [unit], _count(keys, plan.share), 1))

    def write(keys: int) -> Cost:
        count = max(2, _count(keys, plan.share) // 10)
        return Cost.of(running.client.write(running.manager, "grpc", "written", keys, count, 1))

    # What 256 keys cost is a tenth of what a request costs anyway.
    reads = _costs(read, plan.keys, 3 * plan.rounds)
    writes = _costs(write, plan.keys, plan.rounds)
    store = running.store.name
    return [*_per_key_rows(store, "match", reads), *_per_key_rows(store, "start + finish", writes)]


def _count(keys: int, share: float) -> int:
    """Return how many reads of so many keys make a window: it takes much the same time for any number of keys."""
    return max(4, int(share * _MOST_READS / (1 + keys / MIDDLE)))


def _costs(measure: Callable[[int], Cost], sizes: Sequence[int], rounds: int) -> dict[int, list[Cost]]:
    """Return what requests of one key and of so many keys cost, in rounds."""
    measure(MIDDLE)
    costs: dict[int, list[Cost]] = {keys: [] for keys in (1, *sizes)}
    for _ in range(rounds):
        for keys, found in costs.items():
            found.append(measure(keys))
    return costs


def _per_key_rows(store: str, what: str, costs: dict[int, list[Cost]]) -> Iterator[Row]:
    for part, process in enumerate(_processes(store)):
        of_part = {keys: [cost[part] for cost in found] for keys, found in costs.items()}
        alone = of_part.pop(1)
        each = {keys: _median_of_differences(found, alone) / (keys - 1) for keys, found in of_part.items()}
        yield Row(f"{store}: {what}, 1 key", f"{process} CPU per request", statistics.median(alone), "us")
        for keys, cost in each.items():
            ratio, case, metric = (
                cost / each[MIDDLE],
                f"{store}: {what}, {keys:,} keys",
                f"{process} CPU per further key",
            )
            row = Row(case, metric, cost, "us", each[MIDDLE], ratio)
            is_flat, target = 1 - FLAT <= ratio <= 1 + FLAT, f"value/that at {MIDDLE:,} within 1 +- {FLAT}"
            yield replace(row, target=target, ok=is_flat) if store == "memory" else row


def _processes(store: str) -> Sequence[str]:
    """Return the processes of a store, in the order of the parts of a cost."""
    return ("server", "redis") if store == "redis" else ("server",)


def _median_of_differences(values: Sequence[float], fixed: Sequence[float]) -> float:
    """Return how much more one thing costs than another of the same rounds: machines change their pace over minutes."""
    return statistics.median(value - base for value, base in zip(values, fixed, strict=True))


def per_resident(running: Site, plan: Plan) -> list[Row]:
    """Measure matches of 1,024 blocks of one chain, and of as many from anywhere, as blocks get more."""
    running.manager.register("many", 1)
    choice, resident, rows = random.Random(7), 0, []
    first: dict[str, float] = {}
    for size in plan.resident:
        requests = -(-(size - resident) // _CHAIN)
        running.client.fill(running.manager, "many", _CHAIN, resident, requests)
        resident += requests * _CHAIN
        for what, most, units in (
            ("of one chain", MOST_CHAIN, [[_match("many", _chain(choice, resident))] for _ in range(_REQUESTS)]),
            ("scattered", MOST_SCATTERED, [[_match("many", _any(choice, resident))] for _ in range(_REQUESTS)]),
        ):
            running.client.send(running.manager, "grpc", units, _REQUESTS, 1)
            runs = [running.client.send(running.manager, "grpc", units, plan.window, 1) for _ in range(plan.rounds)]
            assert len(pb.GetCacheLocationResponse.FromString(runs[-1].answers[0]).locations) == MIDDLE
            cost, store_cost = map(statistics.median, zip(*map(Cost.of, runs), strict=True))
            base = first.setdefault(what, cost)
            name = f"{running.store.name}: 1,024 hits {what}, {resident:,} resident blocks"
            target = f"value/that of the fewest <= {most}"
            row = Row(name, "server CPU per request", cost, "us", base, cost / base)
            is_judged = running.store.name == "memory"
            rows.append(replace(row, target=target, ok=cost / base <= most) if is_judged else row)
            if running.store.name == "redis":
                rows.append(Row(name, "redis CPU per request", store_cost, "us"))
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
