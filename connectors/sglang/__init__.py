"""KV reuse for SGLang (tested with 0.5.23): a dynamic storage backend of its hierarchical cache.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvcm", "module_path": "connectors.sglang", "class_name": "KVCMStorage", "interface_v1": 1,
    "manager": "host:6381", "instance_id": "my-model"}'

The backend itself needs SGLang; everything it is made of does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connectors.sglang.storage import KVCMStorage

__all__ = ["KVCMStorage"]


def __getattr__(name: str) -> Any:
    """Import the backend when SGLang asks for it."""
    if name != "KVCMStorage":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from connectors.sglang.storage import KVCMStorage
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"sglang", "torch"}:
            raise
        raise ImportError(
            f"connectors.sglang.KVCMStorage needs SGLang 0.5.23 in this environment ({error}); see docs/sglang.md"
        ) from error
    return KVCMStorage
