"""Files that nobody can tell the owner of: nothing of it is left, and the structure is the same."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from request_traces import assert_same, request_traces, turn_traces
from thoroughness import examples

from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.readers import read_trace
from kvcm.optimizer.trace import Trace
from kvcm.optimizer.writers import Pseudonyms, anonymise, write_trace

SALT = b"sixteen bytes ok"
SECRET = "acme-prod"
TOKENS = [123454321] * 5

LINES: dict[str, list[dict[str, Any]]] = {
    "mooncake": [
        {"timestamp": 7003, "input_length": 8, "output_length": 1, "session": SECRET, "hash_ids": [987654321],
         "user": SECRET, "prompt": SECRET},
    ],
    "qwen_bailian": [
        {"timestamp": 9, "input_length": 8, "output_length": 1, "hash_ids": [987654321], "chat_id": SECRET,
         "parent_chat_id": -1, "turn": 1, "type": SECRET},
        {"timestamp": 10, "input_length": 8, "hash_ids": [1], "chat_id": 70037003, "parent_chat_id": -1},
        {"timestamp": 11, "input_length": 8, "hash_ids": [1], "chat_id": 2, "parent_chat_id": SECRET},
    ],
    "publisher_log": [
        {"id": SECRET, "source": SECRET, "component": SECRET, "type": "GetCacheLocation", "trigger_time_us": 10**15,
         "keys": [987654321], "tokens": TOKENS, "location_spec_names": [SECRET], "trace": SECRET},
        {"source": SECRET, "type": "StartWriteCache", "trigger_time_us": 10**15 + 1, "write_session_id": SECRET,
         "keys": [], "tokens": TOKENS, "location_spec_group_names": [SECRET]},
        {"source": SECRET, "type": "FinishWriteCache", "trigger_time_us": 10**15 + 2, "write_session_id": SECRET,
         "success_block": 2},
        {"source": SECRET, "type": "evicted", "trigger_time_us": 10**15 + 3, "keys": [987654321]},
    ],
    "optimizer_schema": [
        {"instance_id": SECRET, "trace_id": SECRET, "timestamp_us": 10**15, "tokens": TOKENS, "keys": [987654321],
         "input_len": 5, "output_len": 3, "total_keys": [987654321]},
        {"instance_id": SECRET, "trace_id": SECRET, "timestamp_us": 10**15, "tokens": TOKENS, "keys": [],
         "query_type": "prefix_match", "location_spec_names": [SECRET]},
    ],
}  # fmt: skip


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("name", LINES)
def test_nothing_tells_whose_it_is(tmp_path: Path, name: str) -> None:
    source, target = write(tmp_path / "in", LINES[name]), tmp_path / "out"
    found = anonymise(source, target, Pseudonyms(SALT), block_tokens=2)
    text = target.read_text()
    assert (found.format, found.bad_line_count) == (name, 0)
    assert found.lines == len([line for line in LINES[name] if line.get("type") != "evicted"])
    for secret in (SECRET, "987654321", "123454321", "1000000", "7003", SALT.decode()):
        assert secret not in text
    with pytest.raises(OptionError, match="out exists"):
        anonymise(source, target, Pseudonyms(SALT), block_tokens=2)


@pytest.mark.parametrize("name", LINES)
def test_the_trace_is_the_same_one_later(tmp_path: Path, name: str) -> None:
    source, target = write(tmp_path / "in", LINES[name]), tmp_path / "out.gz"
    anonymise(source, target, Pseudonyms(), block_tokens=2)
    before = read_trace(source, block_tokens=2, use_cache=False)
    after = read_trace(target, block_tokens=2, use_cache=False)
    assert after.times_us[0] == 0
    # Tokens told how long prompts are that have no length of their own.
    but = {"name", "times_us", "instance_names", "specs"} | ({"input_tokens"} if name in _TOLD_BY_TOKENS else set())
    assert_same(before, after, but=frozenset(but))
    np.testing.assert_array_equal(after.times_us, before.times_us - before.times_us[0])


_TOLD_BY_TOKENS = {"publisher_log", "optimizer_schema"}


@settings(max_examples=examples(200), deadline=None)
@given(st.one_of(turn_traces(), request_traces()), st.sampled_from(["mooncake", "publisher_log", "optimizer_schema"]))
def test_any_trace_keeps_its_structure(trace: Trace, name: str) -> None:
    assume(trace.accesses)  # writes of nothing are no requests
    with TemporaryDirectory() as directory:
        source, target = Path(directory) / "in", Path(directory) / "out"
        try:
            write_trace(trace, source, name)
        except OptionError:
            return  # the format cannot hold it
        before = read_trace(source, format=name, block_tokens=4, use_cache=False)
        anonymise(source, target, Pseudonyms(SALT), format_name=name)
        after = read_trace(target, format=name, block_tokens=4, use_cache=False)
    assert_same(before, after, but=frozenset({"name", "times_us", "instance_names", "specs"}))
    np.testing.assert_array_equal(np.diff(after.times_us), np.diff(before.times_us))
    assert list(after.specs) == list(before.specs)


def test_one_salt_gives_one_pseudonym_in_all_files_and_another_salt_another() -> None:
    def shown(names: Pseudonyms) -> list[object]:
        return [names.keys([5, -5]), names.session(5), names.session("5"), names.text("instance", "5")]

    assert shown(Pseudonyms(SALT)) == shown(Pseudonyms(SALT))
    for mine, other in zip(shown(Pseudonyms(SALT)), shown(Pseudonyms()), strict=True):
        assert mine != other
    told = [str(each) for each in shown(Pseudonyms(SALT))]
    assert len(set(told)) == len(told)
    for salt in (b"", b"x" * 15, b"x" * 65):
        with pytest.raises(OptionError, match=r"salt: has \d+ bytes; allowed: 16 to 64"):
            Pseudonyms(salt)


def test_equal_bits_are_equal_keys(tmp_path: Path) -> None:
    ids = [(1 << 64) - 1, -1, 3]
    lines: list[dict[str, Any]] = [{"timestamp": 0, "input_length": 8, "hash_ids": ids}]
    anonymise(write(tmp_path / "in", lines), tmp_path / "out", Pseudonyms())
    first, second, third = json.loads((tmp_path / "out").read_text())["hash_ids"]
    assert first == second != third


def test_bad_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    good: dict[str, Any] = {"timestamp": 4, "input_length": 8, "hash_ids": [1]}
    write(tmp_path / "in", [good, {"hash_ids": [1]}, good | {"hash_ids": [1 << 80]}, good | {"timestamp": 1}])
    found = anonymise(tmp_path / "in", tmp_path / "out", Pseudonyms())
    assert (found.lines, found.bad_line_count) == (2, 2)
    assert [each.number for each in found.bad_lines] == [2, 3]
    assert [json.loads(line)["timestamp"] for line in (tmp_path / "out").read_text().splitlines()] == [3, 0]


def test_nothing_is_left_behind_where_it_fails(tmp_path: Path) -> None:
    (tmp_path / "in").write_text('{"hash_ids": 3}\n')
    with pytest.raises(TraceError, match="holds no request; 1 bad lines, the first is line 1: hash_ids: 3"):
        anonymise(tmp_path / "in", tmp_path / "out", Pseudonyms())
    write(tmp_path / "in", LINES["publisher_log"])
    with pytest.raises(OptionError, match="block_tokens: lines name blocks by their tokens only; give the tokens per"):
        anonymise(tmp_path / "in", tmp_path / "out", Pseudonyms())
    assert [each.name for each in tmp_path.iterdir()] == ["in"]


def test_progress_covers_both_passes(tmp_path: Path) -> None:
    source = write(tmp_path / "in", LINES["mooncake"])
    told: list[tuple[int, int]] = []
    anonymise(source, tmp_path / "out", Pseudonyms(), progress=lambda done, total: told.append((done, total)))
    size = source.stat().st_size
    assert told == [(size, 2 * size), (2 * size, 2 * size)]
