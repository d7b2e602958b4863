"""Blocking work never runs on the event loop: hashing passwords, opening storages, deleting files.

Python reports file operations to audit hooks in the thread that makes them; scrypt is watched by a spy around it. So
the test sees where the work happens and needs no clock.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvcm.app import Manager
from kvcm.config import Settings
from kvcm.protocol import admin_service_pb2 as admin
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.admin_service_pb2_grpc import AdminServiceStub
from kvcm.protocol.meta_service_pb2_grpc import MetaServiceStub

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
    settings = Settings(rpc_port=0, http_port=0, admin_rpc_port=0, admin_http_port=0, data_dir=str(tmp_path))
    manager = Manager(settings)
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
