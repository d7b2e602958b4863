"""CUDA C++ kernels as CPU libraries: their sources compiled as C++ against `emulated_cuda.h`."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from gpu_tier.kernels import cuda_build

__all__ = ["COMPILER", "emulation"]

COMPILER = shutil.which("g++") or shutil.which("clang++")
_HERE = Path(__file__).parent
_KERNELS = Path(cuda_build.__file__).parent


def emulation(folder: Path, name: str, driver: str) -> ctypes.CDLL:
    """Return a library of the device code of ``kernels/NAME/NAME.cu`` and a driver, built in a folder of its own."""
    for header in _KERNELS.glob("*.cuh"):
        text = '#include "emulated_cuda.h"' if header.name == "copy.cuh" else header.read_text()
        (folder / header.name).write_text(text)
    kernel = (_KERNELS / name / f"{name}.cu").read_text()
    kernel = kernel[: kernel.index('extern "C"')].replace('"../', '"')
    source, target = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(kernel + driver)
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", f"-I{folder}", f"-I{_HERE}"]
    subprocess.run([str(COMPILER), *flags, "-o", str(target), str(source)], check=True)
    return ctypes.CDLL(str(target))
