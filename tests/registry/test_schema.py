"""A store of a schema that this release does not know is refused before anything of it is read."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest
from redis_servers import Standalone

from kvcm import __version__
from kvcm.app import Manager
from kvcm.cache.audit_report import Repair
from kvcm.config import ConfigError, Settings
from kvcm.index_tools import IndexTools
from kvcm.metadata import open_metadata
from kvcm.model.clock import SystemClock
from kvcm.model.errors import StorageIOError
from kvcm.registry.schema import NEWEST_SCHEMA, Schema, check_schema, keep_schema
from kvcm.registry.shelf import Shelf
from kvcm.store.memory import MemoryTable
from kvcm.store.store import Table


async def _flushed() -> None:
    pass


def _shelf(table: Table) -> Shelf[Schema]:
    return Shelf(table, "meta/", Schema)


@pytest.fixture(params=["rocksdb", "redis"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    ports = {"rpc_port": 0, "http_port": 0, "admin_rpc_port": 0, "admin_http_port": 0}
    if request.param == "rocksdb":
        return Settings(**ports, data_dir=str(tmp_path))
    server: Standalone = request.getfixturevalue("redis_standalone")
    return Settings(**ports, registry_storage_uri=server.uri(f"schema-{secrets.token_hex(8)}"))


async def _put(settings: Settings, schema: Schema) -> None:
    metadata = await open_metadata(settings, SystemClock(), "test")
    try:
        await _shelf(metadata.store.table("registry")).change("schema", lambda _known: schema)
        await metadata.store.flush()
    finally:
        await metadata.close()


async def test_a_store_says_who_gave_it_its_schema_and_keeps_that() -> None:
    table = MemoryTable()
    await check_schema(table)
    assert await table.all() == {}, "looking writes nothing"
    await keep_schema(table, _flushed)
    first = await table.all()
    assert await _shelf(table).read("schema") == Schema(1, __version__)
    await keep_schema(table, _flushed)
    assert await table.all() == first


@pytest.mark.parametrize("look", [check_schema, lambda table: keep_schema(table, _flushed)])
async def test_a_schema_that_is_too_new_names_the_release_to_run(look: object) -> None:
    table = MemoryTable()
    await _shelf(table).change("schema", lambda _known: Schema(NEWEST_SCHEMA + 1, "7.1.0"))
    before = await table.all()
    with pytest.raises(StorageIOError, match=rf"schema {NEWEST_SCHEMA + 1}, given by release 7\.1\.0.*run 7\.1\.0"):
        await look(table)  # type: ignore[operator]
    assert await table.all() == before


async def test_a_schema_that_cannot_be_read_is_refused() -> None:
    table = MemoryTable()
    await table.replace("meta/schema", None, b"{")
    with pytest.raises(StorageIOError, match="document is damaged"):
        await keep_schema(table, _flushed)


def test_managers_and_commands_refuse_a_store_of_a_newer_schema(settings: Settings, tmp_path: Path) -> None:
    """And what is there stays."""

    async def serve() -> None:
        async with Manager(settings).running():
            pass

    tools = IndexTools(settings, SystemClock())

    async def export() -> None:
        with (tmp_path / "export").open("wb") as file:
            await tools.export(file, "", with_accounts=False)

    asyncio.run(serve())
    asyncio.run(_put(settings, Schema(NEWEST_SCHEMA + 1, "7.1.0")))
    for attempt in (serve, export, lambda: tools.verify(Repair())):
        with pytest.raises((StorageIOError, ConfigError), match="run 7"):
            asyncio.run(attempt())
    asyncio.run(_put(settings, Schema(NEWEST_SCHEMA, "7.1.0")))
    asyncio.run(serve())
