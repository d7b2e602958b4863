"""Prefixes that need no prefill: from the host pool's own cache, else from a storage; and the blocks given in return.

Invariants:

1. A prefix is attached only as far as every required part of every block is there with its own bytes, and never to the
   last token of the prompt, which has to be computed for its logits.
2. A page that a storage may still write to is held until it does so no more, independent of the request.
3. Only blocks computed with exact attention are published: decoding over a selection gives other KV, which must never
   be taken for the exact one.
4. Failures of the storage are misses: no method raises because of one.

Nothing here waits but `attach` and `flush`. The engine calls `begin` when a request arrives, `poll` before its steps,
and `step` now and then, all from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from torch import Tensor

from kvcm.gpu_tier.connector import (
    KV_SPEC,
    KVConnector,
    LoadTicket,
    PageDst,
    PageSrc,
    PrefixHandle,
    PrefixMatch,
    WriteTicket,
)
from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.pools.host_pool import HostKVPool, PageState

__all__ = [
    "AttachState",
    "AttachedPrefix",
    "BlockWrites",
    "PrefixAttach",
    "PrefixCounters",
    "PrefixStore",
    "SidecarRun",
    "SidecarSpec",
]

# Counters of prefixes.


@dataclass(slots=True)
class PrefixCounters:
    """Counters of prefixes.

    Attributes:
        host_tokens: attached tokens that were in the pool.
        storage_tokens: attached tokens that were loaded.
        loads_short: loads of which fewer blocks arrived than were promised.
        sidecar_misses: attached tokens whose optional sidecar was not there.
        written_pages: pages that the storage has taken, or had.
        failed_pages: pages that it has not.
        dropped_pages: pages not given to it, or only later, because too many were being written.
    """

    host_tokens: int = 0
    storage_tokens: int = 0
    loads_short: int = 0
    sidecar_misses: int = 0
    written_pages: int = 0
    failed_pages: int = 0
    dropped_pages: int = 0


# The life of one prefix that is being attached to a request, from the question to pages full of bytes.


class AttachState(StrEnum):
    """How far it is.

        WAITING ──► MATCHING ──► LOADING ──► DONE          (each state may go to DONE at once)

    WAITING is for a block that another request is loading right now: it is loaded once, and found in the pool then.
    """

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

    The caller that takes it owns one reference to each page; otherwise it calls `PrefixStore.release`.

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


# Pages of the host pool as blocks of a storage: their keys, their memory, and the state of each.


@dataclass(frozen=True, slots=True)
class SidecarSpec:
    """The sidecar of the engine's algorithm.

    Attributes:
        name: of its spec, see `KVFormat.sidecar_spec`.
        page_bytes: of one page.
        is_required: whether a block without it is none.
    """

    name: str
    page_bytes: int
    is_required: bool


class _BlockPages:
    """The host pool's cached pages, by key of the block.

    The state of a page is that of the block that it was last kept as; a page that is given to another block is kept
    again before it is read.

    Args:
        sidecar: of the engine's algorithm, None when it has none.
    """

    def __init__(self, host: HostKVPool, sidecar: SidecarSpec | None) -> None:
        self.host = host
        self.allocator = host.allocator
        self.sidecar = sidecar
        self._key_of: dict[int, int] = {}
        self._has_sidecar: set[int] = set()
        self._is_stored: set[int] = set()
        if sidecar is not None:
            host.add_sidecar(sidecar.name, sidecar.page_bytes)

    @property
    def required(self) -> tuple[str, ...]:
        """Specs without which a block is none."""
        return (KV_SPEC, self.sidecar.name) if self.sidecar is not None and self.sidecar.is_required else (KV_SPEC,)

    @property
    def optional(self) -> tuple[str, ...]:
        """Specs that are good to have."""
        return (self.sidecar.name,) if self.sidecar is not None and not self.sidecar.is_required else ()

    @property
    def all_memory(self) -> tuple[memoryview, ...]:
        """The memory of all pages and sidecars."""
        rows = () if self.sidecar is None else (self._rows().flatten(),)
        return tuple(data.numpy().data for data in (self.host.data, *rows))

    def find(self, keys: Sequence[int]) -> list[int]:
        """Return the pages of the leading blocks that are in the pool, with a reference to each for the caller."""
        pages: list[int] = []
        for key in keys:
            page = self.allocator.lookup(key)
            if page is None:
                break
            pages.append(page)
            if len(self.required) > 1 and page not in self._has_sidecar:
                self.allocator.free([pages.pop()])
                break
        return pages

    def keep(self, page: int, key: int, *, has_sidecar: bool, is_stored: bool) -> None:
        """Cache a page whose bytes are all there. If another page has the key already, that one will be found.

        Args:
            page: it.
            key: of its block.
            has_sidecar: whether its sidecar is there.
            is_stored: whether the storage is known to have the block.
        """
        self.allocator.cache(page, key)
        self._key_of[page] = key
        _put(self._has_sidecar, page, has_sidecar)
        _put(self._is_stored, page, is_stored)

    def mark_stored(self, keys: Sequence[int], pages: Sequence[int], is_stored: bool) -> None:
        """Note whether the storage has blocks; pages that were given to others meanwhile are left alone."""
        for key, page in zip(keys, pages, strict=True):
            if self._key_of.get(page) == key:
                _put(self._is_stored, page, is_stored)

    def is_stored(self, page: int) -> bool:
        """Return whether the storage had the block at the last lookup."""
        return page in self._is_stored

    def with_sidecar(self, pages: Sequence[int]) -> int:
        """Return how many leading pages have their sidecar."""
        return next((n for n, page in enumerate(pages) if page not in self._has_sidecar), len(pages))

    def is_busy(self, page: int) -> bool:
        """Return whether a page is being written to the storage."""
        return self.allocator.state(page) is PageState.WRITING_L3

    def filled(self, pages: Sequence[int]) -> None:
        """Say that all bytes of pages are there; of some it may have been said before."""
        self.allocator.filled(page for page in pages if self.allocator.state(page) is PageState.FILLING)

    def memory(self, page: int, names: Sequence[str]) -> Mapping[str, tuple[memoryview, ...]]:
        """Return the memory of a page's parts."""
        return {name: self._pieces(page, name) for name in names}

    def sidecars(self, pages: Sequence[int]) -> tuple[SidecarRun, ...]:
        """Return the sidecars of the leading pages that have one; no bytes move."""
        if self.sidecar is None:
            return ()
        rows = self._rows()
        runs = _runs(pages[: self.with_sidecar(pages)])
        return tuple(SidecarRun(first, rows[page : page + count]) for first, page, count in runs)

    def set_sidecars(self, pages: Sequence[int], data: Tensor) -> None:
        """Store sidecars beside their pages.

        Args:
            pages: whose they are.
            data: ``uint8 [pages, page_bytes]``.

        Raises:
            ConfigError: `data` has another shape.
        """
        rows = self._rows()
        if data.shape != (len(pages), rows.shape[1]):
            raise ConfigError("sidecar", tuple(data.shape), f"must be {(len(pages), rows.shape[1])}")
        for first, page, count in _runs(pages):  # an index for each page would make it many times slower
            rows[page : page + count] = data[first : first + count]

    def _rows(self) -> Tensor:
        if self.sidecar is None:
            raise ConfigError("sidecar", None, "the algorithm has none")
        return self.host.sidecar(self.sidecar.name)

    def _pieces(self, page: int, name: str) -> tuple[memoryview, ...]:
        pieces = self.host.page_pieces(page) if name == KV_SPEC else (self._rows()[page],)
        return tuple(piece.numpy().data for piece in pieces)


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield position, first page and number of pages that follow each other."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield start, pages[start], i - start
            start = i


def _put(pages: set[int], page: int, is_in: bool) -> None:
    if is_in:
        pages.add(page)
    else:
        pages.discard(page)


# Blocks that are being written to the storage. Their pages are held until the write has ended.


@dataclass(frozen=True, slots=True)
class _Written:
    """Consecutive blocks of one write."""

    keys: tuple[int, ...]
    pages: tuple[int, ...]


class BlockWrites:
    """Offers blocks to a storage.

    Args:
        blocks: the pool.
        connector: to the storage.
        counters: where to count.
        most_pages: that may be held for writing at once.
    """

    def __init__(self, blocks: _BlockPages, connector: KVConnector, counters: PrefixCounters, most_pages: int) -> None:
        self._blocks = blocks
        self._connector = connector
        self._counters = counters
        self._most_pages = most_pages
        self._writing: dict[WriteTicket, _Written] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written."""
        return not self._writing

    def offer(self, keys: Sequence[int], pages: Sequence[int]) -> None:
        """Begin to write what the storage does not have, from the first such block on.

        Args:
            keys: of a chain's blocks, from the first one on.
            pages: their pages.
        """
        start = next((i for i, page in enumerate(pages) if not self._blocks.is_stored(page)), len(pages))
        start = max([start, *(i + 1 for i, page in enumerate(pages) if self._blocks.is_busy(page))])
        pages_left = max(0, self._most_pages - sum(len(written.pages) for written in self._writing.values()))
        held = tuple(pages[start : start + pages_left])
        self._counters.dropped_pages += len(pages) - start - len(held)
        if not held:
            return
        written = _Written(tuple(keys[start : start + len(held)]), held)
        names = [KV_SPEC]
        if self._blocks.sidecar is not None and self._blocks.with_sidecar(held) == len(held):
            names.append(self._blocks.sidecar.name)
        sources = [PageSrc(key, self._blocks.memory(page, names)) for key, page in zip(written.keys, held, strict=True)]
        self._blocks.allocator.begin_write(held)
        self._writing[self._connector.write(keys[start - 1] if start else None, sources)] = written

    def step(self) -> None:
        """Let go of pages whose write is done."""
        for ticket, written in list(self._writing.items()):
            progress = self._connector.poll_write(ticket)
            if not progress.is_done:
                continue
            del self._writing[ticket]
            stored = progress.stored
            self._blocks.mark_stored(written.keys[:stored], written.pages[:stored], True)
            self._blocks.allocator.end_write(written.pages)
            self._counters.written_pages += stored
            self._counters.failed_pages += len(written.pages) - stored


_PAUSE_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class _OrphanedLoad:
    """An abandoned load, whose memory may still change."""

    ticket: LoadTicket
    handle: PrefixHandle | None
    pages: tuple[int, ...]


class PrefixStore:
    """Attaches prefixes to requests and publishes blocks.

    Args:
        host: the pool; the sidecar is added to it.
        connector: to the storage; None shares prefixes inside the pool only.
        page_keys: returns the key of every full page of some tokens; keys depend on all tokens before.
        sidecar: of the engine's algorithm, None when it has none.
        most_writing: share of the pool's pages that may be held for writing at once.

    Attributes:
        counters: of prefixes.
    """

    def __init__(
        self,
        host: HostKVPool,
        connector: KVConnector | None,
        page_keys: Callable[[Sequence[int]], Sequence[int]],
        sidecar: SidecarSpec | None = None,
        most_writing: float = 0.5,
    ) -> None:
        self.counters = PrefixCounters()
        self._blocks = _BlockPages(host, sidecar)
        self._allocator = host.allocator
        self._page_size = host.geometry.page_size
        self._connector = connector
        self._page_keys = page_keys
        self._loading: dict[int, PrefixAttach] = {}
        self._ended: list[_OrphanedLoad] = []
        self._checks: list[tuple[PrefixHandle, tuple[int, ...]]] = []
        self._writes: BlockWrites | None = None
        if connector is not None:
            connector.use_memory(self._blocks.all_memory)
            most_pages = int(most_writing * host.allocator.num_pages)
            self._writes = BlockWrites(self._blocks, connector, self.counters, most_pages)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written, and no memory may change any more."""
        return not self._ended and (self._writes is None or self._writes.is_idle)

    def begin(self, token_ids: Sequence[int]) -> PrefixAttach:
        """Begin to look for the longest known prefix of a prompt."""
        usable = max(0, len(token_ids) - 1) // self._page_size
        attach = PrefixAttach(tuple(self._page_keys(token_ids[: usable * self._page_size])))
        self._match(attach)
        return attach

    def poll(self, attach: PrefixAttach) -> AttachedPrefix | None:
        """Return the prefix, None while it is under way. Ask until there is an answer, or call `abort`."""
        self._advance(attach)
        return attach.result

    def attach(
        self,
        token_ids: Sequence[int],
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> AttachedPrefix:
        """Wait for a prefix, for engines that have nothing else to do meanwhile; an empty one if it is not in time."""
        attach = self.begin(token_ids)
        deadline = clock() + timeout_seconds
        while (prefix := self.poll(attach)) is None:
            if clock() >= deadline:
                self.abort(attach)
                return AttachedPrefix()
            pause(_PAUSE_SECONDS)
        return prefix

    def abort(self, attach: PrefixAttach) -> None:
        """Forget an attach, however far it is. One that is done is given back: not to be called when it was taken."""
        if attach.state is AttachState.DONE:
            if attach.result is not None:
                self.release(attach.result)
            attach.result = None
            return
        if attach.ticket is not None and self._connector is not None:
            self._connector.cancel(attach.ticket)
            self._ended.append(_OrphanedLoad(attach.ticket, attach.handle, tuple(attach.loaded)))
            attach.handle = None
        self._allocator.free(attach.cached)
        self._close(attach)

    def release(self, prefix: AttachedPrefix) -> None:
        """Drop the references of a prefix that was not attached."""
        self._allocator.free(prefix.pages)

    def shorten(self, prefix: AttachedPrefix, n_tokens: int) -> AttachedPrefix:
        """Give back what of a prefix is behind `n_tokens`: ranks of one model go on from the shortest of theirs.

        Raises:
            ConfigError: these are no whole pages of it.
        """
        pages = n_tokens // self._page_size
        if n_tokens % self._page_size or not 0 <= n_tokens <= prefix.n_tokens:
            raise ConfigError("n_tokens", n_tokens, f"must be whole pages of at most {prefix.n_tokens} tokens")
        self._allocator.free(prefix.pages[pages:])
        runs = tuple(
            SidecarRun(run.first_page, run.rows[: pages - run.first_page])
            for run in prefix.sidecars
            if run.first_page < pages
        )
        return AttachedPrefix(prefix.pages[:pages], n_tokens, runs)

    def publish(
        self,
        token_ids: Sequence[int],
        pages: Sequence[int],
        n_exact: int,
        *,
        first_page: int = 0,
        sidecar: Tensor | None = None,
    ) -> None:
        """Let later requests, here and elsewhere, find the full blocks of a request. Call again as it grows.

        What the storage did not take before is offered again.

        Args:
            token_ids: of the request, from its first token on.
            pages: its host pages; the bytes of the full ones among them are all there.
            n_exact: leading tokens whose KV was computed with exact attention; nothing behind them is published.
            first_page: pages before it were attached or published already.
            sidecar: ``uint8 [full pages from first_page on, bytes]`` or more rows; None when there is none.

        Raises:
            ConfigError: the algorithm requires a sidecar and there is none, or it is too short.
        """
        full = min(len(pages), min(n_exact, len(token_ids)) // self._page_size)
        new = pages[first_page:full]
        if new and sidecar is None and len(self._blocks.required) > 1:
            raise ConfigError("sidecar", None, "this algorithm's blocks are of no use without")
        if any(page in ended.pages for ended in self._ended for page in new):
            return  # a storage that hangs may still write beside them
        if sidecar is not None:
            self._blocks.set_sidecars(new, sidecar[: len(new)])
        self._blocks.filled(new)
        keys = tuple(self._page_keys(token_ids[: full * self._page_size]))
        for page, key in zip(new, keys[first_page:], strict=True):
            self._blocks.keep(page, key, has_sidecar=sidecar is not None, is_stored=False)
        if self._writes is not None:
            self._writes.offer(keys, pages[:full])

    def step(self) -> None:
        """Let go of pages that were written, and of those that no storage may write to any more."""
        if self._writes is None:
            return
        self._writes.step()
        self._checks = [check for check in self._checks if not self._poll_match(*check)]
        self._ended = [left for ended in self._ended if (left := self._poll_orphan(ended)) is not None]

    def flush(
        self,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> bool:
        """Wait until nothing is being written; returns whether that came true in time. For the end of a process."""
        deadline = clock() + timeout_seconds
        self.step()
        while not self.is_idle and clock() < deadline:
            pause(_PAUSE_SECONDS)
            self.step()
        return self.is_idle

    def _match(self, attach: PrefixAttach) -> None:
        """Take the blocks in the pool, and look up the others, unless another attach is loading them."""
        attach.cached += self._blocks.find(attach.keys[len(attach.cached) :])
        found = len(attach.cached)
        if found == len(attach.keys) or self._connector is None:
            self._match_cached(attach)
            self._finish(attach, [], 0)
            return
        if attach.keys[found] in self._loading:
            self._wait_for_load(attach)
            return
        attach.handle = self._connector.match_prefix(attach.keys, self._blocks.required, self._blocks.optional)
        attach.state = AttachState.MATCHING

    def _match_cached(self, attach: PrefixAttach) -> None:
        """Look up the pool's blocks in the storage without waiting for the answer.

        Blocks of other engines must not be evicted because all their users have them in their pools; and where the
        storage has lost a block, blocks behind it would be stored in vain.
        """
        if self._connector is not None and attach.keys:
            handle = self._connector.match_prefix(attach.keys, self._blocks.required)
            self._checks.append((handle, tuple(attach.cached)))

    def _poll_match(self, handle: PrefixHandle, pages: Sequence[int]) -> bool:
        """Take note of such an answer; returns whether it is there."""
        assert self._connector is not None
        match = self._connector.matched(handle)
        if match is None:
            return False
        self._record_match(handle.keys, pages, match)
        self._connector.release(handle)
        return True

    def _record_match(self, keys: Sequence[int], pages: Sequence[int], match: PrefixMatch) -> None:
        """Take note which of the leading blocks, whose pages are in the pool, the storage has."""
        if match.reason:
            return
        end = min(match.blocks, len(pages))
        self._blocks.mark_stored(keys[:end], pages[:end], True)
        self._blocks.mark_stored(keys[end : len(pages)], pages[end:], False)

    def _wait_for_load(self, attach: PrefixAttach) -> None:
        """Let another attach load the next block."""
        self._release_handle(attach)
        attach.waits_for = self._loading[attach.keys[len(attach.cached)]]
        attach.state = AttachState.WAITING

    def _release_handle(self, attach: PrefixAttach) -> None:
        if attach.handle is not None and self._connector is not None:
            self._connector.release(attach.handle)
        attach.handle = None

    def _advance(self, attach: PrefixAttach) -> None:
        if attach.state is AttachState.WAITING:
            assert attach.waits_for is not None
            self._advance(attach.waits_for)
            if attach.waits_for.state is AttachState.DONE:
                self._match(attach)
        elif attach.state is AttachState.MATCHING:
            self._load(attach)
        elif attach.state is AttachState.LOADING:
            self._poll_load(attach)

    def _load(self, attach: PrefixAttach) -> None:
        assert self._connector is not None
        assert attach.handle is not None
        match = self._connector.matched(attach.handle)
        if match is None:
            return
        self._record_match(attach.keys, attach.cached, match)
        # Another attach may have loaded or computed some of it meanwhile, or be at it.
        attach.cached += self._blocks.find(attach.keys[len(attach.cached) : match.blocks])
        start = len(attach.cached)
        if start < match.blocks and attach.keys[start] in self._loading:
            self._wait_for_load(attach)
            return
        stop = next((i for i in range(start, match.blocks) if attach.keys[i] in self._loading), match.blocks)
        stop = min(stop, start + self._allocator.available)
        if stop <= start:
            self._finish(attach, [], 0)
            return
        attach.loaded = self._allocator.alloc(stop - start)
        destinations = []
        for block, page in enumerate(attach.loaded, start):
            names = [*self._blocks.required, *(name for name, end in match.optional.items() if block < end)]
            destinations.append(PageDst(block, self._blocks.memory(page, names)))
        attach.ticket = self._connector.load(attach.handle, destinations)
        attach.state = AttachState.LOADING
        self._loading.update(dict.fromkeys(attach.loading_keys, attach))

    def _poll_load(self, attach: PrefixAttach) -> None:
        assert self._connector is not None
        assert attach.ticket is not None
        progress = self._connector.poll(attach.ticket)
        if not progress.is_done:
            return
        start = len(attach.cached)
        count = min(progress.ends[name] for name in self._blocks.required) - start
        names = [*self._blocks.required, *self._blocks.optional]
        complete = min(progress.ends.get(name, start) for name in names) - start if len(names) > 1 else 0
        self.counters.loads_short += count < len(attach.loaded)
        usable, rest = attach.loaded[:count], attach.loaded[count:]
        if progress.is_settled:
            self._allocator.free(rest)
        else:  # of those that are used, an optional part may still be written to
            held = usable[complete:] if self._blocks.optional else []
            self._allocator.share(held)
            self._ended.append(_OrphanedLoad(attach.ticket, None, (*held, *rest)))
        self._finish(attach, usable, complete)

    def _finish(self, attach: PrefixAttach, loaded: Sequence[int], complete: int) -> None:
        """Turn pages into a prefix.

        Args:
            attach: whose prefix it is.
            loaded: pages behind the cached ones whose required parts have arrived.
            complete: leading ones among them whose sidecar has arrived, too.
        """
        self._blocks.filled(loaded)
        start = len(attach.cached)
        pages = list(attach.cached)
        for number, page in enumerate(loaded):
            self._blocks.keep(page, attach.keys[start + number], has_sidecar=number < complete, is_stored=True)
            pages.append(page)
        sidecars = self._blocks.sidecars(pages)
        attach.result = AttachedPrefix(tuple(pages), len(pages) * self._page_size, sidecars)
        if self._blocks.sidecar is not None:
            missing = len(pages) - sum(len(run.rows) for run in sidecars)
            self.counters.sidecar_misses += missing * self._page_size
        self.counters.host_tokens += start * self._page_size
        self.counters.storage_tokens += len(loaded) * self._page_size
        self._close(attach)

    def _close(self, attach: PrefixAttach) -> None:
        for key in attach.loading_keys:
            self._loading.pop(key, None)
        self._release_handle(attach)
        attach.ticket = attach.waits_for = None
        attach.cached, attach.loaded = [], []
        attach.state = AttachState.DONE

    def _poll_orphan(self, ended: _OrphanedLoad) -> _OrphanedLoad | None:
        """Return the blocks of an ended load, None when nothing is."""
        assert self._connector is not None
        progress = self._connector.poll(ended.ticket)
        handle = ended.handle
        if progress.is_done and handle is not None:
            self._connector.release(handle)
            handle = None
        if not progress.is_settled:
            return _OrphanedLoad(ended.ticket, handle, ended.pages)
        self._allocator.free(ended.pages)
        return None
