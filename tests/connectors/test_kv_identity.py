"""Block keys: a definition that never changes, and a dependence on everything before."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.connectors.keys import HashKeys, KeyChain, event_hashes
from kvcm.connectors.reuse import weight_files
from kvcm.connectors.reuse.registration import KvIdentity
from kvcm.connectors.reuse.weight_files import weights_digest
from kvcm.connectors.sglang import page_store
from kvcm.connectors.sglang.identity import weights_of
from kvcm.connectors.sglang.page_store import PageKeys, PageParents
from kvcm.model.directories import cache_directory
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.key_schemes import SGLANG_SHA256, VLLM_SHA256, VLLM_SHA256_CBOR, KeyScheme, block_hashes, vllm_root
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

BASE = KvIdentity("m", "vllm/1", "float16", "sha256", {"all": "kvcm-block/2 ..."})
OTHERS = {
    "model": "n",
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
    assert_separate(other.namespace("w"), BASE.namespace("w"))


def assert_separate(one: bytes, other: bytes) -> None:
    assert one != other
    hashes = [hashlib.sha256(bytes([number])).digest() for number in range(8)]
    assert not set(HashKeys(one).keys(hashes)) & set(HashKeys(other).keys(hashes))


def test_weights_separate_keys_but_not_registrations() -> None:
    assert_separate(BASE.namespace("v"), BASE.namespace("w"))
    assert_separate(BASE.namespace("w", "adapter"), BASE.namespace("w"))
    assert "weights" not in BASE.deployment().extra
    with pytest.raises(InvalidArgumentError, match="weights_version is empty"):
        BASE.namespace("")


texts = st.text(alphabet="ab=\0\n ", min_size=1, max_size=4)
identities = st.builds(
    KvIdentity, texts, texts, texts, texts, st.dictionaries(texts, texts, min_size=1, max_size=2),
    extra=st.dictionaries(texts, texts, max_size=2),
)  # fmt: skip


@given(identities, texts, identities, texts)
def test_no_two_identities_have_one_namespace(one: KvIdentity, v1: str, other: KvIdentity, v2: str) -> None:
    """By construction: whatever the texts are, none can be read as another one and its neighbour."""
    assert (one.namespace(v1) == other.namespace(v2)) == ((one, v1) == (other, v2))


def test_every_field_is_tried() -> None:
    assert set(OTHERS) == set(KvIdentity.__dataclass_fields__)


def test_order_of_mappings_does_not_count() -> None:
    one = replace(BASE, extra={"a": "1", "b": "2"})
    assert one.namespace("w") == replace(BASE, extra={"b": "2", "a": "1"}).namespace("w")


@pytest.mark.parametrize("field", ["model", "engine", "dtype", "hashing", "formats", "tp_size", "pp_size", "cp_size"])
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


@pytest.mark.parametrize("of", [HashKeys(b"").keys, event_hashes])
def test_a_short_hash_is_refused(of: Callable[[list[bytes]], object]) -> None:
    with pytest.raises(InvalidArgumentError, match="has 7 bytes"):
        of([b"12345678", b"1234567"])


@pytest.mark.parametrize(
    ("algorithm", "block_tokens", "printed"),
    [
        (VLLM_SHA256, 16, [7536218907325174565, 9048537298590080561]),
        (VLLM_SHA256_CBOR, 4, [2164874634404590027, 17270480062156288726]),
    ],
)
def test_vllms_events_name_blocks_by_their_last_64_bits(algorithm: str, block_tokens: int, printed: list[int]) -> None:
    """The numbers are those that the engine printed, without a sign."""
    scheme = KeyScheme(algorithm, vllm_root(algorithm, "0"), 0, block_tokens)
    hashes = block_hashes(scheme, range(1, 2 * block_tokens + 1))
    assert event_hashes(hashes) == [number - (1 << 64) * (number >> 63) for number in printed]


@given(st.lists(st.binary(min_size=8, max_size=40), max_size=50))
def test_an_event_hash_is_the_end_of_the_hash(hashes: list[bytes]) -> None:
    assert event_hashes(hashes) == [int.from_bytes(digest[-8:], "big", signed=True) for digest in hashes]


# ---- Digests of files: equal for equal files, wherever they lie, and different for whatever was trained ----


def write(directory: Path, *, file: str = "model.safetensors", flipped: int | None = None, **settings: object) -> Path:
    """Write a model, of which one byte may be another."""
    directory.mkdir(exist_ok=True)
    content = bytearray(Random(0).randbytes(100_000))
    if flipped is not None:
        content[flipped] ^= 1
    (directory / file).write_bytes(content)
    (directory / "config.json").write_text(json.dumps({"hidden_size": 48} | settings))
    if "adapter" in settings:
        (directory / "adapter_config.json").write_text("{}")
        (directory / "config.json").unlink()
    return directory


@pytest.fixture
def digest(tmp_path: Path) -> Callable[[Path], str]:
    return lambda model: weights_digest(model, tmp_path / "cache", now=lambda: time.time() + 3600)


def test_equal_files_are_equal_wherever_they_lie(tmp_path: Path, digest: Callable[[Path], str]) -> None:
    one = write(tmp_path / "one")
    other = write(tmp_path / "other", _name_or_path="/somewhere", transformers_version="9")
    (other / "pytorch_model.bin").write_bytes(bytes(100))  # the same weights in another format
    assert digest(one) == digest(other)


def test_every_byte_and_every_setting_counts(tmp_path: Path, digest: Callable[[Path], str]) -> None:
    variants: list[dict[str, Any]] = [
        {},
        {"rope_theta": 1e6},
        {"file": "b.safetensors"},
        {"file": "model.gguf"},
        {"adapter": 1},
    ]
    variants += [{"flipped": place} for place in (0, 7, 50_001, 99_999)]
    seen = {digest(write(tmp_path / f"{number}", **variant)) for number, variant in enumerate(variants)}
    assert len(seen) == len(variants)


def test_a_file_is_read_once_until_it_changes(
    tmp_path: Path, digest: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = write(tmp_path / "model"), []
    content = weight_files._content
    monkeypatch.setattr(weight_files, "_content", lambda path: read.append(path) or content(path))
    before = digest(model)
    assert digest(model) == before
    assert len(read) == 1
    times = (model / "model.safetensors").stat()
    write(model, flipped=5)  # of the same size, and as old as it was for all that a program can set
    os.utime(model / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert digest(model) != before
    assert len(read) == 2


def test_what_changed_a_moment_ago_is_not_cached(tmp_path: Path) -> None:
    weights_digest(write(tmp_path / "model"), tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*"))


def test_damaged_and_unwritable_caches_only_cost_time(
    tmp_path: Path, digest: Callable[[Path], str], caplog: pytest.LogCaptureFixture
) -> None:
    expected = digest(write(tmp_path / "model"))
    for entry in (tmp_path / "cache").iterdir():
        entry.write_text("damaged")
    assert digest(tmp_path / "model") == expected
    assert weights_digest(tmp_path / "model", tmp_path / "model" / "config.json", now=lambda: 1e11) == expected
    assert "digests of weights are not cached" in caplog.text


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"KVCM_CACHE_DIRECTORY": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/kvcm"),
        ({"HOME": "/c"}, "/c/.cache/kvcm"),
    ],
)
def test_where_digests_are_cached(environment: dict[str, str], expected: str) -> None:
    assert cache_directory(environment) == Path(expected)


def test_a_directory_without_a_model_is_an_error(tmp_path: Path, digest: Callable[[Path], str]) -> None:
    with pytest.raises(ValueError, match="there are no weights in"):
        digest(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(ValueError, match=r"model\.safetensors is not a file"):
        digest(tmp_path)


def test_sglang_takes_a_digest_or_a_commit_and_nothing_that_can_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCM_CACHE_DIRECTORY", str(tmp_path / "cache"))
    model, commit = write(tmp_path / "model"), "0123456789abcdef" * 2 + "01234567"
    assert weights_of(str(model), None) == weights_digest(model)
    assert weights_of(str(tmp_path), commit) == f"commit={commit}"
    for revision in ("main", "v1.0", None):
        with pytest.raises(InvalidArgumentError, match=r"cannot be told from others .* set option 'weights'"):
            weights_of(str(tmp_path), revision)


# ---- Block keys from SGLang's page hashes, and which page comes before which ----

_HASHES = [sha256(bytes([number])).hexdigest() for number in range(100)]


def test_the_definition_does_not_change() -> None:
    """What engines have stored must be found after an update."""
    assert PageKeys(b"namespace").keys([_HASHES[0], "f" * 64]) == [7056020517215283470, -1141678836477285271]


def test_a_text_that_is_no_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        PageKeys(b"").keys(["no hash"])
    with pytest.raises(ValueError, match="invalid literal"):
        page_store.event_hashes(["no hash"])


def test_sglangs_events_name_pages_by_their_first_64_bits() -> None:
    """The numbers are those that the engine printed."""
    pages = [digest.hex() for digest in block_hashes(KeyScheme(SGLANG_SHA256, b"", 0, 16), range(1, 33))]
    assert page_store.event_hashes(pages) == [8635429971592222890, 1256577331724852459]
    assert page_store.event_hashes(["f" * 64, "8" + "0" * 63]) == [-1, -(1 << 63)]
    assert page_store.event_hashes([]) == []


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
