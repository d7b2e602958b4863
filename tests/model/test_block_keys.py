"""Block keys: the running hash of wire.md 5.2."""

from collections.abc import Sequence
from ctypes import c_int64, c_uint64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcm.model.keys import block_keys_from_tokens, key_hex

FIXED = settings(max_examples=150, deadline=None, derandomize=True)
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


@pytest.mark.parametrize("tokens", [(), (1, 2, 3), (1,)])
def test_less_than_a_block_has_no_key(tokens: tuple[int, ...]) -> None:
    assert block_keys_from_tokens(tokens, 4) == []


@pytest.mark.parametrize(
    ("key", "text"),
    [(0, "0"), (-1, "ffffffffffffffff"), (255, "ff"), (-(2**63), "8000000000000000"), (2**63 - 1, "7" + "f" * 15)],
)
def test_hex_is_that_of_the_unsigned_value(key: int, text: str) -> None:
    assert key_hex(key) == text
