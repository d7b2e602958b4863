"""IndexerService as clients of llm-d's indexer call it: scores of pods for the text of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ports import free_port
from scorer_rig import DISK, GPU, HOST, refused, report, scorer, write_tokenizer
from test_transport_sites import Site

from kvcm.config import ConfigError
from kvcm.model.key_schemes import VLLM_SHA256, KeyScheme, block_keys, vllm_root
from kvcm.protocol import indexer_pb2
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.scorer.pod_scores import load_tokenizer, weighted_blocks
from kvcm.scorer.scorer import Scorer
from kvcm.scorer.settings import TierWeights, settings_of

SCHEME = KeyScheme(VLLM_SHA256, vllm_root(VLLM_SHA256), 0x77, 4)
SENT = {"algorithm": SCHEME.algorithm, "root": SCHEME.root, "mask": SCHEME.mask, "block_tokens": 4}
WORDS = range(1, 24)
PROMPT = " ".join(f"w{number}" for number in WORDS)
KEYS = block_keys(SCHEME, [0, *WORDS])  # six blocks: the tokenizer begins with token 0
SERVICE = "indexer.v1.IndexerService"
CALL = f"/{SERVICE}/GetPodScores"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "tokenizer.json")
    return tmp_path


def hold(place: Site, instance: str, engine: str, held: dict[str, Sequence[int]], **more: Any) -> None:
    place.api.ok("ResidencyService.ReportResidency", **report(instance, engine, held, key_scheme=SENT, **more))


def options(instance: str, tokenizer: Path, **more: Any) -> dict[str, Any]:
    return {"pod_scores": ["0"], "model": [f"m={instance}"], "tokenizer": [f"m={tokenizer}"], **more}


async def test_blocks_count_by_the_memory_that_they_are_in(place: Site, address: str, tokenizer: Path) -> None:
    instance = place.instance()
    place.write(instance, KEYS[:5])
    hold(place, instance, "a:1", {GPU: KEYS[:2], HOST: KEYS[2:3]})
    hold(place, instance, "b:1", {GPU: KEYS[:1], DISK: [KEYS[1], KEYS[5]]})
    hold(place, instance, "c:1", {})
    async with scorer(address, **options(instance, tokenizer)) as rig:
        expected = {"a:1": 2 + 0.8 + 2 * 0.5, "b:1": 1 + 0.6 + 3 * 0.5 + 0.5, "c:1": 5 * 0.5}
        found = await rig.pods(PROMPT)
        assert [pod for pod, _, _ in found] == ["a:1", "b:1", "c:1"]
        assert {pod: score for pod, score, _ in found} == pytest.approx(expected)
        assert {rank for _, _, rank in found} == {None}
    async with scorer(address, **options(instance, tokenizer, weight=["storage=0", "cpu=0.5", "disk=0.25"])) as rig:
        assert await rig.pods(PROMPT) == [("a:1", 2.5, None), ("b:1", 1.25, None)]


async def test_candidates_alone_have_scores_also_such_as_never_reported(
    place: Site, address: str, tokenizer: Path
) -> None:
    instance = place.instance()
    place.write(instance, KEYS[:2])
    for engine in ("a:1", "b:1"):
        hold(place, instance, engine, {GPU: KEYS})
    async with scorer(address, **options(instance, tokenizer, pod=["b:1=pod-b"])) as rig:
        assert await rig.pods(PROMPT) == [("a:1", 6.0, None), ("pod-b", 6.0, None)]
        assert await rig.pods(PROMPT, "pod-b", "new:1") == [("pod-b", 6.0, None), ("new:1", 1.0, None)]
        assert await rig.pods(PROMPT, "no#name", "") == [], "and not those of all engines"
        many = [f"e{number}:1" for number in range(1024)]
        assert await rig.pods(PROMPT, "a:1", *many) == [("a:1", 6.0, None)]


async def test_ranks_are_named_where_an_engine_has_several(place: Site, address: str, tokenizer: Path) -> None:
    instance = place.instance()
    hold(place, instance, "a:1", {GPU: KEYS[:1]}, rank=0)
    hold(place, instance, "a:1", {GPU: KEYS[:3]}, rank=1)
    hold(place, instance, "b:1", {GPU: KEYS[:2]}, rank=0)
    async with scorer(address, **options(instance, tokenizer)) as rig:
        assert await rig.pods(PROMPT) == [("a:1", 3.0, 1), ("b:1", 2.0, None), ("a:1", 1.0, 0)]


async def test_special_tokens_can_be_left_out(place: Site, address: str, tokenizer: Path) -> None:
    instance = place.instance()
    hold(place, instance, "a:1", {GPU: block_keys(SCHEME, list(WORDS))})
    async with scorer(address, **options(instance, tokenizer)) as rig:
        assert await rig.pods(PROMPT) == []
    async with scorer(address, **options(instance, tokenizer, no_special_tokens=True)) as rig:
        assert await rig.pods(PROMPT) == [("a:1", 5.0, None)]


async def test_what_nothing_is_known_of_is_an_empty_success(place: Site, address: str, tokenizer: Path) -> None:
    instance = place.instance()
    hold(place, instance, "a:1", {GPU: KEYS})
    async with scorer(address, **options(instance, tokenizer)) as rig:
        assert await rig.pods(PROMPT, model="another") == []
        assert await rig.pods("") == []
        assert await rig.pods("w1 w2") == [], "less than a block"
        assert await rig.pods("w9 w8 w7 w6 w5") == []
        assert rig.count(SERVICE, "OK") == 4


async def test_long_prompts_are_cut_to_what_the_manager_takes(place: Site, address: str, tokenizer: Path) -> None:
    instance = place.instance()
    hold(place, instance, "a:1", {GPU: KEYS})
    async with scorer(address, **options(instance, tokenizer, max_blocks=5)) as rig:
        assert await rig.pods(PROMPT) == [("a:1", 1.0, None)], "5 tokens, as long as the size of blocks is not known"
        assert await rig.pods(PROMPT) == [("a:1", 5.0, None)]
    async with scorer(address, **options(instance, tokenizer)) as rig:
        for _ in range(2):
            assert await rig.pods(f"{PROMPT}{' w1' * 300_000}") == [("a:1", 6.0, None)]


async def test_the_status_of_each_failure(place: Site, address: str, tokenizer: Path) -> None:
    async with scorer(address, **options(place.instance(), tokenizer)) as rig:
        code, text = await rig.raw(CALL, b"\xff\xff\xff")
        assert (code, "GetPodScoresRequest" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        large = indexer_pb2.GetPodScoresRequest(prompt="w" * (8 << 20))
        assert (await rig.raw(CALL, large.SerializeToString()))[0] is grpc.StatusCode.OUT_OF_RANGE
        code, text = await rig.raw(f"/{SERVICE}/ScoreTokens", b"")
        assert (code, "GetPodScores" in text) == (grpc.StatusCode.UNIMPLEMENTED, True)
    async with scorer(f"127.0.0.1:{free_port()}", **options("i", tokenizer)) as rig, refused() as errors:
        await rig.pods(PROMPT)
    assert errors[0].code() is grpc.StatusCode.UNAVAILABLE
    async with scorer(address, **options("nobody", tokenizer)) as rig, refused() as errors:
        await rig.pods(PROMPT)
    assert (errors[0].code(), "nobody" in (errors[0].details() or "")) == (grpc.StatusCode.UNAVAILABLE, True)


async def test_both_services_are_served_by_one_process(place: Site, address: str, tokenizer: Path) -> None:
    instance = place.instance()
    hold(place, instance, "a:1", {GPU: KEYS})
    async with scorer(address, kv_indexer=[f"0={instance}"], **options(instance, tokenizer)) as rig:
        assert await rig.pods(PROMPT, place=1) == [("a:1", 6.0, None)]
        code, text = await rig.raw("/kv_indexer.v1.KVIndexer/MatchExternalKvPrefix", b"", place=1)
        assert (code, "Method not found" in text) == (grpc.StatusCode.UNIMPLEMENTED, True)


_BLOCKS = st.lists(st.sampled_from(["gpu", "cpu", "disk", "storage", ""]), max_size=8)


@given(blocks=_BLOCKS, block_tokens=st.integers(1, 64))
def test_a_score_is_the_weights_of_a_prefix_whose_memories_get_slower(blocks: list[str], block_tokens: int) -> None:
    """As the manager counts: a block behind one in a slower memory counts as if it were in that one."""
    weights, order = TierWeights(gpu=1, cpu=0.5, disk=0.25, storage=0.125), ["gpu", "cpu", "disk", "storage"]
    prefix = blocks[: blocks.index("")] if "" in blocks else blocks
    slowest = [max(order.index(each) for each in prefix[: end + 1]) for end in range(len(prefix))]
    counts = [sum(each <= tier for each in slowest) * block_tokens for tier in range(4)]
    names = ("gpu_tokens", "host_tokens", "disk_tokens", "storage_tokens")
    found = weighted_blocks(pb.EngineScore(**dict(zip(names, counts, strict=True))), block_tokens, weights)
    assert found == sum(getattr(weights, order[each]) for each in slowest)


def test_a_tokenizer_is_a_file_or_its_directory_and_never_cuts_prompts(tokenizer: Path) -> None:
    for path in (tokenizer, tokenizer / "tokenizer.json"):
        assert load_tokenizer("m", path).encode("w1 w2 w3 w4 w5").ids == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("text", [None, "{}", "no json"])
def test_a_tokenizer_that_cannot_be_read_is_named(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError, match=f"--tokenizer m={tmp_path} is no tokenizer, must be a tokenizer.json"):
        Scorer(settings_of({"manager": ["a:1"], **options("i", tmp_path)}))
