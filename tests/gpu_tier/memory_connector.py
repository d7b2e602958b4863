"""A storage in memory with a connector that obeys the Protocol, and does to its caller what real storages do.

By default everything is done when it is first asked for. With `is_manual` nothing happens by itself: the test answers
lookups, lets parts arrive in any order, breaks a load after some bytes, or leaves one hanging, which then goes on
scribbling over the memory that it was given.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcm.gpu_tier.connector import (
    KVConnector,
    LoadProgress,
    LoadTicket,
    PageDst,
    PageSrc,
    PrefixHandle,
    PrefixMatch,
    WriteProgress,
    WriteTicket,
)

Part = tuple[int, str]


@dataclass
class MemoryStorage:
    """Blocks by key; shared by the connectors of several engines."""

    blocks: dict[int, dict[str, bytes]] = field(default_factory=dict)
    writing: set[int] = field(default_factory=set)
    pins: dict[int, int] = field(default_factory=dict)

    def pin(self, keys: Sequence[int], by: int) -> None:
        for key in keys:
            self.pins[key] = self.pins.get(key, 0) + by


@dataclass
class Lookup:
    keys: tuple[int, ...]
    required: tuple[str, ...]
    optional: tuple[str, ...]
    match: PrefixMatch | None = None


@dataclass
class Load:
    lookup: Lookup
    pages: Sequence[PageDst]
    left: list[Part]
    arrived: set[Part] = field(default_factory=set)
    failed: set[Part] = field(default_factory=set)
    hanging: list[memoryview] = field(default_factory=list)
    is_done: bool = False


@dataclass
class Write:
    pages: Sequence[PageSrc]
    mine: list[PageSrc]
    is_done: bool = False
    stored: int = 0


class MemoryConnector:
    """Implements `KVConnector` over a `MemoryStorage`."""

    def __init__(self, storage: MemoryStorage, *, is_manual: bool = False) -> None:
        self.storage = storage
        self.is_manual = is_manual
        self.lookups: dict[int, Lookup] = {}
        self.loads: dict[int, Load] = {}
        self.writes: dict[int, Write] = {}
        self.is_down = False
        self.questions = 0
        self._numbers = itertools.count()

    # The Protocol.

    def use_memory(self, memory: Sequence[memoryview]) -> None:
        self.memory_bytes = sum(piece.nbytes for piece in memory)

    def match_prefix(self, keys: Sequence[int], required: Sequence[str], optional: Sequence[str] = ()) -> PrefixHandle:
        self.questions += 1
        handle = PrefixHandle(next(self._numbers), tuple(keys))
        self.lookups[handle.number] = Lookup(tuple(keys), tuple(required), tuple(optional))
        return handle

    def matched(self, handle: PrefixHandle) -> PrefixMatch | None:
        lookup = self.lookups[handle.number]
        if not self.is_manual:
            self.answer(handle.number)
        return lookup.match

    def load(self, handle: PrefixHandle, pages: Sequence[PageDst]) -> LoadTicket:
        lookup = self.lookups[handle.number]
        assert lookup.match is not None
        assert [page.block for page in pages] == list(range(pages[0].block, pages[-1].block + 1))
        assert pages[-1].block < lookup.match.blocks
        ticket = LoadTicket(next(self._numbers))
        left = [(page.block, name) for page in pages for name in page.parts]
        self.loads[ticket.number] = Load(lookup, pages, left)
        return ticket

    def poll(self, ticket: LoadTicket) -> LoadProgress:
        load = self.loads[ticket.number]
        if not self.is_manual:
            self.arrive(ticket.number, *load.left)
        for piece in load.hanging:
            piece[:] = bytes([0xEE]) * len(piece)
        is_settled = load.is_done and not load.hanging
        if is_settled:
            del self.loads[ticket.number]
        return LoadProgress(_ends(load), load.is_done, is_settled, "a part failed" if load.failed else "")

    def cancel(self, ticket: LoadTicket) -> None:
        self.loads[ticket.number].is_done = True

    def release(self, handle: PrefixHandle) -> None:
        lookup = self.lookups.pop(handle.number)
        if lookup.match is not None:
            self.storage.pin(lookup.keys[: lookup.match.blocks], -1)

    def write(self, parent: int | None, pages: Sequence[PageSrc]) -> WriteTicket:
        ticket = WriteTicket(next(self._numbers))
        known = {page.key for page in pages if self._has(page)} | self.storage.writing
        mine = [] if self.is_down else [page for page in pages if page.key not in known]
        self.storage.writing |= {page.key for page in mine}
        self.writes[ticket.number] = Write(pages, mine)
        return ticket

    def poll_write(self, ticket: WriteTicket) -> WriteProgress:
        write = self.writes[ticket.number]
        if not self.is_manual:
            self.finish_write(ticket.number)
        if write.is_done:
            del self.writes[ticket.number]
        return WriteProgress(write.is_done, write.stored)

    def close(self) -> None:
        for load in self.loads.values():
            load.is_done = True
            load.hanging.clear()

    # What a test lets happen.

    def answer(self, number: int) -> None:
        """Answer a lookup."""
        lookup = self.lookups[number]
        if lookup.match is not None:
            return
        if self.is_down:
            lookup.match = PrefixMatch(0, reason="down")
            return
        blocks = self._if_leader(lookup.keys, lookup.required)
        optional = {name: self._if_leader(lookup.keys[:blocks], [name]) for name in lookup.optional}
        lookup.match = PrefixMatch(blocks, optional)
        self.storage.pin(lookup.keys[:blocks], 1)

    def arrive(self, number: int, *parts: Part) -> None:
        """Let parts of a load arrive, in this order."""
        load = self.loads[number]
        for block, name in parts:
            load.left.remove((block, name))
            if load.is_done:
                continue
            _copy(self.storage.blocks[load.lookup.keys[block]][name], _pieces(load, block, name))
            load.arrived.add((block, name))
        load.is_done |= not load.left

    def break_after(self, number: int, count_bytes: int) -> None:
        """Let a load fail after so many bytes; of the part in which it failed some have arrived."""
        load = self.loads[number]
        while load.left and not load.is_done:
            block, name = load.left[0]
            data = self.storage.blocks[load.lookup.keys[block]][name]
            if len(data) > count_bytes:
                _copy(data[:count_bytes], _pieces(load, block, name))
                self.fail(number, (block, name))
                return
            count_bytes -= len(data)
            self.arrive(number, (block, name))

    def fail(self, number: int, *parts: Part, hangs: bool = False) -> None:
        """Let parts fail, and the load end with them."""
        load = self.loads[number]
        for block, name in parts:
            load.left.remove((block, name))
            load.failed.add((block, name))
            if hangs:
                load.hanging += _pieces(load, block, name)
        load.is_done = True

    def let_go(self, number: int) -> None:
        """Let a hanging storage come to an end."""
        self.loads[number].hanging.clear()

    def finish_write(self, number: int, count: int | None = None) -> None:
        """End a write, of whose blocks the first `count` were stored."""
        write = self.writes[number]
        if write.is_done:
            return
        good = write.mine[: len(write.mine) if count is None else count]
        for page in good:
            parts = {name: b"".join(bytes(piece) for piece in pieces) for name, pieces in page.parts.items()}
            self.storage.blocks.setdefault(page.key, {}).update(parts)
        self.storage.writing -= {page.key for page in write.mine}
        bad = {page.key for page in write.mine} - {page.key for page in good}
        stored = 0 if self.is_down else len(write.pages)
        write.stored = next((n for n, page in enumerate(write.pages[:stored]) if page.key in bad), stored)
        write.is_done = True

    def _has(self, page: PageSrc) -> bool:
        return self.storage.blocks.get(page.key, {}).keys() >= page.parts.keys()

    def _if_leader(self, keys: Sequence[int], names: Sequence[str]) -> int:
        has_all = (set(names) <= self.storage.blocks.get(key, {}).keys() for key in keys)
        return next((n for n, has in enumerate(has_all) if not has), len(keys))


def _is_a_connector(connector: MemoryConnector) -> KVConnector:
    return connector


def _pieces(load: Load, block: int, name: str) -> Sequence[memoryview]:
    return load.pages[block - load.pages[0].block].parts[name]


def _copy(data: bytes, pieces: Sequence[memoryview]) -> None:
    for piece in pieces:
        taken, data = data[: len(piece)], data[len(piece) :]
        piece[: len(taken)] = taken


def _ends(load: Load) -> dict[str, int]:
    ends = {}
    for name in load.pages[0].parts:
        end = load.pages[0].block
        while (end, name) in load.arrived:
            end += 1
        ends[name] = end
    return ends
