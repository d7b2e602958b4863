"""Events of blocks: the log, its streams, and the last accesses."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.telemetry.events import EVENT_KEYS, EventLog, RecentAccesses, Subscription

MOST_KEYS = 1 << 20
MOST_BYTES = 16 << 20


def new_log(path: Path | None = None, max_bytes: int = 1 << 20) -> EventLog:
    ids = count()
    return EventLog(str(path or ""), max_bytes, now=lambda: 1234.5678901, new_id=lambda: f"{next(ids):032x}")


def publish(log: EventLog, number: int = 0, **fields: Any) -> None:
    log.publish("i", "cache_manager", "removed", {"number": number, **fields})


def parsed(data: bytes) -> list[dict[str, Any]]:
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def numbers(data: bytes) -> list[int]:
    return [event["number"] for event in parsed(data)]


@asynccontextmanager
async def running(log: EventLog) -> AsyncIterator[None]:
    task = asyncio.create_task(log.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await log.close()


async def test_an_event_is_one_line_with_the_envelope_of_the_original() -> None:
    log = new_log()
    listener = log.subscribe()
    async with running(log):
        log.publish("inst", "cache_reclaimer", "CacheReclaimSubmit", {"block_keys": [-(2**63), 2**63 - 1]})
        (event,) = parsed(await anext(listener))
    assert event == {
        "id": "0" * 32,
        "source": "inst",
        "component": "cache_reclaimer",
        "type": "CacheReclaimSubmit",
        "trigger_time_us": 1234567890,
        "block_keys": [-(2**63), 2**63 - 1],
    }


async def test_nothing_is_kept_without_listeners() -> None:
    log = new_log()
    publish(log)
    assert (log.is_active, log.published, log.dropped) == (False, 0, 0)
    listener = log.subscribe()
    assert log.is_active
    await log.close()
    assert (listener.pop_pending(), log.is_active) == ([], False)


async def test_every_listener_gets_the_events_while_it_listens() -> None:
    log = new_log()
    async with running(log):
        first = log.subscribe()
        publish(log, 1)
        assert numbers(await anext(first)) == [1]
        second = log.subscribe()
        publish(log, 2)
        assert (numbers(await anext(first)), numbers(await anext(second))) == ([2], [2])
        first.close()
        publish(log, 3)
        assert numbers(await anext(second)) == [3]
    with pytest.raises(StopAsyncIteration):
        await anext(first)


async def test_listeners_end_when_the_log_stops_and_keep_pending_events() -> None:
    log = new_log()
    listener = log.subscribe()
    async with running(log):
        publish(log, 7)
        while log._queue:
            await asyncio.to_thread(int)
    assert [numbers(lines) async for lines in listener] == [[7]]


async def test_subscribing_to_a_stopped_log_ends_at_once() -> None:
    """As a listener does that connects while the manager stops."""
    log = new_log()
    async with running(log):
        pass
    late = log.subscribe()
    assert ([lines async for lines in late], log.is_active) == ([], False)
    late.close()


async def test_events_of_many_keys_give_way_to_requests_as_they_are_handed_out() -> None:
    log = new_log()
    listener = log.subscribe()
    async with running(log):
        for number in range(100):
            publish(log, number, keys=[7] * 4000)
        turns = 0
        while log._queue:
            turns += 1
            await asyncio.sleep(0)
    assert turns >= 50, "one turn for some 8,000 keys"
    assert numbers(b"".join(listener.pop_pending())) == list(range(100))


async def test_events_that_do_not_fit_are_dropped_and_counted_and_never_refused() -> None:
    """No task delivers events here: the queue is bounded by the keys in it."""
    log = new_log()
    listener = log.subscribe()
    for number in range(20):
        publish(log, number, keys=list(range(MOST_KEYS // 10)))
    assert (log.published, log.dropped) == (9, 11)
    await log.close()
    assert numbers(b"".join(listener.pop_pending())) == list(range(9))


async def test_one_event_is_kept_however_large_it_is() -> None:
    log = new_log()
    listener = log.subscribe()
    publish(log, keys=list(range(MOST_KEYS + 1)))
    publish(log)
    await log.close()
    assert (log.published, log.dropped, len(listener.pop_pending())) == (1, 1, 1)


async def test_a_slow_listener_loses_events_is_reported_how_many_and_holds_up_no_other() -> None:
    log = new_log()
    slow, swift = log.subscribe(), log.subscribe()
    taken: list[int] = []
    text = "x" * (MOST_BYTES // 8)
    async with running(log):
        for number in range(20):
            publish(log, number, text=text)
            taken += numbers(await anext(swift))
        assert taken == list(range(20))
        kept = numbers(await anext(slow))
        assert (kept, slow.lost, swift.lost) == (list(range(7)), 13, 0)
        publish(log, 20)
        reported, last = parsed(await anext(slow))
    assert (reported["component"], reported["type"], reported["count"], last["number"]) == (
        "event_log",
        "dropped",
        13,
        20,
    )


async def test_the_file_has_every_line_and_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    path.write_bytes(b'{"number":-1}\n')
    path.chmod(0o600)
    log = new_log(path)
    async with running(log):
        for number in range(300):
            publish(log, number)
    assert numbers(path.read_bytes()) == list(range(-1, 300))
    assert (log.unwritten, log.dropped, path.stat().st_mode & 0o777) == (0, 0, 0o600)
    fresh = new_log(tmp_path / "new")
    publish(fresh)
    await fresh.close()
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600


async def test_a_full_file_is_put_aside_between_two_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    log = new_log(path, max_bytes=2048)
    async with running(log):
        for number in range(40):
            publish(log, number)
    old, new = (tmp_path / "events.log.1").read_bytes(), path.read_bytes()
    assert 0 < len(new) <= 2048
    assert 1024 < len(old) <= 2048
    kept = numbers(old) + numbers(new)
    assert kept == list(range(40 - len(kept), 40)), "the latest, without a gap"
    assert not (tmp_path / "events.log.2").exists()


async def test_a_full_file_that_cannot_be_put_aside_goes_on_growing(tmp_path: Path) -> None:
    """As where a log directory may be written by root alone."""
    path, aside = tmp_path / "events.log", tmp_path / "events.log.1"
    (aside / "in the way").mkdir(parents=True)
    log = new_log(path, max_bytes=500)
    for number in range(20):
        publish(log, number)
    await log.close()
    assert (numbers(path.read_bytes()), log.unwritten) == (list(range(20)), 0)
    aside.joinpath("in the way").rmdir()
    aside.rmdir()
    log = new_log(path, max_bytes=500)
    publish(log, 20)
    await log.close()
    assert (numbers(aside.read_bytes()), numbers(path.read_bytes())) == (list(range(20)), [20])


async def test_events_while_the_manager_stops_are_written(tmp_path: Path) -> None:
    path = tmp_path / "events.log"
    log = new_log(path)
    task = asyncio.create_task(log.run())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    publish(log, 1)
    await log.close()
    assert numbers(path.read_bytes()) == [1]


async def test_a_file_that_cannot_be_written_costs_events_and_nothing_else(tmp_path: Path) -> None:
    log = new_log(tmp_path / "gone" / "events.log")
    listener = log.subscribe()
    async with running(log):
        publish(log, 1)
        assert numbers(await anext(listener)) == [1]
        async with asyncio.timeout(30):
            while not log.unwritten:
                await asyncio.to_thread(int)
        (tmp_path / "gone").mkdir()
        publish(log, 2)
    assert (numbers((tmp_path / "gone" / "events.log").read_bytes()), log.unwritten) == ([2], 1)


async def test_publishing_never_waits_for_a_disk_that_hangs(tmp_path: Path) -> None:
    """Opening a fifo without a reader blocks for ever, as a dead mount does."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    log = new_log(path)
    listener = log.subscribe()
    async with running(log):
        for number in range(50):
            publish(log, number)
            assert numbers(await anext(listener)) == [number]
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # lets the writer go on, so that the test can end
    os.close(reader)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps=st.lists(st.one_of(st.integers(1, MOST_BYTES), st.none()), max_size=30))
def test_a_subscription_is_a_bounded_queue_that_accounts_for_every_line(steps: list[int | None]) -> None:
    """Against a plain model: lines of so many bytes are put, or everything is taken."""
    subscription = Subscription(lambda _subscription: None)
    model: list[str] = []
    space, missed, sizes = MOST_BYTES, 0, 0
    for number, size in enumerate(steps):
        if size is None:
            assert [line.split(b" ")[0].decode() for line in subscription.pop_pending()] == model
            model, space = [], MOST_BYTES
            continue
        line = f"{number} ".encode().ljust(size, b"x")
        subscription.put(line, lambda count: f"lost-{count} ".encode())
        if model and len(line) > space:
            missed += 1
            sizes += 1
            continue
        if missed:
            model.append(f"lost-{missed}")
            space -= len(f"lost-{missed} ")
            missed = 0
        model.append(line.split(b" ")[0].decode())
        space -= len(line)
    assert [line.split(b" ")[0].decode() for line in subscription.pop_pending()] == model
    assert subscription.lost == sizes


class Ticks:
    """A clock that advances by one second at each call."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        self.at += 1.0
        return self.at


async def reported(ring: RecentAccesses) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the first line and the others."""
    text = b"".join([part async for part in ring.lines()])
    first, *others = [json.loads(line) for line in text.splitlines()]
    return first, others


async def test_an_access_is_reported_as_an_event_with_its_keys() -> None:
    ring = RecentAccesses(1000, Ticks(), lambda: "i" * 32)
    ring.add("qwen", "GetCacheLocation", {"query_type": "prefix_match", "hit_keys": 1}, [-3, (1 << 63) - 1])
    _, events = await reported(ring)
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


async def test_the_first_line_counts_kept_and_dropped_events() -> None:
    ring = RecentAccesses(2 * (EVENT_KEYS + 10), Ticks())
    for first in range(0, 50, 10):
        ring.add("i", "GetCacheLocation", {}, range(first, first + 10))
    summary, events = await reported(ring)
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
    summary, events = await reported(ring)
    assert (ring.is_active, summary["most_keys"], events) == (False, 0, [])


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
