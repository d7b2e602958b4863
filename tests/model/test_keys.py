"""Block keys, masks and runs."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_uint64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from kvcm.model.keys import (
    NO_MASK,
    BlockMask,
    block_keys_from_tokens,
    cut_keys,
    encode_keys,
    join_keys,
    key_hex,
    keys_hex,
    mixed,
    mixed_key,
    pack_keys,
    split_keys,
    unmixed,
    unmixed_key,
    unpack_keys,
)
from kvcm.model.locations import BlockRecord, BlockRun, Location, LocationStatus
from kvcm.model.storages import StorageType
from kvcm.protocol import meta_service_pb2 as pb

# ── Block keys ──


FIXED = settings(max_examples=examples(200))
INT64 = st.integers(-(2**63), 2**63 - 1)


def slow_keys(tokens: Sequence[int], block_size: int) -> list[int]:
    """The formula in C's own types, one operation at a time."""
    keys: list[int] = []
    state = c_int64(0)
    for position, token in enumerate(tokens, start=1):
        left = c_uint64(state.value << 12)
        right = c_int64(state.value >> 32)
        total = c_uint64(token + 0x9E3779B97F4A7C15)
        total = c_uint64(total.value + left.value)
        total = c_uint64(total.value + right.value)
        state = c_int64(state.value ^ c_int64(total.value).value)
        if position % block_size == 0:
            keys.append(state.value)
    return keys


@pytest.mark.parametrize(
    ("tokens", "keys"),
    [
        (list(range(1, 10)), [455111481605203084, 6902853672176602142]),
        ([-5, 2**62, -(2**63), 2**63 - 1], [5066827860753437846]),
    ],
)
def test_the_vectors_of_wire_md(tokens: list[int], keys: list[int]) -> None:
    assert block_keys_from_tokens(tokens, 4) == keys
    assert slow_keys(tokens, 4) == keys


@FIXED
@given(tokens=st.lists(st.one_of(INT64, st.integers(0, 200_000)), max_size=80), block_size=st.integers(1, 20))
def test_keys_equal_the_slow_formula(tokens: list[int], block_size: int) -> None:
    keys = block_keys_from_tokens(tokens, block_size)
    assert keys == slow_keys(tokens, block_size)
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert len(keys) == len(tokens) // block_size


@FIXED
@given(tokens=st.lists(INT64, min_size=12, max_size=12), changed=st.integers(0, 11))
def test_a_key_depends_on_the_whole_prefix_and_on_nothing_behind_it(tokens: list[int], changed: int) -> None:
    other = [token ^ 1 if i == changed else token for i, token in enumerate(tokens)]
    differs = [a != b for a, b in zip(block_keys_from_tokens(tokens, 3), block_keys_from_tokens(other, 3), strict=True)]
    assert differs == [block >= changed // 3 for block in range(4)]


@pytest.mark.parametrize(
    ("key", "text"),
    [(0, "0"), (-1, "ffffffffffffffff"), (255, "ff"), (-(2**63), "8000000000000000"), (2**63 - 1, "7" + "f" * 15)],
)
def test_hex_is_that_of_the_unsigned_value(key: int, text: str) -> None:
    assert key_hex(key) == text


# ── Mixed keys ──


EXTREMES = [-(2**63), -(2**63) + 1, -(2**32), -256, -1, 0, 1, 255, 256, 2**32, 2**62, 2**63 - 2, 2**63 - 1]
ANY_KEYS = st.lists(INT64 | st.sampled_from(EXTREMES), max_size=9)  # few keys are plain numbers, more are an array
LENGTHS = [*range(9), 100, 1000]


def plain_keys(count: int) -> list[int]:
    """Different keys, extremes first."""
    keys = [*EXTREMES, *(number * 0x9E3779B97F4A7C15 % 2**64 - 2**63 for number in range(1, count))]
    return keys[:count]


@FIXED
@given(keys=ANY_KEYS)
def test_mixed_keys_are_keys_again_and_unmixed_to_the_same(keys: list[int]) -> None:
    found = mixed(keys)
    assert all(-(2**63) <= key < 2**63 for key in found)
    assert all(type(key) is int for key in (*found, *unmixed(found)))
    assert unmixed(found) == keys
    assert mixed(unmixed(keys)) == keys


@FIXED
@given(keys=ANY_KEYS)
def test_many_keys_are_mixed_as_each_of_them(keys: list[int]) -> None:
    assert mixed(keys) == [mixed_key(key) for key in keys]
    assert unmixed(keys) == [unmixed_key(key) for key in keys]
    assert [unmixed_key(mixed_key(key)) for key in keys] == keys


@pytest.mark.parametrize("count", LENGTHS)
@pytest.mark.parametrize("form", [list, tuple, lambda keys: array("q", keys)])
def test_any_number_of_keys_in_any_sequence_is_mixed(count: int, form: type[Sequence[int]]) -> None:
    keys = plain_keys(count)
    given_keys = form(keys)
    found = mixed(given_keys)
    assert found == [mixed_key(key) for key in keys]
    assert len(set(found)) == count
    assert unmixed(form(found)) == keys
    assert list(given_keys) == keys, "what was given is as it was"


@pytest.mark.parametrize("count", LENGTHS)
def test_keys_are_mixed_straight_from_the_field_of_a_message(count: int) -> None:
    keys = plain_keys(count)
    request = pb.GetCacheLocationRequest(block_keys=keys)
    assert mixed(request.block_keys) == mixed(keys)
    assert list(request.block_keys) == keys, "the message is as it was"


@FIXED
@given(keys=ANY_KEYS)
def test_mixed_keys_leave_as_hex_and_in_documents_as_they_came(keys: list[int]) -> None:
    found = mixed(keys)
    assert keys_hex(found) == [key_hex(key) for key in keys]
    assert encode_keys(found) == array("q", keys).tobytes()


def test_different_keys_stay_different() -> None:
    """Also those that share all bytes but one."""
    keys = {byte << shift for shift in range(0, 64, 8) for byte in range(256)}
    signed = [key - 2**64 if key >> 63 else key for key in keys]
    assert len(set(mixed(signed))) == len(keys) == 1 + 8 * 255


@FIXED
@given(keys=ANY_KEYS)
def test_stores_hold_the_plain_keys_in_big_endian(keys: list[int]) -> None:
    packed = pack_keys(mixed(keys))
    assert list(packed) == [key.to_bytes(8, "big", signed=True) for key in keys]
    assert unpack_keys(packed) == mixed(keys)
    assert join_keys(mixed(keys)) == b"".join(packed)
    assert list(cut_keys(b"".join(packed))) == list(packed)
    assert split_keys(b"".join(packed)) == mixed(keys)


@pytest.mark.parametrize("count", LENGTHS)
def test_any_number_of_keys_is_packed(count: int) -> None:
    keys = plain_keys(count)
    packed = pack_keys(mixed(keys))
    assert list(packed) == [key.to_bytes(8, "big", signed=True) for key in keys]
    assert unpack_keys(iter(packed)) == mixed(keys)


def test_every_process_mixes_with_secrets_of_its_own() -> None:
    keys = list(range(1, 101))  # zero stays zero everywhere
    code = "import json; from kvcm.model.keys import mixed, unmixed; found = mixed(range(1, 101))"
    words = [sys.executable, "-c", f"{code}; print(json.dumps([found, unmixed(found)]))"]
    one, other = (json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout) for _ in range(2))
    assert one[1] == other[1] == keys
    assert len({*one[0], *other[0], *mixed(keys)}) == 300


# ── Block masks ──


FLAGS = st.lists(st.booleans(), max_size=12)


@FIXED
@given(offset=st.integers(-20, 20), count=st.integers(0, 12))
def test_an_offset_masks_the_positions_before_it(offset: int, count: int) -> None:
    """A negative one masks everything: the original casts it to unsigned."""
    kept = BlockMask(offset=offset).unmasked(count)
    assert list(kept) == [i for i in range(count) if 0 <= offset <= i]


@FIXED
@given(flags=FLAGS, count=st.integers(0, 14))
def test_flags_mask_where_they_are_true_and_nothing_behind_their_end(flags: list[bool], count: int) -> None:
    kept = BlockMask(flags=flags).unmasked(count)
    assert list(kept) == [i for i in range(count) if not (i < len(flags) and flags[i])]


@pytest.mark.parametrize("mask", [NO_MASK, BlockMask(), BlockMask(flags=()), BlockMask(offset=0)])
def test_nothing_is_masked_by_default(mask: BlockMask) -> None:
    assert list(mask.unmasked(5)) == [0, 1, 2, 3, 4]
    assert list(mask.unmasked(0)) == []


@FIXED
@given(flags=FLAGS)
def test_of_masks_the_flagged_positions_by_an_offset_where_they_are_a_prefix(flags: list[bool]) -> None:
    is_prefix = flags == sorted(flags, reverse=True)
    mask = BlockMask.of(flags)
    assert (mask.offset is not None) == is_prefix
    assert (mask.flags is None) == is_prefix
    assert list(mask.unmasked(len(flags))) == [i for i, flag in enumerate(flags) if not flag]


# ── Block runs ──


SAME = Location("l", "nfs", StorageType.ST_NFS, LocationStatus.WRITING, ("tp0",), b"", 10, 5.0, "s", 60.0)
KEYS = [11, 12, 13, 14]
CHUNKS = [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize("parent", [None, 10])
def test_each_block_is_the_parent_of_the_next(parent: int | None) -> None:
    records = BlockRun(KEYS, parent, 3, SAME, CHUNKS).records()
    assert records == [
        BlockRecord(before, 3 + number, (SAME._replace(chunk=CHUNKS[number]),))
        for number, before in enumerate([parent, 11, 12, 13])
    ]


@pytest.mark.parametrize(("begin", "end"), [(0, 4), (0, 2), (1, 3), (3, 4), (2, 9)])
def test_a_part_of_a_run_stands_for_the_same_blocks(begin: int, end: int) -> None:
    run = BlockRun(KEYS, 10, 3, SAME, CHUNKS)
    part = run.cut(begin, end)
    assert part.keys == KEYS[begin:end]
    assert part.records() == run.records()[begin:end]
