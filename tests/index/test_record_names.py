"""Names of block records: those of the backend are understood, others are none."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcm.index.backends.redis_keys import BlockKeys

KEYS = BlockKeys("a.b(")


@given(uid=st.integers(0, 2**40), shard=st.integers(0, 4095), key=st.integers(-(2**63), 2**63 - 1))
@example(uid=1, shard=2, key=0x0A0A7D2E0A0A7D0A)  # newlines, brace and dot
def test_a_name_is_taken_apart(uid: int, shard: int, key: int) -> None:
    name = f"a.b(:b{{{uid}.{shard}}}".encode() + key.to_bytes(8, "big", signed=True)
    assert name.startswith(KEYS.prefix)
    assert KEYS.parse(name) == (uid, key)


FOREIGN = (
    *(b"", b"7", b"7.1", b"7.1}", b"7.1}1234567", b"7.1}123456789", b"7}12345678", b"x.1}12345678", b"7.x}12345678"),
    *(b"-7.1}12345678", b"7 .1}12345678", b"9" * 5000 + b".1}12345678", b"\xff\xfe.1}12345678"),
)


@pytest.mark.parametrize("rest", FOREIGN)
def test_a_foreign_name_below_the_prefix_is_none(rest: bytes) -> None:
    assert KEYS.parse(KEYS.prefix + rest) is None
    assert KEYS.parse(b"another:b{7.1}12345678") is None
    assert KEYS.parse(KEYS.prefix + b"7.1}12345678") is not None
