"""The original's replay of the formats that it reads, from the file to the rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from original_documents import config, group, instance

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.groups.original import OriginalConfig, write_original_csv
from kvcm.optimizer.policy_spec import PolicySpec
from kvcm.optimizer.readers import read_trace
from kvcm.optimizer.replay import replay
from kvcm.optimizer.trace import Trace


def event(kind: str, at: int, source: str = "a", **fields: Any) -> dict[str, Any]:
    common = {"id": "x" * 32, "source": source, "component": "cache_manager", "type": kind, "trigger_time_us": at}
    return common | fields


def lookup(at: int, keys: list[int], kind: str = "prefix_match", mask: object = 0, source: str = "a") -> dict[str, Any]:
    return event("GetCacheLocation", at, source, keys=keys, query_type=kind, block_mask=mask, sw_size=1)


def rows_of(tmp_path: Path, wanted: OriginalConfig, *lines: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Return the fields of all rows by instance."""
    path = tmp_path / "trace.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no JSON\n")
    trace = read_trace(path, format=wanted.trace_type, block_tokens=wanted.block_sizes, use_cache=False)
    files = write_original_csv(trace, wanted, tmp_path / "out")
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


def test_turns_of_a_schema(tmp_path: Path) -> None:
    turn = {"instance_id": "a", "trace_id": "t", "tokens": [], "keys": [1, 2], "input_len": 32, "output_len": 16}
    lines = [
        turn | {"timestamp_us": 1, "total_keys": [1, 2, 3]},
        turn | {"timestamp_us": 2, "total_keys": [1, 2, 4], "keys": [1, 2, 4]},
    ]
    rows = rows_of(tmp_path, config(trace_type="optimizer_schema"), *lines)
    assert [(row[0], row[1], row[6], row[9], row[11]) for row in rows["a"]] == [
        ("1", "3", "2", "0", "0"),
        ("2", "4", "3", "2", "0.666667"),
    ]


def test_qwen_needs_an_instance_called_instance(tmp_path: Path) -> None:
    line = {"timestamp": 0.5, "input_length": 32, "output_length": 1, "hash_ids": [1, 2]}
    rows = rows_of(tmp_path, config(group(instance("instance")), trace_type="qwen_bailian"), line, line)
    assert [(row[0], row[9]) for row in rows["instance"]] == [("500000", "0"), ("500000", "2")]
    with pytest.raises(OptionError, match="instance_id: none of a is in the trace; allowed: instance"):
        rows_of(tmp_path, config(trace_type="qwen_bailian"), line)


@pytest.mark.parametrize(("ours", "theirs"), [("lru", "lru"), ("leaf_lru", "leaf_aware_lru")])
def test_precise_eviction_is_mode_request(
    tmp_path: Path, real_trace: Callable[[str], Trace], ours: str, theirs: str
) -> None:
    trace = real_trace("mooncake_synthetic")
    wanted = OriginalConfig.plain(trace.instance_names, 4000, policy=theirs)
    (file,) = write_original_csv(trace, wanted, tmp_path)
    lines = file.read_text().splitlines()
    mirrored = replay(trace, PolicySpec(ours), 4000, mode="request")
    assert sum(int(line.split(", ")[9]) for line in lines[1:]) == mirrored.hits.prefix_blocks
    assert lines[-1].split(", ")[-1] == f"{mirrored.block_hit_rate:.6g}"
