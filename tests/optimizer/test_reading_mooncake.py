"""The Mooncake format: real traces, sizes of blocks that are found out, hostile lines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from thoroughness import examples
from traces import HAND, HAND_IDS

from kvcm.optimizer.errors import OptionError, TraceError
from kvcm.optimizer.readers import read_trace, trace_of_lines
from kvcm.optimizer.trace import Trace

HAND_SECONDS = (0, 1, 2, 3, 5, 9, 10, 12)
HAND_TOKENS = (35, 28, 20, 35, 28, 40, 20, 35)


def line(ids: Sequence[object] = (1, 2), **changes: object) -> bytes:
    fields = {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": ids}
    return json.dumps({**fields, **changes}).encode()


def of(*lines: bytes, block_tokens: int | None = 10) -> Trace:
    return trace_of_lines(lines, "mooncake", name="test", block_tokens=block_tokens)


def test_the_hand_sized_example() -> None:
    lines = [
        line(ids, timestamp=seconds * 1000, input_length=tokens)
        for ids, seconds, tokens in zip(HAND_IDS, HAND_SECONDS, HAND_TOKENS, strict=True)
    ]
    found = of(*lines)
    for column in ("times_us", "input_tokens", "read_blocks", "writes", "offsets", "blocks", "parents", "sessions"):
        np.testing.assert_array_equal(getattr(found, column), getattr(HAND, column))
        assert getattr(found, column).dtype == getattr(HAND, column).dtype
    assert (found.block_tokens, found.has_one_parent, found.bad_line_count) == (10, True, 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "truncated"),
        (b"[]", "Expected object, got array"),
        (line(timestamp=-1), "timestamp: -1 does not fit: Expected float >= 0"),
        (line(timestamp="now"), "timestamp: 'now' does not fit"),
        (line(timestamp=1e300), "timestamp: 1e+300 does not fit"),
        (line().replace(b'"timestamp": 0', b'"timestamp": 1e999'), "timestamp: the value does not fit"),
        (line(input_length=-20), "input_length: -20 does not fit"),
        (line(input_length=1 << 31), "input_length: 2147483648 does not fit"),
        (line(ids=[1, True]), "hash_ids[1]: True does not fit: Expected int | str, got bool"),
        (line(ids=[1, 1 << 64]), "keys[1]: 18446744073709551616 has more than 64 bits"),
        (line(ids=[1]).replace(b"[1]", b"[1" + b"0" * 5000 + b"]"), "hash_ids[0]: the value does not fit"),
        (line(session=[1]), "session: [1] does not fit"),
        (b'{"timestamp": 0}', "missing required field input_length"),
        (line(session="x").replace(b'"x"', b'"\xff"'), "is no UTF-8"),
        (b'{"deep": ' + b"[" * 200_000, "is nested too deeply"),
    ],
)  # fmt: skip
def test_a_bad_line_is_reported_of_and_left_out(text: bytes, reason: str) -> None:
    trace = of(line(), text, line())
    assert len(trace) == 2
    assert trace.bad_line_count == 1
    assert trace.bad_lines[0].number == 2
    assert reason in trace.bad_lines[0].reason


def test_the_first_hundred_bad_lines_are_kept() -> None:
    trace = of(line(), *[b"x"] * 150)
    assert (len(trace.bad_lines), trace.bad_line_count) == (100, 150)


def test_an_id_twice_in_a_request_is_accessed_twice() -> None:
    trace = of(line([5, 5, 6]))
    assert trace.blocks.tolist() == [0, 0, 1]
    assert not trace.has_one_parent


def test_requests_are_sorted_by_time_and_stay_in_order_within_one() -> None:
    texts = [line([number], timestamp=time) for number, time in enumerate([5, 1, 5, 0.5, 1])]
    trace = of(*texts)
    assert trace.times_us.tolist() == [500, 1000, 1000, 5000, 5000]
    in_order = of(*(texts[each] for each in (3, 1, 4, 0, 2)))
    np.testing.assert_array_equal(trace.blocks, in_order.blocks)
    np.testing.assert_array_equal(trace.parents, in_order.parents)


def test_sessions_are_numbered_as_they_appear() -> None:
    names: list[object] = ["b", 7, None, "b", "7"]
    assert of(*(line(session=each) for each in names)).sessions.tolist() == [0, 1, -1, 0, 2]


@pytest.mark.parametrize(
    ("prompts", "size"),
    [
        ([(1030, 3), (512, 1), (100, 1)], 512),  # the last block is partial
        ([(1030, 2), (512, 1), (100, 0)], 512),  # full ones only
        ([(33, 2), (48, 3)], 16),  # 17 to 23 do not hold both
    ],
)
def test_the_size_of_blocks_is_found_out(prompts: list[tuple[int, int]], size: int) -> None:
    lines = [line(list(range(blocks)), input_length=tokens) for tokens, blocks in prompts]
    assert of(*lines, block_tokens=None).block_tokens == size


@pytest.mark.parametrize(
    ("prompts", "size", "doubt"),
    [
        (
            [(30, 1), (32, 1), (5, 2)],
            17,
            "none fits all prompts: line 3 has 5 tokens in 2 blocks, other than the lines",
        ),
        ([(17, 1)], 17, "9 to 17 or 17 and more fit all prompts"),
        ([(16, 0)], 16, "no prompt tells it"),
        ([(35, 4), (28, 3), (20, 2), (40, 4)], 10, "10 to 11 fit all prompts"),
    ],
)
def test_an_unknown_size_is_assumed_and_said(prompts: list[tuple[int, int]], size: int, doubt: str) -> None:
    trace = of(*(line(list(range(blocks)), input_length=tokens) for tokens, blocks in prompts), block_tokens=None)
    assert trace.block_tokens == size
    assert len(trace.assumed) == 1
    assert trace.assumed[0].startswith(f"block_tokens of instance 'instance': {doubt}")
    assert trace.assumed[0].endswith(f"; {size} is assumed, --block-tokens says otherwise")


def test_a_size_out_of_range_is_refused() -> None:
    with pytest.raises(OptionError, match=r"block_tokens: 0 is out of range; allowed: 1 to"):
        of(line(), block_tokens=0)


@settings(max_examples=examples(200), deadline=None)
@example(size=17, lengths=[16], is_partial=False)
@example(size=16, lengths=[17], is_partial=False)
@given(
    size=st.integers(1, 600),
    lengths=st.lists(st.integers(0, 20_000), min_size=1, max_size=30),
    is_partial=st.booleans(),
)
def test_a_size_that_is_found_out_is_the_right_one(size: int, lengths: list[int], is_partial: bool) -> None:
    counts = [-(-length // size) if is_partial else length // size for length in lengths]
    lines = [line(list(range(count)), input_length=length) for length, count in zip(lengths, counts, strict=True)]
    trace = of(*lines, block_tokens=None)
    if trace.assumed:
        return  # several fit, or none
    found = trace.block_tokens
    for length, count in zip(lengths, counts, strict=True):
        assert count in (-(-length // found), length // found)
    assert found == size or found & (found - 1) == 0 or size & (size - 1)


class TestFiles:
    def test_plain_and_gzip_are_the_same_whatever_they_are_called(self, tmp_path: Path) -> None:
        text = b"\n\n".join((line([1, 2]), b"bad", line([1, 3])))
        (tmp_path / "plain.gz").write_bytes(b"\xef\xbb\xbf" + text)
        (tmp_path / "packed").write_bytes(gzip.compress(text))
        for name in ("plain.gz", "packed"):
            trace = read_trace(tmp_path / name, block_tokens=10, use_cache=False)
            assert trace.name == name
            assert trace.blocks.tolist() == [0, 1, 0, 2]
            assert trace.bad_lines[0].number == 3

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"", "is empty"),
            (b"\n \n", "of no known format"),
            (b'{"a": 1}\nx', "of no known format"),
            (b'{"hash_ids": 1}\nx', "holds no request; 2 bad lines, the first is line 1: hash_ids: 1 does"),
            (gzip.compress(line() * 1000, mtime=0)[:-9], "gzip file is damaged"),
            (b"\x1f\x8b\x08 no gzip", "gzip file is damaged"),
            (gzip.compress(b"", mtime=0), "of no known format"),
        ],
    )
    def test_a_file_that_holds_no_trace(self, tmp_path: Path, content: bytes, message: str) -> None:
        path = tmp_path / "trace"
        path.write_bytes(content)
        with pytest.raises(TraceError, match=message):
            read_trace(path, use_cache=False)

    def test_paths_that_are_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="is a directory"):
            read_trace(tmp_path)
        with pytest.raises(TraceError, match="No such file"):
            read_trace(tmp_path / "none")
        with pytest.raises(TraceError, match="no regular file"):
            read_trace(Path("/dev/null"))
        with pytest.raises(TraceError, match="File name too long"):
            read_trace(tmp_path / ("x" * 300), format="mooncake")
        with pytest.raises(OptionError, match="format: 'x' is none; allowed: mooncake, "):
            read_trace(tmp_path, format="x")

    def test_a_name_that_leaves_no_space_for_that_of_the_cache(self, tmp_path: Path) -> None:
        path = tmp_path / ("x" * 250)
        path.write_bytes(line())
        assert len(read_trace(path, block_tokens=10)) == 1

    def test_a_line_that_is_too_long_is_passed_over(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvcm.optimizer.formats._MOST_LINE_BYTES", 1 << 20)
        path = tmp_path / "trace"
        path.write_bytes(b"\n".join((line([1]), b"[" * (5 << 20), line([2]), b" " * (1 << 20))))
        trace = read_trace(path, block_tokens=10, use_cache=False)
        assert trace.blocks.tolist() == [0, 1]
        assert [(each.number, each.reason) for each in trace.bad_lines] == [
            (2, "is longer than 1 MiB"),
            (4, "is longer than 1 MiB"),
        ]

    def test_progress_ends_at_the_size_of_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "trace.gz"
        path.write_bytes(gzip.compress(line() + b"\n"))
        reported: list[tuple[int, int]] = []
        read_trace(path, block_tokens=10, use_cache=False, progress=lambda done, total: reported.append((done, total)))
        assert reported[-1] == (path.stat().st_size, path.stat().st_size)


def test_numbers_are_those_of_a_dictionary() -> None:
    @settings(max_examples=examples(200), deadline=None)
    @given(st.lists(st.lists(st.integers(-5, 5) | st.integers(-(1 << 63), (1 << 64) - 1), max_size=9), min_size=1))
    def check(requests: list[list[int]]) -> None:
        numbers: dict[int, int] = {}
        wanted = [numbers.setdefault(key % (1 << 64), len(numbers)) for keys in requests for key in keys]
        assert of(*map(line, requests)).blocks.tolist() == wanted

    check()


def test_the_table_of_numbers_grows() -> None:
    keys = [(each * 7919) % 100_003 for each in range(100_003)]
    assert of(line([*keys, *keys])).blocks.tolist() == [*range(100_003)] * 2
