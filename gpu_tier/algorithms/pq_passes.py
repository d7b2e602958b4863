"""What all layers of a decode step of PQCache have in common: made on the host once, and uploaded.

Nothing here waits for the device: what the host knows of requests says which rows have codes, how many tokens they look
at and what is due; the sparse mask is applied on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.algorithms.pq_requests import Budgets, PQRequest
from gpu_tier.pools.code_pages import Appending, CodePages, CodeWindow
from gpu_tier.runtime import upload
from gpu_tier.types import ForwardBatch

__all__ = ["Asked", "Newest", "Span", "ask", "merged", "newest"]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens that are scored with one codebook each.

    Attributes:
        slots: ``int64 [B]`` codebook of each row.
        first: ``int32 [B]`` first token.
        stop: ``int32 [B]`` end of them; not behind `first` for rows that have none.
    """

    slots: Tensor
    first: Tensor
    stop: Tensor


@dataclass(frozen=True, slots=True)
class Asked:
    """What all layers of a step ask for.

    Attributes:
        tokens: ``int32 [B]`` tokens of the rows that select, 0 for the others.
        first: ``int32 [B]`` first token of the window, 0 for rows that do not select.
        firsts: the same of the real rows on the host.
        middle: ``int32 [B]`` tokens between the first ones and the window.
        k: ``int32 [B]`` how many of them each row selects; None when `most` is right for all.
        most: the most that a row selects.
        most_local: tokens of the largest window.
        width: tokens that scores have room for.
        table: ``int32 [B, P]`` pages of the codes.
        window: of the codes.
        spans: what is scored with which codebook, one or two.
    """

    tokens: Tensor
    first: Tensor
    firsts: tuple[int, ...]
    middle: Tensor
    k: Tensor | None
    most: int
    most_local: int
    width: int
    table: Tensor
    window: CodeWindow
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Newest:
    """What a step's tokens bring.

    Attributes:
        where: places of their codes; None when no row has codes.
        slots: ``int64 [B]`` codebook of each row.
        due: requests to be clustered anew, with their tokens and the tokens at which that was due.
    """

    where: Appending | None
    slots: Tensor
    due: tuple[tuple[PQRequest, int, float], ...]


@dataclass(frozen=True, slots=True)
class _Row:
    """What a row asks for: all 0 when it does not select."""

    tokens: int = 0
    first: int = 0
    k: int = 0
    slot: int = 0
    border: int = 0
    second_slot: int = 0

    @classmethod
    def of(cls, held: PQRequest | None, n_tokens: int, budgets: Budgets) -> _Row:
        if held is None or not held.is_sparse:
            return cls()
        first = held.first_local(n_tokens, budgets.settings.init)
        if not held.is_indexed:
            return cls(n_tokens, first, max(held.k, budgets.fewest))
        slots = [book.slot for book in held.books]
        border = held.books[1].first if len(slots) > 1 else n_tokens
        return cls(n_tokens, first, held.k, slots[0], border, slots[-1])


def ask(
    batch: ForwardBatch, sparse_mask: Tensor, requests: Mapping[int, PQRequest], codes: CodePages, budgets: Budgets
) -> Asked:
    """Return what a decode step asks for."""
    device, init = sparse_mask.device, budgets.settings.init
    rows = [
        _Row.of(requests.get(request), length, budgets)
        for request, length in zip(batch.requests, batch.lengths, strict=True)
    ]
    middles = [max(0, row.first - init) for row in rows]
    most = max((min(row.k, middle) for row, middle in zip(rows, middles, strict=True)), default=0)
    alike = all(min(row.k, middle) == min(most, middle) for row, middle in zip(rows, middles, strict=True))
    numbers = _upload([[row.tokens, row.first, row.k, row.slot, row.border, row.second_slot] for row in rows], batch)
    tokens, first, k, _, border, _ = torch.where(sparse_mask, numbers, 0).unbind(0)
    width = max((row.first for row in rows), default=0)
    pages = max(1, codes.pool.pages_of(width))
    return Asked(
        tokens=tokens,
        first=first,
        firsts=tuple(row.first for row in rows),
        middle=(first - init).clamp_min(0),
        k=None if alike else k,
        most=most,
        most_local=max((row.tokens - row.first for row in rows), default=0),
        width=width,
        table=codes.pool.table[batch.req_pool_indices, :pages],
        window=codes.window(_looked_at(batch, rows, requests, init)),
        spans=_spans((numbers[3], numbers[5]), (torch.full_like(first, init, device=device), first), border, rows),
    )


def _upload(columns: Sequence[Sequence[int]], batch: ForwardBatch) -> Tensor:
    """Return ``int32 [numbers, B]``, 0 in padding rows."""
    numbers = torch.tensor(columns, dtype=torch.int32).view(len(columns), -1).T.contiguous()
    padded = torch.nn.functional.pad(numbers, (0, batch.rows - len(columns)))
    return upload(padded, batch.seq_lens.device)


def _looked_at(
    batch: ForwardBatch, rows: Sequence[_Row], requests: Mapping[int, PQRequest], init: int
) -> list[tuple[int, int, int]]:
    """Return (request, tokens looked at, tokens that have codes) of rows that score."""
    return [
        (request, row.first, row.tokens - 1)
        for request, row in zip(batch.requests, rows, strict=True)
        if row.first > init and requests[request].is_indexed
    ]


def _spans(
    slots: tuple[Tensor, Tensor], middle: tuple[Tensor, Tensor], border: Tensor, rows: Sequence[_Row]
) -> tuple[Span, ...]:
    first, stop = middle
    if all(row.slot == row.second_slot for row in rows):
        return (Span(slots[0].long(), first, stop),)
    one = Span(slots[0].long(), first, torch.minimum(stop, border))
    return one, Span(slots[1].long(), torch.maximum(first, border), stop)


def newest(batch: ForwardBatch, requests: Mapping[int, PQRequest], codes: CodePages, budgets: Budgets) -> Newest:
    """Return what a decode step's tokens bring."""
    spare, size = codes.tail.shape[1] - 1, codes.page_tokens
    rows, completed, due = [], [], []
    for request, length in zip(batch.requests, batch.lengths, strict=True):
        held, place = requests[request], (length - 1) % size
        if not held.is_sparse or not held.is_indexed:
            rows.append([spare, 0, 0])
        else:
            rows.append([request, place, held.books[-1].slot])
            held.decoded = length
            if place == size - 1:
                completed.append((request, codes.page(request, length - 1)))
        if held.is_sparse and length >= held.due(budgets):
            due.append((held, length, held.due(budgets)))
    padding = [[spare, 0, 0]] * (batch.rows - len(rows))
    places = upload(torch.tensor([*rows, *padding], dtype=torch.int64).view(-1, 3).T, batch.seq_lens.device)
    where = Appending(places[0], places[1], tuple(completed)) if any(row[0] != spare for row in rows) else None
    return Newest(where, places[2], tuple(due))


def merged(indices: Tensor, lengths: Tensor, asked: Asked, init: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the first tokens, the selected ones and the window as one selection of single tokens.

    Args:
        indices: ``int32 [B, H, K]`` selected tokens of the middle, ascending.
        lengths: ``int32 [B, H]``.
        asked: of the step.
        init: first tokens that are always attended to.
        width: of the result.

    Returns:
        ``int32 [B, H, width]`` ascending, -1 behind the lengths, and ``int32 [B, H]``.
    """
    before = asked.tokens.clamp_max(init)[:, None, None]
    selected = lengths[..., None]
    place = torch.arange(width, dtype=torch.int32, device=indices.device)
    whole = before + selected + (asked.tokens - asked.first)[:, None, None]
    chosen = indices.gather(-1, (place - before).clamp(0, indices.shape[-1] - 1).long().expand(*lengths.shape, -1))
    local = asked.first[:, None, None] + place - before - selected
    token = torch.where(place < before, place, torch.where(place < before + selected, chosen, local))
    return torch.where(place < whole, token, -1).int(), whole[..., 0].int()
