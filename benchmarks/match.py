"""Claim: answering a match from encoded records costs a fraction of building messages.

Part one, in one process: request bytes → answer bytes of a prefix match over 1,024 keys, through the manager's own call
path, against a dict of plain records whose messages are built for every answer. Windows of both sides alternate.

Part two: server CPU per request over loopback gRPC, as the operating system counts it, beside a bare handler that reads
the same request and returns an equally large prepared answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))

import grpc
import grpc.aio
from ports import free_port
from report import Row, arguments, publish

from kvcm.app import Manager
from kvcm.config import Settings
from kvcm.model.errors import ErrorCode
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.service.call_metrics import CallMetrics
from kvcm.service.calls import Call, Caller
from kvcm.service.limits import RequestLimits
from kvcm.service.meta_api import MetaApi
from kvcm.telemetry.logs import LEVELS, configure_logs
from kvcm.telemetry.metrics import ApiMetrics

BLOCKS = 1024
SPEC_BYTES = 4096
META = "/kv_cache_manager.proto.meta.MetaService/"


def registration(instance_id: str, spec_count: int) -> pb.RegisterInstanceRequest:
    """Return a registration with so many specs of equal size."""
    request = pb.RegisterInstanceRequest(instance_group="default", instance_id=instance_id, block_size=64)
    request.model_deployment.model_name, request.model_deployment.dtype = "model", "float16"
    for rank in range(spec_count):
        request.location_spec_infos.add(name=f"tp{rank}", size=SPEC_BYTES)
    return request


def match_request(instance_id: str, keys: list[int], wanted: str = "") -> bytes:
    """Return a prefix match as bytes, for one spec or for all."""
    request = pb.GetCacheLocationRequest(
        trace_id="bench", instance_id=instance_id, query_type=pb.QT_PREFIX_MATCH, block_keys=keys
    )
    if wanted:
        request.location_spec_names.append(wanted)
    return request.SerializeToString()


# ---- part one: in one process ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def data_calls(directory: str) -> AsyncIterator[tuple[dict[str, Call], Caller]]:
    """Yield the manager's data plane without its listeners."""
    async with Manager(Settings(data_dir=directory)).opened() as rooms:
        api = MetaApi(rooms.cache, rooms.registry, rooms.leadership, RequestLimits())
        caller = Caller([CallMetrics(ApiMetrics())], lambda _plane: None, lambda _id: {})
        yield {call.name: call for call in api.calls()}, caller


async def store(calls: dict[str, Call], caller: Caller, instance_id: str, spec_count: int, keys: list[int]) -> None:
    """Register an instance and store blocks."""
    await caller.answer(calls["RegisterInstance"], registration(instance_id, spec_count))
    start = pb.StartWriteCacheRequest(instance_id=instance_id, block_keys=keys, write_timeout_seconds=60)
    started = (await caller.answer(calls["StartWriteCache"], start)).complete()
    finish = pb.FinishWriteCacheRequest(instance_id=instance_id, write_session_id=started.write_session_id)
    finish.success_blocks.offset = len(keys)
    finished = (await caller.answer(calls["FinishWriteCache"], finish)).complete()
    assert finished.header.status.code == ErrorCode.OK, finished


Plain = tuple[int, tuple[tuple[str, str], ...]]


def build_answer(records: dict[int, Plain], body: bytes) -> bytes:
    """The other side: look the records up and build a message per block."""
    request = pb.GetCacheLocationRequest.FromString(body)
    response = pb.GetCacheLocationResponse()
    response.header.status.code = pb.OK
    response.header.request_id = f"{request.trace_id}_{time.time_ns() // 1000}"
    wanted = set(request.location_spec_names)
    for key in request.block_keys:
        record = records.get(key)
        if record is None:
            break
        location = response.locations.add(type=record[0], spec_size=len(record[1]))
        for name, uri in record[1]:
            if not wanted or name in wanted:
                location.location_specs.add(name=name, uri=uri)
    return response.SerializeToString()


async def in_process(spec_count: int, rounds: int, repeat: int, wanted: str = "") -> Row:
    """Compare both sides on the same blocks; windows alternate, the median window counts.

    Args:
        spec_count: specs per block.
        rounds: windows of each side.
        repeat: answers per window.
        wanted: name of the only spec to return, "" for all.
    """
    async with contextlib.AsyncExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        calls, caller = await stack.enter_async_context(data_calls(directory))
        keys = [7919 * (i + 1) for i in range(BLOCKS)]
        await store(calls, caller, "bench", spec_count, keys)
        body = match_request("bench", keys, wanted)
        call = calls["GetCacheLocation"]

        async def encoded() -> bytes:
            return (await caller.answer(call, pb.GetCacheLocationRequest.FromString(body))).encoded()

        complete = await caller.answer(call, pb.GetCacheLocationRequest.FromString(match_request("bench", keys)))
        records: dict[int, Plain] = {
            key: (location.type, tuple((spec.name, spec.uri) for spec in location.location_specs))
            for key, location in zip(keys, complete.complete().locations, strict=True)
        }
        answer = pb.GetCacheLocationResponse.FromString(await encoded())
        built = pb.GetCacheLocationResponse.FromString(build_answer(records, body))
        assert list(built.locations) == list(answer.locations), "both sides must give the same answer"
        ours, theirs = [], []
        for _ in range(rounds):
            begin = time.perf_counter()
            for _ in range(repeat):
                await encoded()
            middle = time.perf_counter()
            for _ in range(repeat):
                build_answer(records, body)
            theirs.append((time.perf_counter() - middle) / repeat * 1e6)
            ours.append((middle - begin) / repeat * 1e6)
    value, baseline = statistics.median(ours), statistics.median(theirs)
    target = 10.0 if spec_count == 8 and not wanted else 8.0
    ratio = baseline / value
    specs = f"{spec_count} specs, one asked for" if wanted else f"{spec_count} spec{'s' if spec_count > 1 else ''}"
    case = f"prefix match, {BLOCKS} hits, {specs}, in process"
    return Row(case, "time per answer", value, "us", baseline, ratio, f"messages/encoded >= {target}", ratio >= target)


# ---- part two: over loopback gRPC -----------------------------------------------------------------------------------


class Server(NamedTuple):
    """A running server process and a channel to it."""

    pid: int
    channel: grpc.aio.Channel

    def cpu_seconds(self) -> float:
        """CPU time of the process so far, user and system."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def process(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a Python process; it is gone after the block."""
    running = subprocess.Popen([sys.executable, *arguments], text=True, **options)
    try:
        yield running
    finally:
        running.terminate()
        running.wait(20)


@contextlib.asynccontextmanager
async def servers() -> Any:
    """Yield the manager and the floor."""
    unlimited = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
    ports = {name: free_port() for name in ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")}
    settings = [option for name, port in ports.items() for option in ("-e", f"kvcm.service.{name}={port}")]
    floor_file = str(Path(__file__).with_name("floor_server.py"))
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        quiet = {"stderr": subprocess.DEVNULL}
        manager = stack.enter_context(process("-m", "kvcm", "serve", "--data-dir", directory, *settings, **quiet))
        floor = stack.enter_context(process(floor_file, stdout=subprocess.PIPE))
        assert floor.stdout is not None
        floor_port = int(floor.stdout.readline())
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{ports['rpc_port']}", options=unlimited) as ours,
            grpc.aio.insecure_channel(f"127.0.0.1:{floor_port}", options=unlimited) as theirs,
        ):
            await asyncio.wait_for(ours.channel_ready(), 20)
            yield Server(manager.pid, ours), Server(floor.pid, theirs)


Job = Callable[[], Awaitable[None]]


async def cpu_per_call(server: Server, job: Job, count: int) -> float:
    """Return the server's CPU microseconds per run of a job."""
    begin = server.cpu_seconds()
    for _ in range(count):
        await job()
    return (server.cpu_seconds() - begin) / count * 1e6


async def compare(case: str, pair: tuple[Server, Server], ours: Job, floor: Job, plan: tuple[int, int]) -> Row:
    """Alternate windows of both servers and report the mean CPU of each."""
    rounds, count = plan
    await ours(), await floor()
    value = baseline = 0.0
    for _ in range(rounds):
        value += await cpu_per_call(pair[0], ours, count) / rounds
        baseline += await cpu_per_call(pair[1], floor, count) / rounds
    return Row(case, "server CPU per request", value, "us", baseline, value / baseline if baseline else None)


def sender(server: Server, method: str, body: bytes) -> Callable[[], Awaitable[bytes]]:
    """Return a coroutine function that sends prepared bytes and returns the answer's bytes."""
    call = server.channel.unary_unary(method)

    async def send() -> bytes:
        answer: bytes = await call(body)
        return answer

    return send


async def match_case(pair: tuple[Server, Server], case: str, keys: list[int], plan: tuple[int, int]) -> Row:
    """Measure a match."""
    body = match_request("bench", keys)
    ours = sender(pair[0], f"{META}GetCacheLocation", body)
    floor = sender(pair[1], f"/floor.Floor/Answer{len(await ours())}", body)
    return await compare(case, pair, ours, floor, plan)  # type: ignore[arg-type]


async def write_case(pair: tuple[Server, Server], blocks: int, plan: tuple[int, int]) -> Row:
    """Measure start and finish of fresh blocks; the floor answers two requests of the same sizes."""
    fresh = iter(range(blocks << 40, 1 << 62, blocks))  # cases of different size share no key
    start_call = pair[0].channel.unary_unary(f"{META}StartWriteCache")
    finish_call = pair[0].channel.unary_unary(f"{META}FinishWriteCache")
    sizes: list[tuple[bytes, int]] = []

    async def ours() -> None:
        first = next(fresh)
        start = pb.StartWriteCacheRequest(
            instance_id="bench", block_keys=range(first, first + blocks), write_timeout_seconds=60
        ).SerializeToString()
        answer = await start_call(start)
        session = pb.StartWriteCacheResponse.FromString(answer).write_session_id
        finish = pb.FinishWriteCacheRequest(instance_id="bench", write_session_id=session)
        finish.success_blocks.offset = blocks
        body = finish.SerializeToString()
        finished = await finish_call(body)
        assert pb.CommonResponse.FromString(finished).header.status.code == pb.OK
        sizes[:] = [(start, len(answer)), (body, len(finished))]

    await ours()
    floors = [sender(pair[1], f"/floor.Floor/Answer{size}", body) for body, size in sizes]

    async def floor() -> None:
        for send in floors:
            await send()

    return await compare(f"start + finish, {blocks} fresh blocks", pair, ours, floor, plan)


async def over_grpc(quick: bool) -> list[Row]:
    """Measure every case of part two."""
    rounds = 2 if quick else 5
    async with servers() as pair:
        register = pair[0].channel.unary_unary(f"{META}RegisterInstance")
        await register(registration("bench", 1).SerializeToString())
        keys = [7919 * (i + 1) for i in range(BLOCKS)]
        start_call = pair[0].channel.unary_unary(f"{META}StartWriteCache")
        started = pb.StartWriteCacheResponse.FromString(
            await start_call(
                pb.StartWriteCacheRequest(
                    instance_id="bench", block_keys=keys, write_timeout_seconds=60
                ).SerializeToString()
            )
        )
        finish = pb.FinishWriteCacheRequest(instance_id="bench", write_session_id=started.write_session_id)
        finish.success_blocks.offset = BLOCKS
        await pair[0].channel.unary_unary(f"{META}FinishWriteCache")(finish.SerializeToString())
        missing = [-key for key in keys]
        count = 50 if quick else 400
        return [
            await match_case(pair, "match, 64 hits", keys[:64], (rounds, 2 * count)),
            await match_case(pair, "match, 1,024 hits", keys, (rounds, count)),
            await match_case(pair, "match, 1,024 misses", missing, (rounds, count)),
            await write_case(pair, 64, (rounds, count // 2)),
            await write_case(pair, 1024, (rounds, count // 8)),
        ]


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    configure_logs(LEVELS["ERROR"])
    rounds, repeat = (3, 20) if options.quick else (15, 100)
    cases = ((1, ""), (8, ""), (8, "tp3"))
    rows = [asyncio.run(in_process(specs, rounds, repeat, wanted)) for specs, wanted in cases]
    rows += asyncio.run(over_grpc(options.quick))
    met = publish("match: encoded records against built messages", rows, options.json)
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
