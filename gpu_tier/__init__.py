"""Hierarchical sparse attention: the whole KV in host memory, a small sparse buffer on the GPU.

An algorithm says what to attend to, a residency policy where it is on the device, a manager moves the bytes, an adaptor
makes the kernel's metadata, and `SparseCoordinator` calls them at fixed hooks of the forward pass.
"""

if __name__ == "gpu_tier":  # imported by its old name: until the next release
    from kvcm.old_names import alias_package

    alias_package("gpu_tier", "kvcm.gpu_tier")
