"""Traces are written in every format, and what is read back is the same trace."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from request_traces import assert_same, request_traces, turn_traces
from thoroughness import examples
from traces import HAND, trace_of

from kvcm.optimizer.errors import OptionError
from kvcm.optimizer.formats.sniffing import FORMATS, format_of
from kvcm.optimizer.readers import read_trace
from kvcm.optimizer.trace import Trace
from kvcm.optimizer.writers import WRITERS, lost_in, write_trace, write_whole


def there_and_back(trace: Trace, format_name: str) -> Trace:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "trace.gz"
        write_trace(trace, path, format_name)
        size = None if format_name == "qwen_bailian" else trace.block_tokens
        return read_trace(path, format=format_name, block_tokens=size, use_cache=False)


def test_there_is_a_writer_for_every_format() -> None:
    assert set(WRITERS) == set(FORMATS)


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
        told = [(int(at), found.request_blocks(row).tolist(), bool(write)) for row, (at, write) in enumerate(rows)]
        assert told == wanted


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


def test_what_a_format_cannot_hold_is_refused(tmp_path: Path) -> None:
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


def test_what_a_format_leaves_out_is_told() -> None:
    talk = trace_of([[1, 2], [1, 2, 3]], sessions=[0, 0], input_tokens=[15, 30])
    assert lost_in(talk, "publisher_log") == ("sessions", "lengths of prompts and answers")
    assert lost_in(talk, "optimizer_schema") == ("sessions",)
    assert lost_in(talk, "mooncake") == ()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_of_the_format_that_it_is_taken_for(tmp_path: Path, name: str) -> None:
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
        write_whole(result, "half of it \ud800")
    assert result.read_text() == "old"
    write_whole(result, "new")
    write_whole(link, "nobody reads it")
    assert result.read_text() == "new"
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "rows.json"]
