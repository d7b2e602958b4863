"""Sidecars of rigs whose algorithms have some."""

from __future__ import annotations

from algorithm_rig import Rig

from kvcm.gpu_tier.algorithms.base import Sidecar

__all__ = ["exported"]


def exported(rig: Rig, request: int, start: int, stop: int) -> Sidecar:
    """Return the sidecar of the whole pages in [start, stop)."""
    sidecar = rig.algorithm.export_sidecar(request, start, stop)
    assert sidecar is not None
    return sidecar
