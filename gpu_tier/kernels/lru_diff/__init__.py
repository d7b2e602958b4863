"""One step of a request's device buffer: which selected items are there, which leave, which are loaded into which slot.

For each row and each head that selects on its own, with E = the slots that hold no selected item and may be
overwritten (empty, or the item is in host memory too), coldest first:

1. Promotion: the item that was newest in the last step moves from its newest slot to E[0] and becomes the hottest. A
   selected one goes before all loads; one that is not selected moves only if the loads leave a slot for it. It has
   to be the direct predecessor of the newest item: after a jump its newest slot may have been overwritten.
2. Set intersection: selected items in the buffer keep their slot; the newest item is in ``newest_slots[item % 2]`` and
   takes no part in the order.
3. Loads: the j-th selected item that is missing, in the order of the selection, gets the j-th of E's other slots.
4. New order, coldest first: untouched items, loaded items, hits (`loads_hottest` swaps the two), the promoted
   item; each part in the old order.

Fast path: when all items fit into the buffer, every selected item is in the slot of its number and the promoted one
finds an empty slot, hits do not change the order and nothing is loaded.

Invariants: a slot's item is unique in the row and head; `lru_slots` is a permutation with empty slots in front; a
selected item is never evicted; an item that host memory lacks is never evicted; nothing is loaded from -1; rows that
are padding or not sparse get -1 and 0 and change no state. The number of a request's tokens must not shrink.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntFlag
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import Addressing
from kvcm.gpu_tier.kernels import registry
from kvcm.gpu_tier.kernels.io_transfer import io_transfer

__all__ = ["DiffError", "DiffOutputs", "DiffScratch", "LayerState", "SwapIn", "lru_diff", "move"]

# What the diff kernel works on: the state of one layer, where it puts its plan, and why a row may fail.


class DiffError(IntFlag):
    """Bits of the kernel's error flag; the item concerned gets slot -1."""

    NOT_BACKED_UP = 1
    """A selected item is neither on the device nor in host memory."""
    NO_VICTIM = 2
    """Too few slots are empty or hold an item that host memory has too."""
    OUT_OF_RANGE = 4
    """A selected id is not below the request's number of items."""
    NOT_ADMITTED = 8
    """A row's request has no buffer."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """The buffers of all requests in one layer. R rows of requests, Hs heads that select on their own, C slots.

    Attributes:
        slot_item: ``int32 [R, Hs, C]`` item in each slot, -1 when it is empty.
        lru_slots: ``int16 [R, Hs, C]`` permutation of the slots, coldest first; empty slots are at the front.
        newest_item: ``int32 [R, Hs]`` newest item of the last step, -1 before the first.
        slot_loc: ``int32 [R, C]`` device slot of each slot's first token; of all layers.
        newest_slots: ``int32 [R, 2]`` device slots of the newest item i: entry ``i % 2``; -1 without a buffer; of all
            layers.
        host_loc: ``int64 [R, items]`` host slot of each item's first token, -1 while it is not backed up; of all
            layers.
    """

    slot_item: Tensor
    lru_slots: Tensor
    newest_item: Tensor
    slot_loc: Tensor
    newest_slots: Tensor
    host_loc: Tensor


@dataclass(frozen=True, slots=True)
class DiffOutputs:
    """The plan of one step and layer; -1 is padding.

    Attributes:
        device_slot: ``int32 [B, Hs, K]`` device slot of each selected item.
        load_host: ``int64 [B, Hs, K]`` host slots to load from, left-aligned.
        load_device: ``int32 [B, Hs, K]`` device slots to load to.
        load_count: ``int32 [B, Hs]`` items to load.
        evicted_items: ``int32 [B, Hs, K]`` items that the loads replace, -1 for an empty slot.
        promote_src: ``int32 [B, Hs]`` device slot of the previous newest item.
        promote_dst: ``int32 [B, Hs]`` device slot it moves to.
        counters: ``int64 [4]`` selected, hits, loads and promotions are added to it.
        errors: ``int32 [1]`` bits of `DiffError` are added to it.
    """

    device_slot: Tensor
    load_host: Tensor
    load_device: Tensor
    load_count: Tensor
    evicted_items: Tensor
    promote_src: Tensor
    promote_dst: Tensor
    counters: Tensor
    errors: Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, width: int, counters: Tensor, errors: Tensor) -> Self:
        """Return outputs for selections ``[rows, heads, width]``."""
        device = counters.device

        def ids(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, -1, dtype=dtype, device=device)

        return cls(
            device_slot=ids(rows, heads, width),
            load_host=ids(rows, heads, width, dtype=torch.int64),
            load_device=ids(rows, heads, width),
            load_count=torch.zeros(rows, heads, dtype=torch.int32, device=device),
            evicted_items=ids(rows, heads, width),
            promote_src=ids(rows, heads),
            promote_dst=ids(rows, heads),
            counters=counters,
            errors=errors,
        )

    def of(self, rows: int, counters: Tensor) -> Self:
        """Return the outputs of the first rows, with other counters."""
        shared = {field.name: getattr(self, field.name)[:rows] for field in fields(self)}
        return replace(self, **shared | {"counters": counters, "errors": self.errors})


@dataclass(frozen=True)
class DiffScratch:
    """Memory for the Triton kernel, made when it is first asked for: the other implementations need none.

    Attributes:
        rows: rows B of the largest batch.
        heads: heads Hs.
        items: most items of a request.
        capacity: slots C.
        device: of the memory.
    """

    rows: int
    heads: int
    items: int
    capacity: int
    device: torch.device

    @cached_property
    def item_slot(self) -> Tensor:
        """``int32 [B, Hs, items]`` slot of each item; -1 between calls."""
        return torch.full((self.rows, self.heads, self.items), -1, dtype=torch.int32, device=self.device)

    @cached_property
    def order(self) -> Tensor:
        """``int32 [B, Hs, 3, C]`` hit marks, old order, and victims."""
        return torch.zeros(self.rows, self.heads, 3, self.capacity, dtype=torch.int32, device=self.device)


@dataclass(frozen=True, slots=True)
class SwapIn:
    """The pools of a step that also moves what it planned.

    Attributes:
        host: flat ``uint8`` host pool, pinned where the device is a GPU.
        device: flat ``uint8`` device pool.
        host_addr: addresses of `host`.
        device_addr: addresses of `device`.
        host_layer: position of the layer in the host pool.
        device_layer: its position in the device pool.
        num_heads: KV heads H of both pools.
    """

    host: Tensor
    device: Tensor
    host_addr: Addressing
    device_addr: Addressing
    host_layer: int
    device_layer: int
    num_heads: int


def lru_diff(
    items: Tensor, requests: Tensor, seq_lens: Tensor, sparse_mask: Tensor, num_real: Tensor, state: LayerState,
    out: DiffOutputs, scratch: DiffScratch, *, unit_tokens: int, promote_newest: bool = True,
    loads_hottest: bool = False, swap_in: SwapIn | None = None, impl: str = "auto",
) -> None:  # fmt: skip
    """Plan one step of one layer and update its state in place.

    Args:
        items: ``int32 [B, Hs, K]`` selected items, unique in a row, -1 as padding; K at most the capacity C.
        requests: ``int64 [B]`` row of each request in the state.
        seq_lens: ``int32 [B]`` tokens of each request, the current one included.
        sparse_mask: ``bool [B]`` rows to plan.
        num_real: ``int32 [1]`` rows from here on are padding.
        state: of the layer.
        out: where the plan goes.
        scratch: memory for the kernel.
        unit_tokens: tokens of an item.
        promote_newest: whether the previous newest item stays on the device.
        loads_hottest: whether loaded items are hotter than hits.
        swap_in: pools between which the plan is carried out at once: in CUDA C++ by the same launch. Without it the
            caller moves the rows.
        impl: which implementation runs.
    """
    run = registry.get("lru_diff", items.device, impl)
    run(
        items, requests, seq_lens, sparse_mask, num_real, state, out, scratch,
        unit_tokens=unit_tokens, promote_newest=promote_newest, loads_hottest=loads_hottest, swap_in=swap_in,
    )  # fmt: skip


# Carries out the plan of a step with launches of its own, where the diff does not copy itself.


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
