"""The tests of the GPU tier run on the reference kernels; tests of a kernel name the implementation that they check.

Only these tests see Triton's interpreter chosen: elsewhere it would take over tensors of a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)  # for tensors this small, threads mostly wait for each other

_CHOICE = {"TRITON_INTERPRET": "1", "GPU_TIER_KERNELS": "reference"}


@pytest.fixture(scope="module", autouse=True)
def kernels_of_tests() -> Iterator[None]:
    """Choose the interpreter, which Triton asks for when a kernel is defined, and the reference where none is named."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _CHOICE.items():
            if name not in os.environ:
                patch.setenv(name, value)
        yield
