"""Free slots in memory: which are handed out, when, in what order, and how many are remembered (decision 16)."""

import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.storage.file_slots import (
    FreeSlots,
    InFile,
    Pool,
    SlotReuse,
    notes_path,
    record_deleted_slots,
    record_owner,
    remove_notes,
    shorten,
    slot_owners,
)

GRACE_SECONDS = 10.0
POOL, OTHER = Pool("i", 64), Pool("j", 64)
PATHS = {"a": POOL, "b": POOL, "c": POOL, "d": OTHER}


class World:
    """Free slots, and the same as plain sets."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.time = 0.0
        self.term: int | None = 1
        self.free = FreeSlots(SlotReuse(GRACE_SECONDS, lambda: self.time, lambda: self.term), most)
        self.deleted: set[tuple[str, int]] = set()
        self.deleted_at: dict[tuple[str, int], float] = {}
        self.ready_at: dict[tuple[str, int], float] = {}
        self.taken: set[tuple[str, int]] = set()

    def delete(self, path: str, slots: set[int]) -> None:
        self.free.deleted(path, PATHS[path], slots)
        fresh = {(path, slot) for slot in slots} - self.ready_at.keys() - self.taken - self.deleted
        self.deleted |= fresh
        self.deleted_at |= dict.fromkeys(fresh, self.time)

    def forget(self, path: str, slots: set[int]) -> None:
        self.free.forgotten(path, slots)
        moved = {(path, slot) for slot in slots} & self.deleted
        self.deleted -= moved
        self.ready_at |= dict.fromkeys(moved, self.time + GRACE_SECONDS)

    def end(self, path: str) -> None:
        self.free.discard_file(path)
        self.deleted = {each for each in self.deleted if each[0] != path}
        self.taken = {each for each in self.taken if each[0] != path}
        self.ready_at = {each: at for each, at in self.ready_at.items() if each[0] != path}

    def ready(self, pool: Pool) -> set[tuple[str, int]]:
        return {each for each, at in self.ready_at.items() if at <= self.time and PATHS[each[0]] == pool}

    def take(self, pool: Pool, count: int) -> list[InFile]:
        ready, taken = self.ready(pool), self.free.acquire(pool, count)
        found = [(each.path, slot) for each in taken for slot in each.slots]
        assert len(found) == len(set(found)) == min(count, len(ready))
        assert set(found) <= ready
        for each in found:
            del self.ready_at[each]
        self.taken |= set(found)
        return taken

    def hand_out(self, taken: list[InFile]) -> None:
        for each in taken:
            self.free.settle(each)
            self.taken -= {(each.path, slot) for slot in each.slots}

    def usable(self, path: str, seconds: float) -> int:
        """How many slots of a file are not lost, if metadata has so many seconds to go."""
        pending = {each for each in self.deleted if self.time < self.deleted_at[each] + seconds}
        return sum(each[0] == path for each in pending | self.ready_at.keys() | self.taken)

    def give_back(self, taken: list[InFile]) -> None:
        for each in taken:
            self.free.release(each)
            slots = {(each.path, slot) for slot in each.slots}
            self.ready_at |= dict.fromkeys(slots, self.time)
            self.taken -= slots


_SLOTS = st.sets(st.integers(0, 9), min_size=1)
_PATH = st.sampled_from(sorted(PATHS))
_STEPS: st.SearchStrategy[Callable[[World], object]] = st.one_of(
    st.builds(lambda path, slots: lambda world: world.delete(path, slots), _PATH, _SLOTS),
    st.builds(lambda path, slots: lambda world: world.forget(path, slots), _PATH, _SLOTS),
    st.builds(lambda path, slots: lambda world: (world.delete(path, slots), world.forget(path, slots)), _PATH, _SLOTS),
    st.builds(lambda path: lambda world: world.end(path), _PATH),
    st.builds(lambda pool, count: lambda world: world.take(pool, count), st.sampled_from([POOL, OTHER]), st.just(3)),
    st.builds(lambda pool: lambda world: world.give_back(world.take(pool, 5)), st.sampled_from([POOL, OTHER])),
    st.builds(lambda pool: lambda world: world.hand_out(world.take(pool, 3)), st.sampled_from([POOL, OTHER])),
    st.builds(lambda seconds: lambda world: setattr(world, "time", world.time + seconds), st.sampled_from([1, 10, 50])),
)


@settings(deadline=None)
@given(st.lists(_STEPS, max_size=60))
def test_it_hands_out_what_a_plain_model_says(steps: list[Callable[[World], object]]) -> None:
    world = World()
    for step in steps:
        step(world)
        assert len(world.free) == len(world.deleted) + len(world.ready_at) + len(world.taken)
        assert len(world.free._quarantine) <= len(world.ready_at)
        for path in PATHS:
            assert world.usable(path, 60) <= world.free.usable(path) <= world.usable(path, 120)
    for pool in (POOL, OTHER):
        world.take(pool, 100)


def freed(**files: int) -> World:
    """So many free slots in each file."""
    world = World()
    for path, count in files.items():
        world.delete(path, set(range(count)))
        world.forget(path, set(range(count)))
    world.time += GRACE_SECONDS
    return world


def test_the_fullest_file_with_space_for_all_is_filled_first() -> None:
    assert freed(a=5, b=2, c=9).take(POOL, 4) == [InFile("a", POOL, [0, 1, 2, 3])]
    assert freed(a=5, b=2, c=9).take(POOL, 2) == [InFile("b", POOL, [0, 1])]


def test_more_than_any_file_has_is_taken_from_as_few_as_possible() -> None:
    taken = freed(a=5, b=2, c=9).take(POOL, 12)
    assert [(each.path, len(each.slots)) for each in taken] == [("c", 9), ("a", 3)]


def test_only_so_many_are_remembered_and_the_oldest_are_forgotten() -> None:
    world = World(most=12)
    for path in ("a", "b", "c"):
        world.free.deleted(path, POOL, range(5))
        world.free.forgotten(path, range(5))
    world.time += GRACE_SECONDS
    assert len(world.free) == 10
    taken = world.free.acquire(POOL, 100)
    assert {each.path for each in taken} == {"b", "c"}
    world.hand_out(taken)
    assert len(world.free) == 0


def test_graces_that_are_over_end_some_at_a_time_and_whenever_something_is_deleted() -> None:
    """A manager whose engines write through others never acquires any; an acquire must not block the loop for long."""
    world = World()
    for number in range(5000):
        world.free.deleted(f"f{number}", POOL, [0])
        world.free.forgotten(f"f{number}", [0])
    world.time += GRACE_SECONDS
    assert len(world.free.acquire(POOL, 5000)) == 1000
    for number in range(500):
        world.free.deleted(f"g{number}", POOL, [0])
        world.free.forgotten(f"g{number}", [0])
    assert len(world.free._quarantine) == 500
    assert len(world.free.acquire(POOL, 5000)) == 4000


def test_a_term_forgets_the_free_slots_of_another() -> None:
    for term in (None, 2):
        world = freed(a=5)
        world.term = term
        assert world.free.acquire(POOL, 1) == []
        world.term = 1
        assert world.free.acquire(POOL, 1) == []
        assert len(world.free) == 0


# ── notes ──


_WORDS = st.lists(st.tuples(st.integers(0, 11), st.sampled_from(["", "", "a1", "b2"])), min_size=1, max_size=30)


@settings(deadline=None, max_examples=examples(40))
@given(_WORDS, st.integers(0, 12))
def test_a_note_that_was_cut_off_is_lost_and_is_never_another(words: list[tuple[int, str]], cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/1_12x0123456789abcdef.aa"
        expected: dict[int, str] = {}
        record_deleted_slots(path, [])
        for slot, owner in words:
            before = Path(notes_path(path)).read_bytes()
            assert record_owner(path, [slot], owner) if owner else record_deleted_slots(path, [slot]) is None
            whole = Path(notes_path(path)).read_bytes()
            Path(notes_path(path)).write_bytes(whole[: len(before) + cut])
            if len(before) + cut >= len(whole):
                expected[slot] = owner
            assert slot_owners(path) == expected


@settings(deadline=None, max_examples=examples(40))
@given(_WORDS)
def test_shortened_notes_say_the_same(words: list[tuple[int, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/1_12x0123456789abcdef.aa"
        record_deleted_slots(path, [])
        for slot, owner in words * 40:
            assert record_owner(path, [slot], owner * 8) if owner else record_deleted_slots(path, [slot]) is None
        before, size = slot_owners(path), Path(notes_path(path)).stat().st_size
        shorten(path)
        assert slot_owners(path) == before
        assert Path(notes_path(path)).stat().st_size <= max(3072, size // 2)
        remove_notes(path)
        assert list(Path(folder).iterdir()) == []


def test_notes_that_cannot_be_shortened_stay_and_nothing_is_left_behind(tmp_path: Path) -> None:
    """It only tidies up: on a medium that is full, files have to empty all the same."""
    path = f"{tmp_path}/1_12x0123456789abcdef.aa"
    record_deleted_slots(path, [])
    for _ in range(200):
        assert record_owner(path, range(12), "ab")
    before = Path(notes_path(path)).read_bytes()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, unlimited[1]))  # no file may grow beyond it
    try:
        shorten(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [before]
    shorten(path)
    assert len(Path(notes_path(path)).read_bytes()) < 100


def test_nothing_is_handed_out_where_the_notes_are_gone(tmp_path: Path) -> None:
    assert record_owner(f"{tmp_path}/1_12x0123456789abcdef.aa", [1], "aa") is False
    assert list(tmp_path.iterdir()) == []
