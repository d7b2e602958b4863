"""The local view of one kind of documents never goes back in time, however answers of the store overtake each other."""

import asyncio
from random import Random

import pytest
from registry_rig import SuspendingTable

from kvcm.registry.shelf import Shelf
from kvcm.store.memory import MemoryTable


class Site:
    """A shelf, its slow way to the table, and another manager's fast one."""

    def __init__(self) -> None:
        table = MemoryTable()
        self.way = SuspendingTable(table)
        self.shelf = Shelf(self.way, "n/", int)
        self.other = Shelf(table, "n/", int)


@pytest.fixture
def site() -> Site:
    return Site()


async def put(shelf: Shelf[int], value: int | None) -> None:
    await shelf.change("x", lambda _: value)


async def reached(task: "asyncio.Task[object]", way: SuspendingTable, call: str) -> None:
    """Wait until a task's call is at the table, its answer held."""
    count = way.asked.count(call)
    while way.asked.count(call) == count:  # noqa: ASYNC110 - in steps, to see each one
        await asyncio.sleep(0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()


@pytest.mark.parametrize("value", [2, None])
async def test_an_old_answer_to_a_read_replaces_no_later_change(site: Site, value: int | None) -> None:
    """Invariant 2."""
    await put(site.shelf, 1)
    await put(site.other, 3)
    answer = site.way.hold("get")
    read = asyncio.create_task(site.shelf.read("x"))
    await reached(read, site.way, "get")
    await put(site.shelf, value)
    answer.set()
    assert await read == value
    assert site.shelf.get("x") == value


@pytest.mark.parametrize("value", [2, None])
async def test_an_old_answer_to_a_refresh_replaces_no_later_change(site: Site, value: int | None) -> None:
    """Invariant 2."""
    await put(site.shelf, 1)
    answer = site.way.hold("all")

    async def refresh() -> None:
        with site.shelf.watching() as changed:
            documents = await site.way.all()
        site.shelf.take(documents, changed)

    refreshing = asyncio.create_task(refresh())
    await reached(refreshing, site.way, "all")
    await put(site.shelf, value)
    answer.set()
    await refreshing
    assert site.shelf.get("x") == value


async def test_an_old_answer_to_a_change_replaces_no_later_one(site: Site) -> None:
    """Invariant 2: the change was made, another manager went on from it, and that is known here already."""
    answer = site.way.hold("replace")
    change = asyncio.create_task(put(site.shelf, 1))
    await reached(change, site.way, "replace")
    await put(site.other, 2)
    await site.shelf.read("x")
    answer.set()
    await change
    assert site.shelf.get("x") == 2


async def test_a_change_that_lost_decides_again_from_what_the_winner_made(site: Site) -> None:
    seen: list[int | None] = []
    answer = site.way.hold("get")

    def decide(known: int | None) -> int:
        seen.append(known)
        return (known or 0) + 1

    change = asyncio.create_task(site.shelf.change("x", decide))
    await reached(change, site.way, "get")
    await put(site.other, 10)
    answer.set()
    assert await change == 11
    assert seen == [None, 10]


async def test_many_who_count_lose_no_step(site: Site) -> None:
    shelves = [site.shelf, site.other, Shelf(site.way, "n/", int)]
    await asyncio.gather(*(shelves[n % 3].change("x", lambda known: (known or 0) + 1) for n in range(30)))
    assert await site.other.read("x") == 30


async def test_what_does_not_change_is_not_written(site: Site) -> None:
    await put(site.shelf, 1)
    generation = site.shelf.generation
    await put(site.shelf, 1)
    assert (site.way.asked.count("replace"), site.shelf.generation) == (1, generation)


async def test_other_kinds_of_documents_are_not_touched(site: Site) -> None:
    await put(site.shelf, 1)
    site.shelf.take({"n/x": b'{"version":1,"value":1}', "m/x": b"?", "n": b"?", "": b"?"}, set())
    assert site.shelf.names() == ["x"]


async def test_values_stand_in_the_order_of_their_names_whoever_brings_or_takes_them() -> None:
    """After every single step, since the order is kept between them."""
    table, generator = MemoryTable(), Random(1)
    shelf, other = Shelf(table, "n/", int), Shelf(table, "n/", int)
    known: dict[str, int] = {}
    for _ in range(300):
        name, value = generator.choice("abcdef"), generator.choice([None, 1, 2])
        await generator.choice([shelf, other]).change(name, lambda _, new=value: new)
        shelf.take(await table.all(), ())
        known[name] = value or 0
        known = {name: value for name, value in known.items() if value}
        assert shelf.names() == sorted(known)
        assert shelf.all() == [known[name] for name in sorted(known)]


async def test_who_asked_for_the_names_may_keep_what_he_was_given(site: Site) -> None:
    await put(site.shelf, 1)
    site.shelf.names().append("y")
    assert site.shelf.names() == ["x"]
