"""Who may share: every field of the identity separates registrations and keys, and nothing else does."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.keys import HashKeys
from connectors.reuse.identity import KvIdentity
from kvcm.model.errors import InvalidArgumentError

BASE = KvIdentity("m", "w", "vllm/1", "float16", "sha256", {"all": "kvcm-block/2 ..."})
OTHERS = {
    "model": "n",
    "weights": "v",
    "engine": "sglang/1",
    "dtype": "bfloat16",
    "hashing": "sha256_cbor",
    "formats": {"all": "kvcm-block/2 other"},
    "tp_size": 2,
    "pp_size": 2,
    "cp_size": 2,
    "use_mla": True,
    "extra": {"lora": "x"},
}


@pytest.mark.parametrize("field", OTHERS)
def test_every_field_separates(field: str) -> None:
    other = replace(BASE, **{field: OTHERS[field]})  # type: ignore[arg-type]
    assert other.deployment() != BASE.deployment()
    assert other.namespace != BASE.namespace
    hashes = [hashlib.sha256(bytes([number])).digest() for number in range(8)]
    assert not set(HashKeys(other.namespace).keys(hashes)) & set(HashKeys(BASE.namespace).keys(hashes))


def test_every_field_is_tried() -> None:
    assert set(OTHERS) == set(KvIdentity.__dataclass_fields__)


def test_order_of_mappings_does_not_count() -> None:
    one = replace(BASE, extra={"a": "1", "b": "2"})
    assert one.namespace == replace(BASE, extra={"b": "2", "a": "1"}).namespace


@pytest.mark.parametrize("field", ["model", "weights", "engine", "dtype", "hashing", "formats"])
def test_an_empty_field_is_refused(field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field} is empty"):
        replace(BASE, **{field: "" if field != "formats" else {}})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["tp_size", "pp_size", "cp_size"])
def test_a_size_is_positive(field: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field} is 0"):
        replace(BASE, **{field: 0})  # type: ignore[arg-type]


@given(st.lists(st.binary(min_size=8, max_size=40), max_size=50), st.binary(max_size=20))
def test_a_key_is_the_hash_turned_by_the_namespace(hashes: list[bytes], namespace: bytes) -> None:
    turn = int.from_bytes(hashlib.sha256(namespace).digest()[:8], "little", signed=True)
    expected = [int.from_bytes(digest[:8], "little", signed=True) ^ turn for digest in hashes]
    assert HashKeys(namespace).keys(hashes) == expected
    assert all(-(1 << 63) <= key < 1 << 63 for key in expected)


def test_a_short_hash_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="has 7 bytes"):
        HashKeys(b"").keys([b"1234567"])
