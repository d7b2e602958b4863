"""The class that vLLM instantiates, once in its scheduler and once per rank: each hook belongs to one side.

Errors of the manager or a storage never reach vLLM as exceptions; errors of the configuration do, when the engine
starts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from prometheus_client import Counter, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.credentials import ClientCredentials
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.keys import HashKeys
from kvcm.connectors.layout import format_text
from kvcm.connectors.node import NodeSettings
from kvcm.connectors.reuse.registration import KvIdentity, ManagerLink
from kvcm.connectors.reuse.statistics import BUCKETS_SECONDS, COUNTERS, TIMES, ReuseStatistics, Snapshot, merged
from kvcm.connectors.reuse.weight_files import weights_digest
from kvcm.connectors.vllm.connector_metadata import KvcmConnectorMetadata, KvcmWorkerMetadata
from kvcm.connectors.vllm.engine_weights import EngineWeights, RankWeights
from kvcm.connectors.vllm.kv_cache_groups import KvCacheGroup, KvCacheLayout
from kvcm.connectors.vllm.options import VllmOptions
from kvcm.connectors.vllm.scheduler import EngineMode, KvcmScheduler, StoredEvents
from kvcm.connectors.vllm.worker import KvcmWorker, RankStorages
from kvcm.model.errors import InvalidArgumentError

__all__ = ["KVCMConnector", "KvcmPromMetrics", "KvcmStats", "identity_of"]

# ---- identity: engines with the same identity share KV ----
#
# Only settings that vLLM leaves unchanged count: model code changes the configuration of a model, and the type of its
# cache, while weights are loaded. The model's own files stay unchanged, and are the same in every process.

_LAYOUT_VERSION = "vllm/1"


def identity_of(config: VllmConfig, plan: KvCacheLayout, options: VllmOptions) -> KvIdentity:
    """Return the identity of an engine, besides its weights.

    Args:
        config: of the engine.
        plan: how its KV is stored.
        options: of the connector.

    Raises:
        InvalidArgumentError: its hashes differ in every process, or its weights cannot be identified.
    """
    model = config.model_config
    return KvIdentity(
        model=options.model_name or _model_name(model.model),
        engine=f"{_LAYOUT_VERSION} {_kernels()}",
        dtype=next(group.stored.dtype for group in plan.groups if group.is_whole),
        hashing=_hashing(config),
        formats={group.prefix or "all": _format(group) for group in plan.groups},
        tp_size=plan.ranks,
        use_mla=bool(getattr(model, "use_mla", False)),
        extra=_extra(config),
    )


def _format(group: KvCacheGroup) -> str:
    reach = f"state/{group.block_tokens}" if group.is_state else f"window={group.window_tokens}"
    return f"{format_text(group.stored)} {reach} quantization={group.quantization}"


def _kernels() -> str:
    """Return the kernels that write KV: those for CPUs arrange the elements of a block for their instructions."""
    device = current_platform.device_type
    if device != "cpu":
        return str(device)
    amx = " amx" if torch.cpu._is_amx_tile_supported() else ""
    return f"cpu {torch.backends.cpu.get_cpu_capability()}{amx}"


def _extra(config: VllmConfig) -> Mapping[str, str]:
    """Return the other settings that the KV of given tokens depends on."""
    model, attention = config.model_config, getattr(config, "attention_config", None)
    extra = {
        "model_dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "max_model_len": str(model.max_model_len),  # long-context RoPE depends on it
        "overrides": _text_of(model.hf_overrides),
        "attention": str(getattr(attention, "backend", None)),
    }
    speculative = config.speculative_config
    if speculative is not None:  # layers of a draft model are stored with the others
        extra["speculative"] = f"{speculative.method} {_weights_in(str(speculative.model), None)}"
    return extra


def _text_of(overrides: Any) -> str:
    return getattr(overrides, "__qualname__", None) or json.dumps(overrides, sort_keys=True, default=str)


def _hashing(config: VllmConfig) -> str:
    """Return the settings that block hashes depend on."""
    name = config.cache_config.prefix_caching_hash_algo
    seed = os.environ.get("PYTHONHASHSEED")
    if "sha256" not in name and seed is None:
        raise InvalidArgumentError(
            f"prefix_caching_hash_algo is {name!r}, whose hashes differ in every process: choose sha256, or set"
            " PYTHONHASHSEED to the same number for all engines"
        )
    return f"{name} seed={seed or 'default'}"


def _model_name(model: str) -> str:
    return Path(model).name if Path(model).exists() else model


def weights_of(config: VllmConfig, options: VllmOptions) -> str:
    """Return a text that identifies the weights that an engine starts with.

    Raises:
        InvalidArgumentError: nothing identifies them.
    """
    if options.weights:
        return options.weights
    model = config.model_config
    if str(getattr(config.load_config.load_format, "value", config.load_config.load_format)) == "dummy":
        return f"dummy seed={model.seed}"
    return _weights_in(model.model, getattr(model.hf_config, "_commit_hash", None))


def _weights_in(model: str, commit: str | None) -> str:
    """Return a text that identifies weights: the digest of their files, or the commit of their download."""
    reason = "they are neither in a directory nor of a known commit"
    if Path(model).is_dir():
        try:
            return weights_digest(Path(model))
        except (OSError, ValueError) as error:
            reason = str(error)
    elif commit:
        return f"commit={commit}"
    raise InvalidArgumentError(
        f"the weights of {model!r} cannot be told from others ({reason}): name them with option 'weights'"
    )


# ---- statistics, as vLLM logs them and exports them to Prometheus (`vllm:kvcm_...`) ----

_PREFIX = "vllm:kvcm_"


@dataclass
class KvcmStats(KVConnectorStats):
    """Counts of one interval, over all ranks and the scheduler; `data` is a snapshot of `ReuseStatistics`."""

    data: Snapshot = field(default_factory=dict)

    def reset(self) -> None:
        """Drop all counts."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KvcmStats:
        """Add the counts of others."""
        self.data = merged(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the values for vLLM's log: counters, and mean times in ms."""
        reduced: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, list):
                reduced[name.replace("_seconds", "_ms_mean")] = round(1000 * value[-1] / sum(value[:-1]), 3)
            else:
                reduced[name] = value
        return reduced

    def is_empty(self) -> bool:
        """Return whether there are no counts."""
        return not self.data


class KvcmPromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the connector, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters, histograms = metric_types[Counter], metric_types[Histogram]
        self._metrics: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            self._enter(name, counters(name=_PREFIX + name, documentation=text + ".", labelnames=labelnames))
        for name, text in TIMES.items():
            metric = histograms(
                name=_PREFIX + name, documentation=text + ".", buckets=BUCKETS_SECONDS, labelnames=labelnames
            )
            self._enter(name, metric)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counts of an interval."""
        for name, value in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            if isinstance(value, list):
                _add_samples(metric, value)
            else:
                metric.inc(value)

    def _enter(self, name: str, metric: Any) -> None:
        self._metrics[name] = {engine: metric.labels(*values) for engine, values in self.per_engine_labelvalues.items()}


def _add_samples(histogram: Any, value: list[float]) -> None:
    """Add samples that are known by bucket and sum: each as the mean of all, clipped to its bucket."""
    count = sum(value[:-1])
    if not count:
        return
    mean = value[-1] / count
    for bucket, samples in enumerate(value[:-1]):
        low = BUCKETS_SECONDS[bucket - 1] if bucket else 0.0
        high = BUCKETS_SECONDS[bucket] if bucket < len(BUCKETS_SECONDS) else max(mean, low * 1.01)
        for _ in range(int(samples)):
            histogram.observe(min(max(mean, low * 1.000001), high))


class KVCMConnector(KVConnectorBase_V1, SupportsHMA):
    """Reuse of KV through KVCM, for vLLM's V1 engine.

    Args:
        vllm_config: of the engine.
        role: which side this is.
        kv_cache_config: of the engine.

    Raises:
        InvalidArgumentError: an option is wrong, or this model, or this way to run it, is not supported.
    """

    _cache_hit_source: ClassVar[CacheHitSource] = CacheHitSource.EXTERNAL_UNSPECIFIED

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = VllmOptions.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        plan = KvCacheLayout.from_config(vllm_config, kv_cache_config)
        self._statistics = ReuseStatistics()
        self._scheduler: KvcmScheduler | None = None
        self._worker: KvcmWorker | None = None
        self._groups = len(plan.groups)
        if role == KVConnectorRole.SCHEDULER:
            identity = identity_of(vllm_config, plan, options)
            link = ManagerLink(_client(options), plan.specs(options.instance_group, identity), options.call_seconds)
            events = StoredEvents(_publishes_events(vllm_config), plan.block_tokens, options)
            mode = EngineMode.from_config(vllm_config, plan, options)
            weights = EngineWeights(weights_of(vllm_config, options), plan.ranks)
            self._scheduler = KvcmScheduler(
                plan,
                options=options,
                mode=mode,
                link=link,
                weights=weights,
                keys_of=lru_cache(maxsize=256)(lambda *versions: HashKeys(identity.namespace(*versions))),
                statistics=self._statistics,
                events=events,
            )
        else:
            storages = RankStorages(_client(options), options)
            self._worker = KvcmWorker(
                plan,
                rank=get_tensor_model_parallel_rank(),
                options=options,
                storages=storages,
                statistics=self._statistics,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not saved is computed again."""
        return False

    # ---- scheduler ----

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See the base class."""
        self._scheduler_side.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """See the base class."""
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class."""
        return self._scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        self._scheduler_side.update_state_after_alloc(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """See the base class."""
        return self._scheduler_side.get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See the base class."""
        return self._scheduler_side.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See the base class."""
        results = connector_output.kv_connector_worker_meta
        assert results is None or isinstance(results, KvcmWorkerMetadata)
        self._scheduler_side.update_connector_output(sorted(connector_output.finished_recving or ()), results)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class. Blocks that are still to be saved are pinned one by one, not with their request."""
        self._scheduler_side.request_finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """See the base class."""
        return self._scheduler_side.has_pending_push_work

    def take_events(self) -> Iterable[Any]:
        """See the base class."""
        return self._scheduler_side.take_events()

    def reset_cache(self) -> bool:
        """See the base class."""
        self._scheduler_side.reset_cache()
        return True

    # ---- ranks ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See the base class."""
        self._worker_side.register_kv_caches(kv_caches)
        layers = self._vllm_config.compilation_config.static_forward_context
        self._worker_side.watch_weights(RankWeights({name: layers[name] for name in kv_caches if name in layers}))

    def set_weights_version(self, name: str) -> None:
        """Name the weights of this rank as they are now, after they were changed, instead of having them compared.

        Engines of one instance whose weights have equal names share KV, so all ranks get the name, and no other weights
        may ever have had it. vLLM's prefix cache is reset afterwards, as after every change:

            llm.collective_rpc(lambda worker: get_kv_transfer_group().set_weights_version("step 17"))
            llm.reset_prefix_cache()

        Raises:
            InvalidArgumentError: the name does not have 1 to 256 characters.
        """
        self._worker_side.set_weights_version(name)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See the base class."""
        self._worker_side.start_load_kv(self._connector_meta)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer's KV with `layerwise`; otherwise a step that has to wait has done so in `start_load_kv`."""
        self._worker_side.wait_for_layer_load(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: blocks are saved whole, once they are known to be right."""

    def wait_for_save(self) -> None:
        """Begin the saves of this step; their blocks are pinned, so nothing waits for them."""
        self._worker_side.start_saves(self._connector_meta)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See the base class."""
        ended, failed = self._worker_side.get_transfer_results()
        return KVConnectorTransferResults(
            finished_recving=ended, failed_recving=failed & ended if self._groups > 1 else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        failed = self._worker_side.get_block_ids_with_load_errors()
        return failed if self._groups == 1 else set()

    def build_connector_worker_meta(self) -> KvcmWorkerMetadata | None:
        """See the base class."""
        return self._worker_side.build_connector_worker_meta()

    # ---- both ----

    def get_kv_connector_stats(self) -> KvcmStats | None:
        """See the base class."""
        counted = self._statistics.drain()
        return KvcmStats(counted) if counted else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvcmStats:
        """See the base class."""
        return KvcmStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> KvcmPromMetrics:
        """See the base class."""
        return KvcmPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """See the base class: a graph of the whole model would not wait for its layers."""
        return bool(extra_config.get("layerwise"))

    def shutdown(self) -> None:
        """End loads and saves in flight, within `shutdown_seconds`."""
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    @property
    def _scheduler_side(self) -> KvcmScheduler:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _worker_side(self) -> KvcmWorker:
        assert self._worker is not None
        return self._worker

    @property
    def _connector_meta(self) -> KvcmConnectorMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvcmConnectorMetadata)
        return metadata


def _publishes_events(config: VllmConfig) -> bool:
    return config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events


def _client(options: VllmOptions) -> ManagerClient:
    node_id = NodeSettings.from_environment().node_id
    settings = ClientSettings(
        timeout_seconds=options.call_seconds,
        node_id=node_id,
        credentials=ClientCredentials.from_environment(),
        follow_assignment=options.follow_assignment,
    )
    return ManagerClient(options.manager, options.instance_id, settings)


# vLLM's MultiConnector looks the classes of its parts up by name, and knows only those that are registered.
if "KVCMConnector" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector("KVCMConnector", "kvcm.connectors.vllm.connector", "KVCMConnector")
