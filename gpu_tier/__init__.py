"""Hierarchical sparse attention: the whole KV in host memory, a small sparse buffer on the GPU.

An algorithm says what to attend to, a residency policy where it is on the device, a manager moves the bytes, an adaptor
tells the attention kernel, and `SparseCoordinator` calls them at fixed hooks of the forward pass.
"""
