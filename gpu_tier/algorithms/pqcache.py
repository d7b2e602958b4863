"""Top tokens by product-quantised keys (PQCache, SIGMOD 2025).

A step attends to the `init` first tokens, the `local` last ones and, of those between, the k with the largest products
of the query with their quantised keys; each KV head chooses on its own, by the sum of the softmax of its query heads.
With residency `blocks` the first and the last ones are the steady zone and the selection holds the k; with other
residencies it holds all of them.

When a layer's prompt is complete its middle is clustered, beside the layers that follow; the request waits for that
when it becomes sparse. From then on every token gets its codes with the step that computes it, so that they are there
when it leaves the window; centroids stay as they are, unless `rebuild_every` says when all is clustered anew. What a
request holds is in `pq_requests`, the codes' way from host memory in `gpu_tier.pools.code_pages`.

A prompt that continues an attached prefix finds the prefix's codes and codebook in its sidecars. New tokens get codes
of it (`turns="extend"`) or, if they are enough, a codebook of their own (`per_turn`); with `rebuild` nothing is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from gpu_tier.algorithms.base import BaseSparseAlgorithm, Sidecar
from gpu_tier.algorithms.batch_rows import PerPass, keep_best
from gpu_tier.algorithms.pq_clustering import Clusterer, LayerIndex
from gpu_tier.algorithms.pq_passes import Asked, ask, merged, newest
from gpu_tier.algorithms.pq_requests import Book, Budgets, Build, PQRequest
from gpu_tier.algorithms.pq_sidecars import CodebookImport, PQSidecars
from gpu_tier.config import PQCacheConfig
from gpu_tier.errors import ConfigError
from gpu_tier.index import pq
from gpu_tier.index.layer_time import dense_layer_seconds
from gpu_tier.kernels.pq_score import pq_score
from gpu_tier.kernels.topk_select import topk_select
from gpu_tier.pools.code_pages import CodePages
from gpu_tier.pools.representation import RepresentationPool
from gpu_tier.runtime import upload
from gpu_tier.types import ForwardBatch, Selection, SteadyRing, SteadyZone, TokenRanges, Unit

__all__ = ["PQCache"]


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
        self._asked = PerPass(self._ask)
        self._newest = PerPass(lambda batch, _: newest(batch, self._requests, self.codes, self.budgets))

    @property
    def pool(self) -> RepresentationPool:
        """Who holds which pages of codes."""
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
            held.forget_jobs()
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
            held.forget_jobs()
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
        """Decide what is to be clustered of a request of so many tokens."""
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
        """Take what was clustered, and cluster what was not."""
        build = held.build
        if build is None:
            return
        book = Book(held.request * self.books_each + len(held.books), build.first)
        for layer in range(held.layers):
            for other in range(layer, held.layers):
                self._begin(held, other, at_once=other == layer)
            self._take(held, layer, held.jobs.pop(layer).result(), build.first, (book,))
        held.books.append(book)
        held.encoded, held.clustered = build.stop, [build.stop] * held.layers
        held.build = None

    def _take(self, held: PQRequest, layer: int, index: LayerIndex, first: int, books: tuple[Book, ...]) -> None:
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
        """Give each row's token codes, and cluster a request's layer anew if it is time."""
        layer, step = self.context.geometry.layer_index(layer_id), self._newest.of(batch)
        if step.where is not None:
            row = self.context.geometry.parts[0]
            stored = row.decode(row.encode(k))
            self.codes.append(layer, step.where, pq.encode_rows(stored, self._books(batch, layer, step.slots)))
        for held, n_tokens, due in step.due:
            if held.clustered[layer] < due:
                self._cluster_anew(held, layer, n_tokens)

    def _cluster_anew(self, held: PQRequest, layer: int, n_tokens: int) -> None:
        index = self.clusterer.now(
            self._keys(layer, held.request, 0, n_tokens), self.settings.init, n_tokens - held.local
        )
        # Layers that were not reached yet keep their two codebooks until all have one.
        books = tuple(held.books) or (Book(held.request * self.books_each, 0),)
        self._take(held, layer, index, 0, books)
        held.clustered[layer], held.books = n_tokens, list(books)
        if min(held.clustered) == n_tokens:
            held.books, held.encoded = [books[0]], n_tokens

    def _books(self, batch: ForwardBatch, layer: int, slots: Tensor, *, fresh: bool = False) -> Tensor:
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
            self.unit, 1, indices, lengths, always, SteadyZone(self.settings.init, asked.first, asked.firsts)
        )

    def _ask(self, batch: ForwardBatch, sparse_mask: Tensor | None) -> Asked:
        assert sparse_mask is not None
        return ask(batch, sparse_mask, self._requests, self.codes, self.budgets)

    def _best(self, queries: Tensor, layer: int, batch: ForwardBatch, asked: Asked) -> tuple[Tensor, Tensor]:
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

    def _scores(self, queries: Tensor, layer: int, batch: ForwardBatch, asked: Asked) -> Tensor:
        """Return ``f32 [B, H, N]``: the sum of the softmax over the middle of each query head of a group."""
        codes = self.codes.codes(layer, asked.window)
        out = torch.empty(len(queries), self.context.num_q_heads, asked.width, device=queries.device)
        for number, span in enumerate(asked.spans):
            table = pq.tables(queries, self._books(batch, layer, span.slots, fresh=True), self.context.sm_scale)
            scores = torch.empty_like(out) if number else out
            pq_score(table, codes, asked.table, span.first, span.stop, scores, impl=self.context.config.kernels)
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
            held.books.append(Book(request * self.books_each, 0))
            self._imported += held.layers
            books = taken.codebook.view(torch.float16).view(self.codebooks[:, 0].shape)
            self.codebooks[:, request * self.books_each] = upload(books, self.codebooks.device)
        held.encoded = taken.accepted * size
        return len(codes) * size
