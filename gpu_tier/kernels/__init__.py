"""Kernels, each in a folder of its own: `ref.py` (torch, the definition), `triton_impl.py`, sometimes `cuda.py`.

All implementations of a kernel have one signature, write into outputs that the caller provides, and take unequal
lengths by masks, so that they can be captured in a CUDA graph. `registry.get` picks one.
"""
