"""Block keys of tokens by the schemes of engines; the numbers are those that the engines printed."""

from __future__ import annotations

import sys
from hashlib import blake2b, sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.connectors.keys import HashKeys
from kvcm.connectors.sglang.page_store import PageKeys
from kvcm.model.errors import InvalidArgumentError, UnsupportedError
from kvcm.model.key_schemes import (
    ALGORITHMS,
    KVCM,
    SGLANG_SHA256,
    VLLM_SHA256,
    VLLM_SHA256_CBOR,
    KeyScheme,
    block_hashes,
    block_keys,
    vllm_root,
)
from kvcm.model.keys import block_keys_from_tokens

TOKENS = list(range(1, 33))
NAMESPACE = b"demo"
TURN = int.from_bytes(sha256(NAMESPACE).digest()[:8], "little", signed=True)


def scheme(algorithm: str, mask: int = 0, block_tokens: int = 16, seed: str | None = "0") -> KeyScheme:
    root = vllm_root(algorithm, seed) if algorithm.startswith("vllm") else b""
    return KeyScheme(algorithm, root, mask, block_tokens)


def last_bytes(hashes: list[bytes]) -> list[int]:
    return [int.from_bytes(digest[-8:], "big") for digest in hashes]


def test_vllm_hashes_what_pickle_writes() -> None:
    hashes = block_hashes(scheme(VLLM_SHA256), TOKENS)
    assert [digest.hex()[:16] for digest in hashes] == ["bea72b7d33de03c1", "2744667f6645310f"]
    assert last_bytes(hashes) == [7536218907325174565, 9048537298590080561]
    assert block_keys(scheme(VLLM_SHA256), TOKENS) == [-4538539686734616642, 1094732490954130471]
    assert TURN == -8905785570302519510
    assert block_keys(scheme(VLLM_SHA256, TURN), TOKENS) == [5002255664420630676, -8405671479542820083]


def test_vllm_hashes_cbor() -> None:
    assert vllm_root(VLLM_SHA256_CBOR, "0").hex().startswith("4e1195df")
    assert vllm_root(VLLM_SHA256_CBOR, "0").hex().endswith("1c3e")
    assert last_bytes(block_hashes(scheme(VLLM_SHA256_CBOR), TOKENS)) == [3236607068019569386, 2758186210834249151]
    short = scheme(VLLM_SHA256_CBOR, block_tokens=4)
    assert last_bytes(block_hashes(short, TOKENS[:8])) == [2164874634404590027, 17270480062156288726]
    assert last_bytes(block_hashes(short, TOKENS[:4], "s")) == [1010128506746956049]


def test_sglang_hashes_tokens_as_numbers() -> None:
    hashes = block_hashes(scheme(SGLANG_SHA256), TOKENS)
    assert [digest.hex()[:16] for digest in hashes] == ["77d735ce838418aa", "1170426cf2449ceb"]
    assert block_keys(scheme(SGLANG_SHA256), TOKENS) == [8635429971592222890, 1256577331724852459]
    assert block_keys(scheme(SGLANG_SHA256), TOKENS, "s")[0] == -5131022361626721762


def test_sglang_writes_large_tokens_with_64_bits() -> None:
    page = [1, 2, 1 << 32, 3]
    packed = b"\xff" + b"".join(token.to_bytes(8, "little") for token in page)
    assert block_hashes(scheme(SGLANG_SHA256, block_tokens=4), page) == [sha256(packed).digest()]


def test_keys_of_kvcm_are_the_running_hash() -> None:
    assert block_keys(scheme(KVCM), TOKENS) == block_keys_from_tokens(TOKENS, 16)
    assert block_keys(scheme(KVCM, mask=7), TOKENS) == [key ^ 7 for key in block_keys_from_tokens(TOKENS, 16)]
    with pytest.raises(InvalidArgumentError, match="cache_salt"):
        block_keys(scheme(KVCM), TOKENS, "s")


def test_the_running_hash_goes_on_from_a_block() -> None:
    first, second = block_keys_from_tokens(TOKENS, 16)
    assert block_keys_from_tokens(TOKENS[16:], 16, first) == [second]


@given(namespace=st.binary(max_size=20), tokens=st.lists(st.integers(0, 200_000), min_size=1, max_size=40))
def test_keys_are_those_of_the_connectors(namespace: bytes, tokens: list[int]) -> None:
    turn = int.from_bytes(sha256(namespace).digest()[:8], "little", signed=True)
    vllm = scheme(VLLM_SHA256, turn, 4)
    assert block_keys(vllm, tokens) == HashKeys(namespace).keys(block_hashes(vllm, tokens))
    mask = int.from_bytes(blake2b(namespace, digest_size=8).digest(), "big", signed=True)
    sglang = scheme(SGLANG_SHA256, mask, 4)
    pages = [digest.hex() for digest in block_hashes(sglang, tokens)]
    assert block_keys(sglang, tokens) == PageKeys(namespace).keys(pages)


@pytest.mark.parametrize("algorithm", [each for each in ALGORITHMS if each != KVCM])
def test_a_salt_changes_all_keys(algorithm: str) -> None:
    plain = set(block_keys(scheme(algorithm), TOKENS))
    salted = block_keys(scheme(algorithm), TOKENS, "s")
    assert len(salted) == 2
    assert not plain & set(salted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_tail_that_fills_no_block_has_no_key(algorithm: str) -> None:
    assert block_keys(scheme(algorithm), TOKENS[:15]) == []
    assert block_keys(scheme(algorithm), TOKENS[:31]) == block_keys(scheme(algorithm), TOKENS)[:1]


def test_without_a_seed_the_root_is_vllms_own() -> None:
    assert scheme(VLLM_SHA256, seed=None).root == vllm_root(VLLM_SHA256, "vllm-none-hash")


def test_cbor_without_its_package_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = scheme(VLLM_SHA256_CBOR)
    monkeypatch.setitem(sys.modules, "cbor2", None)
    with pytest.raises(UnsupportedError, match="pip install cbor2"):
        block_keys(known, TOKENS)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (("md5", b"", 0, 16), "algorithm"),
        ((VLLM_SHA256, b"", 0, 16), "root"),
        ((SGLANG_SHA256, b"12345678", 0, 16), "root"),
        ((KVCM, b"", 1 << 63, 16), "mask"),
        ((KVCM, b"", 0, 0), "block_tokens"),
    ],
)
def test_a_wrong_scheme_is_refused(values: tuple[str, bytes, int, int], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=name):
        KeyScheme(*values)


@pytest.mark.parametrize("token", [-1, 1 << 64, "a"])
def test_sglang_refuses_what_is_no_token(token: object) -> None:
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        block_hashes(scheme(SGLANG_SHA256, block_tokens=1), [token])  # type: ignore[list-item]
