"""Managers tell each other how they are through a table, whatever release wrote there before."""

from __future__ import annotations

from dataclasses import replace

from fake_clock import FakeClock

from kvcm.model.nodes import Endpoint
from kvcm.model.vitals import GroupTotals, Vitals
from kvcm.registry.vitals import VitalsBoard
from kvcm.store.memory import MemoryTable


def vitals(node_id: str, requests: int = 1) -> Vitals:
    return Vitals(
        Endpoint(node_id, "h", 1, 2, 3, 4), "1", 1.5, 2.5, "serving", True, {"match": requests}, {"match": 0},
        (0.1,), (1, 2), {"a": GroupTotals(1, 2, 3, 4)}, 0.25, 3, {"a": {"nfs": 5}},
    )  # fmt: skip


async def test_everybody_reads_what_everybody_tells() -> None:
    clock, table = FakeClock(), MemoryTable()
    one, other = VitalsBoard(clock, table), VitalsBoard(clock, table)
    await one.publish(vitals("m1"))
    await other.publish(vitals("m2"))
    await one.publish(vitals("m1", 7))
    assert await other.all() == await one.all() == {"m1": vitals("m1", 7), "m2": vitals("m2")}


async def test_who_falls_silent_is_not_told_of_and_is_removed_by_others() -> None:
    clock, table = FakeClock(), MemoryTable()
    await VitalsBoard(clock, table).publish(vitals("dead"))
    clock.time += 30
    living = VitalsBoard(clock, table)
    assert await living.all() == {}
    await living.publish(vitals("m2"))
    assert set(await table.all()) == {"m2"}


async def test_a_manager_takes_over_what_a_run_before_left_and_what_others_removed() -> None:
    clock, table = FakeClock(), MemoryTable()
    await VitalsBoard(clock, table).publish(vitals("m1", 9))
    board = VitalsBoard(clock, table)
    await board.publish(vitals("m1", 1))
    await table.replace("m1", await table.get("m1"), None)
    await board.publish(vitals("m1", 2))
    assert await board.all() == {"m1": vitals("m1", 2)}


async def test_who_leaves_is_forgotten_at_once() -> None:
    clock, table = FakeClock(), MemoryTable()
    board = VitalsBoard(clock, table)
    await board.withdraw("m1")
    await board.publish(vitals("m1"))
    await board.withdraw("m1")
    assert await table.all() == {}


async def test_what_a_later_release_adds_is_passed_over_and_what_nobody_can_read_vanishes() -> None:
    clock, table = FakeClock(), MemoryTable()
    board = VitalsBoard(clock, table)
    await board.publish(vitals("m1"))
    document = await table.get("m1")
    assert document is not None
    newer = document.replace(b'"phase":', b'"mood":"good","phase":')
    await table.replace("m1", document, newer, due=clock.time + 60)
    await table.replace("m2", None, b"{", due=clock.time + 60)
    await table.replace("m3", None, newer.replace(b'{"version":1', b'{"version":9'), due=clock.time - 1)
    assert await board.all() == {"m1": vitals("m1")}
    await board.publish(replace(vitals("m4"), version="2"))
    assert set(await table.all()) == {"m1", "m2", "m4"}
