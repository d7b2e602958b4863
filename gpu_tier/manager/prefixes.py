"""Prefixes that need no prefill: from the host pool's own cache, else from a storage; and the blocks given in return.

Invariants:

1. A prefix is attached only as far as every required part of every block is there with its own bytes, and never to the
   last token of the prompt, which has to be computed for its logits.
2. A page that a storage may still write to is held until it does so no more, whatever became of the request.
3. Only blocks computed with exact attention are published: decoding over a selection gives other KV, which must never
   be taken for the exact one.
4. Failures of the storage are misses: no method raises because of one.

Nothing here waits but `attach` and `flush`. The engine calls `begin` when a request arrives, `poll` before its steps,
and `step` now and then, all from one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from gpu_tier.connector import KVConnector, LoadTicket, PageDst, PrefixHandle, PrefixMatch
from gpu_tier.errors import ConfigError
from gpu_tier.manager.block_pages import BlockPages, SidecarSpec
from gpu_tier.manager.block_writes import BlockWrites
from gpu_tier.manager.prefix_attach import AttachedPrefix, AttachState, PrefixAttach, SidecarRun
from gpu_tier.manager.prefix_counters import PrefixCounters
from gpu_tier.pools.host_pool import HostKVPool

__all__ = ["AttachedPrefix", "PrefixCounters", "PrefixStore", "SidecarSpec"]

_PAUSE_SECONDS = 0.002


@dataclass(frozen=True, slots=True)
class _Ended:
    """A load that nobody needs, whose memory may still change."""

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
        counters: what was counted so far.
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
        self._blocks = BlockPages(host, sidecar)
        self._allocator = host.allocator
        self._page_size = host.geometry.page_size
        self._connector = connector
        self._page_keys = page_keys
        self._loading: dict[int, PrefixAttach] = {}
        self._ended: list[_Ended] = []
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
        self._look(attach)
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
                self.give_back(attach.result)
            attach.result = None
            return
        if attach.ticket is not None and self._connector is not None:
            self._connector.cancel(attach.ticket)
            self._ended.append(_Ended(attach.ticket, attach.handle, tuple(attach.loaded)))
            attach.handle = None
        self._allocator.free(attach.cached)
        self._close(attach)

    def give_back(self, prefix: AttachedPrefix) -> None:
        """Drop the references of a prefix that nobody took."""
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
        self._checks = [check for check in self._checks if not self._hear(*check)]
        self._ended = [left for ended in self._ended if (left := self._settle(ended)) is not None]

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

    def _look(self, attach: PrefixAttach) -> None:
        """Take what is in the pool, and ask for the rest, unless somebody else is loading it."""
        attach.cached += self._blocks.find(attach.keys[len(attach.cached) :])
        found = len(attach.cached)
        if found == len(attach.keys) or self._connector is None:
            self._check(attach)
            self._finish(attach, [], 0)
            return
        if attach.keys[found] in self._loading:
            self._wait(attach)
            return
        attach.handle = self._connector.match_prefix(attach.keys, self._blocks.required, self._blocks.optional)
        attach.state = AttachState.MATCHING

    def _check(self, attach: PrefixAttach) -> None:
        """Ask whether the storage has what the pool has, though nobody waits for the answer.

        Blocks of other engines must not be evicted because all who use them have them in their pools; and where the
        storage has lost a block, what follows it would be stored in vain.
        """
        if self._connector is not None and attach.keys:
            handle = self._connector.match_prefix(attach.keys, self._blocks.required)
            self._checks.append((handle, tuple(attach.cached)))

    def _hear(self, handle: PrefixHandle, pages: Sequence[int]) -> bool:
        """Take note of such an answer; returns whether it is there."""
        assert self._connector is not None
        match = self._connector.matched(handle)
        if match is None:
            return False
        self._note(handle.keys, pages, match)
        self._connector.release(handle)
        return True

    def _note(self, keys: Sequence[int], pages: Sequence[int], match: PrefixMatch) -> None:
        """Take note which of the leading blocks, whose pages are in the pool, the storage has."""
        if match.reason:
            return
        end = min(match.blocks, len(pages))
        self._blocks.mark_stored(keys[:end], pages[:end], True)
        self._blocks.mark_stored(keys[end : len(pages)], pages[end:], False)

    def _wait(self, attach: PrefixAttach) -> None:
        """Let somebody else load the next block."""
        self._release(attach)
        attach.waits_for = self._loading[attach.keys[len(attach.cached)]]
        attach.state = AttachState.WAITING

    def _release(self, attach: PrefixAttach) -> None:
        if attach.handle is not None and self._connector is not None:
            self._connector.release(attach.handle)
        attach.handle = None

    def _advance(self, attach: PrefixAttach) -> None:
        if attach.state is AttachState.WAITING:
            assert attach.waits_for is not None
            self._advance(attach.waits_for)
            if attach.waits_for.state is AttachState.DONE:
                self._look(attach)
        elif attach.state is AttachState.MATCHING:
            self._load(attach)
        elif attach.state is AttachState.LOADING:
            self._arrive(attach)

    def _load(self, attach: PrefixAttach) -> None:
        assert self._connector is not None
        assert attach.handle is not None
        match = self._connector.matched(attach.handle)
        if match is None:
            return
        self._note(attach.keys, attach.cached, match)
        # Somebody else may have loaded or computed some of it meanwhile, or be at it.
        attach.cached += self._blocks.find(attach.keys[len(attach.cached) : match.blocks])
        start = len(attach.cached)
        if start < match.blocks and attach.keys[start] in self._loading:
            self._wait(attach)
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

    def _arrive(self, attach: PrefixAttach) -> None:
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
            self._ended.append(_Ended(attach.ticket, None, (*held, *rest)))
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
        self._release(attach)
        attach.ticket = attach.waits_for = None
        attach.cached, attach.loaded = [], []
        attach.state = AttachState.DONE

    def _settle(self, ended: _Ended) -> _Ended | None:
        """Return what is left of an ended load, None when nothing is."""
        assert self._connector is not None
        progress = self._connector.poll(ended.ticket)
        handle = ended.handle
        if progress.is_done and handle is not None:
            self._connector.release(handle)
            handle = None
        if not progress.is_settled:
            return _Ended(ended.ticket, handle, ended.pages)
        self._allocator.free(ended.pages)
        return None
