"""The diff in CUDA C++, alone or fused with the copies of its plan; see lru_diff.cu.

The selection of a row and the order of its buffer have to fit into the shared memory of a multiprocessor: K=2048 with
C=4096 takes 47 KiB of 227, K=8192 with C=16384 about 180. What does not fit goes to the Triton kernel.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from kvcm.gpu_tier.geometry import PartStrides
from kvcm.gpu_tier.kernels import cuda_build, registry
from kvcm.gpu_tier.kernels.io_transfer import PartCopy, part_copies
from kvcm.gpu_tier.kernels.lru_diff import DiffOutputs, DiffScratch, LayerState, SwapIn

__all__ = ["add_copies", "arguments", "run"]

_SHARED_BYTES = 227 * 1024  # that a block can have on compute capability 9.0


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("base", "page", "token", "layer", "head")]


class _Part(ctypes.Structure):
    _fields_ = [
        ("src", _Strides), ("dst", _Strides), ("row_bytes", ctypes.c_int64), ("heads", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    ]  # fmt: skip


class _Args(ctypes.Structure):
    _fields_ = [
        *[(name, ctypes.c_void_p) for name in (
            "items", "requests", "seq_lens", "sparse_mask", "num_real", "slot_item", "lru_slots", "newest_item",
            "slot_loc", "newest_slots", "host_loc", "device_slot", "load_host", "load_device", "load_count", "evicted",
            "promote_src", "promote_dst", "counters", "errors",
        )],
        *[(name, ctypes.c_int64) for name in ("row_stride", "head_stride", "item_stride", "host_stride")],
        *[(name, ctypes.c_int32) for name in (
            "rows", "heads", "width", "capacity", "unit", "promote", "loads_hottest", "num_parts",
        )],
        ("host", ctypes.c_void_p), ("device", ctypes.c_void_p),
        ("host_page_size", ctypes.c_int64), ("device_page_size", ctypes.c_int64), ("parts", _Part * 2),
        *[(name, ctypes.c_int32) for name in ("host_layer", "device_layer", "per_head", "reserved")],
    ]  # fmt: skip


def run(
    items: Tensor, requests: Tensor, seq_lens: Tensor, sparse_mask: Tensor, num_real: Tensor, state: LayerState,
    out: DiffOutputs, scratch: DiffScratch, *, unit_tokens: int, promote_newest: bool, loads_hottest: bool,
    swap_in: SwapIn | None = None,
) -> None:  # fmt: skip
    """See `kvcm.gpu_tier.kernels.lru_diff`."""
    if not items.shape[0]:
        return  # a grid cannot be empty
    library = cuda_build.library()
    if library.gpu_tier_lru_diff_shared_bytes(items.shape[2], state.slot_item.shape[-1]) > _SHARED_BYTES:
        registry.get("lru_diff", items.device, "triton")(
            items, requests, seq_lens, sparse_mask, num_real, state, out, scratch, unit_tokens=unit_tokens,
            promote_newest=promote_newest, loads_hottest=loads_hottest, swap_in=swap_in,
        )  # fmt: skip
        return
    args = arguments(items, requests, seq_lens, sparse_mask, num_real, state, out, unit_tokens)
    args.promote, args.loads_hottest = promote_newest, loads_hottest
    if swap_in is not None:
        add_copies(args, swap_in)
    cuda_build.check(library.gpu_tier_lru_diff(ctypes.byref(args), cuda_build.stream(items.device)))


def arguments(
    items: Tensor, requests: Tensor, seq_lens: Tensor, sparse_mask: Tensor, num_real: Tensor, state: LayerState,
    out: DiffOutputs, unit_tokens: int,
) -> _Args:  # fmt: skip
    """Return the arguments of a step that only plans."""
    rows, heads, width = items.shape
    tensors = (
        items, requests, seq_lens, sparse_mask, num_real,
        state.slot_item, state.lru_slots, state.newest_item, state.slot_loc, state.newest_slots, state.host_loc,
        out.device_slot, out.load_host, out.load_device, out.load_count, out.evicted_items,
        out.promote_src, out.promote_dst, out.counters, out.errors,
    )  # fmt: skip
    return _Args(
        *[tensor.data_ptr() for tensor in tensors], *items.stride(), state.host_loc.stride(0),
        rows=rows, heads=heads, width=width, capacity=state.slot_item.shape[-1], unit=unit_tokens,
    )  # fmt: skip


def add_copies(args: _Args, swap_in: SwapIn) -> None:
    """Let the step copy what it plans."""
    per_head = args.heads > 1
    parts = part_copies(swap_in.host_addr, swap_in.device_addr, swap_in.num_heads, per_head)
    args.num_parts, args.parts = len(parts), (_Part * 2)(*map(_part, parts))
    args.host, args.device = swap_in.host.data_ptr(), swap_in.device.data_ptr()
    args.host_page_size, args.device_page_size = swap_in.host_addr.page_size, swap_in.device_addr.page_size
    args.host_layer, args.device_layer, args.per_head = swap_in.host_layer, swap_in.device_layer, per_head


def _part(part: PartCopy) -> _Part:
    return _Part(_strides(part.src), _strides(part.dst), part.row_bytes, part.heads, 0)


def _strides(strides: PartStrides) -> _Strides:
    return _Strides(strides.base, strides.page, strides.token, strides.layer, strides.head)
