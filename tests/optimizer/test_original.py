"""What the original optimizer reads, replays and writes."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from group_traces import NAMES, Step, steps, trace_of_steps
from hypothesis import given, settings
from hypothesis import strategies as st
from original_documents import config, document, group, instance
from thoroughness import examples

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups import original
from kvcm.optimizer.options import PolicySpec
from kvcm.optimizer.readers import read_trace
from kvcm.optimizer.replay import replay
from kvcm.optimizer.trace import QueryMode, Trace


def test_a_document_is_read() -> None:
    read = config(group(instance("a"), instance("b", "random_lru", sample_rate=0.5)), mode=1, batch=7)
    assert (read.eviction_mode, read.batch_size, read.trace_type) == (1, 7, "publisher_log")
    assert (read.trace_file_path, read.output_result_path) == ("t.log", "out")
    assert read.instances == (original.OriginalInstance("a"), original.OriginalInstance("b", 16, "random_lru", 0.5))
    assert read.block_sizes == {"a": 16, "b": 16}
    assert read.groups[0].storages[0].unique_name == "s"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trace_type": "csv"}, "trace_type: 'csv'; allowed: qwen_bailian, publisher_log, optimizer_schema"),
        ({"trace_file_path": 3}, "trace_file_path: 3; allowed: a text"),
        ({"eviction_params": {"eviction_mode": True}}, "eviction_mode: True; allowed: a whole number from 1 to 3"),
        (
            {"eviction_params": {"eviction_mode": 1, "eviction_batch_size_per_instance": 0}},
            "eviction_params.eviction_batch_size_per_instance: 0; allowed: a whole number from 1 to",
        ),
        ({"instance_groups": []}, r"instance_groups: []; allowed: a list of at least one object"),
        ({"instance_groups": [3]}, "instance_groups[0]: 3; allowed: an object"),
        ({"instance_groups": [group(used_percentage=1.5)]}, "used_percentage: 1.5; allowed: a number from 0 to 1"),
        ({"instance_groups": [group(quota_capacity="4")]}, "quota_capacity: '4'; allowed: a whole number from 0"),
        ({"instance_groups": [group(hierarchical_eviction_enabled=1)]}, "enabled: 1; allowed: true, false"),
        ({"instance_groups": [group(instance(policy="lfu"))]}, "'lfu'; allowed: lru, random_lru, leaf_aware_lru"),
        ({"instance_groups": [group(instance(sample_rate=0))]}, "sample_rate: 0; allowed: a number above 0 up to 1"),
        ({"instance_groups": [group(instance(""))]}, "instance_id has 0 bytes of UTF-8, allowed are 1 to 256"),
        ({"instance_groups": [group(instance(), instance())]}, "instance_id: 'a' stands there twice; allowed: each"),
    ],
)
def test_the_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as refused:
        original.OriginalConfig.parse(json.dumps(json.loads(document()) | change))
    assert message in str(refused.value)


def test_every_field_that_is_needed_is_named_when_it_is_missing() -> None:
    whole = json.loads(document(mode=1))
    for name in whole:
        with pytest.raises(OptionError, match=f"^{name}: missing; it has to be there"):
            original.OriginalConfig.parse(json.dumps({each: value for each, value in whole.items() if each != name}))


@pytest.mark.parametrize("text", ["", "{", "3", "null", "[]", '"x"', b"\xff", "[" * 100_000])
def test_an_invalid_document_is_refused(text: str | bytes) -> None:
    with pytest.raises(OptionError, match="config: "):
        original.OriginalConfig.parse(text)


def test_plain_options_make_one_group() -> None:
    plain = original.OriginalConfig.plain(["a", "b"], 8, policy="leaf_lru")
    assert plain.groups[0].limit == 8
    assert [each.policy for each in plain.instances] == ["leaf_aware_lru"] * 2
    assert (plain.trace_type, plain.eviction_mode) == ("", 3)
    with pytest.raises(OptionError, match="policy_type: 'sieve'; allowed: lru, random_lru, leaf_aware_lru"):
        original.OriginalConfig.plain(["a"], 8, policy="sieve")


def replayed(
    requests: Sequence[Step] | Trace, wanted: original.OriginalConfig
) -> tuple[original.OriginalReplay, list[tuple[str, original.Row]]]:
    replay = original.OriginalReplay(requests if isinstance(requests, Trace) else trace_of_steps(requests), wanted)
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


def test_leaf_aware_lru_evicts_from_the_tail() -> None:
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


def test_a_masked_block_that_is_not_cached_ends_the_prefix() -> None:
    # All that a turn reads is external.
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
    first, second = original.write_original_csv(trace_of_steps(requests), shared, tmp_path / "out")
    assert [path.name for path in (first, second)] == ["a_hit_rates.csv", "b_hit_rates.csv"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [first.name, second.name]  # c reads nothing
    assert first.read_bytes().decode() == (
        f"{original.HEADER}\n"
        "0, 2, 2;0;0, 2, 0, 2, 2, 0, 0, 0, 0, 0, 0, 0, 0\n"
        "1000000, 3, 3;0;0, 3, 0, 3, 3, 0, 0, 2, 0.666667, 0.666667, 0, 0.4, 0.4\n"  # ✔ six digits
        "3000000, 3, 3;0;1, 4, 1, 5, 6, 1, 0.166667, 1, 0.166667, 0.333333, 0.0909091, 0.272727, 0.363636\n"
    )
    assert second.read_text().splitlines()[1] == "4000000, 3, 3;3;1, 7, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0"
    assert original.HEADER.count(",") == second.read_text().splitlines()[1].count(", ")


@pytest.mark.parametrize("name", ["../../etc/x", "Qwen/Qwen3-8B", "..", "a" * 256, "é ~"])
def test_no_name_of_an_instance_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    trace = replace(trace_of_steps([Step((1, 2))]), instance_names=(name,))
    (path,) = original.write_original_csv(trace, original.OriginalConfig.plain([name], 4), tmp_path / "out")
    assert path.parent == tmp_path / "out"
    assert list((tmp_path / "out").iterdir()) == [path]
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"output: .*allowed: a folder that can be written"):
        original.write_original_csv(trace_of_steps([EIGHT]), config(), tmp_path / "file")


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


def event(kind: str, at: int, source: str = "a", **fields: Any) -> dict[str, Any]:
    common = {"id": "x" * 32, "source": source, "component": "cache_manager", "type": kind, "trigger_time_us": at}
    return common | fields


def lookup(at: int, keys: list[int], kind: str = "prefix_match", mask: object = 0, source: str = "a") -> dict[str, Any]:
    return event("GetCacheLocation", at, source, keys=keys, query_type=kind, block_mask=mask, sw_size=1)


def rows_of(tmp_path: Path, wanted: original.OriginalConfig, *lines: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Return the fields of all rows by instance."""
    path = tmp_path / "trace.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no JSON\n")
    trace = read_trace(path, format=wanted.trace_type, block_tokens=wanted.block_sizes, use_cache=False)
    files = original.write_original_csv(trace, wanted, tmp_path / "out")
    return {
        file.name.removesuffix("_hit_rates.csv"): [line.split(", ") for line in file.read_text().splitlines()[1:]]
        for file in files
    }


def test_events(tmp_path: Path) -> None:
    """Writes count from their finish, or 100 ms after a start without one; masks say what a read had itself."""
    lines = [
        event("StartWriteCache", 10, write_session_id="s", keys=[1, 2, 3], block_mask=0),
        lookup(20, [1, 2]),
        event("FinishWriteCache", 30, write_session_id="s", success_block=3),
        lookup(40, [1, 2, 9], mask=[True]),
        lookup(50, [1], "batch_get"),
        lookup(60, [1], "reverse_roll_sw_match"),
        event("StartWriteCache", 70, write_session_id="t", keys=[1, 2, 3, 4], block_mask=3),
        lookup(80, [1, 2, 3, 4]),
        lookup(100_080, [1, 2, 3, 4]),
        lookup(100_090, [1], source="stranger"),
    ]
    rows = rows_of(tmp_path, config(group(instance("a"), instance("b"), capacity=10)), *lines)
    assert list(rows) == ["a"]
    columns = ("timestamp", "cached", "internal read", "external read", "internal hits", "external hits")
    picked = [dict(zip(columns, (row[0], row[2], row[4], row[5], row[7], row[9]), strict=True)) for row in rows["a"]]
    assert [tuple(row.values()) for row in picked] == [
        ("20", "0;0", "0", "2", "0", "0"),
        ("40", "3;0", "1", "2", "1", "1"),
        ("80", "3;0", "0", "4", "0", "3"),
        ("100080", "4;0", "0", "4", "0", "4"),
    ]


@pytest.mark.parametrize(("ours", "theirs"), [("lru", "lru"), ("leaf_lru", "leaf_aware_lru")])
def test_precise_eviction_is_mode_request(
    tmp_path: Path, real_trace: Callable[[str], Trace], ours: str, theirs: str
) -> None:
    trace = real_trace("mooncake_synthetic")
    wanted = original.OriginalConfig.plain(trace.instance_names, 4000, policy=theirs)
    (file,) = original.write_original_csv(trace, wanted, tmp_path)
    lines = file.read_text().splitlines()
    mirrored = replay(trace, PolicySpec(ours), 4000, mode="request")
    assert sum(int(line.split(", ")[9]) for line in lines[1:]) == mirrored.hits.prefix_blocks
    assert lines[-1].split(", ")[-1] == f"{mirrored.block_hit_rate:.6g}"
