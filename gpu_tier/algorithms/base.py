"""Interface of an algorithm: a small representation of every key on the device, from which it selects tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from kvcm.gpu_tier.config import AlgorithmConfig, SparseConfig
from kvcm.gpu_tier.errors import ConfigError, StateError
from kvcm.gpu_tier.geometry import KVGeometry
from kvcm.gpu_tier.index.wave_index import SegmentSink
from kvcm.gpu_tier.pools.representation import RepresentationPool
from kvcm.gpu_tier.runtime import DeviceRuntime
from kvcm.gpu_tier.types import ForwardBatch, Partial, Selection, SteadyRing, Unit

__all__ = [
    "AlgorithmContext",
    "BaseSparseAlgorithm",
    "KeySource",
    "PerPass",
    "Sidecar",
    "export_pages",
    "import_pages",
    "keep_best",
    "real_rows",
    "sparse_lengths",
    "token_requests",
]

# What every algorithm asks of a batch, without waiting for the device.

T = TypeVar("T")


class PerPass(Generic[T]):
    """Something that is the same in all layers of a pass: made by the first that asks, kept for the others.

    Args:
        make: of a batch, and of its sparse mask where that matters.
    """

    def __init__(self, make: Callable[[ForwardBatch, Tensor | None], T]) -> None:
        self._make = make
        self._kept: tuple[ForwardBatch, Tensor | None, T] | None = None

    def of(self, batch: ForwardBatch, sparse_mask: Tensor | None = None) -> T:
        """Return it for a pass."""
        if self._kept is None or self._kept[0] is not batch or self._kept[1] is not sparse_mask:
            self._kept = batch, sparse_mask, self._make(batch, sparse_mask)
        return self._kept[2]


def real_rows(batch: ForwardBatch) -> Tensor:
    """Return ``bool [B]``: the rows that are requests, not padding of a CUDA graph."""
    return torch.arange(batch.rows, device=batch.num_real_reqs.device) < batch.num_real_reqs


def sparse_lengths(batch: ForwardBatch, sparse_mask: Tensor) -> Tensor:
    """Return ``int32 [B]``: the tokens of the rows that select, 0 for the others and for padding."""
    return torch.where(sparse_mask & real_rows(batch), batch.seq_lens, 0).int()


def token_requests(batch: ForwardBatch) -> Tensor:
    """Return ``int64 [T]``: the request of each token of a prefill pass, padding left out."""
    device = batch.req_pool_indices.device
    repeats = torch.tensor(batch.extend_lens, dtype=torch.int64).to(device, non_blocking=True)
    rows = batch.req_pool_indices[: batch.num_real]
    return rows.repeat_interleave(repeats, output_size=sum(batch.extend_lens))


def keep_best(indices: Tensor, lengths: Tensor, scores: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the best `k` of a selection, again in ascending order; ties go to the lower id.

    Args:
        indices: ``int32 [B, Hs, K]`` ascending, -1 behind `lengths`.
        lengths: ``int32 [B, Hs]``.
        scores: ``f32 [B, Hs, N]`` what they were selected by.
        k: ``int32 [B]`` how many of each row to keep.

    Returns:
        New indices and lengths of the same shapes.
    """
    padding = indices < 0
    own = scores.gather(-1, indices.clamp_min(0).long())
    # Padding last: -inf is a score that an item may have, so it is ordered by the flag and not by a score.
    order = own.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, padding.gather(-1, order).int().argsort(dim=-1, stable=True))
    kept = torch.arange(indices.shape[-1], device=indices.device) < k[:, None, None]
    chosen = torch.where(kept, indices.gather(-1, order), -1)
    chosen = torch.where(chosen < 0, torch.iinfo(torch.int32).max, chosen).sort(-1).values
    shortened = torch.minimum(lengths, k[:, None].int())
    inside = torch.arange(indices.shape[-1], device=indices.device) < shortened[..., None]
    return torch.where(inside, chosen, -1).int(), shortened


_Settings = TypeVar("_Settings", bound=AlgorithmConfig)


class KeySource(Protocol):
    """Reads a request's KV from both pools; for algorithms that need all of it at times."""

    def keys(self, layer_id: int, request: int, start: int, stop: int) -> Tensor:
        """Return the keys (latents of MLA) of tokens start to stop - 1, ``f32 [n, H, d]`` on the device."""

    def rows(self, layer_id: int, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Return keys ``f32 [n, H, d]`` and values ``f32 [n, H, dv]`` of tokens start to stop - 1 on the device."""


@dataclass(frozen=True, slots=True)
class AlgorithmContext:
    """What an algorithm works with.

    Attributes:
        geometry: of the model's KV.
        config: settings; `config.algo` are the algorithm's own.
        num_q_heads: query heads Hq.
        sm_scale: what scores are multiplied by before the softmax, 1/sqrt(d) for most models.
        max_requests: rows R of the per-request tables.
        max_tokens: most tokens of one request.
        total_tokens: most tokens of all requests together; the representations are sized for them.
        runtime: of the device.
        keys: reader of all keys of a request.
    """

    geometry: KVGeometry
    config: SparseConfig
    num_q_heads: int
    sm_scale: float
    max_requests: int
    max_tokens: int
    total_tokens: int
    runtime: DeviceRuntime
    keys: KeySource

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.geometry.num_kv_heads

    def settings(self, kind: type[_Settings]) -> _Settings:
        """Return the algorithm's own settings.

        Raises:
            ConfigError: they are another algorithm's.
        """
        if not isinstance(self.config.algo, kind):
            raise ConfigError("algo", self.config.algo, f"must be a {kind.__name__}")
        return self.config.algo


@dataclass(frozen=True, slots=True)
class Sidecar:
    """Representations of whole pages of a request, as they are stored beside its KV.

    Attributes:
        start: first token, a multiple of the page size.
        data: ``uint8 [pages, bytes of a page]`` in host memory, one row per page.
    """

    start: int
    data: Tensor


class BaseSparseAlgorithm(ABC):
    """One algorithm over all layers and requests of one engine.

    Keys and values reach it as numbers (``[T, H, d]``; of MLA latents ``[T, 1, D]``), of fp8 KV already rounded to what
    is stored. `extra` is what the engine passes to the hooks beyond them (dsa: `index_query`, `index_key`,
    `index_weight`).
    """

    unit: ClassVar[Unit]
    selects: ClassVar[bool] = True
    """Whether it selects at all; dense attention does not."""
    needs_values: ClassVar[bool] = False
    can_start_late: ClassVar[bool] = True
    """Whether a request that was short can become sparse when it has grown."""
    updates_before_retrieval: ClassVar[bool] = False
    """Whether the current token's representation has to exist before `retrieve_topk`."""
    required_sidecar: ClassVar[bool] = False
    """Whether representations cannot be rebuilt from KV: a prefix without them is a miss."""

    sink: SegmentSink | None = None
    """Who keeps the KV of clusters, of algorithms that make some; None when nobody has to know of them."""

    def __init__(self, context: AlgorithmContext) -> None:
        self.context = context
        self.initialize_representation_pool()

    @property
    def unit_tokens(self) -> int:
        """Tokens of an item."""
        return 1

    @property
    def per_head(self) -> bool:
        """Whether each KV head selects on its own (Hs = H) or all together (Hs = 1)."""
        return False

    @property
    def represents_keys(self) -> bool:
        """Whether representations are made of keys: then an attached prefix that came without them is read through."""
        return True

    @property
    def skip_layers(self) -> int:
        """First layers that attend densely."""
        return 0

    @property
    @abstractmethod
    def max_items(self) -> int:
        """K: the most items of a selection. Its width, unless the algorithm says that selections grow up to it."""

    def initialize_representation_pool(self) -> None:  # noqa: B027 - a baseline has none
        """Allocate the representations of `context.total_tokens` tokens."""

    def reserve(self, request: int, n_tokens: int) -> None:  # noqa: B027 - a baseline has none
        """Allocate the representations of a request of `n_tokens` tokens; more than before or the same.

        Raises:
            PoolExhaustedError: there is none; what the request had stays.
        """

    def construct_representations(  # noqa: B027 - a baseline has none
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, q: Tensor | None = None,
        **extra: Tensor,
    ) -> None:  # fmt: skip
        """Add the tokens of a prefill chunk, after its attention. Called again with the same chunk, nothing changes.

        Args:
            layer_id: id of the layer.
            batch: the prefill pass.
            k: ``[T, H, d]`` keys of the chunk.
            v: values of the chunk.
            q: ``[T, Hq, d]`` queries of the chunk.
            extra: what the engine passed to the hook.
        """

    def update_representations(  # noqa: B027 - a baseline has none
        self, layer_id: int, batch: ForwardBatch, k: Tensor, v: Tensor | None = None, **extra: Tensor
    ) -> None:
        """Add the token of a decode step, ``k [B, H, d]``."""

    def finish_prompt(self, request: int, n_prompt: int) -> None:  # noqa: B027 - most need not know
        """Take note that the prompt is complete: once, after its last chunk and before the request becomes sparse."""

    def is_ready(self, request: int) -> bool:
        """Return whether `become_sparse` need not wait; until then a request whose prompt is complete is dense."""
        return True

    def become_sparse(self, request: int, n_tokens: int) -> None:  # noqa: B027 - most need not know
        """Build the missing representations of a request that becomes sparse; again after `finish_prompt`.

        All of its KV can be read. A request that was short until now comes here without `finish_prompt` having built
        anything.
        """

    def steady_ring(self, n_prompt: int) -> SteadyRing:
        """Return the places of the steady tokens of a request, for residency `blocks`.

        Args:
            n_prompt: tokens of its prompt, or those that it has when it becomes sparse.

        Raises:
            StateError: this algorithm has none.
        """
        raise StateError(f"{type(self).__name__} has no steady zone")

    @property
    def max_execution_tokens(self) -> int:
        """The most tokens, steady ones included, that a head attends to in a step of residency `blocks`.

        Raises:
            StateError: this algorithm has no steady zone.
        """
        raise StateError(f"{type(self).__name__} has no steady zone")

    @property
    def exec_overflow(self) -> int:
        """Items that were estimated and not attended to because the execution buffer was full; waits for the device."""
        return 0

    @property
    def built(self) -> int:
        """Indexes of a layer that were made from KV here (segments, codebooks), and not taken over from sidecars."""
        return 0

    @property
    def imported(self) -> int:
        """Those that were taken over."""
        return 0

    def estimate(self, queries: Tensor, layer_id: int, batch: ForwardBatch, selection: Selection) -> Partial | None:
        """Return the estimated attention over `selection.estimate`, None when there is none."""
        return None

    @abstractmethod
    def retrieve_topk(
        self, queries: Tensor, layer_id: int, batch: ForwardBatch, sparse_mask: Tensor, **extra: Tensor
    ) -> Selection:
        """Return what each row attends to.

        Args:
            queries: ``[B, Hq, d]`` after RoPE; of MLA in the absorbed form, ``[B, Hq, D]``.
            layer_id: id of the layer.
            batch: the decode step.
            sparse_mask: ``bool [B]``; rows without it get length 0.
            extra: what the engine passed to the hook.
        """

    def static_items(self, request: int, layer_id: int) -> Tensor:
        """Return the tokens that a request keeps for good, ``int32 [Hs, m]``; only of algorithms with a fixed set.

        Raises:
            StateError: this one has none.
        """
        raise StateError(f"{type(self).__name__} keeps no fixed set of tokens")

    def free(self, request: int) -> None:  # noqa: B027 - a baseline has none
        """Forget a request; one that is not known too."""

    def close(self) -> None:  # noqa: B027 - most have nothing that is not torch's
        """End threads and give host memory back; a second call does nothing. The device reads none of it any more."""

    @abstractmethod
    def representation_bytes(self, n_tokens: int) -> int:
        """Return the bytes on the device for a request of so many tokens."""

    def sidecar_page_bytes(self) -> int:
        """Return the bytes of one page's sidecar, 0 when there is none."""
        return 0

    def export_sidecar(self, request: int, start: int, stop: int) -> Sidecar | None:
        """Return the representations of the whole pages in [start, stop), None when the algorithm has no sidecar."""
        return None

    def import_sidecar(self, request: int, sidecar: Sidecar) -> int:
        """Take representations over and return the tokens covered; `reserve` was called before."""
        return 0


# Sidecars of algorithms whose representations are pages of fixed bytes: a page's sidecar is its pages, one by one.


def export_pages(pool: RepresentationPool, page_size: int, request: int, start: int, stop: int) -> Sidecar:
    """Return the representations of the whole pages in [start, stop); waits for the device.

    A page of the KV pools is a whole number of the representation's pages, so sidecars of neighbouring pages
    concatenate.
    """
    first, end = -(-start // page_size), stop // page_size
    end = max(first, end)
    per_page = page_size // pool.page_tokens
    data = pool.export_pages(request, first * per_page, end * per_page)
    return Sidecar(first * page_size, data.reshape(end - first, per_page * data.shape[1]))


def import_pages(pool: RepresentationPool, page_size: int, request: int, sidecar: Sidecar) -> int:
    """Take a sidecar over and return the tokens it covers.

    Raises:
        ConfigError: it does not start at a page or has another shape.
        AllocationError: too little was reserved for the request.
    """
    if sidecar.start % page_size:
        raise ConfigError("start", sidecar.start, f"must be a multiple of the page size {page_size}")
    per_page = page_size // pool.page_tokens
    page_bytes = per_page * pool.num_layers * pool.page_bytes
    if sidecar.data.ndim != 2 or sidecar.data.shape[1] != page_bytes:
        raise ConfigError("data", tuple(sidecar.data.shape), f"must be rows of {page_bytes} bytes")
    pages = len(sidecar.data)
    data = sidecar.data.reshape(pages * per_page, pool.num_layers * pool.page_bytes)
    pool.import_pages(request, sidecar.start // pool.page_tokens, data)
    return pages * page_size
