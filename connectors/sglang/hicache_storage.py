"""The dynamic storage backend of SGLang's hierarchical cache, and its view of the SGLang server."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from sglang.srt import runtime_context
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

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.credentials import ClientCredentials
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.node import NodeSettings
from kvcm.connectors.reuse.registration import InstanceSpecs, ManagerLink
from kvcm.connectors.reuse.statistics import BUCKETS_SECONDS, COUNTERS, TIMES, ReuseStatistics, Unsaved
from kvcm.connectors.sglang.engine_weights import EngineWeights, is_serving, refuse_batch_dependent_kv
from kvcm.connectors.sglang.host_pool import PageMemory
from kvcm.connectors.sglang.identity import adapters_of, page_identity, weights_of
from kvcm.connectors.sglang.options import SglangOptions
from kvcm.connectors.sglang.page_store import PageKeys, PageStore, RankParts, TransferSummary, stage_instance
from kvcm.connectors.transfer import TransferEngine
from kvcm.model.errors import InvalidArgumentError

__all__ = ["KVCMStorage", "ReuseMetrics", "ServerState", "TransferFigures"]

_log = logging.getLogger(__name__)

# Settings that KV depends on besides the files of the model, and values that say nothing: the dtype of a pool whose
# elements are what they are called is registered anyway, and how files are read does not matter as long as they are.
_RELEVANT_SETTINGS = ("json_model_override_args", "kv_cache_dtype", "load_format", "quantization")
_DEFAULTS = frozenset({"", "None", "auto", "default", "{}", "bfloat16", "bf16", "float16", "half", "float32", "float"})
_DEFAULT_FORMATS = frozenset({"safetensors", "fastsafetensors", "pt", "npcache", "mistral", "gguf", "sharded_state"})
_MISSING = ""


@dataclass(frozen=True, slots=True)
class ServerState:
    """The model as the server has it now.

    Attributes:
        model_path: a directory, or a name on the hub.
        revision: of the name.
        settings: others that KV depends on.
        adapters: (LoRA) that it was started with.
    """

    model_path: str
    revision: str | None
    settings: Mapping[str, str]
    adapters: tuple[Any, ...]

    @classmethod
    def current(cls) -> ServerState:
        """Return the state of this process."""
        model = runtime_context.get_model()
        read = {name: str(_read(model, name)) for name in _RELEVANT_SETTINGS}
        settings = {name: value for name, value in read.items() if value not in _DEFAULTS}
        if settings.get("load_format") in _DEFAULT_FORMATS:
            del settings["load_format"]
        adapters = _read(runtime_context.get_lora(), "lora_paths")
        return cls(str(_read(model, "model_path")), _read(model, "revision") or None, settings, tuple(adapters or ()))


def _read(settings: Any, name: str) -> Any:
    return getattr(settings, name, _MISSING)


_MAX_OPERATIONS = 4096  # SGLang may never drain them, and then old ones are of no use


class TransferFigures(NamedTuple):
    """One load or save.

    Attributes:
        pages: that moved.
        gigabytes_per_second: that they moved with.
    """

    pages: int
    gigabytes_per_second: float


class _OperationStats:
    """Pages and bandwidth of operations until they are drained; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: deque[TransferFigures] = deque(maxlen=_MAX_OPERATIONS)
        self._saves: deque[TransferFigures] = deque(maxlen=_MAX_OPERATIONS)

    def record_load(self, pages: int, size_bytes: int, seconds: float) -> None:
        """Record a load; one without pages does not count."""
        self._add(self._loads, pages, size_bytes, seconds)

    def record_save(self, pages: int, size_bytes: int, seconds: float) -> None:
        """Record a save; one without pages does not count."""
        self._add(self._saves, pages, size_bytes, seconds)

    def drain(self) -> tuple[list[TransferFigures], list[TransferFigures]]:
        """Return loads and saves since the last call."""
        with self._lock:
            loads, saves = list(self._loads), list(self._saves)
            self._loads.clear()
            self._saves.clear()
        return loads, saves

    def _add(self, operations: deque[TransferFigures], pages: int, size_bytes: int, seconds: float) -> None:
        if pages > 0 and seconds > 0:
            with self._lock:
                operations.append(TransferFigures(pages, size_bytes / seconds / 1e9))


# ---- statistics as metrics of the SGLang server ----
#
# SGLang collects the metrics of its processes through files, which only counters and histograms of `prometheus_client`
# write. They are made in a process with metrics enabled, and updated whenever SGLang calls `get_stats`.

_PREFIX = "sglang:kvcm_"
_made: dict[tuple[str, ...], tuple[dict[str, Any], dict[str, Any]]] = {}  # a process registers a name once


class ReuseMetrics:
    """Counters and histograms of one rank.

    Args:
        statistics: to export.
        labels: of the rank.
    """

    def __init__(self, statistics: ReuseStatistics, labels: Mapping[str, str]) -> None:
        names = tuple(sorted(labels))
        if names not in _made:
            _made[names] = _make(names)
        counters, times = _made[names]
        self._statistics = statistics
        self._counters = {name: counter.labels(**labels) for name, counter in counters.items()}
        self._times = {name: time.labels(**labels) for name, time in times.items()}

    def update(self) -> None:
        """Add the counts since the last call."""
        for name, value in self._statistics.drain().items():
            if isinstance(value, list):
                self._observe(name, value)
            else:
                self._counters[name].inc(value)

    def _observe(self, name: str, samples: list[float]) -> None:
        """Enter times by the upper ends of their buckets: the histogram is exact, and its sum a little too large."""
        ends = [*BUCKETS_SECONDS, 2 * BUCKETS_SECONDS[-1]]
        for end, count in zip(ends, samples, strict=False):
            for _ in range(int(count)):
                self._times[name].observe(end)


def _make(labels: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    from prometheus_client import Counter, Histogram

    counters = {name: Counter(f"{_PREFIX}{name}", text, labels) for name, text in COUNTERS.items()}
    times = {name: Histogram(f"{_PREFIX}{name}", text, labels, buckets=BUCKETS_SECONDS) for name, text in TIMES.items()}
    return counters, times


T = TypeVar("T")


class KVCMStorage(HiCacheStorage):
    """SGLang's storage backend: HiCache's interface on one side, a `PageStore` on the other.

    SGLang calls it from its storage threads, and never expects an exception for a page: every error is a miss. Wrong
    options, and pools whose pages cannot be stored, raise when the backend is attached.

    Args:
        storage_config: of the rank.
        kwargs: further arguments of dynamic backends, unused.

    Raises:
        InvalidArgumentError: an option is wrong, or ranks are laid out in a way that is not supported.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._options = SglangOptions.parse(storage_config.extra_config)
        self._parts = RankParts.of(storage_config)
        self._server = ServerState.current()
        self._figures = _OperationStats()
        self._store: PageStore | None = None
        self._metrics: ReuseMetrics | None = None
        self._weights: EngineWeights | None = None
        self._version = ""
        self._namespace: Callable[[str], bytes] = str.encode
        self._refused_pools: list[str] = []

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Register a host pool. Only pages of the KV pool can be stored.

        Raises:
            InvalidArgumentError: see `on_host_pools_registered`.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if str(host_pool_name) != str(PoolName.KV):
            self._refused_pools.append(str(host_pool_name))
            if self._store is not None:
                _log.error("pool %s cannot be stored, so no KV is reused from now on", host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Register with the manager, now that all pools are known; retry later if no manager answers.

        Raises:
            InvalidArgumentError: the model has pools that cannot be stored, or KV that depends on more than its prefix.
        """
        if self._refused_pools:
            raise InvalidArgumentError(
                f"KV reuse does not support models with these host pools yet: {', '.join(self._refused_pools)}"
            )
        refuse_batch_dependent_kv()
        memory = PageMemory(self.mem_pool_host)
        store, link = self._connect(memory)
        self._store = store
        if self._config.enable_storage_metrics:
            self._metrics = ReuseMetrics(store.statistics, self._labels())
        link.register(self._options.register_seconds)
        _log.info("KV reuse: %s, registration %s", memory.format.text, link.registration.state)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many of the leading pages are there."""
        store = self._usable_store()
        return 0 if store is None else _or_miss(0, lambda: store.exists(keys, _prefix(extra_info)))

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages; true for those that are completely in the host pool."""
        store = self._usable_store()
        missed = TransferSummary([False] * len(keys))
        moved = missed if store is None else _or_miss(missed, lambda: store.load(keys, host_indices))
        self._figures.record_load(moved.pages, moved.bytes, moved.seconds)
        return moved.flags

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Save pages; true for those that are stored now."""
        store = self._usable_store()
        if store is None and self._store is not None:
            self._store.statistics.count_unsaved(Unsaved.WEIGHTS, len(keys))
        missed = TransferSummary([False] * len(keys))
        moved = (
            missed if store is None else _or_miss(missed, lambda: store.save(keys, host_indices, _prefix(extra_info)))
        )
        self._figures.record_save(moved.pages, moved.bytes, moved.seconds)
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
        return {transfer.name: self._record_transfer(self.batch_get_v1, transfer, extra_info) for transfer in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Save pages of KV; those of other pools are not saved."""
        return {transfer.name: self._record_transfer(self.batch_set_v1, transfer, extra_info) for transfer in transfers}

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
        """Drop matched pages. Stored pages belong to all engines of the instance: an operator removes them."""
        if self._store is not None:
            self._store.clear()
        instance_id = stage_instance(self._options.instance_id, self._config)
        _log.warning("stored pages stay, since engines share them: `kvcm trim %s` removes them", instance_id)

    def get_stats(self) -> StorageMetrics:
        """Return the transfers since the last call."""
        if self._metrics is not None:
            self._metrics.update()
        loads, saves = self._figures.drain()
        return StorageMetrics(
            prefetch_pgs=[each.pages for each in loads],
            backup_pgs=[each.pages for each in saves],
            prefetch_bandwidth=[each.gigabytes_per_second for each in loads],
            backup_bandwidth=[each.gigabytes_per_second for each in saves],
        )

    def close(self) -> None:
        """Abort saves and close all connections, within a deadline."""
        store, self._store = self._store, None
        if self._weights is not None:
            self._weights.close()
        if store is not None:
            store.close()

    def _connect(self, memory: PageMemory) -> tuple[PageStore, ManagerLink]:
        options, config = self._options, self._config
        server = self._server
        # A server that is attached while it runs may have taken other weights than those of its files.
        files = "" if options.weights or is_serving() else weights_of(server.model_path, server.revision)
        identity = page_identity(
            options,
            config=config,
            page_format=memory.format,
            hashing=_hashing(),
            model_path=server.model_path,
            extra=server.settings,
        )
        self._namespace = partial(identity.namespace, adapter=adapters_of(server.adapters))
        trusts = options.trust_weight_version
        self._weights = EngineWeights(self.mem_pool_host, options.weights, files, takes_labels=trusts)
        client = ManagerClient(
            options.manager,
            stage_instance(options.instance_id, config),
            ClientSettings(
                timeout_seconds=options.call_seconds,
                node_id=NodeSettings.from_environment().node_id,
                credentials=ClientCredentials.from_environment(),
                follow_assignment=options.follow_assignment,
            ),
        )
        specs = InstanceSpecs(
            options.instance_group,
            block_tokens=memory.format.tokens,
            parts=self._parts.infos(memory.page_bytes),
            deployment=identity.deployment(),
            part_groups=self._parts.groups,
        )
        make_engine = partial(
            TransferEngine.for_storages, threads=options.transfer_threads or None, checksums=options.checksums
        )
        link = ManagerLink(client, specs, options.call_seconds, make_engine)
        keys = PageKeys(b"")  # of no version: replaced before the first use
        return PageStore(link, memory=memory, keys=keys, parts=self._parts, options=options), link

    def _usable_store(self) -> PageStore | None:
        """Return the store with the keys of the weights as they are now, None while nothing may be shared."""
        version = "" if self._refused_pools or self._weights is None else self._weights.version
        if self._store is None or not version:
            return None
        if version != self._version:
            self._store.keys = PageKeys(self._namespace(version))
            self._store.clear()
            self._version = version
        return self._store

    def _record_transfer(
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


def _or_miss(missed: T, task: Callable[[], T]) -> T:
    """Return the task's result, or a miss after an exception: no error may reach the engine."""
    try:
        return task()
    except Exception:
        _log.exception("KV reuse failed, the pages are misses")
        return missed


def _hashing() -> str:
    """Return a page hash of known tokens: it changes when SGLang computes page hashes in another way."""
    first, second = get_hash_str(list(range(8)), None, page_size=4)
    return f"sglang {first[:8]}{second[:8]}"
