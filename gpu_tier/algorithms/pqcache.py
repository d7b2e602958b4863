"""Top tokens by product-quantised keys (PQCache, SIGMOD 2025).

A step attends to the `init` first tokens, the `local` last ones and, of those between, the k with the largest products
of the query with their quantised keys; each KV head chooses on its own, by the sum of the softmax of its query heads.
With residency `blocks` the first and the last ones are the steady zone and the selection holds the k; with other
residencies it holds all of them.

When a layer's prompt is complete its middle is clustered, beside the layers that follow; the request waits for that
when it becomes sparse. From then on every token gets its codes with the step that computes it, so that they are there
when it leaves the window; centroids stay as they are, unless `rebuild_every` says when all tokens are clustered
again. The codes' way from host memory is in `kvcm.gpu_tier.pools.code_pages`.

A prompt that continues an attached prefix finds the prefix's codes and codebook in its sidecars. New tokens get codes
of it (`turns="extend"`) or, if they are enough, a codebook of their own (`per_turn`); with `rebuild` nothing is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from kvcm.gpu_tier.algorithms.base import BaseSparseAlgorithm, PerPass, Sidecar, keep_best
from kvcm.gpu_tier.algorithms.pq_clustering import Clusterer, LayerIndex, dense_layer_seconds
from kvcm.gpu_tier.config import PQCacheConfig, SparseConfig
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.index import pq
from kvcm.gpu_tier.index.pq import CodebookImport, PQSidecars
from kvcm.gpu_tier.kernels.pq_score import pq_score
from kvcm.gpu_tier.kernels.topk_select import topk_select
from kvcm.gpu_tier.pools.code_pages import Appending, CodePages, CodeWindow
from kvcm.gpu_tier.pools.representation import RepresentationPool
from kvcm.gpu_tier.runtime import upload
from kvcm.gpu_tier.types import ForwardBatch, Selection, SteadyRing, SteadyZone, TokenRanges, Unit

__all__ = [
    "Budgets",
    "Build",
    "Codebook",
    "CodebookRange",
    "Newest",
    "PQCache",
    "PQRequest",
    "PQStep",
    "make_step",
    "merged",
    "newest",
]

# What PQCache knows of its requests on the host: windows and budgets, and which codes exist.

_LEAST_LOCAL = 2
"""The current token and the one before, whose copy to the host may still be on its way."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """Windows and budgets by length.

    Attributes:
        settings: of the algorithm.
        fewest: tokens of the middle from which there is an index.
        least_prompt: prompt tokens from which requests are sparse.
        late: tokens beyond which a request becomes sparse whose prompt was shorter.
        longest: tokens beyond which budgets do not grow.
        max_tokens: most tokens of a request; a larger budget attends to no more.
    """

    settings: PQCacheConfig
    fewest: int
    least_prompt: int
    late: int
    longest: int
    max_tokens: int

    @classmethod
    def of(cls, config: SparseConfig, settings: PQCacheConfig, fewest: int, max_tokens: int) -> Budgets:
        """Return those of an engine; in a buffer on the device `top_k` tokens are the most."""
        longest = min(max_tokens, int(config.top_k / settings.token_ratio)) if config.residency == "lru" else max_tokens
        late = config.min_sparse_prompt_len
        if config.residency in ("lru", "device"):
            late = max(config.device_buffer_size, late)
        return cls(settings, fewest, config.min_sparse_prompt_len, late, longest, max_tokens)

    def is_sparse(self, n_prompt: int) -> bool:
        """Return whether a request is sparse from its prompt's end on."""
        return n_prompt >= self.least_prompt

    def tokens(self, n_prompt: int) -> tuple[int, int]:
        """Return (local, k) of a request."""
        basis = n_prompt if self.is_sparse(n_prompt) else self.late + 1
        return self._budget(basis)

    def _budget(self, basis: int) -> tuple[int, int]:
        local, k = self.settings.budget(min(basis, self.longest))
        return max(min(local, self.max_tokens), _LEAST_LOCAL), min(k, self.max_tokens)

    def ring(self, n_tokens: int) -> SteadyRing:
        """Return the steady places of a request that had so many tokens when that was decided."""
        return SteadyRing(self.settings.init, self.tokens(n_tokens)[0])

    @property
    def most_items(self) -> int:
        """The most tokens of the middle that a head attends to in a step."""
        _, k = self._budget(self.longest)
        local, _ = self.tokens(max(self.least_prompt, 1))
        can_lack_an_index = self.least_prompt < self.settings.init + local + self.fewest
        return max(k, self.fewest) if can_lack_an_index else k

    @property
    def most_tokens(self) -> int:
        """The most tokens that a head attends to in a step."""
        local, _ = self._budget(self.longest)
        return min(self.max_tokens, self.settings.init + local + self.most_items)


@dataclass(frozen=True, slots=True)
class Codebook:
    """A codebook of a request, the same place in all layers.

    Attributes:
        slot: its place among all codebooks.
        first: first token whose code is of it, a page's first.
    """

    slot: int
    first: int


@dataclass(frozen=True, slots=True)
class Build:
    """A codebook that is to be made: keys `first` to `stop` - 1 get codes, centroids are those of the middle's."""

    first: int
    train_first: int
    train_stop: int
    stop: int


@dataclass(slots=True, eq=False)
class PQRequest:
    """One request.

    A request's tokens are `init` first ones, a middle, and a window of the last `local` ones; the middle's tokens are
    scored by their codes and the best `k` attended to. Window and k are fixed once, from the prompt's length; a request
    whose prompt was too short to be sparse takes them from the length at which requests may become sparse.

    While the middle is too short for an index, all of it is attended to: the request is dense by another way. The
    middle is clustered by the step that makes it long enough.

    Attributes:
        request: its row in the per-request tables.
        layers: layers that have codes.
        reserved: tokens that memory was set aside for; at first those of the prompt.
        n_prompt: tokens of its prompt, as far as that is known.
        local: tokens of the window.
        k: tokens of the middle that are attended to.
        books: its codebooks, by their first token.
        encoded: leading tokens that got codes when the request was clustered, or before it became sparse.
        decoded: tokens that it had when the last one got its codes in a step.
        clustered: tokens that the request had when each layer was last clustered, 0 for never.
        jobs: clustering under way, by layer.
        build: what the jobs are for.
        taken: tokens that were imported from side data.
        is_finished: whether its prompt is complete.
        is_sparse: whether it attends sparsely.
    """

    request: int
    layers: int
    reserved: int = 0
    n_prompt: int = 0
    local: int = 0
    k: int = 0
    books: list[Codebook] = field(default_factory=list)
    encoded: int = 0
    decoded: int = 0
    clustered: list[int] = field(default_factory=list)
    jobs: dict[int, Future[LayerIndex]] = field(default_factory=dict)
    build: Build | None = None
    taken: CodebookImport | None = None
    is_finished: bool = False
    is_sparse: bool = False

    def __post_init__(self) -> None:
        self.clustered = [0] * self.layers

    @property
    def is_indexed(self) -> bool:
        """Whether there are codes in all layers."""
        return bool(self.books) and min(self.clustered) > 0

    @property
    def coded(self) -> int:
        """Leading tokens that have codes, once the step is over that gives the last one its codes."""
        return max(self.encoded, self.decoded)

    def first_local(self, n_tokens: int, init: int) -> int:
        """Return the first token of the window; of a short request the first behind the `init` first ones."""
        return max(n_tokens - self.local, min(init, n_tokens))

    def due(self, budgets: Budgets) -> float:
        """Return the tokens with which the middle is to be clustered the next time."""
        settings = budgets.settings
        if not self.is_indexed:
            return settings.init + self.local + budgets.fewest
        return min(self.clustered) + settings.rebuild_every if settings.rebuild_every else math.inf

    def cancel_jobs(self) -> None:
        """Drop the running clustering."""
        for job in self.jobs.values():
            job.cancel()
        self.jobs.clear()
        self.build = None


# What all layers of a decode step of PQCache have in common: made on the host once, and uploaded.


@dataclass(frozen=True, slots=True)
class CodebookRange:
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
class PQStep:
    """What all layers of a step ask for.

    Nothing here waits for the device: what the host knows of requests says which rows have codes, how many tokens they
    look at and which requests are due; the sparse mask is applied on the device.

    Attributes:
        tokens: ``int32 [B]`` tokens of the rows that select, 0 for the others.
        first: ``int32 [B]`` first token of the window, 0 for rows that do not select.
        firsts: the same of the real rows on the host.
        middle: ``int32 [B]`` tokens between the first ones and the window.
        k: ``int32 [B]`` how many of them each row selects; None when `most` is right for all.
        most: the most that a row selects.
        most_local: tokens of the largest window.
        width: tokens that the scores can hold.
        table: ``int32 [B, P]`` pages of the codes.
        window: of the codes.
        spans: ranges of tokens by the codebook that scores them, one or two.
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
    spans: tuple[CodebookRange, ...]


@dataclass(frozen=True, slots=True)
class Newest:
    """What a step's tokens bring.

    Attributes:
        where: places of their codes; None when no row has codes.
        slots: ``int64 [B]`` codebook of each row.
        due: requests to be clustered again, with their tokens and the tokens at which that was due.
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


def make_step(
    batch: ForwardBatch, sparse_mask: Tensor, requests: Mapping[int, PQRequest], codes: CodePages, budgets: Budgets
) -> PQStep:
    """Return what a decode step asks for."""
    device, init = sparse_mask.device, budgets.settings.init
    rows = [
        _Row.of(requests.get(request), length, budgets)
        for request, length in zip(batch.requests, batch.lengths, strict=True)
    ]
    middles = [max(0, row.first - init) for row in rows]
    most = max((min(row.k, middle) for row, middle in zip(rows, middles, strict=True)), default=0)
    is_uniform = all(min(row.k, middle) == min(most, middle) for row, middle in zip(rows, middles, strict=True))
    numbers = _upload([[row.tokens, row.first, row.k, row.slot, row.border, row.second_slot] for row in rows], batch)
    tokens, first, k, _, border, _ = torch.where(sparse_mask, numbers, 0).unbind(0)
    width = max((row.first for row in rows), default=0)
    pages = max(1, codes.pool.pages_of(width))
    return PQStep(
        tokens=tokens,
        first=first,
        firsts=tuple(row.first for row in rows),
        middle=(first - init).clamp_min(0),
        k=None if is_uniform else k,
        most=most,
        most_local=max((row.tokens - row.first for row in rows), default=0),
        width=width,
        table=codes.pool.table[batch.req_pool_indices, :pages],
        window=codes.window(_scored_tokens(batch, rows, requests, init)),
        spans=_codebook_ranges(
            (numbers[3], numbers[5]), (torch.full_like(first, init, device=device), first), border, rows
        ),
    )


def _upload(columns: Sequence[Sequence[int]], batch: ForwardBatch) -> Tensor:
    """Return ``int32 [numbers, B]``, 0 in padding rows."""
    numbers = torch.tensor(columns, dtype=torch.int32).view(len(columns), -1).T.contiguous()
    padded = torch.nn.functional.pad(numbers, (0, batch.rows - len(columns)))
    return upload(padded, batch.seq_lens.device)


def _scored_tokens(
    batch: ForwardBatch, rows: Sequence[_Row], requests: Mapping[int, PQRequest], init: int
) -> list[tuple[int, int, int]]:
    """Return (request, tokens looked at, tokens that have codes) of rows that score."""
    return [
        (request, row.first, row.tokens - 1)
        for request, row in zip(batch.requests, rows, strict=True)
        if row.first > init and requests[request].is_indexed
    ]


def _codebook_ranges(
    slots: tuple[Tensor, Tensor], middle: tuple[Tensor, Tensor], border: Tensor, rows: Sequence[_Row]
) -> tuple[CodebookRange, ...]:
    first, stop = middle
    if all(row.slot == row.second_slot for row in rows):
        return (CodebookRange(slots[0].long(), first, stop),)
    one = CodebookRange(slots[0].long(), first, torch.minimum(stop, border))
    return one, CodebookRange(slots[1].long(), torch.maximum(first, border), stop)


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


def merged(indices: Tensor, lengths: Tensor, asked: PQStep, init: int, width: int) -> tuple[Tensor, Tensor]:
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


class PQCache(BaseSparseAlgorithm):
    """Selects the tokens with the largest products, by their codes.

    Attributes:
        layer_seconds: computes one layer of the model over so many tokens and returns the seconds; an engine that
            knows better than `dense_layer_seconds` sets it before the first prompt.
        clusters_beside: whether requests are dense until threads on the CPU have clustered them, so that no step waits.
    """

    unit: ClassVar[Unit] = Unit.TOKEN

    def initialize_representation_pool(self) -> None:
        """Allocate codebooks for all requests, and pages of codes for all tokens.

        Raises:
            ConfigError: keys cannot be cut into m parts.
        """
        context, geometry = self.context, self.context.geometry
        self.settings = context.settings(PQCacheConfig)
        m, b = self.settings.quantisation(context.max_tokens)
        self.shape = pq.PQShape(geometry.num_kv_heads, geometry.head_dim, m, b)
        self.budgets = Budgets.of(context.config, self.settings, self.shape.fewest, context.max_tokens)
        self.layer_seconds: Callable[[int], float] | None = None
        self.clusterer = Clusterer(
            self.shape, self.settings, context.runtime, self._layer_seconds, kernels=context.config.kernels
        )
        self.codes = CodePages(
            num_layers=geometry.num_layers, page_tokens=geometry.page_size, token_shape=(geometry.num_kv_heads, m),
            max_requests=context.max_requests, max_tokens=context.max_tokens, total_tokens=context.total_tokens,
            runtime=context.runtime,
        )  # fmt: skip
        self.books_each = 2 if self.settings.turns == "per_turn" else 1
        self.codebooks = torch.zeros(
            geometry.num_layers, context.max_requests * self.books_each, *self.shape.codebook_shape,
            dtype=torch.float16, device=context.runtime.device,
        )  # fmt: skip
        self.form = PQSidecars.of(self.shape, geometry.layers, geometry.page_size, self.settings.init)
        self._requests: dict[int, PQRequest] = {}
        self._imported = 0
        self.clusters_beside = context.runtime.is_cuda and self.clusterer.on_cpu
        self._last: tuple[ForwardBatch, int, Tensor] | None = None
        self._asked = PerPass(self._make_step)
        self._newest = PerPass(lambda batch, _: newest(batch, self._requests, self.codes, self.budgets))

    @property
    def pool(self) -> RepresentationPool:
        """Owners of the pages of codes."""
        return self.codes.pool

    def _layer_seconds(self) -> Callable[[int], float]:
        context = self.context
        return self.layer_seconds or dense_layer_seconds(context.geometry, context.num_q_heads, context.runtime)

    # What it is.

    @property
    def per_head(self) -> bool:
        """Each KV head has a set of its own."""
        return True

    @property
    def represents_keys(self) -> bool:
        """Codes of an attached prefix are made when the prompt is complete, not while it is attached."""
        return False

    @property
    def max_items(self) -> int:
        """The budget; with residency `blocks` that of the middle, up to which selections grow."""
        return self.budgets.most_items if self._is_in_blocks else self.budgets.most_tokens

    @property
    def _is_in_blocks(self) -> bool:
        return self.context.config.residency == "blocks"

    @property
    def built(self) -> int:
        """Codebooks that were trained, each layer counted."""
        return self.clusterer.trained

    @property
    def imported(self) -> int:
        """Codebooks that were taken over from sidecars, each layer counted."""
        return self._imported

    def steady_ring(self, n_prompt: int) -> SteadyRing:
        """See `BaseSparseAlgorithm`."""
        return self.budgets.ring(n_prompt)

    @property
    def max_execution_tokens(self) -> int:
        """See `BaseSparseAlgorithm`."""
        return self.budgets.most_tokens

    def representation_bytes(self, n_tokens: int) -> int:
        """Return the bytes of the codebooks, ``L·H·2^b·d·2`` each, of pages of codes in two layers, and of the tail."""
        books = self.books_each * self.context.geometry.num_layers * self.shape.codebook_bytes
        return books + self.codes.device_bytes_of(n_tokens)

    # Requests.

    def reserve(self, request: int, n_tokens: int) -> None:
        """See `BaseSparseAlgorithm`."""
        self.codes.reserve(request, n_tokens)
        if request not in self._requests:
            self._requests[request] = PQRequest(request, self.context.geometry.num_layers)
            self._requests[request].n_prompt = n_tokens
        self._requests[request].reserved = n_tokens

    def free(self, request: int) -> None:
        """See `BaseSparseAlgorithm`."""
        held = self._requests.pop(request, None)
        if held is not None:
            held.cancel_jobs()
            for book in held.books:
                self.codebooks[:, book.slot] = 0
        self.codes.free(request)

    def close(self) -> None:
        """See `BaseSparseAlgorithm`."""
        self.clusterer.close()
        self.codes.close()

    def construct_representations(
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, q: Tensor | None = None,
        **extra: Tensor,
    ) -> None:  # fmt: skip
        """Begin to cluster the layer for requests whose prompt is complete in it."""
        layer = self.context.geometry.layer_index(layer_id)
        for request, length in zip(batch.requests, batch.lengths, strict=True):
            held = self._requests[request]
            if length == held.n_prompt == held.reserved and self.budgets.is_sparse(length):
                self._plan(held, length)
                self._begin(held, layer)

    def finish_prompt(self, request: int, n_prompt: int) -> None:
        """Begin to cluster layers that are not yet."""
        held = self._requests[request]
        held.taken, held.is_finished = None, True
        if held.n_prompt != n_prompt:
            held.cancel_jobs()
            held.n_prompt = n_prompt
        held.local, held.k = self.budgets.tokens(n_prompt)
        if self.budgets.is_sparse(n_prompt):
            self._plan(held, n_prompt)
            for layer in range(held.layers):
                self._begin(held, layer)

    def is_ready(self, request: int) -> bool:
        """Return whether all layers are clustered; begins with those that are not, as far as threads are free.

        Where clustering does not run beside the device there is nothing to wait for: `become_sparse` does it.
        """
        held = self._requests[request]
        if not self.clusters_beside:
            return True
        self._plan(held, held.reserved)
        for layer in range(held.layers):
            self._begin(held, layer)
        return held.build is None or (len(held.jobs) == held.layers and all(job.done() for job in held.jobs.values()))

    def become_sparse(self, request: int, n_tokens: int) -> None:
        """Wait for the clustering and give all tokens codes; a request whose middle is too short has none."""
        held = self._requests[request]
        if not held.is_finished:
            self.finish_prompt(request, n_tokens)
        self._build(held, n_tokens)
        held.is_sparse = True

    def _build(self, held: PQRequest, n_tokens: int) -> None:
        """Give all tokens codes; of a request that was too short until now as well."""
        self._plan(held, n_tokens)
        self._complete(held)
        if held.books:
            self._encode_rest(held, n_tokens)

    def _plan(self, held: PQRequest, n_tokens: int) -> None:
        """Plan the clustering of a request of so many tokens."""
        if held.build is not None or any(held.clustered):
            return
        held.local, held.k = self.budgets.tokens(held.n_prompt)
        first = held.encoded
        if held.books and self.settings.turns == "extend":
            return
        train_first, train_stop = max(first, self.settings.init), n_tokens - held.local
        if train_stop - train_first >= self.shape.fewest:
            held.build = Build(first, train_first, train_stop, n_tokens)

    def _begin(self, held: PQRequest, layer: int, *, at_once: bool = False) -> None:
        """Begin to cluster a layer; later, if too many others are being clustered."""
        build = held.build
        if build is None or layer in held.jobs or not (at_once or self.clusterer.is_free()):
            return
        keys = self._keys(layer, held.request, build.first, build.stop)
        held.jobs[layer] = self.clusterer.start(keys, build.train_first - build.first, build.train_stop - build.first)

    def _complete(self, held: PQRequest) -> None:
        """Import finished clusters, and cluster the remaining layers."""
        build = held.build
        if build is None:
            return
        book = Codebook(held.request * self.books_each + len(held.books), build.first)
        for layer in range(held.layers):
            for other in range(layer, held.layers):
                self._begin(held, other, at_once=other == layer)
            self._store_index(held, layer, held.jobs.pop(layer).result(), build.first, (book,))
        held.books.append(book)
        held.encoded, held.clustered = build.stop, [build.stop] * held.layers
        held.build = None

    def _store_index(
        self, held: PQRequest, layer: int, index: LayerIndex, first: int, books: tuple[Codebook, ...]
    ) -> None:
        for book in books:
            self.codebooks[layer, book.slot] = upload(index.codebook, self.codebooks.device)
        self.codes.write(layer, held.request, first, index.codes)

    def _encode_rest(self, held: PQRequest, n_tokens: int) -> None:
        """Give the tokens that have none codes of the last codebook."""
        start, book = held.encoded, self.codebooks[:, held.books[-1].slot]
        for layer in range(held.layers) if start < n_tokens else ():
            keys = self._keys(layer, held.request, start, n_tokens)
            self.codes.write(layer, held.request, start, self.clusterer.encode(keys, book[layer]))
        held.encoded = max(start, n_tokens)
        held.clustered = [count or n_tokens for count in held.clustered]

    def _keys(self, layer: int, request: int, start: int, stop: int) -> Tensor:
        layer_id = self.context.geometry.layers[layer]
        return self.context.keys.keys(layer_id, request, start, stop)

    # A decode step.

    def update_representations(
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, **extra: Tensor
    ) -> None:
        """Give each row's token codes, and cluster a request's layer again if it is due."""
        layer, step = self.context.geometry.layer_index(layer_id), self._newest.of(batch)
        if step.where is not None:
            row = self.context.geometry.parts[0]
            stored = row.decode(row.encode(k))
            self.codes.append(layer, step.where, pq.encode_rows(stored, self._codebooks_of(batch, layer, step.slots)))
        for held, n_tokens, due in step.due:
            if held.clustered[layer] < due:
                self._recluster(held, layer, n_tokens)

    def _recluster(self, held: PQRequest, layer: int, n_tokens: int) -> None:
        index = self.clusterer.now(
            self._keys(layer=layer, request=held.request, start=0, stop=n_tokens),
            self.settings.init,
            n_tokens - held.local,
        )
        # Layers that were not reached yet keep their two codebooks until all have one.
        books = tuple(held.books) or (Codebook(held.request * self.books_each, 0),)
        self._store_index(held=held, layer=layer, index=index, first=0, books=books)
        held.clustered[layer], held.books = n_tokens, list(books)
        if min(held.clustered) == n_tokens:
            held.books, held.encoded = [books[0]], n_tokens

    def _codebooks_of(self, batch: ForwardBatch, layer: int, slots: Tensor, *, fresh: bool = False) -> Tensor:
        """Return the codebooks of each row, ``f32 [B, H, m, 2^b, d/m]``; those that the layer was scored with last.

        They are large: the codebooks that a layer's tokens get their codes of are those that it was just scored with.
        """
        if fresh or self._last is None or self._last[0] is not batch or self._last[1] != layer:
            self._last = batch, layer, self.codebooks[layer, slots].float()
        return self._last[2]

    def retrieve_topk(
        self, queries: Tensor, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor, **extra: Tensor
    ) -> Selection:
        """See `BaseSparseAlgorithm`."""
        asked = self._asked.of(batch, sparse_mask)
        indices, lengths = self._best(queries, self.context.geometry.layer_index(layer_id), batch, asked)
        always = TokenRanges(self.settings.init, asked.most_local)
        if not self._is_in_blocks:
            return Selection(self.unit, 1, *merged(indices, lengths, asked, self.settings.init, self.max_items), always)
        return Selection(
            unit=self.unit,
            unit_tokens=1,
            indices=indices,
            lengths=lengths,
            always=always,
            steady=SteadyZone(self.settings.init, asked.first, asked.firsts),
        )

    def _make_step(self, batch: ForwardBatch, sparse_mask: Tensor | None) -> PQStep:
        assert sparse_mask is not None
        return make_step(batch, sparse_mask, self._requests, self.codes, self.budgets)

    def _best(self, queries: Tensor, layer: int, batch: ForwardBatch, asked: PQStep) -> tuple[Tensor, Tensor]:
        """Return the best tokens of the middle, ``int32 [B, H, K]`` ascending, and how many, ``int32 [B, H]``."""
        heads, init, width = self.shape.heads, self.settings.init, max(1, asked.most)
        indices = torch.full((len(queries), heads, width), -1, dtype=torch.int32, device=queries.device)
        lengths = torch.zeros(len(queries), heads, dtype=torch.int32, device=queries.device)
        if not asked.most:
            return indices, lengths
        scores = self._scores(queries, layer, batch, asked)[..., init:]
        topk_select(scores, asked.middle, asked.most, indices, lengths, impl=self.context.config.kernels)
        if asked.k is not None:
            indices, lengths = keep_best(indices, lengths, scores, asked.k)
        return torch.where(indices < 0, -1, indices + init), lengths

    def _scores(self, queries: Tensor, layer: int, batch: ForwardBatch, asked: PQStep) -> Tensor:
        """Return ``f32 [B, H, N]``: the sum of the softmax over the middle of each query head of a group."""
        codes = self.codes.codes(layer, asked.window)
        out = torch.empty(len(queries), self.context.num_q_heads, asked.width, device=queries.device)
        for number, span in enumerate(asked.spans):
            table = pq.tables(queries, self._codebooks_of(batch, layer, span.slots, fresh=True), self.context.sm_scale)
            scores = torch.empty_like(out) if number else out
            pq_score(
                table=table,
                codes=codes,
                page_table=asked.table,
                first=span.first,
                lengths=span.stop,
                out=scores,
                impl=self.context.config.kernels,
            )
            if number:
                torch.maximum(out, scores, out=out)
        weights: Tensor = out.softmax(-1).unflatten(1, (self.shape.heads, -1))
        return weights.sum(2)

    # Sidecars.

    def sidecar_page_bytes(self) -> int:
        """Return the bytes of a page's row, see `PQSidecars`; 0 where codes are never taken over."""
        return 0 if self.settings.turns == "rebuild" else self.form.row_bytes

    def export_sidecar(self, request: int, start: int, stop: int) -> Sidecar | None:
        """See `BaseSparseAlgorithm`; waits for clustering under way. Pages without codes give rows without an id."""
        if not self.sidecar_page_bytes():
            return None
        size, held = self.context.geometry.page_size, self._requests[request]
        first = -(-start // size)
        end = max(first, stop // size)
        if held.is_finished and self.budgets.is_sparse(held.n_prompt):
            self._build(held, max(held.n_prompt, held.encoded))
        data, coded = self.form.blank(end - first), held.coded // size if held.is_indexed else 0
        borders = [book.first // size for book in held.books[1:]]
        for book, border in zip(held.books, [*borders, coded], strict=False):
            begin, until = max(first, book.first // size), min(end, coded, border)
            if begin < until:
                whole = self.codebooks[:, book.slot].cpu().flatten().view(torch.uint8)
                rows = self.form.rows(whole, begin - book.first // size, self.codes.export(request, begin, until))
                data[begin - first : until - first] = rows
        return Sidecar(first * size, data)

    def import_sidecar(self, request: int, sidecar: Sidecar) -> int:
        """Take over the leading pages of one codebook, as soon as all of it is there; called again with what follows.

        Raises:
            ConfigError: it does not start at a page or has another form.
            AllocationError: too little was reserved for the request.
        """
        size = self.context.geometry.page_size
        if not self.sidecar_page_bytes():
            return 0
        if sidecar.start % size:
            raise ConfigError("start", sidecar.start, f"must be a multiple of the page size {size}")
        held = self._requests[request]
        taken = held.taken = held.taken or CodebookImport(self.form)
        before = taken.accepted
        codes = taken.add(sidecar.start // size, sidecar.data)
        if not len(codes) or taken.codebook is None:
            return 0
        self.codes.adopt(request, before, codes)
        if not held.books:
            held.books.append(Codebook(request * self.books_each, 0))
            self._imported += held.layers
            books = taken.codebook.view(torch.float16).view(self.codebooks[:, 0].shape)
            self.codebooks[:, request * self.books_each] = upload(books, self.codebooks.device)
        held.encoded = taken.accepted * size
        return len(codes) * size
