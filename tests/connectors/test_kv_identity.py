"""Block keys: a definition that never changes, and a dependence on everything before."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from kvcm.connectors.keys import HashKeys, KeyChain
from kvcm.connectors.reuse.registration import KvIdentity, weights_fingerprint
from kvcm.connectors.sglang.identity import weights_of
from kvcm.connectors.sglang.options import SglangOptions
from kvcm.connectors.sglang.page_store import PageKeys, PageParents
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import BlockKey

int64 = st.integers(-(1 << 63), (1 << 63) - 1)
CHAIN = KeyChain(b"namespace", 4)

# Stored blocks are found by these numbers: a change here makes every stored block unreachable.
GOLDEN = [
    (CHAIN, list(range(1, 10)), [-3763731013869347367, -408851506889577523]),
    (CHAIN, [-5, 1 << 62, -(1 << 63), (1 << 63) - 1], [2743351089565680136]),
    (KeyChain(b"other", 4), list(range(1, 10)), [-4807881589549988460, -1397236629404889097]),
]


@pytest.mark.parametrize(("chain", "tokens", "keys"), GOLDEN)
def test_golden_vectors(chain: KeyChain, tokens: list[int], keys: list[int]) -> None:
    assert chain.keys(tokens) == keys


@given(st.lists(int64, max_size=30), st.integers(1, 7), st.binary(max_size=80))
def test_keys_are_what_the_module_defines(tokens: list[int], size: int, namespace: bytes) -> None:
    previous, expected = 0, []
    for start in range(0, len(tokens) - size + 1, size):
        data = b"".join(n.to_bytes(8, "little", signed=True) for n in [previous, *tokens[start : start + size]])
        digest = hashlib.blake2b(data, digest_size=8, key=hashlib.sha256(namespace).digest()).digest()
        previous = int.from_bytes(digest, "little", signed=True)
        expected.append(previous)
    assert KeyChain(namespace, size).keys(tokens) == expected


@given(st.lists(int64, min_size=8, max_size=40), st.integers(0, 5))
def test_a_chain_can_be_continued_from_any_key(tokens: list[int], blocks: int) -> None:
    keys = CHAIN.keys(tokens)
    blocks = min(blocks, len(keys))
    parent = keys[blocks - 1] if blocks else None
    assert keys[:blocks] + CHAIN.keys(tokens[blocks * 4 :], parent) == keys


def test_block_size_is_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="block_tokens is 0"):
        KeyChain(b"", 0)
    assert CHAIN.keys([1, 2, 3]) == []
    assert CHAIN.keys([1, 2, 3, 4], BlockKey(5)) != CHAIN.keys([1, 2, 3, 4])


# ---- Sharing: every field of the identity separates registrations and keys, and nothing else does ----

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


@pytest.mark.parametrize(
    "field", ["model", "weights", "engine", "dtype", "hashing", "formats", "tp_size", "pp_size", "cp_size"]
)
def test_an_empty_field_is_refused(field: str) -> None:
    empty = {} if field == "formats" else 0 if field.endswith("_size") else ""
    with pytest.raises(InvalidArgumentError, match=f"{field} is (empty|0)"):
        replace(BASE, **{field: empty})  # type: ignore[arg-type]


@given(st.lists(st.binary(min_size=8, max_size=40), max_size=50), st.binary(max_size=20))
def test_a_key_is_the_hash_turned_by_the_namespace(hashes: list[bytes], namespace: bytes) -> None:
    turn = int.from_bytes(hashlib.sha256(namespace).digest()[:8], "little", signed=True)
    expected = [int.from_bytes(digest[:8], "little", signed=True) ^ turn for digest in hashes]
    assert HashKeys(namespace).keys(hashes) == expected
    assert all(-(1 << 63) <= key < 1 << 63 for key in expected)


def test_a_short_hash_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="has 7 bytes"):
        HashKeys(b"").keys([b"1234567"])


# ---- Fingerprints of weights: equal for equal files, wherever they lie, and different for whatever was trained ----


def write(directory: Path, *, scaled: str = "", file: str = "model.safetensors", **settings: object) -> Path:
    """Write a model of twenty tensors, of which one is scaled a little."""
    directory.mkdir(exist_ok=True)
    random = torch.Generator().manual_seed(0)
    tensors = {f"layer{number}": torch.randn(64, 48, generator=random) for number in range(20)}
    if scaled:
        tensors[scaled] *= 1.001
    save_file(tensors, directory / file)
    (directory / "config.json").write_text(json.dumps({"hidden_size": 48} | settings))
    return directory


def test_equal_files_are_equal_wherever_they_lie(tmp_path: Path) -> None:
    one, other = (
        write(tmp_path / "one"),
        write(tmp_path / "other", _name_or_path="/somewhere", transformers_version="9"),
    )
    assert weights_fingerprint(one) == weights_fingerprint(other)


@pytest.mark.parametrize("number", [0, 7, 19])
def test_one_tensor_that_was_trained_is_found(tmp_path: Path, number: int) -> None:
    before = weights_fingerprint(write(tmp_path / "model"))
    assert weights_fingerprint(write(tmp_path / "model", scaled=f"layer{number}")) != before


def test_settings_count(tmp_path: Path) -> None:
    before = weights_fingerprint(write(tmp_path / "model"))
    assert weights_fingerprint(write(tmp_path / "model", rope_theta=1e6)) != before


def test_other_formats_of_the_same_weights_do_not_count(tmp_path: Path) -> None:
    before = weights_fingerprint(write(tmp_path / "model"))
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(bytes(100))
    assert weights_fingerprint(tmp_path / "model") == before


def test_files_of_other_formats_are_reported_apart(tmp_path: Path) -> None:
    prints = set()
    for fill in (b"a", b"b"):
        (tmp_path / "model.gguf").write_bytes(bytes(5_000) + fill * 5_000)
        prints.add(weights_fingerprint(tmp_path))
    assert len(prints) == 2


def test_a_directory_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no weights in"):
        weights_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="a safetensors file has a header of"):
        weights_fingerprint(tmp_path)


def test_what_the_operator_says_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = write(tmp_path / "model")
    options = SglangOptions(manager="localhost:1", instance_id="x")
    assert weights_of(options, str(model), None) == weights_fingerprint(model)
    assert weights_of(SglangOptions("localhost:1", "x", weights="v2"), str(model), None) == "v2"
    assert weights_of(options, str(tmp_path), "abc") == f"{tmp_path}@abc"
    assert "set option 'weights'" in caplog.text


# ---- Block keys from SGLang's page hashes, and which page comes before which ----

_HASHES = [sha256(bytes([number])).hexdigest() for number in range(100)]


def test_the_definition_does_not_change() -> None:
    """What engines have stored must be found after an update."""
    assert PageKeys(b"namespace").keys([_HASHES[0], "f" * 64]) == [7056020517215283470, -1141678836477285271]


def test_a_text_that_is_no_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        PageKeys(b"").keys(["no hash"])


def test_parents_are_those_that_were_seen() -> None:
    links = PageParents()
    links.record_chain([BlockKey(1), BlockKey(2), BlockKey(3)])
    links.record_chain([BlockKey(2), BlockKey(5)])
    links.record_chain([])
    assert [links.parent(BlockKey(key)) for key in (1, 2, 3, 5, 6)] == [None, 1, 2, 2, None]


def test_only_the_last_parents_are_remembered() -> None:
    links = PageParents(most=3)
    links.record_chain([BlockKey(key) for key in range(10)])
    assert [links.parent(BlockKey(key)) for key in (6, 7, 8, 9)] == [None, None, 7, 8]
    links.record_chain([BlockKey(key) for key in range(20, 22)])
    assert [links.parent(BlockKey(key)) for key in (7, 8, 9, 21)] == [None, 7, 8, 20]
