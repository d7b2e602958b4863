"""Claim: engines behind `kvcm gateway` reuse more of their own KV with the policy `kvcm` than with the others.

Real vLLM engines on CPUs publish KV events, `kvcm-subscriber` reports their blocks to a manager, and `kvcm gateway`
places the turns of conversations. Half of the conversations name a session; the other half share long beginnings, some
with each, and name none. The caches of all engines together hold a part of the blocks. The policies take turns on the
same engines, whose caches are emptied in between, with the same conversations in the same order; so answers have to be
equal.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import aiohttp
from report import Row, arguments, left_out, publish
from server_process import free_port
from service_site import Manager, site

from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "engines"))
from engine_kinds import VLLM
from tiny_models import write_llama

INSTANCE: Final = "routed"
MODEL: Final = "tiny"
VOCABULARY: Final = 1024
BLOCK_TOKENS: Final = 32
CACHED_PART: Final = 0.4
ENGINES: Final = 2
TURNS: Final = 4
ANSWER_TOKENS: Final = 16
CLIENTS: Final = 4
ACTIVE: Final = 24  # conversations at a time
LEAST_BLOCKS: Final = 128  # of an engine: the longest prompts of its clients have to fit
POLICIES: Final = ("round_robin", "consistent_hash", "kvcm")
LEAST_AGAINST: Final = {"round_robin": 1.5, "consistent_hash": 1.1}
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


class Fleet(NamedTuple):
    """What runs: engines by url, and the manager."""

    urls: list[str]
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
        _register(running.manager)
        urls, tables = [], []
        for number in range(ENGINES):
            port, events, replay = (free_port() for _ in range(3))
            command = _engine_command(model, port, events, replay, blocks)
            log = directory / f"engine-{number}.log"
            quiet = {**VLLM.environment, "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1"}
            quiet["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # as `vllm serve` needs it
            stack.enter_context(process(command, log, quiet))
            urls.append(f"http://127.0.0.1:{port}")
            tables.append(_subscribed(port, events, replay))
        config = directory / "subscriber.toml"
        config.write_text(f'manager = ["127.0.0.1:{running.manager.ports["grpc"]}"]\n' + "\n".join(tables))
        subscriber = [str(Path(sys.executable).with_name("kvcm-subscriber")), "--config", str(config)]
        stack.enter_context(
            process([*subscriber, "--listen", f"127.0.0.1:{free_port()}"], directory / "subscriber.log")
        )
        try:
            asyncio.run(_until_served(urls))
        except TimeoutError:
            for log in directory.glob("*.log"):
                print(f"{log}:\n{log.read_text()[-4000:]}", file=sys.stderr)
            raise
        yield Fleet(urls, running.manager)


def _register(manager: Manager) -> None:
    request = meta.RegisterInstanceRequest(instance_group="default", instance_id=INSTANCE, block_size=BLOCK_TOKENS)
    request.model_deployment.model_name, request.model_deployment.dtype = MODEL, "float32"
    request.location_spec_infos.add(name="tp0", size=1 << 18)
    manager.call("RegisterInstance", request, meta.RegisterInstanceResponse)


def _engine_command(model: Path, port: int, events: int, replay: int, blocks: int) -> list[str]:
    published = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{replay}",
    }
    options = {
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "2048",
        "--max-num-seqs": "8",
        "--block-size": str(BLOCK_TOKENS),
        "--num-gpu-blocks-override": str(blocks),
        "--kv-events-config": json.dumps(published),
    }
    words = [word for option in options.items() for word in option]
    flags = ["--enforce-eager", "--enable-prompt-tokens-details"]
    # Not `vllm serve`: the packages for CPUs have another name than its command asks for.
    return [str(VLLM.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *words, *flags]


def _subscribed(port: int, events: int, replay: int) -> str:
    values = {
        "engine": "vllm",
        "engine_address": f"127.0.0.1:{port}",
        "instance_id": INSTANCE,
        "endpoint": f"tcp://127.0.0.1:{events}",
        "replay_endpoint": f"tcp://127.0.0.1:{replay}",
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


async def place(url: str, them: Sequence[Conversation], clients: int) -> Result:
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
            async with client.post(
                f"{url}/v1/completions", json=body | {"return_token_ids": True}, headers=headers
            ) as answer:
                found = await answer.json()
                assert answer.status == 200, found
                engine = answer.headers["X-Kvcm-Engine"]
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
        for url in fleet.urls:
            async with client.post(f"{url}/reset_prefix_cache") as answer:
                assert answer.status == 200, await answer.text()
            body = {"model": MODEL, "prompt": [3], "max_tokens": 1}  # events are published with the steps of an engine
            async with client.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200
    deadline = time.monotonic() + 30.0
    while _resident(fleet):
        assert time.monotonic() < deadline, "the manager still knows blocks of empty engines"
        await asyncio.sleep(_POLL_SECONDS)


def _resident(fleet: Fleet) -> int:
    """Return the blocks that the manager knows of; -1 while an engine does not report."""
    request = pb.ListReportersRequest(instance_id=INSTANCE)
    listed = fleet.manager.call("/kvcm.v1.ResidencyService/ListReporters", request, pb.ListReportersResponse)
    if len(listed.reporters) < len(fleet.urls):
        return -1
    return sum(medium.blocks for reporter in listed.reporters for medium in reporter.media)


def measured(fleet: Fleet, policy: str, them: Sequence[Conversation], directory: Path) -> Result:
    """Run a gateway with a policy, and all conversations through it."""
    asyncio.run(_emptied(fleet))
    port = free_port()
    command = [sys.executable, "-m", "kvcm", "gateway", "--policy", policy, "--port", str(port)]
    command += ["--manager", f"127.0.0.1:{fleet.manager.ports['grpc']}"]
    command += [word for url in fleet.urls for word in ("--engine", f"{url}={INSTANCE}")]
    url = f"http://127.0.0.1:{port}"
    with process(command, directory / f"gateway-{policy}.log"):
        asyncio.run(_until_ready(url))
        return asyncio.run(place(url, them, CLIENTS))


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
    differing = sum(result.answers != best.answers for result in results.values())
    yield Row(case, "policies with other answers", differing, "", target="= 0", ok=differing == 0)


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    if VLLM.missing:
        return 0 if publish("routing", [left_out("vLLM engines", VLLM.missing, options.quick)], options.json) else 1
    count = 12 if options.quick else 100
    them = conversations(count, 5)
    blocks = max(LEAST_BLOCKS, int(blocks_of(them) * CACHED_PART / ENGINES))
    case = f"{ENGINES} engines of {blocks} blocks, {count} conversations of {TURNS} turns"
    with tempfile.TemporaryDirectory(prefix="kvcm-routing-") as temporary:
        directory = Path(temporary)
        with engines(directory, blocks) as fleet:
            results = {policy: measured(fleet, policy, them, directory) for policy in POLICIES}
    met = publish("routing: reuse of engines' own KV by policy", list(rows_of(results, case)), options.json)
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
