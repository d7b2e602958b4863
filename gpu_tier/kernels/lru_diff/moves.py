"""Carries out the plan of a step with launches of its own, where the diff does not copy itself."""

from __future__ import annotations

from gpu_tier.kernels.io_transfer import io_transfer
from gpu_tier.kernels.lru_diff.values import DiffOutputs, SwapIn

__all__ = ["move"]


def move(out: DiffOutputs, swap_in: SwapIn, unit_tokens: int, impl: str) -> None:
    """Promote first, then load."""
    per_head = out.load_count.shape[1] > 1
    device, layer = swap_in.device, swap_in.device_layer
    io_transfer(
        device, device, swap_in.device_addr, swap_in.device_addr,
        out.promote_src.reshape(-1, 1), out.promote_dst.reshape(-1, 1), layers=((layer, layer),),
        num_heads=swap_in.num_heads, per_head=per_head, unit_tokens=unit_tokens, impl=impl,
    )  # fmt: skip
    io_transfer(
        swap_in.host, device, swap_in.host_addr, swap_in.device_addr,
        out.load_host.flatten(0, 1), out.load_device.flatten(0, 1), layers=((swap_in.host_layer, layer),),
        num_heads=swap_in.num_heads, count=out.load_count.flatten(), per_head=per_head, unit_tokens=unit_tokens,
        impl=impl,
    )  # fmt: skip
