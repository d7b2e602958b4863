"""Reuse of KV for vLLM (V1 connector, tested with 0.32.0):

--kv-transfer-config '{"kv_connector":"KVCMConnector","kv_connector_module_path":"connectors.vllm",
  "kv_role":"kv_both","kv_load_failure_policy":"recompute",
  "kv_connector_extra_config":{"manager":"127.0.0.1:6381","instance_group":"default","instance_id":"my-model"}}'
"""

try:
    import vllm  # noqa: F401
except ImportError as error:
    raise ImportError(
        "connectors.vllm runs inside vLLM: install vllm (tested with 0.32.0) in this environment"
    ) from error

from connectors.vllm.connector import KVCMConnector

__all__ = ["KVCMConnector"]
