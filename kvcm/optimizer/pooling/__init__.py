"""N engines with caches of their own against one pool that all of them share."""

from __future__ import annotations

from kvcm.optimizer.pooling.comparing import Engines, compare_pooling
from kvcm.optimizer.pooling.outcome import PoolingRow, PoolingStudy, Topology
from kvcm.optimizer.pooling.router import DEFAULT_ROUTERS, Router

__all__ = [
    "DEFAULT_ROUTERS",
    "Engines",
    "PoolingRow",
    "PoolingStudy",
    "Router",
    "Topology",
    "compare_pooling",
]
