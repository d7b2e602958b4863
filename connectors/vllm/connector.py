"""The class that vLLM makes, once in its scheduler and once per rank: it passes calls on to one side or the other.

Nothing that goes wrong with the manager or a storage reaches vLLM as an exception; what is configured wrongly does,
when the engine starts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.client import ManagerClient
from connectors.credentials import ClientCredentials
from connectors.exchanges import ClientSettings
from connectors.keys import HashKeys
from connectors.node import NodeSettings
from connectors.reuse.link import ManagerLink
from connectors.reuse.statistics import ReuseStatistics
from connectors.vllm.events import StoredEvents
from connectors.vllm.identity import identity_of
from connectors.vllm.messages import StepOrders, StepResults
from connectors.vllm.metrics import KvcmPromMetrics, KvcmStats
from connectors.vllm.mode import EngineMode
from connectors.vllm.options import VllmOptions
from connectors.vllm.plan import KvPlan
from connectors.vllm.rank_storages import RankStorages
from connectors.vllm.scheduler import KvcmScheduler
from connectors.vllm.worker import KvcmWorker

__all__ = ["KVCMConnector"]


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
        options = VllmOptions.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
        plan = KvPlan.of(vllm_config, kv_cache_config)
        self._statistics = ReuseStatistics()
        self._scheduler: KvcmScheduler | None = None
        self._worker: KvcmWorker | None = None
        self._groups = len(plan.groups)
        if role == KVConnectorRole.SCHEDULER:
            identity = identity_of(vllm_config, plan, options)
            link = ManagerLink(_client(options), plan.specs(options.instance_group, identity), options.call_seconds)
            events = StoredEvents(_publishes_events(vllm_config), plan.block_tokens)
            mode = EngineMode.of(vllm_config, plan, options)
            keys = HashKeys(identity.namespace)
            self._scheduler = KvcmScheduler(plan, options, mode, link, keys, self._statistics, events)
        else:
            storages = RankStorages(_client(options), options)
            self._worker = KvcmWorker(plan, get_tensor_model_parallel_rank(), options, storages, self._statistics)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a block that is not saved is computed again."""
        return False

    # ---- scheduler ----

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """See the base class."""
        self._at_scheduler.bind(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        """See the base class."""
        self._at_scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class."""
        return self._at_scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """See the base class."""
        self._at_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """See the base class."""
        return self._at_scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """See the base class."""
        return self._at_scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """See the base class."""
        results = connector_output.kv_connector_worker_meta
        assert results is None or isinstance(results, StepResults)
        self._at_scheduler.heard(sorted(connector_output.finished_recving or ()), results)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base class."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See the base class. Blocks that are still to be saved are pinned one by one, not with their request."""
        self._at_scheduler.finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        """See the base class."""
        return self._at_scheduler.is_busy

    def take_events(self) -> Iterable[Any]:
        """See the base class."""
        return self._at_scheduler.take_events()

    def reset_cache(self) -> bool:
        """See the base class."""
        self._at_scheduler.reset()
        return True

    # ---- ranks ----

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See the base class."""
        self._at_worker.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See the base class."""
        self._at_worker.begin_loads(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for a layer's KV with `layerwise`; otherwise a step that has to wait has done so in `start_load_kv`."""
        self._at_worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing to do: blocks are saved whole, once they are known to be right."""

    def wait_for_save(self) -> None:
        """Begin the saves of this step; their blocks are pinned, so nothing waits for them."""
        self._at_worker.begin_saves(self._orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See the base class."""
        ended, failed = self._at_worker.take_ended_loads()
        return KVConnectorTransferResults(
            finished_recving=ended, failed_recving=failed & ended if self._groups > 1 else set()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        failed = self._at_worker.take_failed_block_ids()
        return failed if self._groups == 1 else set()

    def build_connector_worker_meta(self) -> StepResults | None:
        """See the base class."""
        return self._at_worker.take_results()

    # ---- both ----

    def get_kv_connector_stats(self) -> KvcmStats | None:
        """See the base class."""
        counted = self._statistics.take()
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
        """End what is under way, within the time that is configured."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    @property
    def _at_scheduler(self) -> KvcmScheduler:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def _at_worker(self) -> KvcmWorker:
        assert self._worker is not None
        return self._worker

    @property
    def _orders(self) -> StepOrders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, StepOrders)
        return orders


def _publishes_events(config: VllmConfig) -> bool:
    return config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events


def _client(options: VllmOptions) -> ManagerClient:
    node_id = NodeSettings.from_environment().node_id
    settings = ClientSettings(
        timeout_seconds=options.call_seconds, node_id=node_id, credentials=ClientCredentials.from_environment()
    )
    return ManagerClient(options.manager, options.instance_id, settings)


# vLLM's MultiConnector asks for the classes of its parts by name, and knows only those that are registered.
if "KVCMConnector" not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector("KVCMConnector", "connectors.vllm.connector", "KVCMConnector")
