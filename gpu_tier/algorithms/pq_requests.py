"""What PQCache knows of its requests on the host: windows and budgets, and which codes exist.

A request's tokens are `init` first ones, a middle, and a window of the last `local` ones; the middle's tokens are
scored by their codes and the best `k` attended to. Window and k are fixed once, from the prompt's length; a request
whose prompt was too short to be sparse takes them from the length at which requests may become sparse.

While the middle is too short for an index, all of it is attended to: the request is dense by another way. The middle
is clustered by the step that makes it long enough.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field

from gpu_tier.algorithms.pq_clustering import LayerIndex
from gpu_tier.algorithms.pq_sidecars import CodebookImport
from gpu_tier.config import PQCacheConfig, SparseConfig
from gpu_tier.types import SteadyRing

__all__ = ["Book", "Budgets", "Build", "PQRequest"]

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
class Book:
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
        taken: what was taken over of sidecars.
        is_finished: whether its prompt is complete.
        is_sparse: whether it attends sparsely.
    """

    request: int
    layers: int
    reserved: int = 0
    n_prompt: int = 0
    local: int = 0
    k: int = 0
    books: list[Book] = field(default_factory=list)
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

    def forget_jobs(self) -> None:
        """Drop what is being clustered."""
        for job in self.jobs.values():
            job.cancel()
        self.jobs.clear()
        self.build = None
