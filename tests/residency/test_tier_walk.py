"""The walk through the tiers counts what a naive walk over sets counts, for each rank and whatever the windows are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from fake_clock import FakeClock
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.model.instances import Instance, LocationSpecInfo, ModelDeployment
from kvcm.model.keys import mixed_array
from kvcm.residency.block_holders import ALL_PARTS, Medium
from kvcm.residency.residency import Change, Engine, Report, Residency
from kvcm.residency.tier_walk import IN_GPU, IN_HOST, ON_DISK, Runs, TierWalk, windows

NONE = mixed_array([])
INSTANCE = Instance("", "group", "instance", 16, (LocationSpecInfo("kv", 10),), ModelDeployment())
MEDIA = {Medium.GPU: IN_GPU, Medium.HOST: IN_HOST, Medium.DISK: ON_DISK}


@dataclass
class Naive:
    """What one rank holds, block by block, as sets."""

    gpu: set[int]
    host: set[int]
    disk: set[int]

    def walk(self, blocks: int) -> tuple[int, ...]:
        """Return the ordered counts and the independent ones."""
        at, ordered = 0, []
        for tier in (self.gpu, self.host, self.disk):
            while at < blocks and at in tier:
                at += 1
            ordered.append(at)
        matched = 0
        while matched < blocks and matched in self.gpu | self.host | self.disk:
            matched += 1
        prefix = set(range(matched))
        return (*ordered, matched, *(len(prefix & tier) for tier in (self.gpu, self.host, self.disk)))


def naive(flags: list[int]) -> Naive:
    """Return a rank by the flags of its blocks."""
    return Naive(*({at for at, flag in enumerate(flags) if flag & wanted} for wanted in (IN_GPU, IN_HOST, ON_DISK)))


blocks_of_ranks = st.integers(0, 14).flatmap(
    lambda blocks: st.lists(st.lists(st.integers(0, 7), min_size=blocks, max_size=blocks), min_size=1, max_size=4)
)


@settings(max_examples=examples(300), deadline=None)
@given(ranks=blocks_of_ranks, cuts=st.lists(st.integers(1, 5), max_size=8), lengths=st.lists(st.integers(1, 3)))
def test_the_walk_is_that_over_sets(ranks: list[list[int]], cuts: list[int], lengths: list[int]) -> None:
    flags = np.array(ranks, np.uint8).T
    runs = np.array([*lengths, *[1] * len(flags)][: len(flags)], np.int64)
    walk, start = TierWalk(len(ranks)), 0
    for cut in (*cuts, len(flags) + 1):
        walk.extend(Runs(runs[start : start + cut], flags[start : start + cut]))
        start += cut
    found = np.stack(walk.matches()).T.tolist()
    for at, counts in enumerate(found):
        expanded = [flag for flag, length in zip(ranks[at], runs.tolist(), strict=True) for _ in range(length)]
        assert tuple(counts) == naive(expanded).walk(len(expanded)), (at, expanded)
        gpu, host, disk, matched, *_ = counts
        assert gpu <= host <= disk <= matched
    assert walk.is_going == any(matched == runs.sum() for _, _, _, matched, *_ in found)


keys_of_rank = st.dictionaries(st.sampled_from(list(MEDIA)), st.sets(st.integers(0, 9)))


@settings(max_examples=examples(100), deadline=None)
@given(ranks=st.lists(keys_of_rank, min_size=1, max_size=4), stored=st.sets(st.integers(0, 9)))
def test_the_blocks_of_reporters_are_walked(ranks: list[dict[Medium, set[int]]], stored: set[int]) -> None:
    residency = Residency(FakeClock(), lambda _id: INSTANCE).open(INSTANCE)
    for rank, held in enumerate(ranks):
        changes = [Change(m, ALL_PARTS, False, NONE, mixed_array(sorted(keys))) for m, keys in held.items() if keys]
        residency.report(Report(Engine("a:1", rank), "run", 1, changes))
    prompt, is_stored = list(range(10)), np.array([key in stored for key in range(10)])
    engines = [*residency.engines(), Engine("unknown:1")]
    walk = TierWalk(len(engines))
    for start in (0, 3, 6, 9):
        window = slice(start, start + 3)
        residency.extend_walk(walk, mixed_array(prompt[window]), engines, is_stored[window])
    of_storages = Naive(set(), set(), stored)
    for counts, held in zip(np.stack(walk.matches()).T.tolist(), [*ranks, {}], strict=True):
        own = Naive(*(held.get(medium, set()) for medium in MEDIA))
        own.disk = own.disk | of_storages.disk
        assert tuple(counts) == own.walk(10)


PARTS = ("a", "b")
IN_PARTS = Instance("", "group", "instance", 16, tuple(LocationSpecInfo(part, 10) for part in PARTS), ModelDeployment())
held_parts = st.dictionaries(
    st.tuples(st.sampled_from(list(MEDIA)), st.sampled_from([ALL_PARTS, *PARTS])), st.sets(st.integers(0, 9)),
)  # fmt: skip


def media_of_block(held: dict[tuple[Medium, str], set[int]], key: int) -> set[Medium]:
    """Return the media that have all of a block, or the slowest one that is needed for all its parts."""
    found = {medium for medium in MEDIA if key in held.get((medium, ALL_PARTS), set())}
    of_parts = [{medium for medium in MEDIA if key in held.get((medium, part), set())} for part in PARTS]
    if all(of_parts):
        found |= set.intersection(*of_parts) or {max(map(min, of_parts))}
    return found


@settings(max_examples=examples(300), deadline=None)
@given(ranks=st.lists(held_parts, min_size=1, max_size=3))
@example(ranks=[{(Medium.GPU, "a"): {0, 1}, (Medium.HOST, "b"): {0, 1}}])
@example(ranks=[{(Medium.GPU, "a"): {0}, (Medium.DISK, "b"): {0}, (Medium.HOST, "b"): {0}}])
def test_blocks_in_parts_are_walked(ranks: list[dict[tuple[Medium, str], set[int]]]) -> None:
    residency = Residency(FakeClock(), lambda _id: IN_PARTS).open(IN_PARTS)
    for rank, held in enumerate(ranks):
        changes = [Change(m, part, False, NONE, mixed_array(sorted(k))) for (m, part), k in held.items() if k]
        residency.report(Report(Engine("a:1", rank), "run", 1, changes))
    engines = residency.engines()
    walk = TierWalk(len(engines))
    residency.extend_walk(walk, mixed_array(list(range(10))), engines, np.zeros(10, np.bool_))
    for at, counts in enumerate(np.stack(walk.matches()).T.tolist()):
        held = ranks[engines[at].rank]
        flags = [sum(MEDIA[medium] for medium in media_of_block(held, key)) for key in range(10)]
        assert tuple(counts) == naive(flags).walk(10)


def test_blocks_above_a_gap_do_not_count_again() -> None:
    """GPU, host, GPU: an engine computes the third block again, or loads it from where it does not lie."""
    walk = TierWalk(1)
    walk.extend(Runs(np.array([1, 1, 1]), np.array([[IN_GPU], [IN_HOST], [IN_GPU]], np.uint8)))
    found = [int(count[0]) for count in walk.matches()]
    assert found == [1, 2, 2, 3, 2, 1, 0]


def test_windows_cover_a_prompt_and_bound_the_work() -> None:
    for blocks, ranks in ((0, 1), (1, 1), (64, 1), (65, 1), (70_000, 1000), (10, 1 << 24)):
        found = list(windows(blocks, ranks))
        assert [at for each in found for at in range(each.start, each.stop)] == list(range(blocks))
        assert all((each.stop - each.start) <= 4096 for each in found)
        assert all((each.stop - each.start) * ranks <= 1 << 22 or each.stop - each.start == 1 for each in found)
