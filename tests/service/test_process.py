"""A manager process beside its calls: threads, memory, background duties, faults on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import platform
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from fake_clock import FakeClock
from ports import free_port
from probe_clients import ask
from rest_client import RestClient
from test_start_and_stop import _refusal as refusal_of
from test_transport_drivers import Api, post
from test_transport_process import ManagerProcess, manager, manager_of_module

from kvcm import components as spaces_module
from kvcm.app import Manager
from kvcm.config import DEBUG_PORT_OFFSET, Settings
from kvcm.index.meta_index import IndexHandle
from kvcm.model.storages import StorageConfig, TairMemPoolStorageSpec
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import debug_service_pb2 as pb
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.admin_service_pb2_grpc import AdminServiceStub
from kvcm.protocol.debug_service_pb2_grpc import DebugServiceStub
from kvcm.protocol.meta_service_pb2_grpc import MetaServiceStub
from kvcm.reclaim.scrub import PoolLeaks, StorageScrubber
from kvcm.storage.backend import Allocation, Part
from kvcm.storage.mempool import PoolReport

FILE_EVENTS = {"open", "os.mkdir", "os.remove", "os.truncate", "os.listdir", "os.scandir", "os.rename"}


class Watch:
    """Where blocking work happened: names of events by whether they ran on this thread."""

    def __init__(self, directory: Path) -> None:
        self.on_loop: list[str] = []
        self.elsewhere: list[str] = []
        self.is_on = True
        self._directory = str(directory)
        self._loop_thread = threading.get_ident()

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_on and event in FILE_EVENTS and str(arguments[0]).startswith(self._directory):
            self.note(event)

    def note(self, event: str) -> None:
        (self.on_loop if threading.get_ident() == self._loop_thread else self.elsewhere).append(event)


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch(tmp_path)
    scrypt = hashlib.scrypt

    def spy(*arguments: Any, **options: Any) -> bytes:
        watch.note("scrypt")
        return scrypt(*arguments, **options)

    monkeypatch.setattr(hashlib, "scrypt", spy)
    sys.addaudithook(watch)
    yield watch
    watch.is_on = False  # an audit hook cannot be taken out


def test_the_watch_sees_blocking_work(watch: Watch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    hashlib.scrypt(b"", salt=b"salt", n=2, r=1, p=1)
    assert watch.on_loop == ["open", "scrypt"] or watch.on_loop == ["scrypt"]
    with (tmp_path / "file").open():
        assert "open" in watch.on_loop


async def test_no_call_blocks_the_loop(tmp_path: Path, watch: Watch) -> None:
    ports = Settings(rpc_port=0, http_port=0, admin_rpc_port=0, admin_http_port=0)
    manager = Manager(replace(ports, data_dir=str(tmp_path), max_queue_ms=60_000))
    async with manager.running() as endpoint:
        watch.on_loop.clear()  # before it serves, a manager may block
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.admin_rpc_port}") as admin_channel,
            grpc.aio.insecure_channel(f"127.0.0.1:{endpoint.meta_rpc_port}") as channel,
        ):
            await administer(AdminServiceStub(admin_channel), tmp_path)
            await write_and_drop(MetaServiceStub(channel))
            async with asyncio.timeout(30):
                while "os.remove" not in watch.elsewhere:
                    await asyncio.to_thread(int)  # one turn of the threads that delete
    assert watch.on_loop == []
    assert {"scrypt", "os.mkdir", "os.remove"} <= set(watch.elsewhere)


async def administer(admins: AdminServiceStub, tmp_path: Path) -> None:
    added = await admins.AddAccount(admin.AddAccountRequest(user_name="ada", password="secret"))
    assert added.header.status.code == admin.OK
    storage = admin.StorageConfig(global_unique_name="more", nfs=admin.NfsStorageSpec(root_path=f"{tmp_path}/more/"))
    stored = await admins.AddStorage(admin.AddStorageRequest(storage=storage))
    assert stored.header.status.code == admin.OK, stored


async def write_and_drop(engines: MetaServiceStub) -> None:
    request = meta.RegisterInstanceRequest(instance_group="default", instance_id="engine", block_size=1)
    request.location_spec_infos.add(name="tp0", size=1)
    request.model_deployment.model_name, request.model_deployment.dtype = "model", "float32"
    assert (await engines.RegisterInstance(request)).header.status.code == meta.OK
    keys = list(range(64))
    started = await engines.StartWriteCache(meta.StartWriteCacheRequest(instance_id="engine", block_keys=keys))
    assert len(started.locations) == len(keys)
    finish = meta.FinishWriteCacheRequest(instance_id="engine", write_session_id=started.write_session_id)
    finish.success_blocks.offset = 0
    assert (await engines.FinishWriteCache(finish)).header.status.code == meta.OK


NEEDS_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def _printed(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


_FAULTS = """
import resource

def faults():
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(100):
        bytes(1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin

before = faults()  # before imports: where modules are compiled, a large piece of the heap is free afterwards
from kvcm.app import configure_allocator
assert configure_allocator()
faults()
print(before, faults())
"""


@NEEDS_GLIBC
@pytest.mark.ci
def test_large_pieces_are_taken_again_without_page_faults() -> None:
    before, after = map(int, _printed(_FAULTS).split())
    assert after < before / 10, (before, after)


_ARENAS = """
import ctypes, re, threading
from kvcm.app import limit_arenas

assert limit_arenas()
barrier = threading.Barrier(33)

def allocate():
    kept = [bytearray(4096) for _ in range(100)]
    barrier.wait()

for thread in [threading.Thread(target=allocate) for _ in range(32)]:
    thread.start()
libc = ctypes.CDLL(None)
libc.fopen.restype, libc.malloc_info.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
file = libc.fopen(b"/dev/stdout", b"w")
libc.malloc_info(0, file)
libc.fclose(file)
barrier.wait()
"""


@NEEDS_GLIBC
@pytest.mark.ci
def test_threads_share_a_few_arenas() -> None:
    printed = _printed(_ARENAS)
    assert 1 < printed.count("<heap ") <= 4, printed


_CYCLES = """
import weakref
from kvcm.app import configure_garbage_collector

class Cycle:
    def __init__(self):
        self.self = self

configure_garbage_collector()
most, left = 0, weakref.WeakSet()
for _ in range(100_000):
    left.add(Cycle())
    most = max(most, len(left))
print(most)
"""


@pytest.mark.ci
def test_cycles_of_requests_do_not_pile_up() -> None:
    printed = _printed(_CYCLES)
    assert 1000 < int(printed) <= 20_001, printed


_TRIMMED = """
import os
from kvcm.app import configure_allocator, trim_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

assert configure_allocator()
start = resident()
pieces = [bytearray(b"x" * 50_000) for _ in range(4000)]
kept = pieces[::50]
del pieces
before = resident() - start
assert trim_memory()
print(before, resident() - start)
"""


@NEEDS_GLIBC
@pytest.mark.ci
def test_free_memory_between_blocks_in_use_is_given_back() -> None:
    before, after = map(int, _printed(_TRIMMED).split())
    assert before > 140 > 80 > after, (before, after)  # some of the 200 were free already, where modules were compiled


MIB = 1 << 20
_DEADLINE_SECONDS = 60.0


@dataclass
class EndlessIndexes:
    """Indexes that are read for ever."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)

    def indexes(self) -> Iterable[IndexHandle]:
        return []

    async def unreadable_instances(self) -> Sequence[str]:
        self.asked.set()
        await asyncio.Event().wait()
        return []


async def test_memory_that_is_gone_is_forgotten_while_a_pool_is_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces_module, "_POOLS_SECONDS", 0.0)
    clock, indexes = FakeClock(), EndlessIndexes()
    async with Manager(Settings(), clock).opened() as opened:
        await opened.leadership.tick()
        pool_config = StorageConfig("p", TairMemPoolStorageSpec(node_id="n", capacity_bytes=MIB))
        await opened.registry.storages.add(pool_config)
        pool = opened.storages.pools()["p"]
        await pool.report(PoolReport("n", 1, MIB))
        await pool.allocate(Allocation("i", "x", [Part("kv", 1, 1)]))
        scrubber = StorageScrubber(indexes, opened.storages, clock, opened.storages.cluster_id)
        leaks = PoolLeaks(opened.storages.pools, lambda _name: 0, scrubber, clock)
        spaces = replace(opened, leaks=leaks)
        duties = [asyncio.create_task(duty()) for name, duty in spaces.background_tasks() if name in {"pools", "leaks"}]
        try:
            async with asyncio.timeout(_DEADLINE_SECONDS):
                while not indexes.asked.is_set():
                    clock.time += 1.0
                    await opened.leadership.tick()
                    await asyncio.sleep(0)
                assert await pool.report(PoolReport("n", 2, MIB))
                while await pool.lost_stamp():
                    clock.time += 1.0
                    await opened.leadership.tick()
                    await asyncio.sleep(0)
            assert not any(duty.done() for duty in duties)
        finally:
            for duty in duties:
                duty.cancel()
            await asyncio.gather(*duties, return_exceptions=True)


CALLS = ["GetCacheLocation", "StartWriteCache", "FinishWriteCache"]


class Debugged:
    """A manager with its debug service."""

    def __init__(self, process: ManagerProcess, api: Api, stub: DebugServiceStub) -> None:
        self.process = process
        self.api = api
        self.stub = stub

    def outcome(self, rpc: str, **fields: Any) -> tuple[int, str]:
        answer = getattr(self.stub, rpc)(getattr(pb, f"{rpc}Request")(**fields), timeout=30)
        assert answer.header.request_id == ""
        return answer.header.status.code, answer.header.status.message

    def ok(self, rpc: str, **fields: Any) -> None:
        assert self.outcome(rpc, **fields) == (pb.OK, "")

    def fails(self, rpc: str, trace_id: str = "") -> bool:
        status = self.api.call(rpc, instance_id="nobody", trace_id=trace_id).header.status
        if status.code == pb.INTERNAL_ERROR:
            assert "injected" in status.message
            return True
        return False


started = manager_of_module("kvcm.service.enable_debug_service=true")


@pytest.fixture
def debugged(started: ManagerProcess) -> Iterator[Debugged]:
    with started.api("grpc") as api, grpc.insecure_channel(started.address.admin_rpc) as channel:
        made = Debugged(started, api, DebugServiceStub(channel))
        made.ok("ClearFaults")
        yield made


@pytest.mark.parametrize("rpc", CALLS)
def test_a_fault_makes_every_call_of_its_api_fail_until_it_is_removed(debugged: Debugged, rpc: str) -> None:
    debugged.ok("InjectFault", api_name=rpc)
    assert [debugged.fails(name) for name in CALLS] == [name == rpc for name in CALLS]
    assert debugged.fails(rpc)
    debugged.ok("RemoveFault", api_name=rpc)
    assert not debugged.fails(rpc)


def test_other_calls_and_unknown_ones_do_not_fail(debugged: Debugged) -> None:
    for name in ("GetCacheMeta", "Nothing"):
        debugged.ok("InjectFault", api_name=name)
    assert not debugged.fails("GetCacheMeta")
    assert debugged.api.ok("GetClusterInfo").self_node_id


def test_once_means_trace_ids_that_end_in_the_number(debugged: Debugged) -> None:
    debugged.ok("InjectFault", api_name=CALLS[0], fault_trigger_strategy="ONCE", trigger_at_call=7)
    hits = {"a_7": True, "_7": True, "a_b_07": True, "a_17": False, "7": False, "a_7x": False, "a_": False, "": False}
    assert {trace_id: debugged.fails(CALLS[0], trace_id) for trace_id in hits} == hits
    assert debugged.fails(CALLS[0], "a_7"), "each time"
    debugged.ok("InjectFault", api_name=CALLS[0])
    assert debugged.fails(CALLS[0], "x"), "replaced"


def test_clear_ends_all(debugged: Debugged) -> None:
    for name in CALLS:
        debugged.ok("InjectFault", api_name=name)
    debugged.ok("ClearFaults")
    assert not any(map(debugged.fails, CALLS))


@pytest.mark.parametrize(
    ("rpc", "fields", "text"),
    [
        ("InjectFault", {}, "api_name"),
        ("InjectFault", {"api_name": "x", "fault_type": 9}, "fault_type is 9"),
        ("InjectFault", {"api_name": "x", "fault_trigger_strategy": 9}, "fault_trigger_strategy is 9"),
        ("RemoveFault", {}, "api_name"),
        ("RemoveFault", {"api_name": "StartWriteCache"}, "has no fault"),
    ],
)
def test_refusals(debugged: Debugged, rpc: str, fields: dict[str, Any], text: str) -> None:
    code, message = debugged.outcome(rpc, **fields)
    assert (code, text in message) == (pb.INVALID_ARGUMENT, True)


def test_over_http_it_has_a_port_of_its_own(tmp_path: Path) -> None:
    port = free_port(DEBUG_PORT_OFFSET)
    settings = ("kvcm.service.enable_debug_service=true", f"kvcm.service.http_port={port}")
    with manager(tmp_path, *settings) as process, process.api("http") as api:
        answer = ask(f"127.0.0.1:{port + DEBUG_PORT_OFFSET}", "/api/clearFaults", "POST")
        assert (answer.status, json.loads(answer.body)["header"]["status"]["code"]) == (200, "OK")
        for address in (process.address.http, process.address.admin_http):
            assert ask(address, "/api/clearFaults", "POST").status == 404
        driver: Any = api.driver
        assert post(driver.admin, "/api/checkHealth", b"{}").status == 200


def test_it_is_off_by_default(server: ManagerProcess) -> None:
    with grpc.insecure_channel(server.address.admin_rpc) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            DebugServiceStub(channel).ClearFaults(pb.ClearFaultsRequest(), timeout=30)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_it_is_refused_where_others_could_reach_it(tmp_path: Path) -> None:
    options = ["-e", "kvcm.service.enable_debug_service=true", "-e", "kvcm.service.host=0.0.0.0"]
    line = refusal_of(tmp_path, *options)
    assert ("enable_debug_service" in line, "--insecure" in line) == (True, True)


def test_a_port_that_leaves_no_space_for_it_is_refused(tmp_path: Path) -> None:
    options = ["-e", "kvcm.service.enable_debug_service=true", "-e", "kvcm.service.http_port=62536"]
    assert "62535" in refusal_of(tmp_path, *options)


TRAFFIC = Path(__file__).parents[2] / "docs/examples/traffic.py"


@pytest.mark.ci
def test_it_makes_groups_and_fills_them(tmp_path: Path) -> None:
    with manager(tmp_path) as process:
        at = process.address
        command = [sys.executable, str(TRAFFIC), "--managers", at.http, "--admin", at.admin_http, "--seconds", "2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        client = RestClient(at.admin_http)
        with contextlib.closing(client.connection):
            used = {group["name"]: group["total"]["used_bytes"] for group in client.get("/v1/usage").body["groups"]}
    assert min(used[name] for name in ("chat", "code", "pinned", "batch")) > 0
    assert used["idle"] == 0
