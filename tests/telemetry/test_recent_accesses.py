"""The ring of recent accesses: bounded, complete between the times that it tells, in the format of events."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvcm.telemetry.recent_accesses import EVENT_KEYS, RecentAccesses


class Ticks:
    """Seconds that pass by one whenever somebody asks."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        self.at += 1.0
        return self.at


async def told(ring: RecentAccesses) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the first line and the others."""
    text = b"".join([part async for part in ring.lines()])
    first, *others = [json.loads(line) for line in text.splitlines()]
    return first, others


async def test_an_access_is_told_as_an_event_with_its_keys() -> None:
    ring = RecentAccesses(1000, Ticks(), lambda: "i" * 32)
    ring.add("qwen", "GetCacheLocation", {"query_type": "prefix_match", "hit_keys": 1}, [-3, (1 << 63) - 1])
    _, events = await told(ring)
    assert events == [
        {
            "id": "i" * 32,
            "source": "qwen",
            "component": "cache_manager",
            "type": "GetCacheLocation",
            "trigger_time_us": 2_000_000,
            "query_type": "prefix_match",
            "hit_keys": 1,
            "keys": [-3, (1 << 63) - 1],
            "tokens": [],
        }
    ]


async def test_the_first_line_says_what_is_there_and_what_was_pushed_out() -> None:
    ring = RecentAccesses(2 * (EVENT_KEYS + 10), Ticks())
    for first in range(0, 50, 10):
        ring.add("i", "GetCacheLocation", {}, range(first, first + 10))
    summary, events = await told(ring)
    assert [event["keys"][0] for event in events] == [30, 40], "the newest stay"
    shown = {
        name: summary[name]
        for name in ("type", "component", "kept_events", "kept_keys", "dropped_events", "dropped_keys")
    }
    assert shown == {
        **{"type": "recent", "component": "event_log", "kept_events": 2, "kept_keys": 20},
        **{"dropped_events": 3, "dropped_keys": 30},
    }
    assert summary["started_us"] == 1_000_000
    assert summary["from_us"] == 4_000_000, "the time of the last one that was pushed out"
    assert summary["until_us"] > events[-1]["trigger_time_us"]


async def test_a_ring_that_is_off_says_so() -> None:
    ring = RecentAccesses(0)
    summary, events = await told(ring)
    assert (ring.is_active, summary["most_keys"], events) == (False, 0, [])


async def test_what_comes_while_it_is_told_does_not_matter() -> None:
    ring = RecentAccesses(1 << 20)
    for _ in range(100):
        ring.add("i", "GetCacheLocation", {}, range(100))
    lines = ring.lines()
    summary = json.loads(await anext(lines))
    ring.add("i", "GetCacheLocation", {}, range(100))
    events = [line async for part in lines for line in part.splitlines()]
    assert (summary["kept_events"], len(events)) == (100, 100)


@given(st.integers(1, 500), st.lists(st.integers(0, 200), max_size=40), st.integers(0, 50))
def test_no_more_is_held_than_was_allowed(most: int, sizes: list[int], flags: int) -> None:
    ring = RecentAccesses(most)
    for size in sizes:
        ring.add("i", "StartWriteCache", {"block_mask": [True] * flags}, range(size), flags=flags)
    held = list(ring._accesses)
    weights = [EVENT_KEYS + len(access.keys) + flags for access in held]
    assert sum(weights) <= most
    newest = sizes[len(sizes) - len(held) :]
    assert [len(access.keys) for access in held] == newest
    rest = sizes[: len(sizes) - len(held)]
    if rest:
        assert sum(weights) + EVENT_KEYS + rest[-1] + flags > most, "one more would have fitted"
