"""The diff in torch, vectorised over rows and heads: the definition.

Names: A active rows, Hs heads, K selected items, C slots. `o_` marks values in the old LRU order, coldest first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcm.gpu_tier.kernels.lru_diff import DiffError, DiffOutputs, DiffScratch, LayerState, SwapIn, move

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class _Step:
    """What the state and the selection say of the active rows, before anything is decided.

    Attributes:
        items: ``[A, Hs, K]`` selected items; 0 where they are not valid.
        slot: ``[A, Hs, K]`` slot of each item, -1 when the buffer lacks it.
        host: ``[A, Hs, K]`` host slot of each item.
        newest, previous, hit, loadable, lost: ``bool [A, Hs, K]``, what each valid item is.
        slot_item: ``[A, Hs, C]`` item of each slot.
        lru: ``[A, Hs, C]`` slots.
        o_hit: ``bool [A, Hs, C]`` slots that were hit.
        o_free: ``bool [A, Hs, C]`` slots that may be overwritten.
        leaving: ``[A, Hs]`` the previous newest item.
        moves: ``bool [A, Hs]`` whether it is to be promoted.
        fast: ``bool [A, Hs]`` whether the fast path applies.
    """

    items: Tensor
    slot: Tensor
    host: Tensor
    newest: Tensor
    previous: Tensor
    hit: Tensor
    loadable: Tensor
    lost: Tensor
    slot_item: Tensor
    lru: Tensor
    o_hit: Tensor
    o_free: Tensor
    leaving: Tensor
    moves: Tensor
    fast: Tensor


@dataclass(frozen=True, slots=True)
class _Decision:
    """Where items go.

    Attributes:
        promoted: ``bool [A, Hs]``.
        promote_to: ``[A, Hs]`` slot of the promoted item.
        loads: ``bool [A, Hs, K]`` items that are loaded.
        rank: ``[A, Hs, K]`` number of each load.
        victim: ``[A, Hs, K]`` slot of each load.
        order: ``[A, Hs, C]`` the new order.
    """

    promoted: Tensor
    promote_to: Tensor
    loads: Tensor
    rank: Tensor
    victim: Tensor
    order: Tensor


def run(
    items: Tensor, requests: Tensor, seq_lens: Tensor, sparse_mask: Tensor, num_real: Tensor, state: LayerState,
    out: DiffOutputs, scratch: DiffScratch, *, unit_tokens: int, promote_newest: bool, loads_hottest: bool,
    swap_in: SwapIn | None = None,
) -> None:  # fmt: skip
    """See `kvcm.gpu_tier.kernels.lru_diff`."""
    _plan(
        items, requests, seq_lens, sparse_mask, num_real, state, out, unit_tokens=unit_tokens,
        promote_newest=promote_newest, loads_hottest=loads_hottest,
    )  # fmt: skip
    if swap_in is not None:
        move(out, swap_in, unit_tokens, impl="reference")


def _plan(
    items: Tensor, requests: Tensor, seq_lens: Tensor, sparse_mask: Tensor, num_real: Tensor, state: LayerState,
    out: DiffOutputs, *, unit_tokens: int, promote_newest: bool, loads_hottest: bool,
) -> None:  # fmt: skip
    _clear(out)
    active = sparse_mask & (torch.arange(len(requests), device=requests.device) < num_real)
    rows = active.nonzero()[:, 0]
    admitted = state.newest_slots[requests[rows], 0] >= 0
    _flag(out, DiffError.NOT_ADMITTED, ~admitted)
    rows = rows[admitted]
    if not len(rows):
        return
    newest_item = ((seq_lens[rows] - 1) // unit_tokens).long()[:, None]
    request = requests[rows]
    _flag(out, DiffError.OUT_OF_RANGE, items[rows] > newest_item[..., None])
    step = _read(items[rows].long(), newest_item, request, state, promote_newest=promote_newest)
    decision = _decide(step, loads_hottest=loads_hottest)
    _report(step, decision, rows, request, newest_item, state, out)
    _update(step, decision, request, newest_item, state)


def _clear(out: DiffOutputs) -> None:
    for ids in (out.device_slot, out.load_host, out.load_device, out.evicted_items, out.promote_src, out.promote_dst):
        ids.fill_(-1)
    out.load_count.zero_()


def _flag(out: DiffOutputs, error: DiffError, where: Tensor) -> None:
    out.errors.bitwise_or_(where.any().int() * int(error))


def _read(items: Tensor, newest_item: Tensor, request: Tensor, state: LayerState, *, promote_newest: bool) -> _Step:
    slot_item, lru = state.slot_item[request].long(), state.lru_slots[request].long()
    host_loc = state.host_loc[request][:, None].expand(-1, items.shape[1], -1)
    leaving = state.newest_item[request].long()
    moves = (leaving >= 0) & (leaving + 1 == newest_item) & promote_newest
    valid = (items >= 0) & (items <= newest_item[..., None])
    items = items.where(valid, 0)
    newest = valid & (items == newest_item[..., None])
    previous = valid & moves[..., None] & (items == leaving[..., None])
    slot = _slots_of(items, slot_item, host_loc.shape[-1]).where(valid & ~newest & ~previous, -1)
    hit = slot >= 0
    host = host_loc.gather(-1, items)
    missing = valid & ~newest & ~previous & ~hit
    o_item = slot_item.gather(-1, lru)
    o_hit = _marks(slot, slot_item.shape[-1]).gather(-1, lru)
    backed_up = (o_item < 0) | (host_loc.gather(-1, o_item.clamp_min(0)) >= 0)
    in_place = (~valid | newest | previous | (slot == items)).all(-1)
    fits = promote_newest & (newest_item < slot_item.shape[-1]) & (~moves | (o_item[..., 0] < 0))
    return _Step(
        items, slot, host, newest, previous, hit, missing & (host >= 0), missing & (host < 0),
        slot_item, lru, o_hit, ~o_hit & backed_up, leaving, moves, fits & in_place,
    )  # fmt: skip


def _slots_of(items: Tensor, slot_item: Tensor, num_items: int) -> Tensor:
    """Return the slot of each item, -1 when the buffer lacks it."""
    slots = torch.arange(slot_item.shape[-1], device=items.device).expand_as(slot_item)
    direct = torch.full((*items.shape[:2], num_items + 1), -1, dtype=torch.int64, device=items.device)
    direct.scatter_(-1, slot_item.where(slot_item >= 0, num_items), slots)
    return direct.gather(-1, items)


def _marks(slots: Tensor, capacity: int) -> Tensor:
    """Return ``bool [..., capacity]``: which slots are among `slots`."""
    marks = torch.zeros(*slots.shape[:-1], capacity + 1, dtype=torch.bool, device=slots.device)
    return marks.scatter_(-1, slots.where(slots >= 0, capacity), value=True)[..., :capacity]


def _decide(step: _Step, *, loads_hottest: bool) -> _Decision:
    free, wanted = step.o_free.sum(-1), step.loadable.sum(-1)
    # A previous newest item that is not selected gives way to loads.
    promoted = step.moves & (free > wanted.where(~step.previous.any(-1), 0))
    taken = torch.minimum(wanted, free - promoted.long())
    o_rank = step.o_free.cumsum(-1) - 1 - promoted[..., None].long()
    o_promoted = step.o_free & (o_rank == -1)
    o_loaded = step.o_free & (o_rank >= 0) & (o_rank < taken[..., None])
    rank = step.loadable.cumsum(-1) - 1
    loads = step.loadable & (rank < taken[..., None])
    # Victims first, in the old order: then the slot of rank j is entry j.
    victims = step.lru.gather(-1, o_loaded.logical_not().byte().argsort(dim=-1, stable=True))
    load_heat, hit_heat = (2, 1) if loads_hottest else (1, 2)
    heat = load_heat * o_loaded + hit_heat * (step.o_hit & ~step.fast[..., None]) + 3 * o_promoted
    return _Decision(
        promoted=promoted,
        promote_to=step.lru.gather(-1, o_promoted.byte().argmax(-1, keepdim=True))[..., 0],
        loads=loads,
        rank=rank,
        victim=victims.gather(-1, rank.clamp_min(0)),
        order=step.lru.gather(-1, heat.argsort(dim=-1, stable=True)),
    )


def _report(
    step: _Step, decision: _Decision, rows: Tensor, request: Tensor, newest_item: Tensor, state: LayerState,
    out: DiffOutputs,
) -> None:  # fmt: skip
    loads, promoted = decision.loads, decision.promoted
    located = state.slot_loc[request][:, None].expand(-1, loads.shape[1], -1)
    newest_slots = state.newest_slots[request]
    promote_to = located.gather(-1, decision.promote_to[..., None])[..., 0]
    victim_slot = located.gather(-1, decision.victim)
    slot = located.gather(-1, step.slot.clamp_min(0)).where(step.hit, -1)
    slot = slot.where(~loads, victim_slot)
    slot = slot.where(~step.newest, newest_slots.gather(-1, newest_item % 2)[..., None])
    moved = step.previous & promoted[..., None]
    out.device_slot[rows] = slot.where(~moved, promote_to[..., None])
    leaving_from = newest_slots.gather(-1, step.leaving.clamp_min(0) % 2)
    out.promote_src[rows] = leaving_from.where(promoted, -1)
    out.promote_dst[rows] = promote_to.where(promoted, -1)
    out.load_host[rows] = _compact(step.host, decision)
    out.load_device[rows] = _compact(victim_slot, decision)
    out.evicted_items[rows] = _compact(step.slot_item.gather(-1, decision.victim).int(), decision)
    out.load_count[rows] = loads.sum(-1, dtype=torch.int32)
    hits = step.hit | step.newest | moved
    selected = hits | step.loadable | step.lost | step.previous
    out.counters.add_(torch.stack([selected.sum(), hits.sum(), loads.sum(), promoted.sum()]))
    _flag(out, DiffError.NOT_BACKED_UP, step.lost)
    _flag(out, DiffError.NO_VICTIM, (step.loadable & ~loads) | (step.previous & ~moved))


def _compact(values: Tensor, decision: _Decision) -> Tensor:
    """Return the values of the loads left-aligned, -1 behind them."""
    width = values.shape[-1]
    padded = torch.full((*values.shape[:2], width + 1), -1, dtype=values.dtype, device=values.device)
    return padded.scatter_(-1, decision.rank.where(decision.loads, width), values)[..., :width]


def _update(step: _Step, decision: _Decision, request: Tensor, newest_item: Tensor, state: LayerState) -> None:
    capacity = step.lru.shape[-1]
    slot_item = torch.cat([step.slot_item, torch.zeros_like(step.slot_item[..., :1])], dim=-1)
    slot_item.scatter_(-1, decision.victim.where(decision.loads, capacity), step.items)
    promote_to = decision.promote_to.where(decision.promoted, capacity)
    slot_item.scatter_(-1, promote_to[..., None], step.leaving[..., None])
    state.slot_item[request] = slot_item[..., :capacity].int()
    state.lru_slots[request] = decision.order.short()
    state.newest_item[request] = newest_item.expand_as(step.leaving).int()
