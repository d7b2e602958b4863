"""The storage backend that SGLang makes: its interface on one side, a `PageStore` on the other.

SGLang calls it from its storage threads, and never expects an exception for a page: everything that goes wrong is a
miss. What cannot work, an unknown option or a pool whose pages cannot be stored, is said when the backend is attached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.utils import get_hash_str
from sglang.srt.observability.metrics_collector import StorageMetrics

from connectors.client import ManagerClient
from connectors.credentials import ClientCredentials
from connectors.exchanges import ClientSettings
from connectors.node import NodeSettings
from connectors.reuse.link import InstanceSpecs, ManagerLink
from connectors.sglang.figures import OperationFigures
from connectors.sglang.metrics import ReuseMetrics
from connectors.sglang.model_identity import page_identity, weights_of
from connectors.sglang.options import SglangOptions
from connectors.sglang.page_keys import PageKeys
from connectors.sglang.page_memory import PageMemory
from connectors.sglang.page_store import Moved, PageStore
from connectors.sglang.rank import RankParts, stage_instance
from connectors.sglang.server import ServerState
from connectors.transfer import TransferEngine
from kvcm.model.errors import InvalidArgumentError

__all__ = ["KVCMStorage"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


class KVCMStorage(HiCacheStorage):
    """Stores pages of KV where the manager says.

    Args:
        storage_config: of the rank.
        kwargs: what else SGLang gives to dynamic backends; nothing of it is used.

    Raises:
        InvalidArgumentError: an option is wrong, or ranks are laid out in a way that is not supported.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._options = SglangOptions.read(storage_config.extra_config)
        self._parts = RankParts.of(storage_config)
        self._server = ServerState.now()
        self._figures = OperationFigures()
        self._store: PageStore | None = None
        self._metrics: ReuseMetrics | None = None
        self._refused_pools: list[str] = []
        self._is_stale = False

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Hear of a pool. Pages of others than KV cannot be stored.

        Raises:
            InvalidArgumentError: see `on_host_pools_registered`.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != str(PoolName.KV):
            self._refused_pools.append(str(host_pool_name))
            if self._store is not None:
                _log.error("pool %s cannot be stored, so no KV is reused from now on", host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Register with the manager, now that all pools are known. Without a manager it is done later.

        Raises:
            InvalidArgumentError: the model has pools that cannot be stored.
        """
        if self._refused_pools:
            raise InvalidArgumentError(
                f"KV reuse does not support models with these host pools yet: {', '.join(self._refused_pools)}"
            )
        memory = PageMemory(self.mem_pool_host)
        store, link = self._connect(memory)
        self._store = store
        if self._config.enable_storage_metrics:
            self._metrics = ReuseMetrics(store.statistics, self._labels())
        link.register(self._options.register_seconds)
        _log.info("KV reuse: %s, registration %s", memory.format.text, link.registration.state)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many of the leading pages are there."""
        store = self._usable()
        return 0 if store is None else _or(0, lambda: store.exists(keys, _prefix(extra_info)))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages; true for those that are completely in the host pool."""
        store = self._usable()
        missed = Moved([False] * len(keys))
        moved = missed if store is None else _or(missed, lambda: store.load(keys, host_indices))
        self._figures.loaded(moved.pages, moved.bytes, moved.seconds)
        return moved.flags

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Save pages; true for those that are stored now."""
        store = self._usable()
        missed = Moved([False] * len(keys))
        moved = missed if store is None else _or(missed, lambda: store.save(keys, host_indices, _prefix(extra_info)))
        self._figures.saved(moved.pages, moved.bytes, moved.seconds)
        return moved.flags

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return how many of the leading pages are there; none when other pools than KV must have theirs, too."""
        if any(str(transfer.name) != str(PoolName.KV) for transfer in pool_transfers or ()):
            return PoolTransferResult.empty()
        hits = self.batch_exists(keys, extra_info)
        return PoolTransferResult(hits, {str(transfer.name): hits for transfer in pool_transfers or ()})

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of KV; those of other pools are misses."""
        return {transfer.name: self._moved(self.batch_get_v1, transfer, extra_info) for transfer in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Save pages of KV; those of other pools are not saved."""
        return {transfer.name: self._moved(self.batch_set_v1, transfer, extra_info) for transfer in transfers}

    def exists(self, key: str) -> bool:
        """Return whether a page is there."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Miss: single pages are not loaded this way (`interface_v1`)."""

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Miss: pages are not loaded this way (`interface_v1`)."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store nothing: single pages are not saved this way (`interface_v1`)."""
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store nothing: pages are not saved this way (`interface_v1`)."""
        return False

    def clear(self) -> None:
        """Forget what was looked up. What is stored belongs to all engines of the instance: its operator removes it."""
        if self._store is not None:
            self._store.clear()
        instance_id = stage_instance(self._options.instance_id, self._config)
        _log.warning("stored pages stay, since engines share them: `kvcm trim %s` removes them", instance_id)

    def get_stats(self) -> StorageMetrics:
        """Return what moved since the last call."""
        if self._metrics is not None:
            self._metrics.update()
        loads, saves = self._figures.take()
        return StorageMetrics(
            prefetch_pgs=[each.pages for each in loads],
            backup_pgs=[each.pages for each in saves],
            prefetch_bandwidth=[each.gigabytes_per_second for each in loads],
            backup_bandwidth=[each.gigabytes_per_second for each in saves],
        )

    def close(self) -> None:
        """Abort what is being saved and close all connections, within a deadline."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _connect(self, memory: PageMemory) -> tuple[PageStore, ManagerLink]:
        options, config = self._options, self._config
        server = self._server
        weights = weights_of(options, server.model_path, server.revision)
        identity = page_identity(
            options, config, memory.format, _hashing(), weights, server.model_path, server.settings
        )
        client = ManagerClient(
            options.manager,
            stage_instance(options.instance_id, config),
            ClientSettings(
                timeout_seconds=options.call_seconds,
                node_id=NodeSettings.from_environment().node_id,
                credentials=ClientCredentials.from_environment(),
            ),
        )
        specs = InstanceSpecs(
            options.instance_group,
            memory.format.tokens,
            self._parts.infos(memory.page_bytes),
            identity.deployment(),
            self._parts.groups,
        )
        make_engine = partial(
            TransferEngine.for_storages, threads=options.transfer_threads or None, checksums=options.checksums
        )
        link = ManagerLink(client, specs, options.call_seconds, make_engine)
        return PageStore(link, memory, PageKeys(identity.namespace), self._parts, options), link

    def _usable(self) -> PageStore | None:
        """Return the store, None when its pages are not those of this model any more."""
        if self._refused_pools or self._is_stale:
            return None
        if self._server.has_changed():
            self._is_stale = True
            _log.error("the weights were changed: KV is not reused until the storage backend is attached anew")
            return None
        return self._store

    def _moved(
        self, move: Callable[..., list[bool]], transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        keys = transfer.keys or []
        if str(transfer.name) != str(PoolName.KV) or transfer.host_indices is None:
            return [False] * len(keys)
        return move(keys, transfer.host_indices, extra_info)

    def _labels(self) -> dict[str, str]:
        config = self._config
        return {"tp_rank": str(config.tp_rank), "pp_rank": str(config.pp_rank), "dp_rank": str(config.dp_rank)}


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> Sequence[str]:
    return (extra_info.prefix_keys or ()) if extra_info is not None else ()


def _or(missed: T, task: Callable[[], T]) -> T:
    """Return what the task returns, or else a miss: whatever goes wrong here must not reach the engine."""
    try:
        return task()
    except Exception:
        _log.exception("KV reuse failed, the pages are misses")
        return missed


def _hashing() -> str:
    """Return a page hash of known tokens: it changes when SGLang computes page hashes in another way."""
    first, second = get_hash_str(list(range(8)), None, page_size=4)
    return f"sglang {first[:8]}{second[:8]}"
