"""The binary form of a file: everything is kept, and nothing is believed that was not made from this very file."""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from request_traces import assert_same, request_traces
from thoroughness import examples
from traces import HAND

from kvcm.optimizer.readers import read_trace
from kvcm.optimizer.readers.trace_cache import Origin, cache_path, decode_trace, encode_trace
from kvcm.optimizer.trace import BadLine, QueryMode, Trace

ORIGIN = Origin("00", "mooncake", 10)


def line(ids: list[int], **changes: object) -> str:
    return json.dumps({"timestamp": 1, "input_length": 10 * len(ids), "hash_ids": ids, **changes}) + "\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache directory."""
    monkeypatch.setenv("KVCM_CACHE_DIRECTORY", str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "trace.jsonl"
    path.write_text(line([1, 2, 3]) + "bad\n" + line([1, 2, 4]))
    return path


def read(path: Path, **options: object) -> Trace:
    return read_trace(path, **{"block_tokens": 10, **options})  # type: ignore[arg-type]


def is_from_cache(path: Path) -> bool:
    """Whether reading leaves the file that is kept as it is."""
    before = cache_path(path).stat().st_ino
    read(path)
    return cache_path(path).stat().st_ino == before


@settings(max_examples=examples(200), deadline=None)
@given(request_traces(), st.lists(st.builds(BadLine, st.integers(1, 9), st.text(max_size=5)), max_size=3))
def test_everything_is_kept(trace: Trace, bad: list[BadLine]) -> None:
    trace = replace(trace, bad_lines=tuple(bad), bad_line_count=len(bad))
    kept = decode_trace(bytearray(b"".join(encode_trace(trace, ORIGIN))), ORIGIN, "kept")
    assert kept.name == "kept"
    assert_same(kept, trace)
    for column in (kept.blocks, kept.times_us, kept.writes):
        assert not len(column) or (column.flags.writeable and column.flags.aligned)  # one machine code for all traces


def test_the_second_reading_uses_the_cache_of_the_first(path: Path, cache: Path) -> None:
    first = read(path)
    assert is_from_cache(path)
    assert_same(read(path), first, but=frozenset())
    assert read(path).bad_lines[0].number == 2
    assert list(path.parent.iterdir()) == [path]  # a folder of data stays as it is
    assert list(cache.iterdir()) == [cache_path(path)]


def test_what_was_not_used_for_a_month_is_removed(path: Path, cache: Path) -> None:
    read(path)
    unused, used = cache / "unused.kvtrace", cache_path(path)
    unused.touch()
    for each in (unused, used):
        os.utime(each, (0, 0))
    read(path)  # is a use
    read(path, block_tokens=11)
    assert list(cache.iterdir()) == [used]


def test_a_file_that_changed_is_read_again_even_if_its_times_say_it_did_not(path: Path) -> None:
    read(path)
    before = path.stat()
    path.write_text(path.read_text().replace("4", "5").replace("[1, 2, 3]", "[6, 7, 8]"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert read(path).unique_blocks == 6


def test_other_options_are_read_again(path: Path) -> None:
    read(path)
    assert read(path, block_tokens=11).block_tokens == 11
    assert read(path, format="qwen_bailian").block_tokens == 10
    assert read(path, format="qwen_bailian").times_us[0] == 1_000_000
    assert read(path, block_tokens={"instance": 12}).block_tokens == 12


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_one_changed_byte_is_noticed(data: st.DataObject) -> None:
    content = bytearray(b"".join(encode_trace(HAND, ORIGIN)))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    assert decode_trace(content, ORIGIN, "x") is None


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=200) | st.integers(0, 900).map(lambda end: b"".join(encode_trace(HAND, ORIGIN))[:end]))
def test_a_cache_file_that_is_no_trace_is_none(content: bytes) -> None:
    assert decode_trace(bytearray(content), ORIGIN, "x") is None


@pytest.mark.parametrize("content", [b"", b"KVTRACE\x01", b"KVTRACE\x02", b"x" * 1000])
def test_a_damaged_cache_is_made_again(path: Path, content: bytes) -> None:
    first = read(path)
    cache_path(path).write_bytes(content)
    assert_same(read(path), first)
    assert is_from_cache(path)


_IMPOSSIBLE: dict[str, list[object]] = {
    "blocks": [np.full_like(HAND.blocks, 99), np.full_like(HAND.blocks, -1)],
    "parents": [np.full_like(HAND.parents, 7), np.full_like(HAND.parents, -2)],
    "offsets": [HAND.offsets + 1, HAND.offsets[::-1], HAND.offsets[:-1]],
    "instances": [HAND.instances + 1],
    "sessions": [HAND.sessions - 1],
    "read_blocks": [HAND.read_blocks + 1, HAND.read_blocks * -1],
    "times_us": [HAND.times_us[::-1], HAND.times_us - 1],
    "writes": [HAND.writes[1:]],
    "instance_block_tokens": [()],
    "modes": [{99: QueryMode.BATCH}, {1: 7}],
    "masks": [{1: np.ones(99, np.bool_)}],
}


@pytest.mark.parametrize(("field", "value"), [(name, each) for name, found in _IMPOSSIBLE.items() for each in found])
def test_a_trace_that_cannot_be_is_none_even_with_the_right_hash(field: str, value: object) -> None:
    content = bytearray(b"".join(encode_trace(replace(HAND, **{field: value}), ORIGIN)))  # type: ignore[arg-type]
    assert decode_trace(content, ORIGIN, "x") is None


def test_without_a_cache_reading_goes_on_and_is_logged_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache_path(path).mkdir(parents=True)
    with caplog.at_level(logging.WARNING, "kvcm.optimizer"):
        assert len(read(path)) == 2
        assert len(read(path)) == 2
    assert len(caplog.records) == 1
    assert str(cache_path(path).parent) in caplog.text
    assert list(cache_path(path).parent.iterdir()) == [cache_path(path)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives files away")
def test_cache_files_of_another_user_are_not_trusted(path: Path) -> None:
    read(path)
    os.chown(cache_path(path), 12_345, -1)
    assert not is_from_cache(path)
    assert is_from_cache(path)


def test_a_cache_that_is_not_for_writing_stays_as_it_is(
    path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o555)
    assert len(read(path)) == 2
    assert not cache_path(path).exists()
    assert "Permission denied" in caplog.text


def test_no_other_user_can_read_what_is_kept(path: Path) -> None:
    path.chmod(0o666)
    read(path)
    assert stat.S_IMODE(cache_path(path).stat().st_mode) == 0o600
