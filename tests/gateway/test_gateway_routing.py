"""Which engine requests go to: sessions, scores of a real gRPC server, and what happens without them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_rig import CHAT, FakeManager, engines, eventually, gateway, metric, score

from kvcm.gateway.settings import GatewaySecrets
from kvcm.protocol import meta_service_pb2 as meta


async def test_requests_of_a_session_go_to_one_engine() -> None:
    async with engines(4) as found, gateway(found, "consistent_hash") as rig:
        by_header = [{(await rig.post(x_session_id=f"s{each}")).engine for _ in range(3)} for each in range(12)]
        by_user = [{(await rig.post({**CHAT, "user": f"s{each}"})).engine for _ in range(3)} for each in range(12)]
    assert all(len(each) == 1 for each in by_header)
    assert len(set.union(*by_header)) > 1
    assert by_user == by_header


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_prompts_with_the_same_beginning_go_to_one_engine(path: str) -> None:
    def prompt(begin: str, end: str) -> dict[str, Any]:
        text = begin * 60 + end
        return {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}

    async with engines(4) as found, gateway(found, "consistent_hash", hash_prefix_characters=50) as rig:
        chosen = [{(await rig.post(prompt(begin, end), path)).engine for end in "xyz"} for begin in "abcdefghij"]
    assert all(len(each) == 1 for each in chosen)
    assert len(set.union(*chosen)) > 1


async def test_the_least_loaded_engine_is_taken() -> None:
    release = asyncio.Event()
    async with engines(2) as (one, other), gateway([one, other], "least_loaded") as rig:
        one.answer = one.hang(release)
        waiting = asyncio.create_task(rig.post())
        await eventually(lambda: one.seen)
        assert {(await rig.post()).engine for _ in range(3)} == {"b"}
        release.set()
        await waiting


async def test_the_highest_score_wins_and_what_it_promises_is_counted() -> None:
    manager = FakeManager()
    async with manager.running(), engines(3) as found, gateway(found, "kvcm", manager=manager.address) as rig:
        found[0].tokens = list(range(100))
        for engine, seconds in zip(found, (0.1, 0.5, 0.3), strict=True):
            manager.scores[engine.address] = [score(engine, seconds, (16, 48, 80))]
        salted = {**CHAT, "cache_salt": "pepper", "tools": [], "n": 1, "temperature": 0.5}
        assert (await rig.post(salted, x_request_id="r-1")).engine == "b"
        asked = manager.asked[0]
        assert (asked.trace_id, asked.instance_id, asked.cache_salt) == ("r-1", "i", "pepper")
        assert list(asked.token_ids) == list(range(100))
        assert list(asked.engines) == [each.address for each in found]
        assert asked.costs.compute_tokens_per_second == 10_000
        assert found[0].asked == [{"model": "m", "messages": CHAT["messages"], "tools": []}]
        promised = {tier: metric(rig, "kvcm_gateway_promised_tokens_total", tier=tier) for tier in _TIERS}
        assert promised == {"gpu": 16, "host": 32, "storage": 32}
        assert metric(rig, "kvcm_gateway_prompt_tokens_total") == 100
        assert metric(rig, "kvcm_gateway_score_seconds_count") == 1


_TIERS = ("gpu", "host", "storage")


async def test_a_busy_engine_loses_what_it_would_save() -> None:
    manager, release = FakeManager(), asyncio.Event()
    settings = {"manager": manager, "compute_tokens_per_second": 100.0}
    async with manager.running(), engines(2) as (one, other):
        async with gateway([one, other], "kvcm", **{**settings, "manager": manager.address}) as rig:
            one.tokens = other.tokens = list(range(100))
            manager.scores[one.address] = [score(one, 0.8, (20, 20, 20))]
            one.answer = one.hang(release)
            waiting = asyncio.create_task(rig.post({**CHAT, "stream": True}))
            await eventually(lambda: one.seen)
            assert rig.gateway.engines[0].tokens_in_flight == 80
            assert (await rig.post()).engine == "b", "0.8 s saved after a wait of 0.8 s: a tie, and b has nothing to do"
            manager.scores[one.address] = [score(one, 0.9, (20, 20, 20))]
            one.answer = one.plain
            assert (await rig.post()).engine == "a"
            release.set()
            await waiting
            assert rig.gateway.engines[0].tokens_in_flight == 0


async def test_every_instance_is_asked_for_its_own_engines() -> None:
    manager = FakeManager()
    async with manager.running(), engines(3) as found:
        instances = {"instance_a": "x", "instance_b": "y", "instance_c": "x"}
        async with gateway(found, "kvcm", manager=manager.address, **instances) as rig:
            manager.scores[found[2].address] = [score(found[2], 1.0)]
            manager.scores[found[1].address] = [score(found[1], 2.0)]
            assert (await rig.post()).engine == "b"
            asked = {each.instance_id: list(each.engines) for each in manager.asked}
            assert asked == {"x": [found[0].address, found[2].address], "y": [found[1].address]}
            manager.failing = {"y"}
            assert (await rig.post()).engine == "c", "the scores that there are count"
            assert _fallbacks(rig) == {}


async def test_the_best_rank_of_an_engine_is_asked_for() -> None:
    manager = FakeManager()
    async with manager.running(), engines(2) as (one, other):
        async with gateway([one, other], "kvcm", manager=manager.address) as rig:
            manager.scores[one.address] = [score(one, 0.1, rank=0), score(one, 0.7, rank=3)]
            manager.scores[other.address] = [score(other, 0.5)]
            await rig.post(x_data_parallel_rank="9")
            assert one.seen[0].headers["x-data-parallel-rank"] == "3"
            manager.scores[one.address] = []
            await rig.post()
            assert "x-data-parallel-rank" not in other.seen[0].headers


@pytest.mark.parametrize(
    ("prompt", "tokens", "asked"),
    [
        ("abc", [1, 2, 3], {"prompt": "abc"}),
        (["abc", "d"], [1, 2, 3], {"prompt": "abc"}),
        ([7, 8], [7, 8], None),
        ([[7, 8], [9]], [7, 8], None),
    ],
)
async def test_prompts_of_completions_become_tokens(prompt: object, tokens: list[int], asked: object) -> None:
    manager = FakeManager()
    async with manager.running(), engines(1) as (engine,):
        async with gateway([engine], "kvcm", manager=manager.address) as rig:
            assert (await rig.post({"prompt": prompt}, "/v1/completions")).status == 200
    assert list(manager.asked[0].token_ids) == tokens
    assert engine.asked == ([] if asked is None else [asked])


async def test_lists_of_tokens_as_sglang_has_them_are_read() -> None:
    manager = FakeManager()
    async with manager.running(), engines(1) as (engine,):
        engine.tokens = [[5, 6], [7]]
        async with gateway([engine], "kvcm", manager=manager.address) as rig:
            await rig.post()
    assert list(manager.asked[0].token_ids) == [5, 6]


def _fallbacks(rig: Any) -> dict[str, float]:
    families = {each.name: each for each in rig.gateway.metrics.registry.collect()}
    samples = families["kvcm_gateway_fallbacks"].samples
    return {each.labels["reason"]: each.value for each in samples if each.name.endswith("_total")}


@pytest.mark.parametrize("tokens", [None, [], [-1], [True], [1.5], ["x"]])
async def test_without_tokens_the_hash_decides(tokens: Any) -> None:
    manager = FakeManager()
    async with manager.running(), engines(3) as found, gateway(found, "consistent_hash") as plain:
        expected = [(await plain.post(x_session_id=f"s{each}")).engine for each in range(6)]
        async with gateway(found, "kvcm", manager=manager.address) as rig:
            for engine in found:
                engine.tokens = tokens
            assert [(await rig.post(x_session_id=f"s{each}")).engine for each in range(6)] == expected
            assert _fallbacks(rig) == {"tokenize": 6}
    assert manager.asked == []


async def test_a_slow_tokenizer_is_not_waited_for() -> None:
    manager, never = FakeManager(), asyncio.Event()
    async with manager.running(), engines(1) as (engine,):
        settings = {"manager": manager.address, "tokenize_timeout_ms": 20}
        async with gateway([engine], "kvcm", **settings) as rig:

            async def wait(_request: Any) -> Any:
                await never.wait()

            engine.tokenizing = wait
            assert (await rig.post()).status == 200
            assert _fallbacks(rig) == {"tokenize": 1}


@pytest.mark.parametrize("failure", ["timeout", "refused", "error", "unavailable"])
async def test_without_scores_the_hash_decides(failure: str) -> None:
    manager = FakeManager()
    async with engines(2) as found, manager.running(), gateway(found, "consistent_hash") as plain:
        expected = [(await plain.post(x_session_id=f"s{each}")).engine for each in range(6)]
        if failure == "timeout":
            manager.wait = asyncio.Event()
        manager.code = meta.INSTANCE_NOT_EXIST if failure == "refused" else meta.OK
        manager.failing = {"i"} if failure == "error" else set()
        address = "127.0.0.1:1" if failure == "unavailable" else manager.address
        timeout = 50 if failure == "timeout" else 30_000
        async with gateway(found, "kvcm", manager=address, score_timeout_ms=timeout) as rig:
            assert [(await rig.post(x_session_id=f"s{each}")).engine for each in range(6)] == expected
            reason = "score_refused" if failure == "error" else f"score_{failure}"
            assert _fallbacks(rig) == {reason: 6}


async def test_calls_without_a_prompt_need_no_scores() -> None:
    manager = FakeManager()
    async with manager.running(), engines(1) as (engine,):
        async with gateway([engine], "kvcm", manager=manager.address) as rig:
            await rig.post({"input": "x"}, "/v1/embeddings")
            await rig.get("/v1/models")
            assert _fallbacks(rig) == {}
    assert (manager.asked, engine.asked) == ([], [])


async def test_the_manager_gets_its_key_and_engines_theirs() -> None:
    manager = FakeManager()
    secrets = GatewaySecrets(api_key="own", engine_key="theirs", manager_key="kvcm_1_2")
    async with manager.running(), engines(1) as (engine,):
        async with gateway([engine], "kvcm", secrets, manager=manager.address) as rig:
            assert (await rig.post(authorization="Bearer own")).status == 200
    assert manager.metadata[0]["authorization"] == "Bearer kvcm_1_2"
    assert engine.seen[0].headers["authorization"] == "Bearer theirs"
    assert engine.probes[0]["authorization"] == "Bearer theirs"
    assert engine.tokenize_headers[0]["authorization"] == "Bearer theirs"
