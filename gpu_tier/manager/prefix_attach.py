"""The life of one prefix that is being attached to a request, from the question to pages full of bytes.

    WAITING ──► MATCHING ──► LOADING ──► DONE          (each state may go to DONE at once)

WAITING is for a block that another request is loading right now: it is loaded once, and found in the pool then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from gpu_tier.connector import LoadTicket, PrefixHandle

__all__ = ["AttachState", "AttachedPrefix", "PrefixAttach", "SidecarRun"]


class AttachState(StrEnum):
    """How far it is."""

    WAITING = "waiting"
    MATCHING = "matching"
    LOADING = "loading"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class SidecarRun:
    """Sidecars of pages that lie one behind the other.

    Attributes:
        first_page: position of the first of them in the prefix.
        rows: ``uint8 [pages, bytes of a page]``, a view of the host pool.
    """

    first_page: int
    rows: Tensor


@dataclass(frozen=True, slots=True)
class AttachedPrefix:
    """KV of a prompt's first tokens in the host pool.

    Whoever takes it takes over one reference to each page; who does not calls `PrefixStore.give_back`.

    Attributes:
        pages: host pages, full and in order.
        n_tokens: tokens in them; fewer than the prompt has.
        sidecars: of the leading pages that have one, in order; of all when the algorithm cannot do without. They stay
            as they are while the pages are held.
    """

    pages: tuple[int, ...] = ()
    n_tokens: int = 0
    sidecars: tuple[SidecarRun, ...] = ()


@dataclass(slots=True, eq=False)
class PrefixAttach:
    """One attach; `PrefixStore` moves it on.

    Attributes:
        keys: of the blocks that may be attached.
        state: how far it is.
        cached: pages that were in the pool.
        loaded: pages that bytes arrive in.
        waits_for: the attach that loads the next block.
        handle: of the lookup, until it is released.
        ticket: of the load, until it is settled.
        result: what came of it, once it is done.
    """

    keys: tuple[int, ...]
    state: AttachState = AttachState.WAITING
    cached: list[int] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    waits_for: PrefixAttach | None = None
    handle: PrefixHandle | None = None
    ticket: LoadTicket | None = None
    result: AttachedPrefix | None = None

    @property
    def loading_keys(self) -> tuple[int, ...]:
        """Keys of the blocks that are being loaded."""
        start = len(self.cached)
        return self.keys[start : start + len(self.loaded)]
