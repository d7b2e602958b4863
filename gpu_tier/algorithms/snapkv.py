"""The prompt's tokens that its last queries attend to, chosen once (SnapKV, Li et al., NeurIPS 2024).

When the prompt is complete its last `w_obs` queries vote on all its tokens (`votes`); each KV head keeps the best of
them and the window itself. From then on a head attends to this set and to every token that was generated since.

Order is part of the contract: the ids of a selection are the set, ascending, and behind it the new tokens as they came.
A residency that never moves anything may therefore take the place in the selection for the place in the buffer.

With `reselect_every` = R the last queries, now those of the decode steps, vote again as soon as R tokens were
generated: the set then is the best of all tokens so far and the window.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvcm.gpu_tier.algorithms.base import BaseSparseAlgorithm, sparse_lengths
from kvcm.gpu_tier.config import SnapKVConfig
from kvcm.gpu_tier.errors import ConfigError, StateError
from kvcm.gpu_tier.geometry import KVDtype
from kvcm.gpu_tier.kernels.topk_select import topk_select
from kvcm.gpu_tier.types import ForwardBatch, Selection, Unit

__all__ = ["ObservationWindows", "SnapKV", "votes"]

# The last queries of each request, for algorithms in which they vote.


@dataclass(slots=True)
class _Window:
    data: Tensor
    seen: dict[int, range] = field(default_factory=dict)  # by layer: positions whose queries were recorded


class ObservationWindows:
    """The last `width` queries of requests in each layer.

    A window is a ring: the query of position p is at place ``p % width``. Positions are taken once, in order: a chunk
    that comes again changes nothing, and behind a gap (tokens whose queries were not observed, as those of an attached
    prefix) the window starts again.

    Args:
        num_layers: layers.
        width: queries of a window.
        heads: query heads Hq.
        dims: numbers of a query.
        dtype: how they are kept.
        device: where.
    """

    def __init__(
        self, num_layers: int, width: int, heads: int, dims: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.width = width
        self._shape = (num_layers, width, heads, dims)
        self._dtype, self._device = dtype, device
        self._windows: dict[int, _Window] = {}

    @property
    def window_bytes(self) -> int:
        """Bytes of a request's windows."""
        return torch.Size(self._shape).numel() * self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all windows."""
        return sum(window.data.nbytes for window in self._windows.values())

    def open(self, request: int) -> None:
        """Begin to record a request; of one that is recorded nothing happens."""
        if request not in self._windows:
            self._windows[request] = _Window(torch.empty(self._shape, dtype=self._dtype, device=self._device))

    def close(self, request: int) -> None:
        """Forget a request; one that is not known too."""
        self._windows.pop(request, None)

    def record(self, layer: int, batch: ForwardBatch, queries: Tensor) -> None:
        """Take the queries ``[T, Hq, d]`` of a pass over, of the requests that are recorded."""
        token = 0
        for request, length, extend in zip(batch.requests, batch.lengths, batch.extend_lens, strict=True):
            window = self._windows.get(request)
            if window is not None:
                self._record(window, layer, range(length - extend, length), queries[token : token + extend])
            token += extend

    def _record(self, window: _Window, layer: int, positions: range, queries: Tensor) -> None:
        seen = window.seen.get(layer, range(0))
        first = positions.start
        if seen and first <= seen.stop:
            positions = range(max(first, seen.stop), positions.stop)
        if not positions:
            return
        begins = seen.start if seen and positions.start == seen.stop else positions.start
        window.seen[layer] = range(begins, positions.stop)
        taken = positions[-self.width :]
        places = torch.arange(taken.start, taken.stop, device=self._device) % self.width
        window.data[layer, places] = queries[taken.start - first : taken.stop - first].to(self._dtype)

    def last(self, layer: int, request: int) -> tuple[range, Tensor]:
        """Return the positions of the last queries, at most `width`, and the queries ``[m, Hq, d]``."""
        window = self._windows.get(request)
        if window is None or layer not in window.seen:
            return range(0), torch.empty(0, *self._shape[2:], dtype=self._dtype, device=self._device)
        positions = window.seen[layer][-self.width :]
        places = torch.arange(positions.start, positions.stop, device=self._device) % self.width
        return positions, window.data[layer, places]


# How much the last queries of a prompt attend to each of its tokens (SnapKV, Li et al., NeurIPS 2024).


def votes(
    queries: Tensor, positions: range, keys: Tensor, *, sm_scale: float, candidates: int, pool: str, kernel: int
) -> Tensor:
    """Return the votes for the leading tokens, ``f32 [H, candidates]``.

    A query head's vote for a token is the sum of its attention weights over the queries, each over all keys up to its
    own position. It is pooled over the neighbours among the candidates (avg counts what lies outside as zeros) and
    summed over the query heads of a KV head.

    Args:
        queries: ``[m, Hq, d]``.
        positions: of the queries.
        keys: ``f32 [n, H, d]`` of all tokens.
        sm_scale: what products are multiplied by before the softmax.
        candidates: tokens that can be voted for; at least 1.
        pool: avg or max.
        kernel: tokens that are pooled, odd.
    """
    heads = keys.shape[1]
    grouped = queries.float().unflatten(1, (heads, -1))
    own = torch.arange(positions.start, positions.stop, device=keys.device)
    future = torch.arange(len(keys), device=keys.device) > own[:, None]
    pooled = avg_pool1d if pool == "avg" else max_pool1d
    result = torch.empty(heads, candidates, device=keys.device)
    # Head by head: the weights of all of them would be the largest tensor of the prefill.
    for head in range(heads):
        products = torch.einsum("mgd,nd->gmn", grouped[:, head], keys[:, head]) * sm_scale
        weights = products.masked_fill_(future, -torch.inf).softmax(-1)[..., :candidates].sum(1)
        result[head] = pooled(weights[:, None], kernel, stride=1, padding=kernel // 2).sum((0, 1))
    return result


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
            num_layers=layers,
            width=self.settings.w_obs,
            heads=context.num_q_heads,
            dims=geometry.head_dim,
            dtype=dtype,
            device=device,
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
        """The set and the tokens generated until the next choice. Selections are narrower and grow up to it."""
        longest = self.context.max_tokens
        return min(longest, self.widest_set + self.settings.reselect_every) if self.settings.reselect_every else longest

    def reserve(self, request: int, n_tokens: int) -> None:
        """Allocate memory for the last queries, of which there are as many however long the request is."""
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
        window_tokens = torch.arange(n_tokens - window, n_tokens, dtype=torch.int32, device=queries.device)
        best = self._best(
            layer_id=layer_id,
            request=request,
            positions=positions,
            queries=queries,
            candidates=n_tokens - window,
            k=kept - window,
        )
        chosen = torch.cat([best, window_tokens.expand(best.shape[0], -1)], dim=1)
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
        keys = self.context.keys.keys(layer_id=layer_id, request=request, start=0, stop=positions.stop)
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
        return Selection(
            unit=self.unit, unit_tokens=1, indices=torch.where(place < lengths[..., None], ids, -1), lengths=lengths
        )

    def _width(self, layer: int, batch: ForwardBatch) -> int:
        """Return the set's width, generated tokens included; doubled, so that shapes seldom change."""
        since = [self._chosen.get((layer, request), (0, length))[1] for request, length in _lengths(batch)]
        generated = max((length - start for (_, length), start in zip(_lengths(batch), since, strict=True)), default=0)
        generated_places = 1 << max(4, (generated - 1).bit_length())
        return min(self.widest_set + generated_places, self.max_items)

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
