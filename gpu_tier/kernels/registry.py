"""Which implementation of a kernel runs.

An implementation named by the call wins, then `GPU_TIER_KERNELS`, then `auto`: CUDA C++ if the tensors are on a GPU and
it is built, Triton if they are on a GPU or `TRITON_INTERPRET=1` is set, else the reference. Modules are imported when
first asked for: the package works without Triton, and its interpreter has to be chosen before a kernel is defined.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from kvcm.gpu_tier.errors import ConfigError, KernelUnavailableError

__all__ = ["IMPLEMENTATIONS", "get", "implementations"]

IMPLEMENTATIONS = ("reference", "triton", "cuda")
_MODULES = {"reference": "ref", "triton": "triton_impl", "cuda": "cuda"}


@lru_cache
def implementations(name: str) -> tuple[str, ...]:
    """Return the implementations that exist of a kernel."""
    found = [impl for impl in IMPLEMENTATIONS if find_spec(f"kvcm.gpu_tier.kernels.{name}.{_MODULES[impl]}")]
    if not found:
        raise ConfigError("name", name, "no such kernel")
    return tuple(found)


def get(name: str, device: torch.device, impl: str = "auto") -> Callable[..., Any]:
    """Return the function `run` of a kernel's implementation.

    Args:
        name: folder of the kernel.
        device: where its tensors are.
        impl: auto, reference, triton or cuda.

    Raises:
        ConfigError: no such kernel or implementation.
        KernelUnavailableError: the implementation cannot run here.
    """
    if impl == "auto":
        impl = os.environ.get("GPU_TIER_KERNELS", "auto")
    if impl == "auto":
        impl = _best(name, device)
    if impl not in IMPLEMENTATIONS:
        raise ConfigError.choice("kernels", impl, ("auto", *IMPLEMENTATIONS))
    if impl not in implementations(name):
        # A choice for all kernels (GPU_TIER_KERNELS=cuda) must not fail where only some have such an implementation.
        impl = "triton" if impl == "cuda" else "reference"
    return _load(name, impl)


def _best(name: str, device: torch.device) -> str:
    on_gpu = device.type == "cuda"
    if on_gpu and "cuda" in implementations(name) and _cuda_is_built():
        return "cuda"
    wants_triton = on_gpu or os.environ.get("TRITON_INTERPRET") == "1"
    return "triton" if wants_triton and "triton" in implementations(name) else "reference"


@lru_cache
def _cuda_is_built() -> bool:
    try:
        import_module("kvcm.gpu_tier.kernels.cuda_build").library()
    except KernelUnavailableError:
        return False
    return True


@lru_cache
def _load(name: str, impl: str) -> Callable[..., Any]:
    try:
        module = import_module(f"kvcm.gpu_tier.kernels.{name}.{_MODULES[impl]}")
    except ImportError as error:
        raise KernelUnavailableError(f"the {impl} implementation of {name} cannot be loaded: {error}") from error
    run: Callable[..., Any] = module.run
    return run
