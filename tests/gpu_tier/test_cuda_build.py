"""The CUDA C++ kernels compile, and what cannot run here says why."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

from kvcm.gpu_tier.errors import KernelUnavailableError
from kvcm.gpu_tier.kernels import cuda_build

nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


@pytest.mark.ci
@pytest.mark.timeout(600)  # the compiler takes minutes beside other work
@pytest.mark.skipif(nvcc is None, reason="needs nvcc")
def test_all_kernels_are_in_one_library_that_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = cuda_build.build(tmp_path)
    names = {"gpu_tier_probe"} | {f"gpu_tier_{path.stem}" for path in cuda_build.sources()}
    library = ctypes.CDLL(str(built))
    assert {name for name in names if hasattr(library, name)} == names
    assert list(tmp_path.iterdir()) == [built]
    monkeypatch.setattr(cuda_build, "_nvcc", lambda: "/nowhere")
    assert cuda_build.build(tmp_path) == built


@pytest.mark.skipif(nvcc is None, reason="needs nvcc")
def test_what_nvcc_says_is_in_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.cu"
    broken.write_text("int f() { return nothing_there; }")
    monkeypatch.setattr(cuda_build, "sources", lambda: [broken])
    with pytest.raises(KernelUnavailableError, match="nothing_there"):
        cuda_build.build(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_without_nvcc_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(KernelUnavailableError, match="need nvcc"):
        cuda_build.build(tmp_path)


@pytest.mark.parametrize("error", [PermissionError("read-only"), RuntimeError("no home")])
def test_a_library_not_made_or_loaded_is_unavailable(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> Path:
        raise error

    monkeypatch.setattr(cuda_build, "build", failing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(KernelUnavailableError, match=f"{error}; GPU_TIER_CACHE"):
        cuda_build.library()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(KernelUnavailableError, match=r"\(9, 0\), this is \(8, 0\)"):
        cuda_build.library()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_library_is_not_loaded() -> None:
    with pytest.raises(KernelUnavailableError, match="need a GPU"):
        cuda_build.library()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_library_answers() -> None:
    assert cuda_build.library().gpu_tier_probe() == 0
