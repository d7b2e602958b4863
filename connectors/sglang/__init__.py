"""KV reuse for SGLang (tested with 0.5.23): a dynamic storage backend of its hierarchical cache.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvcm", "module_path": "kvcm.connectors.sglang", "class_name": "KVCMStorage", "interface_v1": 1,
    "manager": "host:6381", "instance_id": "my-model"}'

The backend itself needs SGLang; everything it is made of does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcm.connectors.engine_names import engine_names

if TYPE_CHECKING:
    from kvcm.connectors.sglang.hicache_storage import KVCMStorage

__all__ = ["KVCMStorage"]

__getattr__ = engine_names(
    package=__name__,
    modules={"KVCMStorage": "kvcm.connectors.sglang.hicache_storage"},
    needs="SGLang 0.5.23 (docs/sglang.md)",
    engines={"sglang", "torch"},
)
