"""Kernels, each in a folder of its own: `ref.py` (torch, what is right), `triton_impl.py`, and `cuda.py` where it pays.

All implementations of a kernel have one signature, write into outputs that the caller provides, and take unequal
lengths by masks, so that they can be captured in a CUDA graph. `registry.get` picks one.
"""
