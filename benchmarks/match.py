"""Claim: answering a match from encoded records costs a fraction of building messages.

In one process: request bytes → answer bytes of a prefix match over 1,024 keys, through the manager's own call path,
against a dict of plain records whose messages are built for every answer. Windows of both sides alternate.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator

from report import Row, arguments, publish

from kvcm.app import Manager
from kvcm.config import Settings
from kvcm.model.errors import ErrorCode
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.service.calls import Call, Caller, CallRecorder
from kvcm.service.meta_api import MetaApi
from kvcm.service.request_limits import RequestLimits
from kvcm.telemetry.logs import LEVELS, configure_logs
from kvcm.telemetry.metrics import ApiMetrics

BLOCKS = 1024
SPEC_BYTES = 4096


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


@contextlib.asynccontextmanager
async def data_calls(directory: str) -> AsyncIterator[tuple[dict[str, Call], Caller]]:
    """Yield the manager's data plane without its listeners."""
    async with Manager(Settings(data_dir=directory)).opened() as components:
        api = MetaApi(components.cache, components.registry, components.leadership, RequestLimits())
        caller = Caller(CallRecorder(ApiMetrics()), lambda _plane: None, lambda _id: {})
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


def main() -> int:
    options = arguments(__doc__ or "").parse_args()
    configure_logs(LEVELS["ERROR"])
    rounds, repeat = (3, 20) if options.quick else (15, 100)
    cases = ((1, ""), (8, ""), (8, "tp3"))
    rows = [asyncio.run(in_process(specs, rounds, repeat, wanted)) for specs, wanted in cases]
    met = publish("match: encoded records against built messages", rows, options.json)
    return 0 if met or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
