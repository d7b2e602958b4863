"""Claim: with nothing to reuse the connector costs an engine next to nothing, and its scheduler little per lookup.

Two vLLM engines with the same model answer the same new prompts in turn: one with the connector,
which looks all of them up and saves all of them, and one without. What counts is the time of a step: that of the whole
run, by its steps. Of two equal engines the one that was started first is slower here by some percent, so engines come
in couples of pairs: with the connector first, and last. The model has fourteen times the bytes of KV per operation of a
Llama 3 8B, so there is more to save per step than with most models.

Requests to an engine whose manager has been killed, and to one without the connector, are timed one by one, in turn.

Lookups of 1,024 blocks are made beside, against the same manager, as the scheduler makes them: how long its thread is
held, and what all threads of its process compute, is what the engine's other work loses.

    python benchmarks/connector.py [--quick] [--json FILE]
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import sqrt
from random import Random

from engine_site import EngineSite, engine_site, other_manager
from report import Row, arguments, publish

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.keys import HashKeys
from kvcm.connectors.reuse.lookups import LookupPlan, Lookups, LookupSettings
from kvcm.connectors.reuse.registration import InstanceSpecs, ManagerLink
from kvcm.connectors.reuse.statistics import ReuseStatistics
from kvcm.model.instances import LocationSpecInfo, ModelDeployment

MOST_OVERHEAD = 0.03
MOST_LOOKUP_MS = 1.5
MOST_OUTAGE_MS = 5.0
_BLOCKS = 1024
_PROMPT_TOKENS = 384
_NEW_TOKENS = 48
_REQUESTS = 8
_AT_ONCE = 4
_OUTAGE_TOKENS = 100  # a few blocks; more computation would hide the measured time
_UNTIL_OPEN = 8  # requests, of which three open the breaker


def overhead(site: EngineSite, couples: int, rounds: int) -> list[float]:
    """Return for each couple of pairs of runs the time with the connector by that without it."""
    ratios: list[float] = []
    for couple in range(couples):
        first, last = (_pair(site, f"overhead-{couple}-{place}", place, rounds) for place in (0, 1))
        ratios += [sqrt(one * other) for one, other in zip(first, last, strict=True)]
    return ratios


def _pair(site: EngineSite, instance_id: str, place: int, rounds: int) -> list[float]:
    """Start two engines, the one with the connector at its place; return the ratio of each round."""
    names = [instance_id, None] if place == 0 else [None, instance_id]
    sides = [site.engine(name, max_num_seqs=_AT_ONCE) for name in names]
    ratios: list[float] = []
    try:
        for number in range(rounds + 1):
            prompts = _prompts(number)
            order = (0, 1) if number % 2 else (1, 0)
            seconds = {side: _timed(sides[side], prompts) for side in order}
            if number:  # the first round warms both up
                ratios.append(seconds[place] / seconds[1 - place])
    finally:
        for side in sides:
            side.close()
    return ratios


def outage(site: EngineSite, count: int) -> list[float]:
    """Return for each pair of requests how many ms the one to the engine with a dead manager took longer."""
    return [ms for place in (0, 1) for ms in _outage(site, place, count // 2)]


def _outage(site: EngineSite, place: int, count: int) -> list[float]:
    with other_manager(site) as manager:
        names = ["outage", None] if place == 0 else [None, "outage"]
        sides = [site.engine(name, manager=manager) for name in names]
        try:
            for side in sides:
                side.generate(_prompts(1)[:1], 2)
            manager.kill()
            more = []
            for number in range(count + _UNTIL_OPEN):
                prompt = [_prompts(10_000 + number)[0][:_OUTAGE_TOKENS]]
                order = (0, 1) if number % 2 else (1, 0)
                seconds = {side: sum(sides[side].ask("first_tokens", prompts=prompt)) for side in order}
                if number >= _UNTIL_OPEN:
                    more.append(1000 * (seconds[place] - seconds[1 - place]))
            return more
        finally:
            for side in sides:
                side.close()


def _prompts(seed: int) -> list[list[int]]:
    random = Random(seed)
    return [random.choices(range(3, 1000), k=_PROMPT_TOKENS) for _ in range(_REQUESTS)]


def _timed(engine: object, prompts: list[list[int]]) -> float:
    """Return how long the engine takes; its saves in the background end before the next engine is timed."""
    begun = time.perf_counter()
    engine.generate(prompts, _NEW_TOKENS, seconds=300)  # type: ignore[attr-defined]
    seconds = time.perf_counter() - begun
    engine.ask("settle")  # type: ignore[attr-defined]
    return seconds


def interval(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """Return the bounds of the median with 95 % confidence, by drawing from the values again and again."""
    random = Random(0)
    medians = sorted(statistics.median(random.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]


def lookups(site: EngineSite, count: int) -> tuple[list[float], list[float]]:
    """Return for each lookup how long the scheduler's thread was held and what the process computed, in ms."""
    client = ManagerClient(site.manager.address, "lookups")
    specs = InstanceSpecs(
        "default", 32, [LocationSpecInfo("tp0", 4096)], ModelDeployment("bench", "float32", tp_size=1)
    )
    link = ManagerLink(client, specs, 5.0)
    link.register()
    hashes = [hashlib.sha256(str(number).encode()).digest() for number in range(_BLOCKS)]
    make_keys = HashKeys(b"bench")
    keys = make_keys.keys(hashes)
    grant = client.start_write(keys, timeout_seconds=60)
    assert grant is not None
    client.finish_write(grant.session_id, [True] * _BLOCKS, timeout_seconds=60)
    asked = Lookups(link, LookupPlan(("tp0",)), LookupSettings(lookup_seconds=60, share_seconds=0), ReuseStatistics())
    try:
        samples = [_lookup(asked, partial(make_keys.keys, hashes), str(number)) for number in range(count + 20)]
    finally:
        asked.close(1)
        link.close()
    held, computed = zip(*samples[20:], strict=True)
    return list(held), list(computed)


def _lookup(asked: Lookups, make_keys: Callable[[], list], request_id: str) -> tuple[float, float]:  # type: ignore[type-arg]
    """Make one lookup. Leases are released a little later, together: that falls to one lookup of many."""
    computing, begun = time.process_time(), time.perf_counter()
    asked.answered.clear()
    asked.start(request_id, make_keys())
    held = time.perf_counter() - begun
    asked.answered.wait(60)
    begun = time.perf_counter()
    found = asked.poll(request_id)
    assert found is not None
    assert found.blocks == _BLOCKS
    asked.release(request_id)
    held += time.perf_counter() - begun
    time.sleep(0.005)  # what goes on in the background counts, too
    return 1000 * held, 1000 * (time.process_time() - computing)


def rows_of(
    ratios: Sequence[float], held: Sequence[float], computed: Sequence[float], later: Sequence[float]
) -> list[Row]:
    """Return the figures."""
    late = statistics.median(later)
    most = f"<= {MOST_OUTAGE_MS:g} ms"
    down = f"manager killed, {len(later)} pairs of requests"
    over = statistics.median(ratios) - 1
    low, high = interval(ratios)
    target = f"<= {100 * MOST_OVERHEAD:g} %"
    case = f"0 % hits, {2 * len(ratios)} pairs of runs"
    cpu = statistics.median(computed)
    lookup = f"lookup of {_BLOCKS:,} blocks"
    return [
        Row(case, "more time per step with the connector", 100 * over, "%", target=target, ok=over <= MOST_OVERHEAD),
        Row(case, "the same, lower bound (95 %)", 100 * (low - 1), "%"),
        Row(case, "the same, upper bound (95 %)", 100 * (high - 1), "%"),
        Row(lookup, "scheduler's thread held", statistics.median(held), "ms"),
        Row(lookup, "CPU of its process", cpu, "ms", target=f"<= {MOST_LOOKUP_MS} ms", ok=cpu <= MOST_LOOKUP_MS),
        Row(down, "first token later, median", late, "ms", target=most, ok=late <= MOST_OUTAGE_MS),
        Row(down, "first token later, 9 of 10", sorted(later)[int(0.9 * len(later))], "ms"),
    ]


def main() -> int:
    from tiny_models import write_large_llama

    options = arguments((__doc__ or "").partition("\n")[0]).parse_args()
    couples, rounds, count, requests = (1, 1, 50, 10) if options.quick else (3, 3, 400, 80)
    with engine_site(partial(write_large_llama, hidden=512 if options.quick else 1024)) as site:
        held, computed = lookups(site, count)
        ratios = overhead(site, couples, rounds)
        later = outage(site, requests)
    for ratio in ratios:
        print(f"with / without: {ratio:.4f}", file=sys.stderr)
    is_sound = publish("connector: what it costs an engine", rows_of(ratios, held, computed, later), options.json)
    return 0 if is_sound or options.quick else 1


if __name__ == "__main__":
    raise SystemExit(main())
