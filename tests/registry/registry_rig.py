"""Valid values to spoil one field of, and what stands in for storages and for the network to the store."""

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kvcm.model.errors import StorageIOError
from kvcm.model.groups import (
    CacheConfig,
    CachePreferStrategy,
    InstanceGroup,
    InstanceGroupQuota,
    MetaIndexerConfig,
    QuotaConfig,
)
from kvcm.model.instances import Instance, LocationSpecGroup, LocationSpecInfo, ModelDeployment
from kvcm.model.storages import StorageConfig, StorageType
from kvcm.store.store import Replacement, Revision, Table

T = TypeVar("T")

GROUP = InstanceGroup(
    "group",
    ("nfs",),
    "quota-group",
    quota=InstanceGroupQuota(100, (QuotaConfig(StorageType.ST_NFS, 50),)),
    cache_config=CacheConfig(
        data_storage_strategy=CachePreferStrategy.CPS_PREFER_3FS, meta_indexer_config=MetaIndexerConfig()
    ),
    version=1,
)

INSTANCE = Instance(
    "",
    "group",
    "Qwen/Qwen3-8B",
    16,
    (LocationSpecInfo("tp0", 64), LocationSpecInfo("tp1", 64)),
    ModelDeployment("Qwen3-8B", "bf16"),
    (LocationSpecGroup("full", ("tp1", "tp0")), LocationSpecGroup("a", ("tp0",))),
)


class Opener:
    """Opens nothing and records its calls; rejects storages while `refusal` is set."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._open: dict[str, StorageConfig] = {}
        self.refusal: Exception | None = None
        self.refused = 0
        self.gate: threading.Event | None = None

    def prepare(self, config: StorageConfig, *, is_new: bool) -> StorageConfig:
        if self.gate is not None:
            self.gate.wait()
        if self.refusal is not None:
            self.refused += 1
            raise self.refusal
        return config

    async def prepare_in_thread(self, config: StorageConfig, *, is_new: bool) -> StorageConfig:
        return await asyncio.to_thread(self.prepare, config, is_new=is_new)

    def discard(self, prepared: StorageConfig) -> None:
        self.calls.append(("discard", prepared.global_unique_name))

    def install(self, config: StorageConfig, prepared: StorageConfig) -> None:
        self.calls.append(("open", config.global_unique_name))
        self._open[config.global_unique_name] = replace(config, spec=prepared.spec)

    def set_enabled(self, name: str, *, enabled: bool) -> None:
        self.calls.append(("enable" if enabled else "disable", name))
        self._open[name] = replace(self._open[name], is_available=enabled)

    def set_draining(self, name: str, *, is_draining: bool) -> None:
        self.calls.append(("drain" if is_draining else "fill", name))

    def close(self, name: str) -> None:
        self.calls.append(("close", name))
        del self._open[name]

    def state(self) -> dict[str, tuple[str, bool]]:
        """Return root and switch of every open storage by name."""
        return {name: (config.spec.root_path, config.is_available) for name, config in self._open.items()}  # type: ignore[union-attr]


class SuspendingTable:
    """A table that lets others run before and after each call, by `pauses`: any order of events, as on a network.

    Attributes:
        asked: names of the calls made, in order.
        outage: raised instead of every call.
        lost_answer: raised by changes once they are made.
    """

    def __init__(self, table: Table, pauses: Iterable[int] = ()) -> None:
        self._table = table
        self._pauses = iter(pauses)
        self._held: dict[str, asyncio.Event] = {}
        self.asked: list[str] = []
        self.outage: Exception | None = None
        self.lost_answer: Exception | None = None

    def hold(self, call: str) -> asyncio.Event:
        """Keep back the answer to the next call of that name until the event is set."""
        return self._held.setdefault(call, asyncio.Event())

    async def get(self, name: str) -> bytes | None:
        return await self._suspended("get", self._table.get(name))

    async def all(self) -> Mapping[str, bytes]:
        return await self._suspended("all", self._table.all())

    async def replace(self, name: str, old: bytes | None, new: bytes | None, due: float = 0.0) -> bool:
        done = await self._suspended("replace", self._table.replace(name, old, new, due))
        if self.lost_answer is not None:
            raise self.lost_answer
        return done

    async def replace_together(self, replacements: Sequence[Replacement]) -> bool:
        done = await self._suspended("replace_together", self._table.replace_together(replacements))
        if self.lost_answer is not None:
            raise self.lost_answer
        return done

    async def due(self, now: float, most: int) -> list[str]:
        return await self._suspended("due", self._table.due(now, most))

    @property
    def due_from(self) -> float:
        return self._table.due_from

    @property
    def revision(self) -> Revision | None:
        return self._table.revision

    async def version(self) -> int:
        return await self._suspended("version", self._table.version())

    async def _suspended(self, name: str, call: Coroutine[Any, Any, T]) -> T:
        self.asked.append(name)
        await self._pause()
        if self.outage is not None:
            call.close()
            raise self.outage
        result = await call
        held = self._held.pop(name, None)
        if held is not None:
            await held.wait()
        await self._pause()
        return result

    async def _pause(self) -> None:
        for _ in range(next(self._pauses, 1)):
            await asyncio.sleep(0)


class DyingTable(SuspendingTable):
    """A way to a table that goes away after so many calls: before the next is made, or before its answer comes."""

    def __init__(self, table: Table, calls: int, *, is_late: bool = False, pauses: Iterable[int] = ()) -> None:
        super().__init__(table, pauses)
        self._calls = calls
        self._is_late = is_late

    async def _suspended(self, name: str, call: Coroutine[Any, Any, T]) -> T:
        self._calls -= 1
        if self._calls < 0 and not self._is_late:
            self.outage = StorageIOError("the store went away")
        result = await super()._suspended(name, call)
        if self._calls < 0:
            raise StorageIOError("the store went away before it answered")
        return result
