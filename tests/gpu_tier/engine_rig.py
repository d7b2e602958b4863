"""What the tests of the engine share: hooks that keep all KV in plain tensors, and a forward pass without any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvcm.gpu_tier.engine.interfaces import DecoderModel, ModelState
from kvcm.gpu_tier.errors import PoolExhaustedError
from kvcm.gpu_tier.types import AttnMetadata, ForwardBatch, Mode, Partial


def plain_attention(q: Tensor, k: Tensor, v: Tensor, sm_scale: float) -> Tensor:
    """Return causal attention of the last T of S tokens, in the inputs' dtype."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * sm_scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(k.shape[0] - q.shape[0] + 1)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def plain_forward(model: DecoderModel, tokens: Sequence[int]) -> Tensor:
    """Return the logits of every token of one sequence, computed at once."""
    positions = torch.arange(len(tokens))
    states: list[ModelState] = [{}]
    hidden = model.embed(torch.tensor(tokens), positions)
    for layer in range(model.num_layers):
        inputs = model.attention_inputs(layer, hidden, positions, states, [len(tokens)])
        v = inputs.k[..., : model.v_head_dim] if inputs.v is None else inputs.v
        hidden = model.attention_output(layer, hidden, plain_attention(inputs.q, inputs.k, v, model.sm_scale))
    return model.logits(hidden)


@dataclass
class _Row:
    """One request of `PlainHooks`: its tracker and its KV."""

    n_prompt: int
    cached_tokens: int = 0
    seq_len: int = 0
    prompt_finished: bool = False
    kv: dict[int, list[Tensor]] = field(default_factory=dict)


class PlainHooks:
    """Hooks with dense attention over plain tensors; `calls` lists the called hooks, `capacity` are tokens of KV."""

    def __init__(self, v_dims: int, capacity: int = 1 << 30) -> None:
        self.v_dims = v_dims
        self.capacity = capacity
        self.trackers: dict[int, _Row] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.batches: list[ForwardBatch] = []
        self.widest_read = 0
        self._next = 0

    @property
    def key_reader(self) -> PlainHooks:
        return self

    def rows(self, layer_id: int, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        self.widest_read = max(self.widest_read, stop - start)
        k, v = self.trackers[request].kv[layer_id]
        assert stop <= len(k)
        return k[start:stop].float(), v[start:stop].float()

    def on_request_begin(self, n_prompt: int, prefix: Any = None) -> int:
        self._check_free(1)
        self._next += 1
        self.calls.append(("begin", self._next, ""))
        self.trackers[self._next] = _Row(n_prompt)
        if prefix is not None:
            row = self.trackers[self._next]
            row.kv = {layer: list(kv) for layer, kv in prefix.items()}
            row.cached_tokens = row.seq_len = len(row.kv[0][0])
        return self._next

    def _check_free(self, tokens: int) -> None:
        if sum(row.seq_len for row in self.trackers.values()) + tokens > self.capacity:
            raise PoolExhaustedError("full")

    def plan_prefill(self, requests: Sequence[int], extend_lens: Sequence[int]) -> ForwardBatch:
        return self._plan(Mode.PREFILL, requests, extend_lens, 0)

    def plan_decode(self, requests: Sequence[int], pad_to: int = 0) -> ForwardBatch:
        return self._plan(Mode.DECODE, requests, [1] * len(requests), max(0, pad_to - len(requests)))

    def _plan(self, mode: Mode, requests: Sequence[int], extend: Sequence[int], padding: int) -> ForwardBatch:
        self._check_free(sum(extend))
        starts = [self.trackers[request].seq_len for request in requests]
        stops = [start + count for start, count in zip(starts, extend, strict=True)]
        positions = [i for start, stop in zip(starts, stops, strict=True) for i in range(start, stop)]
        rows = (torch.tensor([*requests, *[0] * padding]), torch.tensor([*stops, *[0] * padding], dtype=torch.int32))
        slots = torch.tensor([*range(len(positions)), *[-1] * padding])
        padded, count = torch.tensor([*positions, *[0] * padding]), torch.tensor([len(requests)], dtype=torch.int32)
        batch = ForwardBatch(mode, *rows, slots, padded, count, tuple(requests), tuple(stops), tuple(extend))
        self.batches.append(batch)
        return batch

    def forward_begin(self, batch: ForwardBatch) -> None:
        self.calls.append(("forward_begin", batch.mode))

    def write_kv(self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None) -> None:
        assert len(k) == len(batch.positions)
        v = k[..., : self.v_dims] if v is None else v
        real = sum(batch.extend_lens)
        pieces = zip(k[:real].split(batch.extend_lens), v[:real].split(batch.extend_lens), strict=True)
        for request, piece in zip(batch.requests, pieces, strict=True):
            kv = self.trackers[request].kv
            old = kv.get(layer_id, [p[:0] for p in piece])
            kv[layer_id] = [torch.cat([o, p]) for o, p in zip(old, piece, strict=True)]
        self.calls.append(("write_kv", layer_id))

    def attention_begin(
        self, q: Tensor, k: Tensor, v: Tensor | None, layer_id: int, batch: ForwardBatch, meta: Any = None, **extra: Any
    ) -> tuple[AttnMetadata | None, list[Partial]]:
        assert all(len(x) == len(batch.positions) for x in (q, k, *extra.values()))
        self.calls.append(("attention_begin", layer_id))
        self._layer, self._batch = layer_id, batch
        return None, []

    def attend(self, q: Tensor, meta: AttnMetadata | None, partials: list[Partial], sm_scale: float) -> Tensor:
        out = torch.zeros(*q.shape[:2], self.v_dims)
        for i, request in enumerate(self._batch.requests):
            k, v = self.trackers[request].kv[self._layer]
            out[i] = plain_attention(q[i : i + 1].float(), k.float(), v.float(), sm_scale)[0]
        return out

    def attention_end(self, out: Tensor, layer_id: int, batch: ForwardBatch) -> None:
        assert len(out) == len(batch.positions)
        self.calls.append(("attention_end", layer_id))

    def forward_end(self, batch: ForwardBatch) -> None:
        for request, length in zip(batch.requests, batch.lengths, strict=True):
            self.trackers[request].seq_len = length
        self.calls.append(("forward_end", batch.mode))

    def prompt_finished(self, request: int) -> None:
        row = self.trackers[request]
        assert row.seq_len == row.n_prompt
        assert not row.prompt_finished
        row.prompt_finished = True

    def on_request_end(self, request: int, reason: str = "finished") -> None:
        row = self.trackers.pop(request)
        assert row.prompt_finished == (row.seq_len >= row.n_prompt)
        self.calls.append(("end", request, reason))
