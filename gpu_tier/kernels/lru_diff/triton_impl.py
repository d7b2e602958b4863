"""The diff in Triton, without a sort: one program for a row and head, O(K + C) work, bit-exact with the reference.

A slow step goes through six passes. Items find their slot in a direct map that is all -1 between calls:

1. map: write each slot's number at its item;
2. match: look the selected items up, mark the slots that are hit;
3. victims: walk the old order, empty the map again, and line up the slots that may be overwritten (prefix sums);
4. decide how many slots promotion and loads take;
5. order: give every slot its place in the new order (prefix sums);
6. assign: the j-th load takes the j-th victim.

What one pass writes the next one reads from other threads: hence the barriers between them.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor

from kvcm.gpu_tier.kernels.lru_diff import DiffError, DiffOutputs, DiffScratch, LayerState, SwapIn, move

__all__ = ["run"]

triton: Any = import_module("triton")  # optional, and without types
tl: Any = import_module("triton.language")
_jit: Callable[[Callable[..., Any]], Any] = triton.jit

# Triton evaluates the annotations of a kernel: names that are not Triton's have to be text, and `tl.constexpr`, which
# makes a parameter fixed at compilation, must not be. Hence no `annotations` of the future in this file.

_MOST_BLOCK = 1024
_NOT_BACKED_UP = tl.constexpr(int(DiffError.NOT_BACKED_UP))
_NO_VICTIM = tl.constexpr(int(DiffError.NO_VICTIM))
_OUT_OF_RANGE = tl.constexpr(int(DiffError.OUT_OF_RANGE))
_NOT_ADMITTED = tl.constexpr(int(DiffError.NOT_ADMITTED))

# What an item is between passes 2 and 6, instead of a slot: -1 means that it has none.
_NEWEST = tl.constexpr(-2)
_PREVIOUS = tl.constexpr(-3)
_LOADABLE = tl.constexpr(-4)

# A word of the old order: the slot, and two flags.
_FREE = tl.constexpr(1 << 16)
_HIT = tl.constexpr(1 << 17)


@_jit
def _clear(device_slot: "Any", load_host: "Any", load_device: "Any", evicted: "Any", width: tl.constexpr,
           block: tl.constexpr) -> None:  # fmt: skip
    for start in range(0, width, block):
        at = start + tl.arange(0, block)
        nothing = tl.full([block], -1, tl.int32)
        tl.store(device_slot + at, nothing, mask=at < width)
        tl.store(load_device + at, nothing, mask=at < width)
        tl.store(evicted + at, nothing, mask=at < width)
        tl.store(load_host + at, nothing.to(tl.int64), mask=at < width)


@_jit
def _in_place(items: "Any", item_stride: "Any", slot_item: "Any", newest: "Any", previous: "Any", width: tl.constexpr,
              capacity: tl.constexpr, block: tl.constexpr) -> "Any":  # fmt: skip
    """Return how many selected items are not in the slot of their number; of a request that fits."""
    elsewhere = tl.zeros([], tl.int32)
    for start in range(0, width, block):
        at = start + tl.arange(0, block)
        item = tl.load(items + at * item_stride, mask=at < width, other=-1)
        look = (item >= 0) & (item < newest) & (item != previous)
        held = tl.load(slot_item + item, mask=look & (item < capacity), other=-1)
        elsewhere += tl.sum((look & (held != item)).to(tl.int32))
    return elsewhere


@_jit
def _fast_slots(items: "Any", item_stride: "Any", slot_loc: "Any", device_slot: "Any", newest: "Any",
                newest_slot: "Any", previous: "Any", promote_to: "Any", errors: "Any", width: tl.constexpr,
                block: tl.constexpr) -> "Any":  # fmt: skip
    """Write the device slots of the fast path; return the valid items."""
    selected = tl.zeros([], tl.int32)
    beyond = tl.zeros([], tl.int32)
    for start in range(0, width, block):
        at = start + tl.arange(0, block)
        item = tl.load(items + at * item_stride, mask=at < width, other=-1)
        valid = (item >= 0) & (item <= newest)
        slot = tl.load(slot_loc + item, mask=valid & (item < newest), other=-1)
        slot = tl.where(valid & (item == newest), newest_slot, slot)
        slot = tl.where(valid & (item == previous), promote_to, slot)
        tl.store(device_slot + at, slot, mask=at < width)
        selected += tl.sum(valid.to(tl.int32))
        beyond += tl.sum((item > newest).to(tl.int32))
    if beyond > 0:
        tl.atomic_or(errors, _OUT_OF_RANGE)
    return selected


@_jit
def _rotate(lru_slots: "Any", capacity: tl.constexpr, block: tl.constexpr) -> None:
    """Make the coldest slot the hottest."""
    coldest = tl.load(lru_slots)
    for start in range(0, capacity, block):
        at = start + tl.arange(0, block)
        slot = tl.load(lru_slots + at + 1, mask=at < capacity - 1, other=0)
        tl.debug_barrier()  # a neighbour's value is read before it is overwritten
        tl.store(lru_slots + at, tl.where(at < capacity - 1, slot, coldest), mask=at < capacity)


@_jit
def _map(slot_item: "Any", item_slot: "Any", marks: "Any", capacity: tl.constexpr, block: tl.constexpr) -> None:
    for start in range(0, capacity, block):
        at = start + tl.arange(0, block)
        item = tl.load(slot_item + at, mask=at < capacity, other=-1)
        tl.store(item_slot + item, at, mask=item >= 0)
        tl.store(marks + at, tl.zeros([block], tl.int32), mask=at < capacity)


@_jit
def _match(items: "Any", item_stride: "Any", item_slot: "Any", host_loc: "Any", marks: "Any", device_slot: "Any",
           newest: "Any", previous: "Any", errors: "Any", width: tl.constexpr,
           block: tl.constexpr) -> "Any":  # fmt: skip
    """Write what each item is; return how many are selected, hit, loadable, lost and the previous newest one."""
    selected = tl.zeros([], tl.int32)
    hits = tl.zeros([], tl.int32)
    loadable = tl.zeros([], tl.int32)
    lost = tl.zeros([], tl.int32)
    before = tl.zeros([], tl.int32)
    beyond = tl.zeros([], tl.int32)
    for start in range(0, width, block):
        at = start + tl.arange(0, block)
        item = tl.load(items + at * item_stride, mask=at < width, other=-1)
        valid = (item >= 0) & (item <= newest)
        is_newest = valid & (item == newest)
        is_previous = valid & (item == previous)
        look = valid & (item < newest) & (item != previous)
        slot = tl.load(item_slot + item, mask=look, other=-1)
        hit = slot >= 0
        tl.store(marks + slot, tl.full([block], 1, tl.int32), mask=hit)
        missing = look & (slot < 0)
        host = tl.load(host_loc + item, mask=missing, other=-1)
        can_load = missing & (host >= 0)
        slot = tl.where(can_load, _LOADABLE, slot)
        slot = tl.where(is_newest, _NEWEST, slot)
        slot = tl.where(is_previous, _PREVIOUS, slot)
        tl.store(device_slot + at, slot, mask=at < width)
        selected += tl.sum(valid.to(tl.int32))
        hits += tl.sum((hit | is_newest).to(tl.int32))
        loadable += tl.sum(can_load.to(tl.int32))
        lost += tl.sum((missing & (host < 0)).to(tl.int32))
        before += tl.sum(is_previous.to(tl.int32))
        beyond += tl.sum((item > newest).to(tl.int32))
    if beyond > 0:
        tl.atomic_or(errors, _OUT_OF_RANGE)
    return selected, hits, loadable, lost, before


@_jit
def _line_up(lru_slots: "Any", slot_item: "Any", item_slot: "Any", host_loc: "Any", marks: "Any", order: "Any",
             victims: "Any", capacity: tl.constexpr, block: tl.constexpr) -> "Any":  # fmt: skip
    """Write the old order with flags and the slots that may be overwritten; return how many may, and were hit."""
    free_slots = tl.zeros([], tl.int32)
    hit_slots = tl.zeros([], tl.int32)
    for start in range(0, capacity, block):
        at = start + tl.arange(0, block)
        inside = at < capacity
        slot = tl.load(lru_slots + at, mask=inside, other=0).to(tl.int32)
        item = tl.load(slot_item + slot, mask=inside, other=-1)
        tl.store(item_slot + item, tl.full([block], -1, tl.int32), mask=inside & (item >= 0))
        hit = inside & (tl.load(marks + slot, mask=inside, other=0) > 0)
        host = tl.load(host_loc + item, mask=inside & (item >= 0), other=-1)
        free = inside & (hit == 0) & ((item < 0) | (host >= 0))
        rank = free_slots + tl.cumsum(free.to(tl.int32), 0) - 1
        tl.store(victims + rank, slot, mask=free)
        tl.store(order + at, slot + tl.where(free, _FREE, 0) + tl.where(hit, _HIT, 0), mask=inside)
        free_slots += tl.sum(free.to(tl.int32))
        hit_slots += tl.sum(hit.to(tl.int32))
    return free_slots, hit_slots


@_jit
def _reorder(order: "Any", lru_slots: "Any", promoted: "Any", taken: "Any", hit_slots: "Any", capacity: tl.constexpr,
             loads_hottest: tl.constexpr, block: tl.constexpr) -> None:  # fmt: skip
    cold_done = tl.zeros([], tl.int32)
    free_done = tl.zeros([], tl.int32)
    hits_done = tl.zeros([], tl.int32)
    first_warm = capacity - promoted - taken - hit_slots
    first_load = first_warm + (hit_slots if loads_hottest else 0)
    first_hit = first_warm + (0 if loads_hottest else taken)
    for start in range(0, capacity, block):
        at = start + tl.arange(0, block)
        inside = at < capacity
        word = tl.load(order + at, mask=inside, other=0)
        free = (word & _FREE) != 0
        hit = (word & _HIT) != 0
        rank = free_done + tl.cumsum(free.to(tl.int32), 0) - 1 - promoted
        used = free & (rank < taken)
        cold = inside & (hit == 0) & (used == 0)
        place = cold_done + tl.cumsum(cold.to(tl.int32), 0) - 1
        place = tl.where(hit, first_hit + hits_done + tl.cumsum(hit.to(tl.int32), 0) - 1, place)
        place = tl.where(used, first_load + rank, place)
        place = tl.where(free & (rank < 0), capacity - 1, place)
        tl.store(lru_slots + place, (word & 0xFFFF).to(tl.int16), mask=inside)
        cold_done += tl.sum(cold.to(tl.int32))
        free_done += tl.sum(free.to(tl.int32))
        hits_done += tl.sum(hit.to(tl.int32))


@_jit
def _assign(items: "Any", item_stride: "Any", slot_item: "Any", slot_loc: "Any", host_loc: "Any", victims: "Any",
            device_slot: "Any", load_host: "Any", load_device: "Any", evicted: "Any", newest_slot: "Any",
            promoted: "Any", promote_to: "Any", taken: "Any", width: tl.constexpr,
            block: tl.constexpr) -> None:  # fmt: skip
    done = tl.zeros([], tl.int32)
    for start in range(0, width, block):
        at = start + tl.arange(0, block)
        inside = at < width
        item = tl.load(items + at * item_stride, mask=inside, other=-1)
        slot = tl.load(device_slot + at, mask=inside, other=-1)
        wanted = slot == _LOADABLE
        rank = done + tl.cumsum(wanted.to(tl.int32), 0) - 1
        load = wanted & (rank < taken)
        victim = tl.load(victims + rank + promoted, mask=load, other=0)
        target = tl.load(slot_loc + victim, mask=load, other=-1)
        tl.store(evicted + rank, tl.load(slot_item + victim, mask=load, other=-1), mask=load)
        tl.store(load_host + rank, tl.load(host_loc + item, mask=load, other=-1), mask=load)
        tl.store(load_device + rank, target, mask=load)
        tl.store(slot_item + victim, item, mask=load)
        located = tl.load(slot_loc + slot, mask=slot >= 0, other=-1)
        located = tl.where(load, target, located)
        located = tl.where(slot == _NEWEST, newest_slot, located)
        located = tl.where((slot == _PREVIOUS) & (promoted > 0), promote_to, located)
        tl.store(device_slot + at, located, mask=inside)
        done += tl.sum(wanted.to(tl.int32))


@_jit
def _count(counters: "Any", selected: "Any", hits: "Any", loads: "Any", promoted: "Any") -> None:
    tl.atomic_add(counters, selected.to(tl.int64))
    tl.atomic_add(counters + 1, hits.to(tl.int64))
    tl.atomic_add(counters + 2, loads.to(tl.int64))
    tl.atomic_add(counters + 3, promoted.to(tl.int64))


@_jit
def _slow(items: "Any", item_stride: "Any", slot_item: "Any", lru_slots: "Any", slot_loc: "Any", host_loc: "Any",
          device_slot: "Any", load_host: "Any", load_device: "Any", load_count: "Any", evicted: "Any",
          counters: "Any", errors: "Any", item_slot: "Any", scratch: "Any", newest: "Any", newest_slot: "Any",
          previous: "Any", moves: "Any", width: tl.constexpr, capacity: tl.constexpr, loads_hottest: tl.constexpr,
          block: tl.constexpr) -> "Any":  # fmt: skip
    """Make the step in the six passes; return whether the previous newest item was promoted, and where to."""
    marks = scratch
    old_order = scratch + capacity
    victims = scratch + 2 * capacity
    _map(slot_item, item_slot, marks, capacity, block)
    tl.debug_barrier()
    selected, hits, wanted, lost, before = _match(items, item_stride, item_slot, host_loc, marks, device_slot, newest,
                                                  previous, errors, width, block)  # fmt: skip
    tl.debug_barrier()
    free_slots, hit_slots = _line_up(lru_slots, slot_item, item_slot, host_loc, marks, old_order, victims, capacity,
                                     block)  # fmt: skip
    tl.debug_barrier()
    # A previous newest item that is not selected gives way to loads.
    promoted = moves * (free_slots > tl.where(before > 0, 0, wanted)).to(tl.int32)
    taken = tl.minimum(wanted, free_slots - promoted)
    _reorder(old_order, lru_slots, promoted, taken, hit_slots, capacity, loads_hottest, block)
    first = tl.load(victims, mask=promoted > 0, other=0)
    promote_to = tl.load(slot_loc + first)
    _assign(items, item_stride, slot_item, slot_loc, host_loc, victims, device_slot, load_host, load_device, evicted,
            newest_slot, promoted, promote_to, taken, width, block)  # fmt: skip
    tl.store(load_count, taken)
    tl.store(slot_item + first, previous, mask=promoted > 0)
    _count(counters, selected, hits + before * promoted, taken, promoted)
    if lost > 0:
        tl.atomic_or(errors, _NOT_BACKED_UP)
    if (wanted > taken) | (before > promoted):
        tl.atomic_or(errors, _NO_VICTIM)
    return promoted, promote_to


@_jit
def _diff(items: "Any", row_stride: "Any", head_stride: "Any", item_stride: "Any", requests: "Any", seq_lens: "Any",
          sparse_mask: "Any", num_real: "Any", slot_item: "Any", lru_slots: "Any", newest_item: "Any",
          slot_loc: "Any", newest_slots: "Any", host_loc: "Any", host_stride: "Any", device_slot: "Any",
          load_host: "Any", load_device: "Any", load_count: "Any", evicted: "Any", promote_src: "Any",
          promote_dst: "Any", counters: "Any", errors: "Any", item_slot: "Any", map_stride: "Any", order: "Any",
          heads: tl.constexpr, width: tl.constexpr, capacity: tl.constexpr, unit: tl.constexpr,
          promote: tl.constexpr, loads_hottest: tl.constexpr, block: tl.constexpr) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    pair = row * heads + head
    items += row * row_stride + head * head_stride
    device_slot += pair * width
    load_host += pair * width
    load_device += pair * width
    evicted += pair * width
    _clear(device_slot, load_host, load_device, evicted, width, block)
    tl.store(load_count + pair, 0)
    tl.store(promote_src + pair, -1)
    tl.store(promote_dst + pair, -1)
    if (row >= tl.load(num_real)) | (tl.load(sparse_mask + row) == 0):
        return
    request = tl.load(requests + row).to(tl.int64)
    newest_slots += request * 2
    if tl.load(newest_slots) < 0:
        tl.atomic_or(errors, _NOT_ADMITTED)
        return
    tl.debug_barrier()
    state_row = request * heads + head
    slot_item += state_row * capacity
    lru_slots += state_row * capacity
    slot_loc += request * capacity
    host_loc += request * host_stride
    newest = ((tl.load(seq_lens + row) - 1) // unit).to(tl.int32)
    leaving = tl.load(newest_item + state_row)
    # The previous newest item if it is to be promoted, else an id that nothing has.
    previous = tl.where((leaving >= 0) & (leaving + 1 == newest), leaving, -1) if promote else leaving * 0 - 1
    moves = (previous >= 0).to(tl.int32)
    newest_slot = tl.load(newest_slots + newest % 2)
    leaving_from = tl.load(newest_slots + tl.maximum(previous, 0) % 2)
    coldest = tl.load(lru_slots).to(tl.int32)
    fast = tl.zeros([], tl.int32)
    if (newest < capacity) & ((moves == 0) | (tl.load(slot_item + coldest) < 0)) & promote:
        elsewhere = _in_place(items, item_stride, slot_item, newest, previous, width, capacity, block)
        fast += (elsewhere == 0).to(tl.int32)
    if fast > 0:
        promote_to = tl.load(slot_loc + coldest)
        promoted = moves
        selected = _fast_slots(items, item_stride, slot_loc, device_slot, newest, newest_slot, previous, promote_to,
                               errors, width, block)  # fmt: skip
        if promoted > 0:
            tl.store(slot_item + coldest, previous)
            _rotate(lru_slots, capacity, block)
        _count(counters, selected, selected, moves * 0, moves)
    else:
        scratch = order + pair * 3 * capacity
        promoted, promote_to = _slow(
            items, item_stride, slot_item, lru_slots, slot_loc, host_loc, device_slot, load_host, load_device,
            load_count + pair, evicted, counters, errors, item_slot + pair * map_stride, scratch, newest, newest_slot,
            previous, moves, width, capacity, loads_hottest, block,
        )  # fmt: skip
    if promoted > 0:
        tl.store(promote_src + pair, leaving_from)
        tl.store(promote_dst + pair, promote_to)
    tl.store(newest_item + state_row, newest)  # last: every thread has read the old one long ago


def run(
    items: Tensor, requests: Tensor, seq_lens: Tensor, sparse_mask: Tensor, num_real: Tensor, state: LayerState,
    out: DiffOutputs, scratch: DiffScratch, *, unit_tokens: int, promote_newest: bool, loads_hottest: bool,
    swap_in: SwapIn | None = None, block: int | None = None,
) -> None:  # fmt: skip
    """See `kvcm.gpu_tier.kernels.lru_diff`. `block` is how many items or slots in one pass, a power of two."""
    rows, heads, width = items.shape
    if not rows:
        return  # a grid cannot be empty
    capacity = state.slot_item.shape[-1]
    if block is None:
        block = min(_MOST_BLOCK, triton.next_power_of_2(max(width, capacity, 16)))
    _diff[(rows, heads)](
        items, *items.stride(), requests, seq_lens, sparse_mask, num_real,
        state.slot_item, state.lru_slots, state.newest_item, state.slot_loc, state.newest_slots,
        state.host_loc, state.host_loc.stride(0),
        out.device_slot, out.load_host, out.load_device, out.load_count, out.evicted_items,
        out.promote_src, out.promote_dst, out.counters, out.errors,
        scratch.item_slot, scratch.item_slot.shape[-1], scratch.order,
        heads=heads, width=width, capacity=capacity, unit=unit_tokens,
        promote=promote_newest, loads_hottest=loads_hottest, block=block,
        # No barrier parts loads from stores that go to the same place in the same thread. Of a block with fewer numbers
        # than threads, several warps would hold the same ones, and one might read what another has already overwritten.
        num_warps=max(1, min(4, block // 32)),
    )  # fmt: skip
    if swap_in is not None:
        move(out, swap_in, unit_tokens, impl="triton")
