"""A store in memory that several managers share. Every call suspends before and after it takes effect, and a manager
can crash at any of these points: it never gets an answer again, whatever it was doing."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from inspect import iscoroutinefunction
from random import Random
from typing import Any, TypeVar

from cache_world import CLUSTER, CountingIds
from fake_clock import FakeClock
from record_by_record import RecordByRecord

from kvcm.cache.manager import CacheManager
from kvcm.index.backends.backend import Change, Written
from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.search_cache import CacheBudget
from kvcm.model.errors import NotReadyError, StorageIOError
from kvcm.model.groups import InstanceGroup
from kvcm.model.instances import Instance, Placement
from kvcm.model.keys import pack_keys
from kvcm.model.storages import StorageConfig, StorageType
from kvcm.reclaim.deletion_executor import DeletionExecutor
from kvcm.registry.registry import Registry
from kvcm.storage.directory import OPENERS, StorageDirectory
from kvcm.storage.dummy import DummyStorage
from kvcm.store.memory import MemoryTable

Answer = TypeVar("Answer")
Invalidate = Callable[[Mapping[int, Sequence[bytes]]], None]


class SharedStore:
    """What outlives every manager.

    Args:
        on_change: sees (uid, change) right after it took effect.
    """

    def __init__(self, on_change: Callable[[int, Change], None] = lambda _uid, _change: None) -> None:
        self.on_change = on_change
        self.connections: list[Connection] = []
        self._tables: dict[str, MemoryTable] = {}
        self._backends: dict[int, MemoryBackend] = {}

    def table(self, name: str) -> MemoryTable:
        return self._tables.setdefault(name, MemoryTable())

    def backend(self, uid: int) -> MemoryBackend:
        return self._backends.setdefault(uid, MemoryBackend())

    def backends(self) -> Mapping[int, MemoryBackend]:
        """Records by uid, also of instances that are gone."""
        return self._backends

    def changed(self, uid: int, changes: Sequence[Change]) -> None:
        for change in changes:
            self.on_change(uid, change)
        for connection in self.connections:
            connection.invalidate({uid: pack_keys([change.key for change in changes])})


class Connection:
    """The store as one manager sees it.

    Attributes:
        invalidate: called for every change of a block by any manager.
        crashed: set by a crash.
    """

    is_shared = True

    def __init__(self, store: SharedStore, random: Random, most: int = 2) -> None:
        self._store = store
        self._random = random
        self._most = most
        self.crashed = asyncio.Event()
        self._buried = asyncio.Event()
        self.invalidate: Invalidate = lambda _changed: None
        store.connections.append(self)

    def table(self, name: str, shard_count: int = 1) -> "SharedTable":
        return SharedTable(self._store.table(name), self)

    def new_backend(self, placement: Placement) -> "SharedBackend":
        return SharedBackend(placement.uid, self._store, self)

    async def flush(self) -> None:
        await self.pause()

    async def sync(self) -> None:
        await self.pause()

    async def close(self) -> None:
        """Nothing to let go of."""

    async def pause(self) -> None:
        for _ in range(self._random.randint(0, self._most)):
            await asyncio.sleep(0)
        if self.crashed.is_set():
            await self._buried.wait()
            raise StorageIOError("this manager has crashed")

    def crash(self) -> None:
        """From now on nothing that the manager does has an effect, and it gets no notifications."""
        self.crashed.set()
        self._store.connections.remove(self)

    def bury(self) -> None:
        """Let what hangs since the crash end with an error, so that no task outlives a test."""
        self._buried.set()


def _paused(call: Callable[..., Awaitable[Any]], pause: Callable[[], Awaitable[None]]) -> Callable[..., Awaitable[Any]]:
    async def paused(*arguments: Any, **named: Any) -> Any:
        await pause()
        answer = await call(*arguments, **named)
        await pause()
        return answer

    return paused


class SharedTable:
    """A table of the store: every call suspends before it takes effect and before its answer comes."""

    def __init__(self, inner: MemoryTable, connection: Connection) -> None:
        self._inner = inner
        self._pause = connection.pause

    def __getattr__(self, name: str) -> Any:
        return _paused(getattr(self._inner, name), self._pause)

    @property
    def due_from(self) -> float:
        return self._inner.due_from


class SharedBackend(RecordByRecord):
    """The records of one instance: calls suspend as those of a table do."""

    awaits = True
    is_shared = True
    has_runs = False
    due_from = 0.0
    revision = None

    def __init__(self, uid: int, store: SharedStore, connection: Connection) -> None:
        self._uid = uid
        self._store = store
        self._pause = connection.pause

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store.backend(self._uid), name)
        return _paused(found, self._pause) if iscoroutinefunction(found) else found

    async def refresh(self, *, is_exact: bool = True) -> None:
        await self._pause()

    async def write_many(self, changes: Sequence[Change]) -> Written:
        await self._pause()
        inner = self._store.backend(self._uid)
        written = await inner.write_many(changes)
        self._store.changed(self._uid, [change for change in changes if change.key not in written.lost])
        await self._pause()
        return written

    async def scan(self, batch_size: int) -> AsyncIterator[list[int]]:
        async for page in self._store.backend(self._uid).scan(batch_size):
            await self._pause()
            yield page


class LoggedStorage(DummyStorage):
    """A storage that reports deletions.

    Args:
        name: of the storage.
        on_delete: sees uris right before their bytes are gone.
    """

    def __init__(self, name: str, on_delete: Callable[[Sequence[str]], None]) -> None:
        super().__init__(name, f"/{CLUSTER}/", 1)
        self._on_delete = on_delete

    async def delete(self, uris: Sequence[str]) -> list[str | None]:
        self._on_delete(uris)
        return await super().delete(uris)


class Node:
    """One manager on a shared store, as `kvcm.components` wires it.

    Args:
        store: shared with other nodes.
        clock: the same for all.
        ids: the same for all, in the place of randomness.
        seed: decides where it suspends.
        on_delete: sees uris right before their bytes are gone.
    """

    def __init__(
        self,
        store: SharedStore,
        clock: FakeClock,
        ids: CountingIds,
        seed: int,
        on_delete: Callable[[Sequence[str]], None] = lambda _uris: None,
    ) -> None:
        self.connection = Connection(store, Random(seed))
        openers = {StorageType.ST_DUMMY: lambda config, _: LoggedStorage(config.global_unique_name, on_delete)}
        self.storages = StorageDirectory(CLUSTER, openers={**OPENERS, **openers})
        self.registry = Registry(self.storages, self.connection.table("registry"), self.connection.flush)
        self.executor = DeletionExecutor(self.storages, clock)
        self.manager = CacheManager(
            self.registry,
            self.storages,
            clock,
            ids,
            self.connection.new_backend,
            store=self.connection,
            budget=CacheBudget(1 << 20),
        )
        self.executor.serve(self.manager)
        self._hanging: list[asyncio.Future[Any]] = []

    async def begin(self) -> None:
        """Load the stored state, as a manager does before it serves."""
        await self.registry.load()
        await self.manager.load()
        self.connection.invalidate = self.manager.open_caches.invalidate

    async def ask(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        """Return what a call returns, or raise NotReadyError when the manager crashes before it answers."""
        asked, crash = asyncio.ensure_future(call), asyncio.ensure_future(self.connection.crashed.wait())
        await asyncio.wait({asked, crash}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            crash.cancel()
            return asked.result()
        self._hanging.append(asked)
        raise NotReadyError("the manager has crashed")

    def crash(self) -> None:
        self.connection.crash()

    async def close(self) -> None:
        self.connection.bury()
        await asyncio.gather(*self._hanging, return_exceptions=True)
        self.storages.close_all()


async def begin_two(first: Node, second: Node, storage: StorageConfig, group: InstanceGroup, one: Instance) -> None:
    """Begin two managers on an empty store, and configure a storage, a group and an instance before the second."""
    await first.begin()
    await first.registry.storages.add(storage)
    await first.registry.groups.create(group)
    await first.manager.register_instance(one)
    await second.begin()
