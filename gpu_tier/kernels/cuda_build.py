"""Builds the CUDA C++ kernels into one library and loads it.

All `kernels/*/*.cu` go into one shared object with a plain C interface: NAME.cu exports `gpu_tier_NAME`, which returns
a CUDA error code. What they share is in `kernels/*.cuh`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kvcm.gpu_tier.errors import ConfigError, KernelUnavailableError
from kvcm.gpu_tier.kernels.native_build import build_once

__all__ = ["FLAGS", "build", "check", "check_dtype", "library", "sources", "stream"]

FLAGS = (
    "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", "-gencode", "arch=compute_90a,code=sm_90a",
)  # fmt: skip
_CAPABILITY = (9, 0)
_HERE = Path(__file__).parent


def sources() -> list[Path]:
    """Return the sources of the library, in a fixed order."""
    return sorted(_HERE.glob("*/*.cu"))


def build(directory: Path | None = None) -> Path:
    """Return the library, built if there is none of these sources and flags.

    Args:
        directory: where libraries are kept; `GPU_TIER_CACHE` or the user's cache directory if not given.

    Raises:
        KernelUnavailableError: there is no nvcc, or it failed; the message has its output.
    """
    headers = sorted(_HERE.glob("*.cuh"))
    return build_once("kernels", _nvcc, FLAGS, sources(), headers=headers, directory=directory)


@lru_cache
def library() -> ctypes.CDLL:
    """Return the library, built if need be.

    Raises:
        KernelUnavailableError: it cannot be built or cannot run here.
    """
    if not torch.cuda.is_available():
        raise KernelUnavailableError("the CUDA kernels need a GPU: torch sees none")
    found = torch.cuda.get_device_capability()
    if found != _CAPABILITY:
        raise KernelUnavailableError(f"the CUDA kernels are for compute capability {_CAPABILITY}, this is {found}")
    loaded = _loaded()
    code = loaded.gpu_tier_probe()
    if code:
        allowed = "the driver has to be as new as the nvcc that built them"
        raise KernelUnavailableError(f"the CUDA kernels cannot run on this device: CUDA error {code}; {allowed}")
    return loaded


def _loaded() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(build()))
    except (OSError, RuntimeError) as error:  # a home that cannot be written, or a library of another host
        text = f"the CUDA kernels cannot be built or loaded: {error}; GPU_TIER_CACHE names another directory"
        raise KernelUnavailableError(text) from error


def check(code: int) -> None:
    """Raise `torch.cuda.CudaError` unless a call of the library returned 0."""
    torch.cuda.check_error(code)


def check_dtype(field: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    """Raise `ConfigError` unless a tensor holds what the library reads at its address."""
    if tensor.dtype not in allowed:
        raise ConfigError(field, tensor.dtype, f"must be {' or '.join(map(str, allowed))}")


def stream(device: torch.device) -> ctypes.c_void_p:
    """Return the current stream of a device, as the library takes it."""
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if found is None:
        raise KernelUnavailableError("the CUDA kernels need nvcc: none on PATH nor in CUDA_HOME")
    return found
