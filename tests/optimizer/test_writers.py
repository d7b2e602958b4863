"""Traces written in every format, and files whose owner cannot be found out."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from request_traces import assert_same, request_traces, turn_traces
from thoroughness import examples
from traces import HAND, trace_of

from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.formats import FORMATS, format_of
from kvcm.optimizer.readers import read_trace
from kvcm.optimizer.trace import Trace
from kvcm.optimizer.writers import Pseudonyms, anonymise, lost_in, write_atomic, write_trace


def there_and_back(trace: Trace, format_name: str) -> Trace:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "trace.gz"
        write_trace(trace, path, format_name)
        size = None if format_name == "qwen_bailian" else trace.block_tokens
        return read_trace(path, format=format_name, block_tokens=size, use_cache=False)


@settings(max_examples=examples(200), deadline=None)
@given(turn_traces(step_us=1))
def test_mooncake(trace: Trace) -> None:
    assert lost_in(trace, "mooncake") == ()
    assert_same(there_and_back(trace, "mooncake"), trace)


@settings(max_examples=examples(200), deadline=None)
@given(turn_traces(step_us=1, are_trees=True))
def test_qwen_bailian(trace: Trace) -> None:
    trace = replace(trace, block_tokens=16, instance_block_tokens=(16,))
    assert_same(there_and_back(trace, "qwen_bailian"), trace)


@settings(max_examples=examples(200), deadline=None)
@given(request_traces())
def test_publisher_log(trace: Trace) -> None:
    assert lost_in(trace, "publisher_log") == ()
    # Writes of nothing are no requests when they are read.
    is_nothing = trace.writes & (np.diff(trace.offsets) == 0)
    if not is_nothing.any():
        assert_same(there_and_back(trace, "publisher_log"), trace)


def test_a_write_that_failed_in_part_as_events() -> None:
    mask = np.array([False, True, False])
    trace = replace(trace_of([[1, 2, 3]], read_blocks=[0]), masks={0: mask}, instance_names=("a",))
    assert_same(there_and_back(trace, "publisher_log"), trace)


@settings(max_examples=examples(200), deadline=None)
@given(turn_traces(is_partial=True))
def test_turns_as_events_are_a_read_and_then_a_write(trace: Trace) -> None:
    wanted = []
    for number in range(len(trace)):
        blocks, reads = trace.request_blocks(number).tolist(), int(trace.read_blocks[number])
        at = int(trace.times_us[number])
        wanted += [(at, blocks[:reads], False)] if reads else []
        wanted += [(at, blocks, True)] if blocks else []
    if wanted:
        found = there_and_back(trace, "publisher_log")
        rows = zip(found.times_us, found.writes, strict=True)
        reported = [(int(at), found.request_blocks(row).tolist(), bool(write)) for row, (at, write) in enumerate(rows)]
        assert reported == wanted


@settings(max_examples=examples(200), deadline=None)
@given(request_traces())
def test_optimizer_schema(trace: Trace) -> None:
    assert_same(there_and_back(trace, "optimizer_schema"), trace)


@settings(max_examples=examples(200), deadline=None)
@given(turn_traces(is_partial=True))
def test_turns_in_the_optimizer_schema(trace: Trace) -> None:
    # One without blocks is a write there, which has no lengths.
    if np.diff(trace.offsets).all():
        assert lost_in(trace, "optimizer_schema") == ()
        assert_same(there_and_back(trace, "optimizer_schema"), trace)


def test_traces_that_a_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for name in ("mooncake", "qwen_bailian"):
        with pytest.raises(OptionError, match=r"lookups and writes apart from each other|have 16 tokens"):
            write_trace(replace(HAND, writes=~HAND.writes), path, name)
    with pytest.raises(OptionError, match="blocks of qwen_bailian have 16 tokens, those of test 10"):
        write_trace(HAND, path, "qwen_bailian")
    with pytest.raises(OptionError, match="holds prefix trees only, and blocks of test follow several"):
        write_trace(trace_of([[1, 2], [2, 1]], block_tokens=16), path, "qwen_bailian")
    masked = replace(HAND, masks={2: np.array([True, False])}, read_blocks=HAND.read_blocks * 0)
    with pytest.raises(OptionError, match="holds whole writes only, and request 3 of test is none"):
        write_trace(masked, path, "optimizer_schema")
    with pytest.raises(OptionError, match="has lookups with masks"):
        write_trace(masked, path, "mooncake")
    with pytest.raises(OptionError, match="has 2 instances"):
        write_trace(replace(HAND, instance_names=("a", "b")), path, "mooncake")
    with pytest.raises(OptionError, match="format: 'parquet' is none; allowed: mooncake, "):
        write_trace(HAND, path, "parquet")
    assert not list(tmp_path.iterdir())


def test_fields_that_a_format_leaves_out_are_reported() -> None:
    talk = trace_of([[1, 2], [1, 2, 3]], sessions=[0, 0], input_tokens=[15, 30])
    assert lost_in(talk, "publisher_log") == ("sessions", "lengths of prompts and answers")
    assert lost_in(talk, "optimizer_schema") == ("sessions",)
    assert lost_in(talk, "mooncake") == ()


@pytest.mark.parametrize("name", FORMATS)
def test_written_traces_are_recognised_as_their_format(tmp_path: Path, name: str) -> None:
    path = tmp_path / "out"
    write_trace(trace_of([[1, 2], [1, 3]], block_tokens=16), path, name)
    assert format_of(path) == name


def test_a_file_that_is_there_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.gz"
    path.write_text("precious")
    with pytest.raises(OptionError, match="exists: choose another name, or give --force"):
        write_trace(HAND, path, "mooncake")
    assert path.read_text() == "precious"
    write_trace(HAND, path, "mooncake", force=True)
    first = path.read_bytes()
    assert first[4:8] == bytes(4)  # no time of making: the same trace is the same file
    write_trace(HAND, path, "mooncake", force=True)
    assert path.read_bytes() == first
    assert [each.name for each in tmp_path.iterdir()] == ["out.gz"]


def test_whole_milliseconds_are_whole_numbers_and_seconds_never_are(tmp_path: Path) -> None:
    trace = trace_of([[1], [2]], times_seconds=[2, 3.0005], block_tokens=16)
    write_trace(trace, tmp_path / "m", "mooncake")
    assert [json.loads(line)["timestamp"] for line in (tmp_path / "m").read_text().splitlines()] == [2000, 3000.5]
    assert '"timestamp":2000,' in (tmp_path / "m").read_text()
    write_trace(trace, tmp_path / "q.gz", "qwen_bailian")
    assert b'"timestamp":2.0,' in gzip.decompress((tmp_path / "q.gz").read_bytes())


def test_a_text_appears_when_it_is_complete_and_pipes_are_written_as_they_are(tmp_path: Path) -> None:
    result, link = tmp_path / "rows.json", tmp_path / "link"
    result.write_text("old")
    link.symlink_to("/dev/null")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(result, "half of it \ud800")
    assert result.read_text() == "old"
    write_atomic(result, "new")
    write_atomic(link, "discarded")
    assert result.read_text() == "new"
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "rows.json"]


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
def test_nothing_reports_whose_it_is(tmp_path: Path, name: str) -> None:
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
    # Tokens gave the length of prompts that have none of their own.
    but = {"name", "times_us", "instance_names", "specs"} | ({"input_tokens"} if name in _REPORTED_BY_TOKENS else set())
    assert_same(before, after, but=frozenset(but))
    np.testing.assert_array_equal(after.times_us, before.times_us - before.times_us[0])


_REPORTED_BY_TOKENS = {"publisher_log", "optimizer_schema"}


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
    reported = [str(each) for each in shown(Pseudonyms(SALT))]
    assert len(set(reported)) == len(reported)
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
