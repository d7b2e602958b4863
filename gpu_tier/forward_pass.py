"""One forward pass, as the coordinator knows it: which rows are sparse, and whose each token is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvcm.gpu_tier.backend import DenseRows
from kvcm.gpu_tier.runtime import upload
from kvcm.gpu_tier.types import ForwardBatch, Mode, ResidencyPlan, Selection, Unit

__all__ = ["BatchPlan", "Step", "make_batch"]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The rows of a pass on the host.

    Attributes:
        requests: row of each request in the per-request tables.
        starts: tokens of each before the pass.
        extend_lens: tokens that each brings.
        slots: device slot of each token, row after row.
    """

    requests: tuple[int, ...]
    starts: tuple[int, ...]
    extend_lens: tuple[int, ...]
    slots: Tensor


def make_batch(mode: Mode, plan: BatchPlan, device: torch.device, pad_to: int = 0) -> ForwardBatch:
    """Return the batch of a plan, with padding rows up to `pad_to`; a padding row is one token without a slot."""
    lengths = tuple(start + extend for start, extend in zip(plan.starts, plan.extend_lens, strict=True))
    padding = max(0, pad_to - len(plan.requests))
    slots = torch.nn.functional.pad(plan.slots.long(), (0, padding), value=-1)
    positions = torch.nn.functional.pad(_positions(plan, lengths), (0, padding))
    return ForwardBatch(
        mode=mode,
        req_pool_indices=_tensor([*plan.requests, *[0] * padding], torch.int64, device),
        seq_lens=_tensor([*lengths, *[0] * padding], torch.int32, device),
        out_cache_loc=upload(slots, device),
        positions=upload(positions, device),
        num_real_reqs=_tensor([len(plan.requests)], torch.int32, device),
        requests=plan.requests,
        lengths=lengths,
        extend_lens=plan.extend_lens,
    )


def _positions(plan: BatchPlan, lengths: Sequence[int]) -> Tensor:
    if all(extend == 1 for extend in plan.extend_lens):
        return torch.tensor(plan.starts, dtype=torch.int64)
    return torch.cat([torch.arange(start, stop) for start, stop in zip(plan.starts, lengths, strict=True)])


def _tensor(values: Sequence[int] | Sequence[bool], dtype: torch.dtype, device: torch.device) -> Tensor:
    return upload(torch.tensor(values, dtype=dtype), device)


@dataclass(frozen=True)
class Step:
    """Inputs of a pass beside its batch; values shared by all layers are made once.

    Attributes:
        batch: the pass.
        sparse_mask: ``bool [B]`` rows that are sparse.
        num_sparse: how many there are.
        dense: slots of the other rows.
        resident: slots of all rows in the arena of the resident layers, which are dense for all.
    """

    batch: ForwardBatch
    sparse_mask: Tensor
    num_sparse: int
    dense: DenseRows
    resident: DenseRows | None

    @property
    def any_sparse(self) -> bool:
        """Whether there is a sparse row."""
        return self.num_sparse > 0

    @classmethod
    def of(cls, batch: ForwardBatch, is_sparse: Sequence[bool], table: Tensor, resident: Tensor | None) -> Step:
        """Return the step of a batch whose real rows are sparse or not; two tables of slots."""
        padding = batch.rows - batch.num_real
        dense = [length for length, sparse in zip(batch.lengths, is_sparse, strict=True) if not sparse]
        return cls(
            batch=batch,
            sparse_mask=_tensor([*is_sparse, *[False] * padding], torch.bool, batch.seq_lens.device),
            num_sparse=sum(is_sparse),
            dense=DenseRows(batch, table, max(dense, default=0)),
            resident=None if resident is None else DenseRows(batch, resident, max(batch.lengths, default=0)),
        )

    @cached_property
    def dense_lengths(self) -> Tensor:
        """Tokens of each dense row, 0 for sparse rows and padding, ``int32 [B]``."""
        return torch.where(self.sparse_mask, 0, self.dense.lengths)

    @cached_property
    def resident_slots(self) -> Tensor:
        """Where the pass's tokens go in the arena of the resident layers, ``int64 [T]``, -1 for padding."""
        assert self.resident is not None
        batch = self.batch
        rows = torch.tensor(batch.requests).repeat_interleave(torch.tensor(batch.extend_lens))
        owners = upload(rows, self.resident.table.device)
        slots = self.resident.table[owners, batch.positions[: len(rows)]].long()
        return torch.nn.functional.pad(slots, (0, len(batch.positions) - len(rows)), value=-1)

    @cached_property
    def newest_token(self) -> tuple[Selection, ResidencyPlan]:
        """The current token of every sparse row as a selection, and where it is."""
        batch = self.batch
        mask = self.sparse_mask[:, None]
        indices = torch.where(mask, batch.seq_lens[:, None] - 1, -1)[:, None].int()
        slots = torch.where(mask, batch.out_cache_loc[:, None], -1)[:, None].int()
        return Selection(unit=Unit.TOKEN, unit_tokens=1, indices=indices, lengths=mask.int()), ResidencyPlan(slots)
