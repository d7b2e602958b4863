"""One step of a request's device buffer: which selected items are there, which leave, what is loaded where.

For each row and each head that selects on its own, with E = the slots that hold no selected item and may be
overwritten (empty, or the item is in host memory too), coldest first:

1. Promotion: the item that was newest in the last step moves from its newest slot to E[0] and becomes the hottest. A
   selected one goes before all loads; one that is not selected moves only if the loads leave a slot for it. It has
   to be the direct predecessor of the newest item: after a jump its newest slot may have been overwritten.
2. Set intersection: selected items in the buffer keep their slot; the newest item is in ``newest_slots[item % 2]`` and
   takes no part in the order.
3. Loads: the j-th selected item that is missing, in the order of the selection, gets the j-th of E's other slots.
4. New order, coldest first: what was not touched, loaded items, hits (`loads_hottest` swaps the two), the promoted
   item; each part in the old order.

Fast path: when all items fit into the buffer, every selected item is in the slot of its number and the promoted one
finds an empty slot, hits do not change the order and nothing is loaded.

Invariants: a slot's item is unique in the row and head; `lru_slots` is a permutation with empty slots in front; a
selected item is never evicted; an item that host memory lacks is never evicted; nothing is loaded from -1; rows that
are padding or not sparse get -1 and 0 and change no state. The number of a request's tokens must not shrink.
"""

from __future__ import annotations

from torch import Tensor

from gpu_tier.kernels import registry
from gpu_tier.kernels.lru_diff.values import DiffError, DiffOutputs, DiffScratch, LayerState, SwapIn

__all__ = ["DiffError", "DiffOutputs", "DiffScratch", "LayerState", "SwapIn", "lru_diff"]


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
        scratch: room for the kernel.
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
