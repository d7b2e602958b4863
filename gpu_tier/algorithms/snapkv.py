"""The prompt's tokens that its last queries attend to, chosen once (SnapKV, Li et al., NeurIPS 2024).

When the prompt is complete its last `w_obs` queries vote on all its tokens (`votes`); each KV head keeps the best of
them and the window itself. From then on a head attends to this set and to every token that was generated since.

Order is part of the contract: the ids of a selection are the set, ascending, and behind it the new tokens as they came.
A residency that never moves anything may therefore take the place in the selection for the place in the buffer.

With `reselect_every` = R the last queries, now those of the decode steps, vote anew as soon as R tokens were generated:
the set then is the best of all tokens so far and the window.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from gpu_tier.algorithms.base import BaseSparseAlgorithm
from gpu_tier.algorithms.batch_rows import sparse_lengths
from gpu_tier.algorithms.observation import ObservationWindows
from gpu_tier.algorithms.votes import votes
from gpu_tier.config import SnapKVConfig
from gpu_tier.errors import ConfigError, StateError
from gpu_tier.kernels.topk_select import topk_select
from gpu_tier.rows import KVDtype
from gpu_tier.types import ForwardBatch, Selection, Unit

__all__ = ["SnapKV"]

_ID_BYTES = 4


class SnapKV(BaseSparseAlgorithm):
    """Selects a set per KV head that the prompt's end decided, and what came after it."""

    unit: ClassVar[Unit] = Unit.TOKEN
    can_start_late: ClassVar[bool] = False

    def initialize_representation_pool(self) -> None:
        """Allocate the sets; windows of queries are allocated while a request needs them."""
        context, geometry = self.context, self.context.geometry
        self.settings = context.settings(SnapKVConfig)
        if self.settings.reselect_every and context.config.residency == "static":
            raise ConfigError("residency", "static", "reselect_every changes the set, so it needs lru or device")
        device, layers, rows = context.runtime.device, geometry.num_layers, context.max_requests
        self.widest_set = self.settings.kept(context.max_tokens)
        shape = (layers, rows, geometry.num_kv_heads, self.widest_set)
        self._sets = torch.zeros(shape, dtype=torch.int32, device=device)
        self._kept = torch.zeros(layers, rows, dtype=torch.int32, device=device)
        # Tokens from here on were generated after the choice; max_tokens where nothing was chosen yet.
        self._since = torch.full((layers, rows), context.max_tokens, dtype=torch.int32, device=device)
        self._chosen: dict[tuple[int, int], tuple[int, int]] = {}  # the same on the host: (kept, since)
        dtype = torch.bfloat16 if geometry.dtype is KVDtype.FP8 else geometry.dtype.torch_dtype
        self._windows = ObservationWindows(
            layers, self.settings.w_obs, context.num_q_heads, geometry.head_dim, dtype, device
        )

    @property
    def per_head(self) -> bool:
        """Each KV head has a set of its own."""
        return True

    @property
    def represents_keys(self) -> bool:
        """See `BaseSparseAlgorithm`."""
        return False

    @property
    def max_items(self) -> int:
        """The set and what is generated until the next choice. Selections are narrower and grow up to it."""
        longest = self.context.max_tokens
        return min(longest, self.widest_set + self.settings.reselect_every) if self.settings.reselect_every else longest

    def reserve(self, request: int, n_tokens: int) -> None:
        """Make room for the last queries, of which there are as many however long the request is."""
        if (0, request) not in self._chosen:
            self._windows.open(request)

    def construct_representations(
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, q: Tensor | None = None,
        **extra: Tensor,
    ) -> None:  # fmt: skip
        """Remember the last queries; they vote when the prompt is complete. An attached prefix has none."""
        if q is not None:
            self._windows.record(self.context.geometry.layer_index(layer_id), batch, q)

    def finish_prompt(self, request: int, n_prompt: int) -> None:
        """Choose the sets of all layers.

        Raises:
            StateError: no query of the request's last tokens was seen.
        """
        for layer_id in self.context.geometry.layers:
            self._choose(layer_id, request, n_prompt)
        if not self.settings.reselect_every:
            self._windows.close(request)

    def _choose(self, layer_id: int, request: int, n_tokens: int) -> None:
        layer = self.context.geometry.layer_index(layer_id)
        positions, queries = self._windows.last(layer, request)
        if not positions or positions.stop != n_tokens:
            raise StateError(f"request {request}: no query of token {n_tokens - 1} in layer {layer_id} was seen")
        kept, window = self.settings.kept(n_tokens), min(self.settings.w_obs, n_tokens)
        recent = torch.arange(n_tokens - window, n_tokens, dtype=torch.int32, device=queries.device)
        best = self._best(layer_id, request, positions, queries, n_tokens - window, kept - window)
        chosen = torch.cat([best, recent.expand(best.shape[0], -1)], dim=1)
        self._sets[layer, request, :, :kept] = chosen
        self._kept[layer, request] = kept
        self._since[layer, request] = n_tokens
        self._chosen[layer, request] = kept, n_tokens

    def _best(self, layer_id: int, request: int, positions: range, queries: Tensor, candidates: int, k: int) -> Tensor:
        """Return the `k` tokens below `candidates` with the most votes, ``int32 [H, k]``, ascending."""
        heads, device = self.context.geometry.num_kv_heads, queries.device
        best = torch.empty(1, heads, k, dtype=torch.int32, device=device)
        if not k:
            return best[0]
        keys = self.context.keys.keys(layer_id, request, 0, positions.stop)
        settings = self.settings
        scores = votes(
            queries, positions, keys, sm_scale=self.context.sm_scale, candidates=candidates,
            pool=settings.pool, kernel=settings.kernel,
        )  # fmt: skip
        lengths = torch.full((1,), candidates, dtype=torch.int32, device=device)
        counts = torch.empty(1, heads, dtype=torch.int32, device=device)
        topk_select(scores[None], lengths, k, best, counts, impl=self.context.config.kernels)
        return best[0]

    def static_items(self, request: int, layer_id: int) -> Tensor:
        """Return the set of a request, ``int32 [H, kept]``, ascending.

        Raises:
            StateError: its prompt is not complete.
        """
        layer = self.context.geometry.layer_index(layer_id)
        if (layer, request) not in self._chosen:
            raise StateError(f"request {request} has no set before finish_prompt")
        return self._sets[layer, request, :, : self._chosen[layer, request][0]]

    def retrieve_topk(
        self, queries: Tensor, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor, **extra: Tensor
    ) -> Selection:
        """See `BaseSparseAlgorithm`."""
        layer, rows = self.context.geometry.layer_index(layer_id), batch.req_pool_indices
        if self.settings.reselect_every:
            self._reselect(layer_id, layer, batch, queries)
        place = torch.arange(self._width(layer, batch), dtype=torch.int32, device=queries.device)
        tokens, since = sparse_lengths(batch, sparse_mask), self._since[layer, rows]
        kept = self._kept[layer, rows]
        lengths = torch.where(tokens > 0, kept + (tokens - since).clamp_min(0), 0)[:, None]
        chosen = self._sets[layer][rows][..., place.clamp_max(self.widest_set - 1).long()]
        generated = (since - kept)[:, None, None] + place
        ids = torch.where(place < kept[:, None, None], chosen, generated)
        lengths = lengths.expand(-1, ids.shape[1]).contiguous()
        return Selection(self.unit, 1, torch.where(place < lengths[..., None], ids, -1), lengths)

    def _width(self, layer: int, batch: ForwardBatch) -> int:
        """Return the set's width and room for the generated tokens; doubled, so that shapes seldom change."""
        since = [self._chosen.get((layer, request), (0, length))[1] for request, length in _lengths(batch)]
        generated = max((length - start for (_, length), start in zip(_lengths(batch), since, strict=True)), default=0)
        room = 1 << max(4, (generated - 1).bit_length())
        return min(self.widest_set + room, self.max_items)

    def _reselect(self, layer_id: int, layer: int, batch: ForwardBatch, queries: Tensor) -> None:
        self._windows.record(layer, batch, queries)
        for request, length in _lengths(batch):
            chosen = self._chosen.get((layer, request))
            if chosen is not None and length - chosen[1] >= self.settings.reselect_every:
                self._choose(layer_id, request, length)

    def free(self, request: int) -> None:
        """See `BaseSparseAlgorithm`."""
        self._windows.close(request)
        for layer in range(self.context.geometry.num_layers):
            self._chosen.pop((layer, request), None)
        self._kept[:, request] = 0
        self._since[:, request] = self.context.max_tokens

    def representation_bytes(self, n_tokens: int) -> int:
        """Return the bytes of the sets and, as long as they are needed, of the last queries."""
        geometry = self.context.geometry
        return geometry.num_layers * geometry.num_kv_heads * self.widest_set * _ID_BYTES + self._windows.window_bytes


def _lengths(batch: ForwardBatch) -> list[tuple[int, int]]:
    return list(zip(batch.requests, batch.lengths, strict=True))
