"""What an engine lets the connector do: how it was configured, and what vLLM cannot cope with."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from vllm.config import VllmConfig

from connectors.vllm.options import VllmOptions
from connectors.vllm.plan import KvPlan

__all__ = ["EngineMode"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineMode:
    """What the connector does in an engine.

    Attributes:
        loads: whether KV is loaded.
        saves: whether KV is saved.
        load_async: whether it is loaded between steps, while other requests are computed.
    """

    loads: bool
    saves: bool
    load_async: bool

    @classmethod
    def of(cls, config: VllmConfig, plan: KvPlan, options: VllmOptions) -> EngineMode:
        """Return the mode of an engine, and say in the log what is not as somebody may expect."""
        transfer = config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            _log.warning(
                "kv_load_failure_policy is %r: a request of which a block cannot be loaded ends with an error."
                " 'recompute' computes it",
                transfer.kv_load_failure_policy,
            )
        # With several groups vLLM can be told of a failed request only, and only of one that is loaded between steps.
        # With overlapping steps it would keep a token that the next step computed of KV that was not loaded.
        must_be_async = len(plan.groups) > 1 or config.max_concurrent_batches > 1
        if must_be_async and not options.load_async:
            _log.warning("load_async is false, which this engine cannot do safely: KV is loaded between steps")
        return cls(
            loads=transfer.is_kv_consumer,
            saves=transfer.is_kv_producer and options.publish,
            load_async=options.load_async or must_be_async,
        )
