"""The table of blocks holds what a dict would, while it grows, shrinks, is rebuilt and has its values replaced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.residency.block_table import ABSENT, FIRST_VALUE, BlockTable, Keys, Values

LARGE = 400_000  # blocks: some rebuilds are done in steps


def random_keys(count: int, seed: int) -> Keys:
    """Return distinct keys, the key 0 among them: fresh memory has it, too."""
    keys = np.unique(np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, count, np.int64, endpoint=True))
    keys[0] = 0
    return np.random.default_rng(seed + 1).permutation(np.unique(keys))


def clustered_keys(count: int, seed: int) -> Keys:
    """Return keys that all have their homes in few buckets: mixed keys never do, and the table holds them, too."""
    upper = np.random.default_rng(seed).integers(0, 8, count, np.int64) << 58
    return np.unique(upper | np.random.default_rng(seed + 1).integers(0, 1 << 32, count, np.int64))


def put(table: BlockTable, keys: Keys, value: int, *, inserts: bool = True) -> None:
    """Give keys a value."""
    table.update(keys, lambda before: np.full(len(before), value, np.uint32), inserts=inserts)


steps = st.lists(
    st.tuples(
        st.sampled_from(("insert", "insert", "insert", "change", "remove", "maintain", "replace")),
        st.floats(0, 1),
        st.integers(1, 3000),
        st.integers(FIRST_VALUE, FIRST_VALUE + 5),
    ),
    max_size=40,
)


@settings(max_examples=examples(200), deadline=None)
@given(
    history=steps,
    seed=st.integers(0, 1000),
    count=st.sampled_from((30, 2000, 20_000)),
    make=st.sampled_from((random_keys, random_keys, clustered_keys)),
)
def test_any_history_leaves_what_a_dict_would_hold(
    history: list[tuple[str, float, int, int]], seed: int, count: int, make: object
) -> None:
    count = min(count, 600) if make is clustered_keys else count
    pool = clustered_keys(count, seed) if make is clustered_keys else random_keys(count, seed)
    table, model = BlockTable(), dict[int, int]()
    for deed, where, size, value in history:
        begin = int(where * len(pool))
        keys = np.concatenate((pool[begin : begin + size], pool[begin : begin + 3]))  # some of them twice
        if deed == "insert":
            put(table, keys, value)
            model |= dict.fromkeys(keys.tolist(), value)
        elif deed == "change":
            put(table, keys, value, inserts=False)
            model |= {key: value for key in keys.tolist() if key in model}
        elif deed == "remove":
            put(table, keys, ABSENT, inserts=False)
            for key in keys.tolist():
                model.pop(key, None)
        elif deed == "maintain":
            table.maintain()
        else:
            replace_all(table, value)
            for key in [key for key, held in model.items() if held == value]:
                del model[key]
        assert table.count == len(model)
    assert table.find(pool).tolist() == [model.get(key, ABSENT) for key in pool.tolist()]


def replace_all(table: BlockTable, value: int) -> None:
    """Drop a value from the whole table."""

    def transition(before: Values) -> Values:
        return np.where(before == value, np.uint32(ABSENT), before).astype(np.uint32)

    while table.replace(transition):
        pass


def test_a_table_grows_and_shrinks_in_steps() -> None:
    """No step does much, and memory stays within the stated bytes for each block."""
    keys = random_keys(LARGE, 7)
    table = BlockTable()
    for start in range(0, len(keys), 4096):
        put(table, keys[start : start + 4096], FIRST_VALUE)
        if table.count > 50_000:
            assert table.memory_bytes / table.count <= 32
        probe = keys[: start + 4096 : 997]
        assert (table.find(probe) == FIRST_VALUE).all()
    full = table.memory_bytes
    put(table, keys[LARGE // 20 :], ABSENT, inserts=False)
    while table.maintain():
        assert (table.find(keys[: LARGE // 20 : 97]) == FIRST_VALUE).all()
    assert table.memory_bytes < full / 4
    assert (table.count, (table.find(keys) == FIRST_VALUE).sum()) == (LARGE // 20, LARGE // 20)


@pytest.mark.parametrize("rounds", [30])
def test_blocks_that_come_and_go_take_no_more_memory(rounds: int) -> None:
    """Slots of removed keys are used again, or go with the next rebuild."""
    table, size = BlockTable(), 20_000
    previous = random_keys(size, 0)
    put(table, previous, FIRST_VALUE)
    peak = 0
    for number in range(1, rounds):
        current = random_keys(size, number)
        put(table, previous, ABSENT, inserts=False)
        put(table, current, FIRST_VALUE)
        previous, peak = current, max(peak, table.memory_bytes)
    assert table.count == len(previous)
    assert peak <= 2 * 32 * size


def test_values_are_replaced_while_the_table_is_rebuilt() -> None:
    keys = random_keys(LARGE, 3)
    table = BlockTable()
    odd, even = keys[1::2], keys[::2]
    put(table, even, FIRST_VALUE)
    put(table, odd, FIRST_VALUE + 1)
    added, calls = random_keys(20 * 4096, 4), 0

    def transition(before: Values) -> Values:
        return np.where(before == FIRST_VALUE, np.uint32(ABSENT), before).astype(np.uint32)

    while table.replace(transition):
        if calls < 20:  # the table grows beside it
            put(table, added[calls * 4096 : (calls + 1) * 4096], FIRST_VALUE + 2)
        calls += 1
    assert (table.find(even) != FIRST_VALUE).all()
    assert (table.find(odd) >= FIRST_VALUE + 1).all()
