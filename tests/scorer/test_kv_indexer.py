"""KVIndexer as SGLang's router calls it: prefixes of the events' hashes, and the status of each failure."""

from __future__ import annotations

import socket
from random import Random
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ports import free_port
from scorer_rig import DISK, GPU, HOST, INDEXER, refused, report, scorer
from secured import Tenants, secured
from structlog.testing import capture_logs
from test_transport_process import manager
from test_transport_sites import Site
from thoroughness import examples

from kvcm.model.key_schemes import SGLANG_SHA256, VLLM_SHA256, KeyScheme, block_keys, vllm_root
from kvcm.protocol import kv_indexer_pb2 as wire
from kvcm.scorer.settings import ScorerSecrets

MASK = -(0x1234_5678_9ABC_DEF0)
SCHEME = {"algorithm": SGLANG_SHA256, "mask": MASK, "block_tokens": 4}
MATCH = f"{INDEXER}MatchExternalKvPrefix"
# As SGLang 0.5.23 has them in events: tokens 1 to 16 and 17 to 32 in pages of 16.
EXAMPLE = (8635429971592222890, 1256577331724852459)
HASHES = [2**63 - 1, -(2**63), 0, 7, 8, 9]


def keys_of(hashes: list[int] | tuple[int, ...]) -> list[int]:
    return [each ^ MASK for each in hashes]


def hold(place: Site, instance: str, engine: str, held: dict[str, Any], **more: Any) -> None:
    """Report blocks by their hashes."""
    keys = {medium: keys_of(hashes) for medium, hashes in held.items()}
    place.api.ok("ResidencyService.ReportResidency", **report(instance, engine, keys, key_scheme=SCHEME, **more))


async def test_events_hashes_are_those_of_the_blocks_that_tokens_make(place: Site, address: str) -> None:
    instance = place.instance(block_size=16)
    scheme = KeyScheme(SGLANG_SHA256, b"", MASK, 16)
    keys = block_keys(scheme, list(range(1, 33)))
    sent = {"algorithm": SGLANG_SHA256, "mask": MASK, "block_tokens": 16}
    place.api.ok("ResidencyService.ReportResidency", **report(instance, "w:1", {GPU: keys}, key_scheme=sent))
    async with scorer(address, kv_indexer=[f"0={instance}"]) as rig:
        answer = await rig.match(EXAMPLE)
    assert answer == wire.MatchExternalKvPrefixResponse(
        matches=[wire.ExternalKvPrefixMatch(worker_address="http://w:1", matched_prefix_blocks=2, worker_id="w:1")],
        best_prefix_blocks=2,
        blocks_read=2,
    )


async def test_gpu_and_host_memory_count_and_disks_and_storages_do_not(place: Site, address: str) -> None:
    instance = place.instance()
    place.write(instance, keys_of(HASHES))
    hold(place, instance, "a:1", {GPU: HASHES[:1], HOST: HASHES[1:2], DISK: HASHES[2:]})
    hold(place, instance, "b:1", {HOST: HASHES[:3], GPU: HASHES[4:]})
    hold(place, instance, "c:1", {DISK: HASHES})
    hold(place, instance, "d:1", {GPU: HASHES[1:]})
    async with scorer(address, kv_indexer=[f"0={instance}"]) as rig:
        assert await rig.matched(HASHES) == [("http://b:1", 3), ("http://a:1", 2)]
        assert await rig.matched(HASHES, max_blocks=2) == [("http://a:1", 2), ("http://b:1", 2)]
        assert await rig.matched(HASHES, max_blocks=100) == [("http://b:1", 3), ("http://a:1", 2)]
        assert (await rig.match(HASHES, max_blocks=2)).blocks_read == 2
        nothing = await rig.match([99, *HASHES])
        assert (list(nothing.matches), nothing.best_prefix_blocks) == ([], 0)


async def test_workers_are_named_as_the_router_names_them(place: Site, address: str) -> None:
    instance = place.instance()
    for engine in ("a:1", "b:1"):
        hold(place, instance, engine, {GPU: HASHES})
    named = {"worker_prefix": "https://", "worker": ["b:1=http://b.example/"]}
    async with scorer(address, kv_indexer=[f"0={instance}"], **named) as rig:
        assert await rig.matched(HASHES) == [("https://a:1", 6), ("http://b.example/", 6)]


async def test_of_an_engine_with_several_ranks_the_best_one_counts(place: Site, address: str) -> None:
    instance = place.instance()
    for rank, count in enumerate((1, 4, 2)):
        hold(place, instance, "a:1", {GPU: HASHES[:count]}, rank=rank)
    async with scorer(address, kv_indexer=[f"0={instance}"]) as rig:
        assert await rig.matched(HASHES) == [("http://a:1", 4)]


async def test_each_instance_has_an_address_of_its_own(place: Site, address: str) -> None:
    first, second = place.instance(), place.instance()
    hold(place, first, "a:1", {GPU: HASHES[:1]})
    hold(place, second, "b:1", {GPU: HASHES[:2]})
    async with scorer(address, kv_indexer=[f"0={first}", f"0={second}"]) as rig:
        assert [await rig.matched(HASHES, place=place) for place in (0, 1)] == [
            [("http://a:1", 1)],
            [("http://b:1", 2)],
        ]


async def test_an_instance_without_reporters_is_no_error(place: Site, address: str) -> None:
    async with scorer(address, kv_indexer=[f"0={place.instance()}"]) as rig:
        assert await rig.matched(HASHES) == []
        assert rig.count("kv_indexer.v1.KVIndexer", "OK") == 1


async def test_more_blocks_than_the_manager_takes_are_cut_off(place: Site, address: str) -> None:
    instance = place.instance()
    hold(place, instance, "a:1", {GPU: HASHES})
    async with scorer(address, kv_indexer=[f"0={instance}"]) as rig:
        answer = await rig.match([*HASHES, *range(100, 70_000)])
        assert (answer.best_prefix_blocks, answer.blocks_read) == (6, 65_536)
    async with scorer(address, kv_indexer=[f"0={instance}"], max_blocks=4) as rig:
        assert await rig.matched(HASHES, max_blocks=5) == [("http://a:1", 4)]


async def test_prefixes_are_those_of_a_plain_model(place: Site, address: str) -> None:
    # Within one loop: gRPC keeps sockets for every loop that it was ever used in.
    random = Random(3)
    for _ in range(examples(100)):
        held = {
            engine: {(random.choice([GPU, HOST, DISK]), random.randrange(6)) for _ in range(random.randrange(12))}
            for engine in random.sample("abc", random.randint(1, 3))
        }
        max_blocks = random.randrange(8)
        assert await _matched(place, address, held, max_blocks) == _expected(held, max_blocks)


async def _matched(
    place: Site, address: str, held: dict[str, set[tuple[str, int]]], max_blocks: int
) -> list[tuple[str, int]]:
    instance = place.instance("default")
    for engine, blocks in held.items():
        media = {medium: [HASHES[each] for m, each in blocks if m == medium] for medium, _ in blocks}
        hold(place, instance, f"{engine}:1", media)
    async with scorer(address, kv_indexer=[f"0={instance}"]) as rig:
        return await rig.matched(HASHES, max_blocks)


def _expected(held: dict[str, set[tuple[str, int]]], max_blocks: int) -> list[tuple[str, int]]:
    def prefix(blocks: set[tuple[str, int]]) -> int:
        servable = {each for medium, each in blocks if medium != DISK}
        return next((n for n in range(max_blocks or 6) if n not in servable), min(max_blocks or 6, 6))

    found = [(f"http://{engine}:1", count) for engine, blocks in held.items() if (count := prefix(blocks))]
    return sorted(found, key=lambda each: (-each[1], each[0]))


# Failures. The router answers its user 503 on any status but UNAVAILABLE, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED and
# OUT_OF_RANGE.


async def test_bad_requests_have_the_statuses_of_the_original(place: Site, address: str) -> None:
    instance = place.instance()
    async with scorer(address, kv_indexer=[f"0={instance}"]) as rig:
        code, text = await rig.raw(MATCH, b"")
        assert (code, "hashes is empty" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        code, text = await rig.raw(MATCH, b"\xff\xff\xff")
        assert (code, "MatchExternalKvPrefixRequest" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        most = (8 << 20) // 8
        code, text = await rig.raw(MATCH, wire.MatchExternalKvPrefixRequest(hashes=[0] * most).SerializeToString())
        assert (code, str(8 << 20) in text) == (grpc.StatusCode.OUT_OF_RANGE, True)
        assert (await rig.match([0] * (most - 8))).blocks_read == 65_536
        too_large, _ = await rig.raw(MATCH, b"0" * (17 << 20))
        assert too_large is grpc.StatusCode.RESOURCE_EXHAUSTED
        counts = {
            code: rig.count("kv_indexer.v1.KVIndexer", code) for code in ("INVALID_ARGUMENT", "OUT_OF_RANGE", "OK")
        }
        assert counts == {"INVALID_ARGUMENT": 2, "OUT_OF_RANGE": 1, "OK": 1}


@pytest.mark.parametrize(
    "call",
    [
        *("MatchExternalKv", "ApplyExternalKvBatch", "GetExternalKvHitCounts", "ConfigureExpectedWorkers"),
        *("ReplaceExternalKvSnapshot", "InvalidateWorker", "BeginExternalKvSnapshot", "OfALaterRelease"),
    ],
)
async def test_other_calls_say_how_engines_report(call: str, address: str) -> None:
    async with scorer(address, kv_indexer=["0=i"]) as rig:
        code, text = await rig.raw(f"{INDEXER}{call}", b"")
    assert (code, "kvcm-subscriber" in text) == (grpc.StatusCode.UNIMPLEMENTED, True)


async def test_a_manager_that_is_away_is_unavailable() -> None:
    async with scorer(f"127.0.0.1:{free_port()}", kv_indexer=["0=i"]) as rig:
        code, text = await rig.raw(MATCH, wire.MatchExternalKvPrefixRequest(hashes=[1]).SerializeToString())
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "the manager has no scores (unavailable)" in text
        assert rig.count("kv_indexer.v1.KVIndexer", "UNAVAILABLE") == 1


async def test_the_next_manager_answers_for_one_that_is_away(place: Site, address: str) -> None:
    instance = place.instance()
    hold(place, instance, "a:1", {GPU: HASHES})
    with capture_logs() as logs:
        async with scorer(f"127.0.0.1:{free_port()}", address, kv_indexer=[f"0={instance}"]) as rig:
            for _ in range(3):
                assert await rig.matched(HASHES) == [("http://a:1", 6)]
    of_managers = [each["event"] for each in logs if "manager" in each]
    assert of_managers == ["score_failed", "scores_failing", "scores_again"], "the one that answers is asked first"


async def test_a_manager_that_knows_no_scheme_yet_is_unavailable_and_another_one_answers(
    place: Site, address: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """As one that has restarted, until the first snapshot names it."""
    instance = place.instance()
    place.api.ok("ResidencyService.ReportResidency", **report(instance, "a:1", {GPU: keys_of(HASHES)}))
    async with scorer(address, kv_indexer=[f"0={instance}"]) as rig, refused() as errors:
        await rig.match(HASHES)
    assert errors[0].code() is grpc.StatusCode.UNAVAILABLE
    assert "key_scheme" in (errors[0].details() or "")
    with manager(tmp_path_factory.mktemp("other")) as other, other.api() as calls:
        theirs = Site(calls)
        calls.ok("AdminService.GetInstanceGroup", name="default")
        calls.ok("RegisterInstance", **_registered(instance))
        hold(theirs, instance, "a:1", {GPU: HASHES[:2]})
        async with scorer(address, other.address.rpc, kv_indexer=[f"0={instance}"]) as rig:
            assert await rig.matched(HASHES) == [("http://a:1", 2)]


def _registered(instance: str) -> dict[str, Any]:
    spec = [{"name": "kv", "size": 64}]
    model = {"model_name": "m", "dtype": "bf16"}
    names = {"instance_id": instance, "instance_group": "default", "block_size": 4}
    return {**names, "location_spec_infos": spec, "model_deployment": model}


@pytest.mark.parametrize(
    ("scheme", "text"),
    [
        (
            {"algorithm": VLLM_SHA256, "root": vllm_root(VLLM_SHA256), "block_tokens": 4},
            "events of algorithm vllm-sha256",
        ),
        (None, "'nobody'"),
    ],
)
async def test_what_the_manager_refuses_is_unavailable_too(
    scheme: dict[str, Any] | None, text: str, place: Site, address: str
) -> None:
    instance = "nobody"
    if scheme is not None:
        instance = place.instance()
        place.api.ok("ResidencyService.ReportResidency", **report(instance, "a:1", {GPU: [1]}, key_scheme=scheme))
    async with scorer(address, kv_indexer=[f"0={instance}"]) as rig, refused() as errors:
        await rig.match(HASHES)
    assert errors[0].code() is grpc.StatusCode.UNAVAILABLE
    assert "(refused): " in (errors[0].details() or "")
    assert text in (errors[0].details() or "")


async def test_a_manager_that_never_answers_is_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with scorer(address, kv_indexer=["0=i"], score_timeout_ms=1) as rig, refused() as errors:
            await rig.match(HASHES)
    assert errors[0].code() is grpc.StatusCode.UNAVAILABLE
    assert "the manager has no scores (timeout)" in (errors[0].details() or "")


# Keys and health.


async def test_the_key_for_the_manager_needs_the_verb_score(tmp_path_factory: pytest.TempPathFactory) -> None:
    with secured(tmp_path_factory.mktemp("secured")) as server:
        tenants = Tenants.on(server)
        instance, address = tenants.instances["a"], server.process.address.rpc
        with server.api() as api:
            hold(Site(api), instance, "a:1", {GPU: HASHES})

        async def ask(key: str) -> Any:
            async with scorer(address, kv_indexer=[f"0={instance}"], secrets=ScorerSecrets(manager_key=key)) as rig:
                return await rig.matched(HASHES)

        assert await ask(tenants.keys["score"]) == [("http://a:1", 6)]
        for name in ("match", "write", "foreign", ""):
            async with refused() as errors:
                await ask(tenants.keys.get(name, ""))
            assert errors[0].code() is grpc.StatusCode.UNAVAILABLE, name
            wanted = {"": "UNAUTHENTICATED", "foreign": "is not registered"}.get(name, "PERMISSION_DENIED")
            assert wanted in (errors[0].details() or ""), name


@pytest.mark.parametrize("shown", ["", "other", "secret"])
async def test_clients_show_the_scorers_own_key(shown: str, place: Site, address: str) -> None:
    instance = place.instance()
    hold(place, instance, "a:1", {GPU: HASHES})
    own = ScorerSecrets(api_key="secret")
    async with scorer(address, kv_indexer=[f"0={instance}"], secrets=own, key=shown) as rig:
        code, text = await rig.raw(MATCH, wire.MatchExternalKvPrefixRequest(hashes=HASHES).SerializeToString())
        if shown == "secret":
            assert code is grpc.StatusCode.OK
        else:
            assert (code, "authorization" in text, "secret" in text) == (grpc.StatusCode.UNAUTHENTICATED, True, False)
        health: Any = health_pb2_grpc.HealthStub(rig.channels[0])
        for service in ("", "kv_indexer.v1.KVIndexer"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_hashes_are_given_alone(place: Site) -> None:
    instance = place.instance()
    for other in ({"block_keys": [1]}, {"token_ids": [1]}):
        asked = {"instance_id": instance, "event_hashes": [1], **other}
        code, text = place.api.refused("ResidencyService.Score", **asked)
        assert (code, "Score.event_hashes" in text) == ("INVALID_ARGUMENT", True)
    code, text = place.api.refused("ResidencyService.Score", instance_id=instance, event_hashes=[1] * 65_537)
    assert (code, "event_hashes has 65537 entries" in text) == ("INVALID_ARGUMENT", True)


@pytest.mark.parametrize("transport", ["grpc", "http"])
def test_events_of_reporters_without_a_scheme_are_keyed_by_their_hashes(transport: str, scored: Any) -> None:
    with scored.api(transport) as api:
        place = Site(api)
        instance = place.instance()
        place.write(instance, HASHES[:3])
        found = api.ok("ResidencyService.Score", instance_id=instance, event_hashes=HASHES, engines=["a:1"])
    assert [(each.engine, each.storage_tokens) for each in found.engines] == [("a:1", 12)]
    assert (found.block_tokens, found.prompt_tokens) == (4, 24)
