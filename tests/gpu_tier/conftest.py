"""The tests of the GPU tier run on the reference kernels; tests of a kernel name the implementation that they check."""

from __future__ import annotations

import os

import torch

# Triton decides at the definition of a kernel whether it is interpreted.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("GPU_TIER_KERNELS", "reference")

torch.set_num_threads(1)  # for tensors this small, threads mostly wait for each other
