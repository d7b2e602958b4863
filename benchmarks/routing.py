"""Claim: engines behind `kvcm gateway` reuse more of their own KV with the policy `kvcm` than with the others.

Two vLLM and one SGLang on CPUs publish KV events, `kvcm-subscriber` reports their blocks to a manager, and `kvcm
gateway` places the turns of conversations. Half of the conversations name a session; the other half share long
beginnings, some with each, and name none. The caches of all engines together hold a part of the blocks. The policies
take turns on the same engines, whose caches are emptied in between, with the same conversations in the same order;
answers have to be those of one vLLM alone.

Two more runs bound the figures. *One engine alone* gets all conversations. The *oracle* is no gateway: it reads the
events of every engine itself before each request, computes the engines' own hashes of the prompt, and takes the engine
with the longest prefix, of equal ones the least busy.

A turn's prompt is all that was said before and some new tokens. The hit rate is the engines' own count of prompt tokens
that they did not compute.

    python benchmarks/routing.py [--quick] [--json FILE]
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, Protocol

import aiohttp
import zmq
from report import Row, arguments, left_out, publish
from server_process import free_port
from service_site import Manager, site

from kvcm.connectors.events.decoding import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from kvcm.model.key_schemes import SGLANG_SHA256, VLLM_SHA256, KeyScheme, block_hashes, vllm_root
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines"))
from engine_kinds import SGLANG, VLLM, EngineKind
from tiny_models import write_llama

KINDS: Final = (VLLM, VLLM, SGLANG)
MODEL: Final = "tiny"
VOCABULARY: Final = 1024
BLOCK_TOKENS: Final = 32
CACHED_PART: Final = 0.4
TURNS: Final = 4
ANSWER_TOKENS: Final = 16
CLIENTS: Final = 4
ACTIVE: Final = 24  # conversations at a time
LEAST_BLOCKS: Final = 128  # of an engine: the longest prompts of its clients have to fit
POLICIES: Final = ("round_robin", "consistent_hash", "kvcm")
ALONE: Final = "one engine alone"
ORACLE: Final = "oracle"
LEAST_AGAINST: Final = {"round_robin": 1.5, "consistent_hash": 1.1, ORACLE: 0.95}
SCHEMES: Final = {
    "vllm": KeyScheme(VLLM_SHA256, vllm_root(VLLM_SHA256), 0, BLOCK_TOKENS),
    "sglang": KeyScheme(SGLANG_SHA256, b"", 0, BLOCK_TOKENS),
}
_START_SECONDS: Final = 240.0
_POLL_SECONDS: Final = 0.25


@dataclass(slots=True)
class Conversation:
    """What one user says.

    Attributes:
        number: of the conversation.
        session: its name, "" for none.
        said: tokens of each turn; the first begins with the shared ones.
    """

    number: int
    session: str
    said: list[list[int]] = field(default_factory=list)


def conversations(count: int, seed: int) -> list[Conversation]:
    """Return conversations: the even ones share one of some beginnings, the odd ones name a session."""
    random = Random(seed)

    def tokens(most: int) -> list[int]:
        return random.choices(range(3, VOCABULARY), k=random.randint(most // 2, most))

    shared = [random.choices(range(3, VOCABULARY), k=480) for _ in range(max(2, count // 20))]
    found = []
    for number in range(count):
        is_sharing = number % 2 == 0
        begin = random.choice(shared) if is_sharing else tokens(480)
        said = [begin + tokens(64), *(tokens(96) for _ in range(TURNS - 1))]
        found.append(Conversation(number, "" if is_sharing else f"session-{number}", said))
    return found


def blocks_of(them: Sequence[Conversation]) -> int:
    """Return how many distinct blocks the conversations have, about: answers are left out."""
    distinct: set[tuple[int, ...]] = set()
    for each in them:
        whole = [token for said in each.said for token in said]
        distinct.update(tuple(whole[:end]) for end in range(BLOCK_TOKENS, len(whole) + 1, BLOCK_TOKENS))
    return len(distinct)


class Engine(NamedTuple):
    """A running engine.

    Attributes:
        kind: vLLM or SGLang.
        port: where it serves.
        events: port of its KV events.
        replay: port of their replays.
    """

    kind: EngineKind
    port: int
    events: int
    replay: int

    @property
    def url(self) -> str:
        """Where it serves."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def instance(self) -> str:
        """Of the manager; the blocks of one engine are none of another's kind."""
        return f"routed-{self.kind.name}"


class Fleet(NamedTuple):
    """What runs: engines, and the manager."""

    engines: list[Engine]
    manager: Manager


@contextlib.contextmanager
def process(arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Run a process; it is gone after the block."""
    with log.open("ab") as output:
        running = subprocess.Popen(
            list(arguments), stdout=output, stderr=output, env={**os.environ, **(environment or {})}
        )
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(30)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait(30)


@contextlib.contextmanager
def engines(directory: Path, blocks: int) -> Iterator[Fleet]:
    """Run a manager, engines and the subscriber of their events."""
    model = directory / "model"
    write_llama(model)
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(site(["kvcm.limits.max_queue_ms=0"]))
        them = [Engine(kind, *(free_port() for _ in range(3))) for kind in KINDS]
        for name in {each.instance for each in them}:
            _register(running.manager, name)
        for number, each in enumerate(them):
            command, environment = _COMMANDS[each.kind.name](model, each, blocks)
            stack.enter_context(process(command, directory / f"engine-{number}.log", environment))
        config = directory / "subscriber.toml"
        tables = "\n".join(map(_subscribed, them))
        config.write_text(f'manager = ["127.0.0.1:{running.manager.ports["grpc"]}"]\n{tables}')
        subscriber = [str(Path(sys.executable).with_name("kvcm-subscriber")), "--config", str(config)]
        stack.enter_context(
            process([*subscriber, "--listen", f"127.0.0.1:{free_port()}"], directory / "subscriber.log")
        )
        try:
            asyncio.run(_until_served([each.url for each in them]))
        except TimeoutError:
            for log in directory.glob("*.log"):
                print(f"{log}:\n{log.read_text()[-4000:]}", file=sys.stderr)
            raise
        yield Fleet(them, running.manager)


def _register(manager: Manager, name: str) -> None:
    request = meta.RegisterInstanceRequest(instance_group="default", instance_id=name, block_size=BLOCK_TOKENS)
    request.model_deployment.model_name, request.model_deployment.dtype = MODEL, "float32"
    request.location_spec_infos.add(name="tp0", size=1 << 18)
    manager.call("RegisterInstance", request, meta.RegisterInstanceResponse)


def _published(engine: Engine) -> dict[str, Any]:
    endpoints = {"endpoint": f"tcp://*:{engine.events}", "replay_endpoint": f"tcp://*:{engine.replay}"}
    return {"publisher": "zmq", **endpoints}


def _vllm_command(model: Path, engine: Engine, blocks: int) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of an engine with so many blocks."""
    options = {
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": str(engine.port),
        "--dtype": "float32",
        "--max-model-len": "2048",
        "--max-num-seqs": "8",
        "--block-size": str(BLOCK_TOKENS),
        "--num-gpu-blocks-override": str(blocks),
        "--kv-events-config": json.dumps({"enable_kv_cache_events": True, **_published(engine)}),
    }
    words = [word for option in options.items() for word in option]
    flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
    environment = {**VLLM.environment, "VLLM_SERVER_DEV_MODE": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # as `vllm serve` needs it
    # Not `vllm serve`: the packages for CPUs have another name than its command asks for.
    command = [str(VLLM.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *words, *flags]
    return command, environment


def _sglang_command(model: Path, engine: Engine, blocks: int) -> tuple[list[str], dict[str, str]]:
    """Do the same for SGLang."""
    options = {
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": str(engine.port),
        "--device": "cpu",
        "--dtype": "float32",
        "--context-length": "2048",
        "--max-running-requests": "8",
        "--page-size": str(BLOCK_TOKENS),
        "--max-total-tokens": str(blocks * BLOCK_TOKENS),
        "--kv-events-config": json.dumps(_published(engine)),
    }
    words = [word for option in options.items() for word in option]
    flags = ["--disable-overlap-schedule", "--enable-cache-report"]
    environment = {**SGLANG.environment, "PYTHONPATH": os.pathsep.join(map(str, SGLANG.paths))}
    return [str(SGLANG.python), "-m", "sglang.launch_server", "--model-path", str(model), *words, *flags], environment


_COMMANDS: Final = {"vllm": _vllm_command, "sglang": _sglang_command}


def _subscribed(engine: Engine) -> str:
    values = {
        "engine": engine.kind.name,
        "engine_address": f"127.0.0.1:{engine.port}",
        "instance_id": engine.instance,
        "endpoint": f"tcp://127.0.0.1:{engine.events}",
        "replay_endpoint": f"tcp://127.0.0.1:{engine.replay}",
    }
    lines = [f'{name} = "{value}"' for name, value in values.items()]
    return "\n".join(["[[engine]]", *lines, f"block_tokens = {BLOCK_TOKENS}", ""])


async def _until_served(urls: Sequence[str]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    async with aiohttp.ClientSession() as client:
        waiting = list(urls)
        while waiting:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"{waiting[0]}/health") as answer:
                    if answer.status == 200:
                        waiting.pop(0)
                        continue
            if time.monotonic() > deadline:
                raise TimeoutError(f"{waiting} do not serve")
            await asyncio.sleep(_POLL_SECONDS)


# One policy.


class Result(NamedTuple):
    """What a policy made of the conversations.

    Attributes:
        prompt: tokens of all prompts.
        cached: those of them that engines had.
        seconds: that all of it took.
        answers: tokens by conversation and turn.
        served: requests by engine.
    """

    prompt: int
    cached: int
    seconds: float
    answers: dict[tuple[int, int], list[int]]
    served: dict[str, int]

    @property
    def hit_rate(self) -> float:
        """Part of the prompts that engines had."""
        return self.cached / self.prompt


class Route(Protocol):
    """Where requests are sent."""

    def begin(self, prompt: Sequence[int]) -> str:
        """Return the url for a request."""

    def end(self, url: str) -> None:
        """A request has its answer."""


class One:
    """All requests go to one url."""

    def __init__(self, url: str) -> None:
        self._url = url

    def begin(self, _prompt: Sequence[int]) -> str:
        return self._url

    def end(self, _url: str) -> None:
        pass


class Oracle:
    """Requests go to the engine that has most of the prompt, as the engines' own events say a moment before.

    Args:
        engines: with empty caches.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = {each.url: each for each in engines}
        self._sockets = {each.url: self._connected(each) for each in engines}
        self._copies: dict[str, Counter[int | bytes]] = {each.url: Counter() for each in engines}
        self._busy = Counter({each.url: 0 for each in engines})

    def _connected(self, engine: Engine) -> Any:
        socket = zmq.Context.instance().socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(f"tcp://127.0.0.1:{engine.events}")
        return socket

    def begin(self, prompt: Sequence[int]) -> str:
        socket: Any
        for url, socket in self._sockets.items():
            while socket.poll(0):
                self._apply(url, decode_batch(socket.recv_multipart()[2]).events)
        hashes = {kind: _event_hashes(kind, prompt) for kind in SCHEMES}
        held = {url: self._held(url, hashes[each.kind.name]) for url, each in self._engines.items()}
        chosen = min(held, key=lambda url: (-held[url], self._busy[url], url))
        self._busy[chosen] += 1
        return chosen

    def end(self, url: str) -> None:
        self._busy[url] -= 1

    def _held(self, url: str, hashes: Sequence[int]) -> int:
        copies = self._copies[url]
        return next((number for number, each in enumerate(hashes) if not copies[each]), len(hashes))

    def _apply(self, url: str, events: Sequence[Any]) -> None:
        copies = self._copies[url]
        for event in events:
            if isinstance(event, AllBlocksCleared):
                copies.clear()
            elif isinstance(event, BlockStored | BlockRemoved):
                for each in event.hashes:
                    # vLLM publishes each copy of a block; SGLang has one, and may say so more than once.
                    stored = isinstance(event, BlockStored)
                    is_one = self._engines[url].kind is SGLANG
                    copies[each] = int(stored) if is_one else max(0, copies[each] + (1 if stored else -1))

    def close(self) -> None:
        """Close the sockets."""
        for socket in self._sockets.values():
            socket.close()


def _event_hashes(kind: str, prompt: Sequence[int]) -> list[int]:
    """Return the hashes of a prompt's blocks as events of an engine have them."""
    digests = block_hashes(SCHEMES[kind], prompt)
    if kind == "vllm":
        return [int.from_bytes(each[-8:], "big") for each in digests]
    return [int.from_bytes(each[:8], "big", signed=True) for each in digests]


async def place(route: Route, them: Sequence[Conversation], clients: int) -> Result:
    """Send all conversations. Some are active at a time, and any of these has the next turn."""
    answers: dict[tuple[int, int], list[int]] = {}
    totals, served = [0, 0], dict[str, int]()
    histories: dict[int, list[int]] = {each.number: [] for each in them}
    begin = time.monotonic()
    async with aiohttp.ClientSession() as client:

        async def say(each: Conversation, turn: int) -> None:
            prompt = histories[each.number] + each.said[turn]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0.0}
            headers = {"X-Session-ID": each.session} if each.session else {}
            url = route.begin(prompt)
            async with client.post(
                f"{url}/v1/completions", json=body | {"return_token_ids": True}, headers=headers
            ) as answer:
                found = await answer.json()
                assert answer.status == 200, found
                engine = answer.headers.get("X-Kvcm-Engine", url)
            route.end(url)
            usage = found["usage"]
            said = found["choices"][0]["token_ids"]
            answers[each.number, turn] = said
            histories[each.number] = prompt + said
            served[engine] = served.get(engine, 0) + 1
            totals[0] += usage["prompt_tokens"]
            totals[1] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

        coming, random = list(reversed(them)), Random(1)
        idle = [(coming.pop(), 0) for _ in range(min(ACTIVE, len(coming)))]

        async def speak() -> None:
            while idle:
                each, turn = idle.pop(random.randrange(len(idle)))
                await say(each, turn)
                if turn + 1 < TURNS:
                    idle.append((each, turn + 1))
                elif coming:
                    idle.append((coming.pop(), 0))

        await asyncio.gather(*(speak() for _ in range(clients)))
        assert len(answers) == len(them) * TURNS
    return Result(totals[0], totals[1], time.monotonic() - begin, answers, served)


async def _emptied(fleet: Fleet) -> None:
    """Empty the caches of all engines, and wait until the manager knows it."""
    async with aiohttp.ClientSession() as client:
        for each in fleet.engines:
            path = "reset_prefix_cache" if each.kind is VLLM else "flush_cache"
            async with client.post(f"{each.url}/{path}") as answer:
                assert answer.status == 200, await answer.text()
            body = {"model": MODEL, "prompt": [3], "max_tokens": 1}  # events are published with the steps of an engine
            async with client.post(f"{each.url}/v1/completions", json=body) as answer:
                assert answer.status == 200
    deadline = time.monotonic() + 30.0
    while _resident(fleet):
        assert time.monotonic() < deadline, "the manager still knows blocks of empty engines"
        await asyncio.sleep(_POLL_SECONDS)


def _resident(fleet: Fleet) -> int:
    """Return the blocks that the manager knows of; -1 while an engine does not report."""
    reporters = []
    for name in {each.instance for each in fleet.engines}:
        request = pb.ListReportersRequest(instance_id=name)
        listed = fleet.manager.call("/kvcm.v1.ResidencyService/ListReporters", request, pb.ListReportersResponse)
        reporters += listed.reporters
    if len(reporters) < len(fleet.engines):
        return -1
    return sum(medium.blocks for reporter in reporters for medium in reporter.media)


def measured(fleet: Fleet, policy: str, them: Sequence[Conversation], directory: Path) -> Result:
    """Run a gateway with a policy, and all conversations through it; or send them without one."""
    asyncio.run(_emptied(fleet))
    if policy == ALONE:
        return asyncio.run(place(One(fleet.engines[0].url), them, CLIENTS))
    if policy == ORACLE:
        with contextlib.closing(Oracle(fleet.engines)) as oracle:
            return asyncio.run(place(oracle, them, CLIENTS))
    port = free_port()
    command = [sys.executable, "-m", "kvcm", "gateway", "--policy", policy, "--port", str(port)]
    command += ["--manager", f"127.0.0.1:{fleet.manager.ports['grpc']}"]
    command += [word for each in fleet.engines for word in ("--engine", f"{each.url}={each.instance}")]
    url = f"http://127.0.0.1:{port}"
    with process(command, directory / f"gateway-{policy}.log"):
        asyncio.run(_until_ready(url))
        return asyncio.run(place(One(url), them, CLIENTS))


async def _until_ready(url: str) -> None:
    deadline = time.monotonic() + 60.0
    async with aiohttp.ClientSession() as client:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with client.get(f"{url}/readyz") as answer:
                    if answer.status == 200:
                        return
            assert time.monotonic() < deadline, "the gateway is not ready"
            await asyncio.sleep(_POLL_SECONDS)


def rows_of(results: Mapping[str, Result], case: str) -> Iterator[Row]:
    """Yield the figures, and whether the answers of all policies are equal."""
    best = results["kvcm"]
    for policy, result in results.items():
        ratio = best.hit_rate / result.hit_rate if result.hit_rate else float("inf")
        least = LEAST_AGAINST.get(policy)
        target = f"kvcm / {policy} >= {least}" if least else ""
        is_met = ratio >= least if least else None
        yield Row(f"{case}, {policy}", "hit rate in engines", result.hit_rate, "", best.hit_rate, ratio, target, is_met)
        yield Row(f"{case}, {policy}", "time of all turns", result.seconds, "s")
        yield Row(f"{case}, {policy}", "most requests of one engine", max(result.served.values()), "")
    expected = results[ALONE].answers
    differing = sum(answer != expected[turn] for result in results.values() for turn, answer in result.answers.items())
    yield Row(case, "answers that one engine alone gives otherwise", differing, "", target="= 0", ok=differing == 0)


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    missing = "; ".join(filter(None, dict.fromkeys(kind.missing for kind in KINDS)))
    if missing:
        return 0 if publish("routing", [left_out("engines", missing, options.quick)], options.json) else 1
    count = 12 if options.quick else 100
    them = conversations(count, 5)
    blocks = max(LEAST_BLOCKS, int(blocks_of(them) * CACHED_PART / len(KINDS)))
    case = f"{len(KINDS)} engines of {blocks} blocks, {count} conversations of {TURNS} turns"
    with tempfile.TemporaryDirectory(prefix="kvcm-routing-") as temporary:
        directory = Path(temporary)
        with engines(directory, blocks) as fleet:
            results = {policy: measured(fleet, policy, them, directory) for policy in (ALONE, ORACLE, *POLICIES)}
    met = publish("routing: reuse of engines' own KV by policy", list(rows_of(results, case)), options.json)
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
