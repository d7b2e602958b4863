"""The examples for other routers: the class for vLLM's production stack with a real manager, files of the others."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from aiohttp import web
from ports import free_port
from scorer_rig import GPU, report
from secured import Tenants, secured
from test_transport_process import ManagerProcess
from test_transport_sites import Site
from typer.main import get_command

from kvcm.cli import app
from kvcm.model.key_schemes import VLLM_SHA256, KeyScheme, block_keys, vllm_root

EXAMPLES = Path(__file__).parents[2] / "docs/examples/routers"
SCHEME = KeyScheme(VLLM_SHA256, vllm_root(VLLM_SHA256), 0, 4)
SENT = {"algorithm": SCHEME.algorithm, "root": SCHEME.root, "mask": 0, "block_tokens": 4}
TOKENS = list(range(40))
PATIENT = {"score_seconds": 60.0, "tokenize_seconds": 60.0}


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("production_stack", EXAMPLES / "production_stack.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


KvcmRouter = _example().KvcmRouter


@dataclass(frozen=True)
class Endpoint:
    """As the router knows an engine."""

    url: str


@dataclass(frozen=True)
class Stats:
    """As the router knows an engine's load."""

    num_running_requests: int = 0
    num_queuing_requests: int = 0


class Tokenizer:
    """An engine that only tokenizes, and does not if it has no tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] | None = TOKENS
        self.asked: list[Mapping[str, Any]] = []
        self.url = ""

    async def tokenize(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        return web.Response(status=404) if self.tokens is None else web.json_response({"tokens": self.tokens})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Tokenizer]:
        served = web.Application()
        served.router.add_post("/tokenize", self.tokenize)
        runner = web.AppRunner(served)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()


@pytest.fixture
async def engines() -> AsyncIterator[list[Tokenizer]]:
    made = [Tokenizer() for _ in range(3)]
    async with made[0].running(), made[1].running(), made[2].running():
        yield made


@asynccontextmanager
async def router(manager: str, instance: str, **more: Any) -> AsyncIterator[Any]:
    made = KvcmRouter(manager, instance, **{**PATIENT, **more})
    try:
        yield made
    finally:
        await made.aclose()


async def chosen(made: Any, engines: list[Tokenizer], body: Mapping[str, Any], *loads: int) -> int:
    """Return the place of the engine that a request goes to."""
    endpoints = [Endpoint(each.url) for each in engines]
    stats = {each.url: Stats(load // 2, load - load // 2) for each, load in zip(engines, loads, strict=False)}
    url = await made.route_request(endpoints, stats, {}, None, body)
    return [each.url for each in engines].index(url)


def _hold(place: Site, instance: str, engine: Tokenizer, tokens: list[int], salt: str = "") -> None:
    keys = {GPU: block_keys(SCHEME, tokens, salt)}
    name = engine.url.removeprefix("http://")
    place.api.ok("ResidencyService.ReportResidency", **report(instance, name, keys, key_scheme=SENT))


async def test_requests_go_to_the_engine_that_holds_most_of_the_prompt(
    scored: ManagerProcess, place: Site, engines: list[Tokenizer]
) -> None:
    instance = place.instance()
    _hold(place, instance, engines[1], TOKENS)
    _hold(place, instance, engines[2], TOKENS[:8], "tenant")
    async with router(f"http://{scored.address.http}/", instance) as made:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "stream": True}
        assert await chosen(made, engines, body, 0, 50, 1) == 1
        assert engines[0].asked == [{"model": "m", "messages": body["messages"]}], "the idlest one makes the tokens"
        assert await chosen(made, engines, {"prompt": "Hello", "cache_salt": "tenant"}, 0, 1, 9) == 2
        engines[0].tokens = [7] * 40
        assert await chosen(made, engines, body, 1, 3, 2) == 0, "no engine has it: the idlest"


async def test_without_tokens_or_scores_the_idlest_engine_gets_the_request(
    scored: ManagerProcess, place: Site, engines: list[Tokenizer]
) -> None:
    instance = place.instance()
    _hold(place, instance, engines[1], TOKENS)
    for manager, name in ((f"http://127.0.0.1:{free_port()}", instance), (f"http://{scored.address.http}", "nobody")):
        async with router(manager, name) as made:
            assert await chosen(made, engines, {"prompt": "Hello"}, 2, 2, 1) == 2
    async with router(f"http://{scored.address.http}", instance) as made:
        for tokens in (None, []):
            engines[0].tokens = tokens
            assert await chosen(made, engines, {"prompt": "Hello"}, 0, 1, 1) == 0
    async with router(f"http://{scored.address.http}", instance, tokenize_seconds=1e-9) as made:
        assert await chosen(made, engines, {"prompt": "Hello"}, 5, 4, 3) == 2


async def test_the_router_shows_its_key(engines: list[Tokenizer], tmp_path_factory: pytest.TempPathFactory) -> None:
    with secured(tmp_path_factory.mktemp("secured")) as server:
        tenants = Tenants.on(server)
        instance, manager = tenants.instances["a"], f"http://{server.process.address.http}"
        with server.api() as api:
            _hold(Site(api), instance, engines[1], TOKENS)
        for name, expected in (("score", 1), ("match", 0)):
            async with router(manager, instance, api_key=tenants.keys[name]) as made:
                assert await chosen(made, engines, {"prompt": "Hello"}) == expected


def test_storages_weigh_less_than_memory_in_llm_ds_picker() -> None:
    document = yaml.safe_load((EXAMPLES / "llm_d_picker.yaml").read_text())
    plugins = {each["type"]: each.get("parameters", {}) for each in document["plugins"]}
    indexer = plugins["precise-prefix-cache-producer"]["indexerConfig"]
    weights = {each["name"]: each["weight"] for each in indexer["kvCacheBackendConfigs"]}
    assert weights["gpu"] > weights["cpu"] > weights["storage"] > 0
    assert plugins["prefix-cache-scorer"]["prefixMatchInfoProducerName"] == "precise-prefix-cache-producer"
    (profile,) = document["schedulingProfiles"]
    assert {each["pluginRef"] for each in profile["plugins"]} <= set(plugins)


def test_the_command_of_sglangs_example_has_options_that_there_are() -> None:
    path = EXAMPLES / "sglang_router.sh"
    subprocess.run(["sh", "-n", str(path)], check=True)
    (line,) = [each for each in path.read_text().splitlines() if each.startswith("kvcm scorer ")]
    used = [word for word in shlex.split(line.rstrip("&")) if word.startswith("--")]
    command: Any = get_command(app)
    known = {option for each in command.commands["scorer"].params for option in each.opts}
    assert used
    assert set(used) <= known
