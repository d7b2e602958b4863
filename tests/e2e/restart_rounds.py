"""Restarts managers under load, and while they load: everything is answered, everything is there afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from manager_site import GroupPlan, Manager, Site, managers_on
from restart_load import Client, Load, Way

_CAPACITY_BYTES = 1 << 40
_STOP_SECONDS = 60.0
_CALM_SECONDS = 60.0


@dataclass(slots=True)
class RestartReport:
    """What restarts showed.

    Attributes:
        wrong: what may not happen, in words.
        stops: how many.
        answered: requests.
        turned_away: requests that a stopping manager turned away.
        cancelled: requests that came while a stopping manager closed its port.
        refused: requests that found no listener.
        long_requests: in flight at a signal and answered after it.
        confirmed_blocks: that were looked for after the last restart.
        stop_seconds: from the signal to the end of the process.
        loading_stops: signals that came before the manager served.
        longest_seconds: of an answer.
    """

    wrong: list[str] = field(default_factory=list)
    stops: int = 0
    answered: int = 0
    turned_away: int = 0
    cancelled: int = 0
    refused: int = 0
    long_requests: int = 0
    confirmed_blocks: int = 0
    stop_seconds: list[float] = field(default_factory=list)
    loading_stops: int = 0
    longest_seconds: float = 0.0


async def restart_under_load(directory: Path, uri: str = "", managers: int = 1, rounds: int = 3) -> RestartReport:
    """Stop and start managers by turns while clients work.

    Args:
        directory: for logs and data.
        uri: of a store that managers share, "" for a RocksDB.
        managers: how many.
        rounds: how many stops.
    """
    report, load = RestartReport(), Load()
    with managers_on(directory, uri, managers, {"kvcm.service.drain_timeout_ms": "60000"}) as running_managers:
        clients = _clients(load, running_managers)
        site = Site(GroupPlan("restart", tuple(client.instance for client in clients), _CAPACITY_BYTES))
        await site.set_up_at(running_managers[0])
        for manager in running_managers:
            async with manager.connected() as wire:
                await site.until_known_at([wire])
        tasks = [asyncio.create_task(client.run()) for client in clients]
        for number in range(rounds):
            await _calm(clients, load)
            await _restart(running_managers[number % managers], number % managers, load, report)
        await _calm(clients, load)
        load.is_over = True
        await asyncio.gather(*tasks)
        await _check_all(clients, load)
        report.confirmed_blocks = sum(len(keys) for client in clients for keys in client.confirmed)
        for manager in running_managers:
            report.wrong += manager.failures()
            _note_end(report, manager, manager.stop())
    _add(report, load)
    return report


def _clients(load: Load, managers: list[Manager]) -> list[Client]:
    ways = [
        Way(transport, int(manager.settings[f"kvcm.service.{name}"]), number)
        for number, manager in enumerate(managers)
        for transport, name in (("grpc", "rpc_port"), ("http", "http_port")) * 4
    ]
    return [Client(load, way, f"client{number}") for number, way in enumerate(ways)]


async def _calm(clients: list[Client], load: Load) -> None:
    """Return when every client has worked for a while with the managers as they are."""
    deadline, before = time.monotonic() + _CALM_SECONDS, [client.rounds for client in clients]
    while any(client.rounds < begun + 3 for client, begun in zip(clients, before, strict=True)):
        assert not load.wrong, load.wrong
        assert time.monotonic() < deadline, "clients do not get on"
        await asyncio.sleep(0.02)


async def _restart(manager: Manager, number: int, load: Load, report: RestartReport) -> None:
    """Stop a manager with a long request in flight, and start it again."""
    others = {key: count for key, count in load.outcomes.items() if key[0] != number and key[1] != "answered"}
    async with _long_request(int(manager.settings["kvcm.service.http_port"])) as answered:
        begin = time.monotonic()
        manager.signal(signal.SIGTERM)
        await _until_draining(manager)
        await asyncio.sleep(0.3)  # others are turned away meanwhile
        await answered()
        report.long_requests += 1
        code = await asyncio.to_thread(manager.wait, _STOP_SECONDS)
    report.stop_seconds.append(time.monotonic() - begin)
    report.stops += 1
    _note_end(report, manager, code)
    await asyncio.to_thread(manager.start)
    now = {key: count for key, count in load.outcomes.items() if key[0] != number and key[1] != "answered"}
    if now != others:
        report.wrong.append(f"clients of another manager noticed that one stopped: {now}, before {others}")


@contextlib.asynccontextmanager
async def _long_request(port: int) -> AsyncIterator[object]:
    """Have a request in flight; the yielded function sends the rest of it and expects an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /api/getClusterInfo HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n"
    writer.write(head.encode())
    assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")
    writer.write(b"{")
    await writer.drain()

    async def answered() -> None:
        writer.write(b"}")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200"), "a request in flight was cut off"

    try:
        yield answered
    finally:
        writer.close()


async def _until_draining(manager: Manager) -> None:
    while not any(event["event"] == "draining" for event in manager.events()):
        assert manager.is_running, "the manager ended with a request in flight"
        await asyncio.sleep(0.01)


def _note_end(report: RestartReport, manager: Manager, code: int) -> None:
    events = {event["event"]: event for event in manager.events()}
    if code != 0:
        report.wrong.append(f"exit code {code}")
    if "stopped" not in events:
        report.wrong.append("the manager did not end in order")
    report.wrong += [json.dumps(events[name]) for name in ("tasks_left", "requests_cut_off") if name in events]


async def _check_all(clients: list[Client], load: Load) -> None:
    for client in clients:
        try:
            again = Client(load, client.way, client.instance)
            for keys in client.confirmed:
                await again.check(keys)
            await again.close()
        except Exception as error:
            load.wrong.append(f"{client.instance}: {error!r}")


def _add(report: RestartReport, load: Load) -> None:
    report.wrong += load.wrong
    report.longest_seconds = load.longest_seconds
    for (_, outcome), count in load.outcomes.items():
        if outcome == "answered":
            report.answered += count
        elif outcome == "refused":
            report.refused += count
        elif outcome == "cancelled":
            report.cancelled += count
        else:
            report.turned_away += count


async def stop_while_loading(directory: Path, blocks: int, stops: int, seed: int) -> RestartReport:
    """Stop a manager at any moment of its start, again and again; then everything has to be there.

    Args:
        directory: for log and data.
        blocks: that it has to load.
        stops: how many.
        seed: of the moments.
    """
    report, load, moments = RestartReport(), Load(blocks=4096), random.Random(seed)
    with managers_on(directory) as (manager,):
        await Site(GroupPlan("restart", ("client0",), _CAPACITY_BYTES)).set_up_at(manager)
        client = Client(load, Way("grpc", int(manager.settings["kvcm.service.rpc_port"]), 0), "client0")
        while len(client.confirmed) * load.blocks < blocks:
            await client.write_and_read()
        await client.close()
        _note_end(report, manager, manager.stop())
        seconds = _start_seconds(manager)
        _note_end(report, manager, manager.stop())
        for _ in range(stops):
            _stop_early(manager, moments.uniform(0, seconds), report)
        manager.start()
        await _check_all([client], load)
        report.confirmed_blocks = sum(map(len, client.confirmed))
        _note_end(report, manager, manager.stop())
        report.wrong += manager.failures()
    _add(report, load)
    return report


def _start_seconds(manager: Manager) -> float:
    """Start the manager and return how long it takes from listening to serving."""
    manager.spawn()
    listening = _seen(manager, "listening")
    return _seen(manager, "serving") - listening


def _seen(manager: Manager, name: str) -> float:
    deadline = time.monotonic() + _STOP_SECONDS
    while not any(event["event"] == name for event in manager.events()):
        assert manager.is_running, manager.new_log()[-2000:]
        assert time.monotonic() < deadline, f"never {name}"
        time.sleep(0.002)
    return time.monotonic()


def _stop_early(manager: Manager, after_seconds: float, report: RestartReport) -> None:
    manager.spawn()
    _seen(manager, "listening")
    time.sleep(after_seconds)
    begin = time.monotonic()
    manager.signal(signal.SIGTERM)
    code = manager.wait(_STOP_SECONDS)
    report.stops += 1
    report.stop_seconds.append(time.monotonic() - begin)
    report.loading_stops += not any(event["event"] == "serving" for event in manager.events())
    _note_end(report, manager, code)


async def stop_twice(directory: Path, stops: int) -> RestartReport:
    """End a manager that still drains with a second signal, again and again; confirmed blocks have to be there.

    Args:
        directory: for log and data.
        stops: how many.
    """
    report, load = RestartReport(), Load()
    settings = {"kvcm.service.drain_delay_ms": "3600000", "kvcm.store.fsync": "always"}
    with managers_on(directory, settings=settings) as (manager,):
        await Site(GroupPlan("restart", ("client0",), _CAPACITY_BYTES)).set_up_at(manager)
        client = Client(load, Way("grpc", int(manager.settings["kvcm.service.rpc_port"]), 0), "client0")
        for _ in range(stops):
            await client.write_and_read()
            manager.signal(signal.SIGTERM)
            await _until_draining(manager)
            await client.write_and_read()  # it serves on for the delay
            begin = time.monotonic()
            manager.signal(signal.SIGTERM)
            code = await asyncio.to_thread(manager.wait, _STOP_SECONDS)
            report.stop_seconds.append(time.monotonic() - begin)
            report.stops += 1
            if code != -signal.SIGTERM:
                report.wrong.append(f"exit code {code} after a second signal")
            await asyncio.to_thread(manager.start)
        await client.close()
        await _check_all([client], load)
        report.confirmed_blocks = sum(map(len, client.confirmed))
        report.wrong += manager.failures()
    _add(report, load)
    return report
