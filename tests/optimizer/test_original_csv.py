"""What the original optimizer writes. Figures marked ✔ in wire.md 12 were measured on it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from group_traces import NAMES, Step, steps, trace_of_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from original_documents import config, group, instance
from thoroughness import examples

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups.original import HEADER, OriginalConfig, OriginalReplay, Row, write_original_csv
from kvcm.optimizer.trace import QueryMode, Trace


def replayed(requests: Sequence[Step] | Trace, wanted: OriginalConfig) -> tuple[OriginalReplay, list[tuple[str, Row]]]:
    replay = OriginalReplay(requests if isinstance(requests, Trace) else trace_of_steps(requests), wanted)
    return replay, list(replay.rows())


EIGHT = Step(tuple(range(8)))


@pytest.mark.parametrize(("mode", "left"), [(1, 2), (2, 2), (3, 4)])
@pytest.mark.parametrize("policy", ["lru", "random_lru", "leaf_aware_lru"])
def test_eight_blocks_with_a_limit_of_four_and_batches_of_three(mode: int, left: int, policy: str) -> None:
    replay, rows = replayed([EIGHT], config(group(instance(policy=policy)), mode=mode))
    assert len(replay.caches[0]) == left  # ✔
    assert [row.cached_here for _, row in rows] == [left]  # ✔ the state after the write and the eviction


def test_mode_1_evicts_from_every_instance_of_the_group_alone() -> None:
    both = group(instance("a"), instance("b"), capacity=10)
    other = group(instance("c"), name="other", capacity=10)
    write = [Step(tuple(range(5)), 0), Step(tuple(range(5)), 2), Step(tuple(range(6)), 1)]
    for mode, left in ((1, [2, 3, 5]), (2, [5, 3, 5]), (3, [5, 5, 5])):
        replay, _ = replayed(write, config(both, other, mode=mode))
        assert [len(cache) for cache in replay.caches] == left


def test_a_writer_that_has_nothing_left_ends_the_eviction() -> None:
    replay, _ = replayed([Step((1, 2), 0), Step((), 0)], config(group(capacity=0)))
    assert len(replay.caches[0]) == 0
    shared = config(group(instance("a"), instance("b"), capacity=1), mode=3)
    replay, _ = replayed([Step((1,), 0), Step((1, 2), 1), Step((5,), 1)], shared)
    assert [len(cache) for cache in replay.caches] == [1, 0]


@pytest.mark.parametrize(
    ("capacity", "percentage", "limit"), [(10, 0.8, 8), (7, 0.5, 3), (100, 0.29, 28), (9, 0, 0), (5, 1, 5)]
)
def test_the_limit_is_the_floor_of_a_product_of_floats(capacity: int, percentage: float, limit: int) -> None:
    assert config(group(capacity=capacity, used_percentage=percentage)).groups[0].limit == limit


def test_hierarchical_eviction_counts_the_first_tier_alone() -> None:
    tiers = [
        {"unique_name": f"s{priority}", "storage_type": "file", "priority": priority, "capacity": 10 * priority}
        for priority in (3, 1, 2)
    ]
    settled = {"capacity": 100, "storages": tiers, "used_percentage": 0.5}
    assert config(group(hierarchical_eviction_enabled=True, **settled)).groups[0].limit == 5
    assert config(group(**settled)).groups[0].limit == 50


def test_lru_is_by_access_and_leaf_aware_lru_goes_from_the_tail() -> None:
    requests = [Step((1, 2, 3)), Step((7,)), Step((1, 2), writes=False), Step((8, 9)), Step((1, 2, 3), writes=False)]
    for policy, hits in (("lru", [0, 0, 2, 0, 2]), ("leaf_aware_lru", [0, 0, 2, 0, 2])):
        _, rows = replayed(requests, config(group(instance(policy=policy))))
        assert [row.external_hits for _, row in rows] == hits
    one_chain = [Step((1, 2, 3, 4, 5)), Step((1, 2, 3, 4, 5), writes=False)]
    for policy, hits in (("lru", [0, 0]), ("leaf_aware_lru", [0, 4])):
        _, rows = replayed(one_chain, config(group(instance(policy=policy))))
        assert [row.external_hits for _, row in rows] == hits


def test_random_lru_takes_the_oldest_of_a_sample() -> None:
    blocks = [Step((each,)) for each in range(1, 41)]
    everything = config(group(instance(policy="random_lru", sample_rate=0.01), capacity=20))
    replay, _ = replayed(blocks, everything)
    assert replay.caches[0].here == bytearray([0] * 20 + [1] * 20)
    some = config(group(instance(policy="random_lru", sample_rate=0.5), capacity=20))
    replay, _ = replayed(blocks, some)
    assert len(replay.caches[0]) == 20
    assert replay.caches[0].here != bytearray([0] * 20 + [1] * 20)


def test_reads_are_internal_where_they_are_masked() -> None:
    mask = (True, True, False, False, True)
    requests = [Step((1, 2, 3)), Step((1, 2, 3, 4, 5), writes=False, mask=mask)]
    _, rows = replayed(requests, config(group(capacity=10)))
    row = rows[1][1]
    assert (row.internal_read, row.external_read, row.internal_hits, row.external_hits) == (3, 2, 2, 1)
    assert row.accumulated == (2, 1, 8)
    # A masked block that is not cached ends the walk; all that a turn reads is external.
    requests = [Step((2,)), Step((1, 2), writes=False, mask=(True, False)), Step((2,), mask=(True,))]
    _, rows = replayed(requests, config(group(capacity=10)))
    assert [(row.internal_hits, row.external_hits) for _, row in rows] == [(0, 0), (0, 0), (0, 1)]


def test_only_prefix_reads_are_replayed_and_of_a_schema_only_turns() -> None:
    requests = [
        Step((1, 2), reads=0),
        Step((1,), writes=False),
        Step((1,), writes=False, mode=QueryMode.BATCH),
        Step((1,), writes=False, mode=QueryMode.WINDOW, window=1),
        Step((1, 2), reads=1),
    ]
    _, rows = replayed(requests, config())
    assert [row.timestamp_us for _, row in rows] == [1_000_000, 4_000_000]
    _, rows = replayed(requests, config(trace_type="optimizer_schema"))
    assert [(row.timestamp_us, row.external_hits) for _, row in rows] == [(4_000_000, 0)]


def test_files_are_written_byte_by_byte(tmp_path: Path) -> None:
    shared = config(group(instance("a"), instance("b"), instance("c"), capacity=12))
    requests = [
        Step((0, 1), 0),
        Step((0, 1, 2), 0),
        Step((5,), 2, reads=0),
        Step((0, 1, 6, 7, 8, 9), 0, writes=False, mask=(True,)),
        Step((0, 4, 5), 1),
    ]
    first, second = write_original_csv(trace_of_steps(requests), shared, tmp_path / "out")
    assert [path.name for path in (first, second)] == ["a_hit_rates.csv", "b_hit_rates.csv"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [first.name, second.name]  # c reads nothing
    assert first.read_bytes().decode() == (
        f"{HEADER}\n"
        "0, 2, 2;0;0, 2, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0\n"
        "1000000, 3, 3;0;0, 3, 0, 3, 3, 0, 0, 2, 0.666667, 0.666667, 0, 0.4, 0.4\n"  # ✔ six digits
        "3000000, 3, 3;0;1, 4, 1, 5, 6, 1, 0.166667, 1, 0.166667, 0.333333, 0.0909091, 0.272727, 0.363636\n"
    )
    assert second.read_text().splitlines()[1] == "4000000, 3, 3;3;1, 7, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0"
    assert HEADER.count(",") == second.read_text().splitlines()[1].count(", ")


@pytest.mark.parametrize("name", ["../../etc/x", "Qwen/Qwen3-8B", "..", "a" * 256, "é ~"])
def test_no_name_of_an_instance_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    trace = replace(trace_of_steps([Step((1, 2))]), instance_names=(name,))
    (path,) = write_original_csv(trace, OriginalConfig.plain([name], 4), tmp_path / "out")
    assert path.parent == tmp_path / "out"
    assert list((tmp_path / "out").iterdir()) == [path]
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"output: .*allowed: a folder that can be written"):
        write_original_csv(trace_of_steps([EIGHT]), config(), tmp_path / "file")


def test_instances_that_are_not_configured_are_left_out() -> None:
    replay, rows = replayed([Step((1,), 0), Step((1,), 1)], config())
    assert replay.unknown_instances == ("b",)
    assert [name for name, _ in rows] == ["a"]
    with pytest.raises(OptionError, match="instance_id: none of a is in the trace; allowed: b"):
        replayed([Step((1,), 1)], config())


@settings(max_examples=examples(300))
@given(
    requests=steps(modes=[QueryMode.PREFIX]),
    mode=st.sampled_from((1, 2, 3)),
    batch=st.integers(1, 4),
    capacity=st.integers(0, 14),
)
def test_lru_as_a_list_by_access(requests: list[Step], mode: int, batch: int, capacity: int) -> None:
    shared = config(group(*map(instance, NAMES), capacity=capacity), mode=mode, batch=batch)
    caches = [OrderedDict[int, None]() for _ in NAMES]
    expected = []
    for step in requests:
        cache = caches[step.instance]
        read = step.ids[: step.read_blocks]
        prefix = next((place for place, each in enumerate(read) if each not in cache), len(read))
        for each in step.ids if step.writes else read[:prefix]:
            cache[each] = None
            cache.move_to_end(each)
        givers = (caches if mode == 1 else [cache]) if step.writes else []
        while any(givers) and (excess := sum(map(len, caches)) - capacity) > 0:
            for each in givers:
                for _ in range(min(len(each), excess if mode == 3 else batch)):
                    each.popitem(last=False)
        if read:
            expected.append((prefix, tuple(map(len, caches))))
    _, rows = replayed([*requests, *(Step((), place) for place in range(3))], shared)
    assert [(row.internal_hits + row.external_hits, row.cached) for _, row in rows] == expected
