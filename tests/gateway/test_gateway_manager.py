"""A gateway and a real manager: requests go to the engine that reported their prompt's blocks."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import pytest
from gateway_rig import CHAT, FakeEngine, engines, gateway, metric
from test_transport_drivers import Api
from test_transport_process import manager
from test_transport_sites import Site

from kvcm.model.key_schemes import VLLM_SHA256, KeyScheme, block_keys, vllm_root

SCHEME = KeyScheme(VLLM_SHA256, vllm_root(VLLM_SHA256), 0x1234, 4)  # blocks of Site.instance
PROMPTS = [list(range(begin, begin + 40)) for begin in (0, 100, 200)]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, str]]:
    """Calls of a manager, and the address of its gRPC port."""
    with manager(tmp_path_factory.mktemp("manager")) as process, process.api() as found:
        yield found, process.address.rpc


def _report(api: Api, instance: str, engine: FakeEngine, tokens: list[int]) -> None:
    keys = block_keys(SCHEME, tokens)
    scheme = {"algorithm": SCHEME.algorithm, "root": SCHEME.root, "mask": SCHEME.mask, "block_tokens": 4}
    api.ok(
        "ResidencyService.ReportResidency",
        instance_id=instance,
        engine=engine.address,
        stream="run",
        sequence=1,
        key_scheme=scheme,
        changes=[{"medium": "MEDIUM_GPU", "added_keys": struct.pack(f"<{len(keys)}q", *keys)}],
        snapshot={"first": True, "last": True},
    )


async def test_prompts_go_where_their_blocks_are(api: tuple[Api, str]) -> None:
    calls, address = api
    instance = Site(calls).instance()
    async with engines(3) as found:
        for engine, tokens in zip(found, PROMPTS, strict=True):
            _report(calls, instance, engine, tokens)
        instances = {f"instance_{engine.name}": instance for engine in found}
        async with gateway(found, "kvcm", manager=address, **instances) as rig:
            for engine, tokens in zip(found, PROMPTS, strict=True):
                for each in found:
                    each.tokens = [*tokens, 7, 8]
                assert {(await rig.post(x_session_id=f"s{turn}")).engine for turn in range(4)} == {engine.name}
            assert metric(rig, "kvcm_gateway_promised_tokens_total", tier="gpu") == 12 * 40
            assert metric(rig, "kvcm_gateway_prompt_tokens_total") == 12 * 42


async def test_an_instance_that_the_manager_does_not_know_is_a_fallback(api: tuple[Api, str]) -> None:
    async with engines(1) as (engine,), gateway([engine], "kvcm", manager=api[1], instance_a="unknown") as rig:
        assert (await rig.post(CHAT)).status == 200
        assert metric(rig, "kvcm_gateway_fallbacks_total", reason="score_refused") == 1
