"""Reuse of KV for vLLM (V1 connector, tested with 0.32.0):

--kv-transfer-config '{"kv_connector":"KVCMConnector","kv_connector_module_path":"kvcm.connectors.vllm",
  "kv_role":"kv_both","kv_load_failure_policy":"recompute",
  "kv_connector_extra_config":{"manager":"127.0.0.1:6381","instance_group":"default","instance_id":"my-model"}}'
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcm.connectors.engine_names import engine_names

if TYPE_CHECKING:
    from kvcm.connectors.vllm.connector import KVCMConnector

__all__ = ["KVCMConnector"]

__getattr__ = engine_names(
    package=__name__,
    modules={"KVCMConnector": "kvcm.connectors.vllm.connector"},
    needs="vLLM 0.32.0 (docs/vllm.md)",
    engines={"vllm", "torch"},
)
