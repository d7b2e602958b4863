"""What policies share: queues of slots, and turns between instances."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.reclaim.policies.policy import END, SlotLinks, SlotQueue
from kvcm.reclaim.policies.s3fifo import Ghost
from kvcm.reclaim.policies.sharing import Sharing

SLOTS = st.integers(0, 300)


def passed(step: Callable[[int], int], end: int) -> list[int]:
    """Return the slots from an end of a queue to that end again."""
    found, slot = [], step(end)
    while slot >= 0:
        found.append(slot)
        slot = step(slot)
    assert slot == end
    return found


@given(st.lists(st.tuples(st.sampled_from(["push", "push all", "after", "remove", "renew", "move"]), SLOTS, SLOTS)))
def test_queues_that_share_their_links_keep_their_order(steps: list[tuple[str, int, int]]) -> None:
    links = SlotLinks(queues=3)
    column = links.column("q")
    queues = [SlotQueue(links, end) for end in (-1, -2, -3)]
    lists: list[list[int]] = [[], [], []]
    for verb, slot, other in steps:
        owner = next((at for at, each in enumerate(lists) if slot in each), None)
        if owner is None and verb == "push all":
            together = [each for each in dict.fromkeys((slot, other)) if not any(each in queue for queue in lists)]
            lists[slot % 3] += together
            queues[slot % 3].push_all(together)
            for each in together:
                column[each] = each << 32
        elif owner is None and verb in ("push", "after"):
            at = slot % 3
            place = other % len(lists[at]) if lists[at] and verb == "after" else len(lists[at]) - 1
            after = lists[at][place] if place >= 0 else -1 - at
            lists[at].insert(place + 1, slot)
            if verb == "push":
                queues[at].push(slot)
            else:
                queues[at].put(slot, after)
            column[slot] = slot << 32
        elif owner is not None and verb == "remove":
            lists[owner].remove(slot)
            queues[owner].remove(slot)
        elif owner is not None and verb == "renew":
            lists[owner].append(lists[owner].pop(lists[owner].index(slot)))
            queues[owner].renew(slot)
        elif owner is not None and verb == "move" and not any(other in each for each in lists):
            lists[owner][lists[owner].index(slot)] = other
            kept = column[slot]
            links.move(slot, other)
            assert column[other] == kept
    for at, (queue, blocks) in enumerate(zip(queues, lists, strict=True)):
        assert passed(queue.newer, -1 - at) == blocks == passed(queue.older, -1 - at)[::-1]
        assert len(queue) == len(blocks)
        assert (queue.oldest, queue.newest) == ((blocks[0], blocks[-1]) if blocks else (-1 - at, -1 - at))
    assert {slot for slot in range(-4, 400) if slot in links} == {slot for each in lists for slot in each}


def test_a_slot_is_in_one_queue_at_a_time() -> None:
    links = SlotLinks(queues=2)
    first, second = SlotQueue(links, -1), SlotQueue(links, -2)
    first.push(7)
    with pytest.raises(AssertionError):
        second.push(7)
    with pytest.raises(AssertionError):
        second.remove(8)
    with pytest.raises(AssertionError):
        first.renew(8)
    first.push(8)
    with pytest.raises(AssertionError):
        links.move(7, 8)


def test_a_cursor_steps_back_when_its_slot_leaves_and_goes_along_when_it_is_renamed() -> None:
    links = SlotLinks()
    queue = SlotQueue(links)
    for slot in range(3):
        queue.push(slot)
    cursor = links.open_cursor()
    cursor.stand_on(1)
    links.move(1, 9)
    assert (cursor.at, cursor.stepped_back) == (9, False)
    queue.renew(9)
    assert (cursor.at, cursor.stepped_back) == (0, True)
    queue.remove(0)
    assert cursor.at == END
    links.close_cursor(cursor)
    assert passed(queue.newer, END) == [2, 9]


NAMES = st.sampled_from([*range(12), *(each << 32 for each in range(-4, 4)), -(2**63), 2**63 - 1])


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "shrink"]), NAMES, st.integers(0, 12))))
def test_the_memory_of_names_forgets_the_oldest_first(steps: list[tuple[str, int, int]]) -> None:
    ghost, names = Ghost(), list[int]()
    for verb, name, most in steps:
        was_known = name in names
        if verb == "shrink":
            ghost.shrink(most)
            names = names[max(0, len(names) - most) :]
        elif verb == "discard":
            assert ghost.discard(name) == was_known
            names = [each for each in names if each != name]
        else:
            ghost.add(name)
            names = [*(each for each in names if each != name), name]
        assert len(ghost) == len(names)
        assert [each for each in (*range(12), 1 << 32, -(2**63)) if each in ghost] == [
            each for each in (*range(12), 1 << 32, -(2**63)) if each in names
        ]
    for count in range(len(names), -1, -1):
        ghost.shrink(count)
        assert all(each in ghost for each in names[len(names) - count :])
        assert not any(each in ghost for each in names[: len(names) - count])


# ── The instance that gives up the next block ──


def turns(strategy: str, used: list[int], weights: list[float], amount: int, ages: list[float]) -> list[int]:
    """Return the instance that gives each block, in order."""
    sharing = Sharing(strategy, dict(enumerate(used)), dict(enumerate(weights)), amount)
    given = []
    for _ in range(amount):
        uid = min(range(len(used)), key=lambda uid: sharing.priority(uid, ages[uid]))
        sharing.record(uid, 1)
        given.append(uid)
    return [given.count(uid) for uid in range(len(used))]


@pytest.mark.parametrize("strategy", ["group_lru", ""])
def test_by_age_over_weight(strategy: str) -> None:
    assert turns(strategy, [9, 9], [1, 1], 4, [5, 6]) == [0, 4]
    assert turns(strategy, [9, 9], [1, 2], 4, [5, 6]) == [4, 0]


def test_the_same_part_of_each() -> None:
    assert turns("proportional", [12, 4], [1, 1], 8, [1, 1]) == [6, 2]
    assert turns("proportional", [12, 12], [2, 1], 9, [1, 1]) == [3, 6]


def test_instances_above_their_share_of_the_remaining_bytes_give() -> None:
    assert turns("fixed", [11, 5], [3, 1], 8, [1, 1]) == [5, 3]
    assert turns("fixed", [11, 5], [1, 1], 8, [1, 1]) == [7, 1]
    assert turns("fixed", [8, 8], [1, 3], 4, [1, 9]) == [4, 0]
