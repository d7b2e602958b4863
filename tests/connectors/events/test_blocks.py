"""Which blocks events come to: keys, copies, memory, groups, and the blocks whose keys cannot be known."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import msgspec
import pytest
from engine_model import BLOCK_TOKENS, SGLANG, VLLM, event_number, stored
from hypothesis import given
from hypothesis import strategies as st

from kvcm.connectors.events.blocks import CLEARED, Change, HeldBlocks, MappingSettings, Memory
from kvcm.connectors.events.decoding import decode_batch
from kvcm.model.errors import CapacityError, InvalidArgumentError
from kvcm.model.key_schemes import (
    KVCM,
    VLLM_SHA256,
    VLLM_SHA256_CBOR,
    KeyScheme,
    block_hash,
    block_hashes,
    block_keys,
    vllm_root,
)
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

TOKENS = list(range(1, 13))
GPU, HOST, DISK = Memory(pb.MEDIUM_GPU, ""), Memory(pb.MEDIUM_HOST, ""), Memory(pb.MEDIUM_DISK, "")


class Rank:
    """The blocks of a rank, fed with events as they are published."""

    def __init__(self, scheme: KeyScheme = VLLM, engine: str = "", **settings: Any) -> None:
        engine = engine or ("vllm" if scheme.is_vllm else "sglang")
        self.changes: list[Change] = []
        mapping = MappingSettings(engine, scheme, settings.pop("group_specs", {}), **settings)
        self.blocks = HeldBlocks(mapping, self.changes.extend)

    def feed(self, *events: dict[str, Any]) -> None:
        batch = decode_batch(msgspec.msgpack.encode([0.0, list(events), 0]))
        assert not batch.malformed
        self.blocks.apply(batch.events)

    def keys(self, memory: Memory = GPU) -> set[int]:
        return {key for found, key in self.blocks.pairs() if found == memory}


def removed(*hashes: int | bytes, medium: str = "GPU", **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": medium} | fields


def keys(tokens: list[int] = TOKENS, scheme: KeyScheme = VLLM, salt: str = "") -> set[int]:
    return set(block_keys(scheme, tokens, salt))


@pytest.mark.parametrize("algorithm", [VLLM_SHA256, VLLM_SHA256_CBOR])
@pytest.mark.parametrize("salt", ["", "s"])
def test_vllms_hashes_are_computed_again_along_the_chain(algorithm: str, salt: str) -> None:
    scheme = KeyScheme(algorithm, vllm_root(algorithm, "0"), 99, BLOCK_TOKENS)
    rank = Rank(scheme)
    rank.feed(stored(scheme, TOKENS, 0, 1, salt), stored(scheme, TOKENS, 1, 3, salt))
    assert rank.keys() == keys(TOKENS, scheme, salt)
    assert not rank.blocks.unmapped


def test_full_hashes_need_neither_tokens_nor_parents() -> None:
    rank = Rank()
    hashes = block_hashes(VLLM, TOKENS)
    event = stored(VLLM, TOKENS) | {"block_hashes": hashes[1:], "parent_block_hash": hashes[0], "token_ids": []}
    rank.feed(event | {"block_size": 0})
    assert rank.keys() == set(block_keys(VLLM, TOKENS)[1:])
    rank.feed(removed(hashes[1]))
    assert rank.keys() == set(block_keys(VLLM, TOKENS)[2:])


def test_sglangs_keys_are_those_of_the_event() -> None:
    rank = Rank(SGLANG)
    rank.feed(stored(SGLANG, TOKENS, 1) | {"token_ids": []})  # without the first block: no parent is needed
    assert rank.keys() == set(block_keys(SGLANG, TOKENS)[1:])


def salted_event(tokens: list[int], salt: str, first: int = 0) -> dict[str, Any]:
    """Return an event of SGLang with a salt: its hashes begin with another seed than its storage's."""
    digest, hashes = sha256(b"sglang-cache-salt-v1\0" + salt.encode()).digest(), []
    for start in range(0, len(tokens), BLOCK_TOKENS):
        digest = block_hash(SGLANG, digest, tokens[start : start + BLOCK_TOKENS])
        hashes.append(event_number(SGLANG, digest))
    parent = hashes[first - 1] if first else None
    event = stored(SGLANG, tokens, first, cache_salt=salt)
    return event | {"block_hashes": hashes[first:], "parent_block_hash": parent}


def test_sglangs_keys_with_a_salt_are_computed_along_both_chains() -> None:
    scheme = KeyScheme(SGLANG.algorithm, b"", 0, 16)
    tokens = list(range(1, 17))
    rank = Rank(scheme)
    # The numbers that SGLang 0.5.23 printed.
    rank.feed(stored(scheme, tokens, cache_salt="s") | {"block_hashes": [-6257209062357622693]})
    assert rank.keys() == {-5131022361626721762}
    other = Rank(SGLANG)
    event = salted_event(TOKENS, "s")
    one = event | {"block_hashes": event["block_hashes"][:1], "token_ids": TOKENS[:BLOCK_TOKENS]}
    other.feed(one, salted_event(TOKENS, "s", 1))
    assert other.keys() == keys(TOKENS, SGLANG, "s")


@pytest.mark.parametrize(("engine", "scheme"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_keys_of_tokens_join_with_any_engine(engine: str, scheme: KeyScheme) -> None:
    kvcm = KeyScheme(KVCM, b"", 5, BLOCK_TOKENS)
    rank = Rank(kvcm, engine)
    rank.feed(stored(scheme, TOKENS, 0, 2), stored(scheme, TOKENS, 2, 3))
    assert rank.keys() == keys(TOKENS, kvcm)
    rank.feed(stored(scheme, TOKENS[::-1], 0, 1, "s", cache_salt="s"))
    assert rank.blocks.unmapped == {"extra_keys": 1}


def test_images_and_embeddings_are_hashed_as_vllm_does() -> None:
    extra = (("mm", "image", -2), ("cache_salt", "s"), ("prompt_embeds", b"digest"))
    digest = block_hash(VLLM, None, TOKENS[:BLOCK_TOKENS], extra)
    rank = Rank()
    event = stored(VLLM, TOKENS, 0, 1, extra_keys=[[["image", -2], "s", b"digest"]])
    rank.feed(event | {"block_hashes": [event_number(VLLM, digest)]})
    assert rank.keys() == {VLLM.key(digest)}


@pytest.mark.parametrize(
    ("reason", "event"),
    [
        ("adapter", stored(VLLM, TOKENS, lora_name="adapter")),
        ("adapter", stored(VLLM, TOKENS, lora_name="adapter", block_hashes=block_hashes(VLLM, TOKENS))),
        ("unknown_parent", stored(VLLM, TOKENS + TOKENS, 3)),
        ("no_tokens", stored(VLLM, TOKENS, token_ids=[], block_size=0)),
        ("token_count", stored(VLLM, TOKENS, token_ids=[*TOKENS, 1])),
        ("block_size", stored(VLLM, TOKENS, block_size=BLOCK_TOKENS * 2)),
        ("hash_mismatch", stored(VLLM, TOKENS, extra_keys=[["s"], None, None])),
        ("extra_keys", stored(VLLM, TOKENS, extra_keys=[[1.5], None, None])),
        ("group", stored(VLLM, TOKENS, group_idx=1, kv_cache_spec_kind="sliding_window")),
    ],
)
def test_blocks_without_a_known_key_are_counted_and_not_reported(reason: str, event: dict[str, Any]) -> None:
    rank = Rank()
    rank.feed(event)
    assert rank.blocks.unmapped == {reason: 3}
    assert not rank.changes
    rank.feed(removed(*event["block_hashes"]))
    assert not rank.changes


def test_what_sglang_does_not_say_is_counted() -> None:
    rank = Rank(SGLANG)
    pairs = [[token, token + 1] for token in TOKENS]
    rank.feed(
        stored(SGLANG, TOKENS, lora_name="adapter"),
        stored(SGLANG, TOKENS, token_ids=pairs, cache_salt="s"),
        stored(SGLANG, TOKENS, cache_salt="s"),
        salted_event(TOKENS, "s", 1),
    )
    assert rank.blocks.unmapped == {"adapter": 3, "token_pairs": 3, "hash_mismatch": 3, "unknown_parent": 2}
    rank.feed(stored(SGLANG, TOKENS, token_ids=pairs))
    assert rank.keys() == keys(TOKENS, SGLANG)


def test_a_chain_ends_where_it_does_not_agree() -> None:
    rank = Rank()
    event = stored(VLLM, TOKENS)
    event["block_hashes"][1] += 1
    rank.feed(event)
    assert rank.keys() == set(block_keys(VLLM, TOKENS)[:1])
    assert rank.blocks.unmapped == {"hash_mismatch": 2}


def test_a_block_is_there_until_its_last_copy_is_gone() -> None:
    rank = Rank()
    rank.feed(stored(VLLM, TOKENS, 0, 1), stored(VLLM, TOKENS, 0, 1))
    (hashed,) = stored(VLLM, TOKENS, 0, 1)["block_hashes"]
    (key,) = block_keys(VLLM, TOKENS[:BLOCK_TOKENS])
    assert rank.changes == [Change(GPU, key, is_added=True)]
    rank.feed(removed(hashed))
    assert rank.keys() == {key}
    rank.feed(removed(hashed), removed(hashed))
    assert rank.changes[1:] == [Change(GPU, key, is_added=False)]


def test_where_stores_are_repeated_the_first_removal_counts() -> None:
    rank = Rank(counts_copies=False)
    rank.feed(stored(VLLM, TOKENS, 0, 1), stored(VLLM, TOKENS, 0, 1))
    rank.feed(removed(*stored(VLLM, TOKENS, 0, 1)["block_hashes"]))
    assert not rank.keys()


def test_memory_by_memory() -> None:
    rank = Rank()
    hashes = stored(VLLM, TOKENS)["block_hashes"]
    rank.feed(*[stored(VLLM, TOKENS, medium=medium) for medium in ("GPU", "CPU", "DISK", "STORAGE", "EXTERNAL")])
    rank.feed(stored(VLLM, TOKENS, medium="CPU", locality="REMOTE"))
    assert rank.blocks.counts() == {GPU: 3, HOST: 3, DISK: 3}
    assert rank.blocks.ignored == 9
    rank.feed(removed(*hashes), removed(*hashes, medium="STORAGE"), removed(*hashes, medium="CPU", locality="REMOTE"))
    assert rank.blocks.counts() == {GPU: 0, HOST: 3, DISK: 3}
    rank.feed({"type": "AllBlocksCleared"})
    assert rank.changes[-1] == CLEARED
    assert not len(rank.blocks)


def test_blocks_that_are_offloaded_without_tokens_are_known_from_the_gpu() -> None:
    rank = Rank()
    rank.feed(stored(VLLM, TOKENS, 0, 2))
    rank.feed(stored(VLLM, TOKENS, medium="CPU", token_ids=[], block_size=0, group_idx=0))
    assert rank.keys(HOST) == set(block_keys(VLLM, TOKENS)[:2])
    assert rank.blocks.unmapped == {"no_tokens": 1}


def test_the_first_group_of_full_attention_stands_for_whole_blocks() -> None:
    rank = Rank()
    rank.feed(
        stored(VLLM, TOKENS, group_idx=0, kv_cache_spec_kind="sliding_window"),
        stored(VLLM, TOKENS, group_idx=1, kv_cache_spec_kind="full_attention"),
        stored(VLLM, TOKENS, group_idx=2, kv_cache_spec_kind="full_attention"),
    )
    hashes = stored(VLLM, TOKENS)["block_hashes"]
    assert rank.blocks.unmapped == {"group": 6}
    rank.feed(removed(*hashes, group_idx=0), removed(*hashes, group_idx=2))
    assert len(rank.blocks) == 3
    rank.feed(removed(*hashes, group_idx=1))
    assert len(rank.blocks) == 0


def test_configured_groups_are_parts() -> None:
    rank = Rank(group_specs={0: "full", 1: "window"})
    rank.feed(*[stored(VLLM, TOKENS, group_idx=group) for group in (0, 1, 2)])
    assert rank.blocks.counts() == {Memory(pb.MEDIUM_GPU, "full"): 3, Memory(pb.MEDIUM_GPU, "window"): 3}
    assert rank.blocks.unmapped == {"group": 3}


def test_settings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="part of its own"):
        MappingSettings("vllm", VLLM, {0: "a", 1: "a"})
    with pytest.raises(InvalidArgumentError, match="not of engine sglang"):
        MappingSettings("sglang", VLLM, {})


_VALUES = st.recursive(
    st.none() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=3) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


@given(
    scheme=st.sampled_from(
        [VLLM, KeyScheme(VLLM_SHA256_CBOR, vllm_root(VLLM_SHA256_CBOR), 0, 1), SGLANG, KeyScheme(KVCM, b"", 0, 1)]
    ),
    hashes=st.lists(st.integers(-9, 9) | st.binary(min_size=16, max_size=32), max_size=3),
    tokens=st.lists(_VALUES, max_size=4),
    extra_keys=st.lists(_VALUES, max_size=3),
    salt=st.sampled_from(["", "s"]),
)
def test_no_event_raises(
    scheme: KeyScheme, hashes: list[Any], tokens: list[Any], extra_keys: list[Any], salt: str
) -> None:
    rank = Rank(scheme)
    event = {"type": "BlockStored", "block_hashes": hashes, "token_ids": tokens, "extra_keys": extra_keys}
    rank.feed(event | {"cache_salt": salt, "block_size": len(tokens) // max(1, len(hashes))})
    rank.feed(event | {"block_size": 1, "parent_block_hash": 3}, removed(*hashes))


@given(
    tokens=st.lists(st.lists(st.integers(0, 3), min_size=12, max_size=12), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    salt=st.sampled_from(["", "s"]),
)
def test_keys_are_those_of_prompts_however_their_blocks_come(
    tokens: list[list[int]], cuts: list[int], salt: str
) -> None:
    rank = Rank()
    for prompt, cut in zip(tokens, cuts, strict=False):
        rank.feed(stored(VLLM, prompt, 0, cut, salt))
        if cut < 3:
            rank.feed(stored(VLLM, prompt, cut, 3, salt))
    assert rank.keys() == {key for prompt in tokens for key in block_keys(VLLM, prompt, salt)}
    assert not rank.blocks.unmapped


def test_there_are_at_most_so_many_blocks() -> None:
    rank = Rank(most_blocks=2)
    rank.feed(stored(VLLM, TOKENS, 0, 2))
    rank.feed(stored(VLLM, TOKENS, 0, 2))  # copies are no further blocks
    with pytest.raises(CapacityError, match="more than 2 blocks"):
        rank.feed(stored(VLLM, TOKENS, 2, 3))
    rank.blocks.clear()
    rank.feed(stored(VLLM, TOKENS, 0, 2))
    assert len(rank.blocks) == 2
