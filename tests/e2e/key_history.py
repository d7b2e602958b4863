"""What clients did to every block of one round, and what may be true of it when all is quiet again.

Times are those of the clients: an operation takes effect between its `sent` and its `ended`, and one that was never
answered may have taken effect until the manager died. A block is judged by its latest history:

1. A write that was confirmed is served, unless a removal of the key overlapped the write or came after it.
2. A served block was written by a session that was finished, with this block named successful, and not refused.
3. A location that was there when a confirmed removal began is never served again.
4. The blocks of one finished session are all served or none, but for those that were removed.
5. Two sessions never hold the same block at the same time (invariant 2 of the design).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

Block = tuple[str, int]
"""Instance and block key."""


class Outcome(Enum):
    """How a request ended for its client."""

    OK = "ok"
    REFUSED = "refused"  # the manager said no: it did nothing
    UNKNOWN = "unknown"  # no answer, or one that says that the store failed


@dataclass(slots=True)
class Write:
    """A write session.

    Attributes:
        instance: of its blocks.
        session_id: as granted.
        uris: where each block was to be written.
        sent: when the start was sent.
        granted: when its answer came.
        seconds: its timeout.
        succeeded: keys that its finish named as written; None while no finish was sent.
        finish_sent: when the (first) finish was sent.
        finish_ended: when the deciding answer came.
        outcome: of its finish.
    """

    instance: str
    session_id: str
    uris: dict[int, str]
    sent: float
    granted: float
    seconds: int
    succeeded: frozenset[int] | None = None
    finish_sent: float = math.inf
    finish_ended: float = math.inf
    outcome: Outcome | None = None

    @property
    def deadline(self) -> float:
        """Latest time at which the manager lets it expire."""
        return self.granted + self.seconds

    @property
    def is_certainly_open(self) -> bool:
        """Whether there is time to write: bytes that come after the session's end would have no owner."""
        return time.monotonic() < self.sent + self.seconds - 0.2

    @property
    def held_from_to(self) -> tuple[float, float]:
        """When it certainly held its blocks: from its grant until it could have ended, at the earliest."""
        return self.granted, min(self.finish_sent, self.sent + self.seconds)


@dataclass(frozen=True, slots=True)
class Removal:
    """A removal of blocks; `keys` None for all of the instance."""

    instance: str
    keys: frozenset[int] | None
    sent: float
    ended: float
    is_confirmed: bool


@dataclass(slots=True)
class History:
    """Everything that was done in one round.

    Attributes:
        base: blocks that were served when the round began, and where.
        writes: in the order of their grants.
        removals: in the order in which they were sent.
        broken: invariants that were seen broken.
    """

    base: Mapping[Block, str] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    removals: list[Removal] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    _by_uri: dict[str, Write] = field(default_factory=dict)
    _writes_of: dict[Block, list[Write]] = field(default_factory=dict)
    _removals_of: dict[tuple[str, int | None], list[int]] = field(default_factory=dict)

    def writer_of(self, uri: str) -> Write | None:
        """Return the session that a place was granted to."""
        return self._by_uri.get(uri)

    def granted(self, write: Write) -> None:
        """Note a session; checks rule 5."""
        for key, uri in write.uris.items():
            if uri in self._by_uri:
                self.broken.append(f"{uri} was handed out twice")
            self._by_uri[uri] = write
            self._writes_of.setdefault((write.instance, key), []).append(write)
        self.writes.append(write)

    def double_owners(self) -> Iterator[str]:
        """Yield pairs of sessions that held the same block at the same time (rule 5)."""
        for block, writes in self._writes_of.items():
            latest: Write | None = None
            for write in sorted(writes, key=lambda each: each.held_from_to[0]):
                if latest is not None and self._overlap(block, latest, write):
                    yield f"{block}: two sessions hold it: {_reported(latest, block)}; {_reported(write, block)}"
                if latest is None or write.held_from_to[1] > latest.held_from_to[1]:
                    latest = write

    def _overlap(self, block: Block, first: Write, second: Write) -> bool:
        (start, end), (later, until) = first.held_from_to, second.held_from_to
        if not (start < later < min(end, until)):
            return False
        # A removed block may be written again while its writer is still at it, or was not even answered yet: those
        # bytes will be dropped.
        begin = min(first.sent, second.sent)
        return not any(each.ended > begin and each.sent < until for each in self.removals_of(block))

    def due(self, block: Block) -> str | None:
        """Return the uri that must be served now (rule 1), None where nothing must be."""
        candidates = [
            (write.sent, write.uris[block[1]])
            for write in self._finished(block)
            if write.outcome is Outcome.OK and not self._touched_since(block, write.sent)
        ]
        if not candidates and block in self.base and not self._touched_since(block, -math.inf):
            return self.base[block]
        return max(candidates)[1] if candidates else None

    def objection(self, block: Block, uri: str) -> str | None:
        """Return why a uri must not be served now (rules 2 and 3), None where it may be."""
        key = block[1]
        if self.base.get(block) == uri:
            granted = -math.inf
        else:
            write = self._by_uri.get(uri)
            if write is None or write.uris.get(key) != uri or write.instance != block[0]:
                return "the manager gave no client this location for it"
            if write.succeeded is None or key not in write.succeeded:
                return "its writer never said that it is written"
            if write.outcome is Outcome.REFUSED:
                return "its finish was refused"
            granted = write.granted
        gone = [each for each in self.removals_of(block) if each.is_confirmed and each.sent > granted]
        return f"its removal was confirmed {len(gone)} times since" if gone else None

    def halves(self, served: Mapping[Block, str]) -> Iterator[str]:
        """Yield sessions of which some blocks are served and others are not, without a removal (rule 4)."""
        for write in self.writes:
            if not write.succeeded or write.outcome is None:
                continue
            blocks = [(write.instance, key) for key in write.succeeded]
            alone = [block for block in blocks if not self._touched_since(block, write.sent)]
            there = {served.get(block) == write.uris[block[1]] for block in alone}
            if len(there) > 1:
                yield f"session {write.session_id[:8]}: only some of its {len(alone)} blocks are served"

    def writes_of(self, block: Block) -> Sequence[Write]:
        """Return the sessions that were to write a block."""
        return self._writes_of.get(block, ())

    def removals_of(self, block: Block) -> Iterator[Removal]:
        """Return the removals of a block."""
        numbers = (*self._removals_of.get(block, ()), *self._removals_of.get((block[0], None), ()))
        return (self.removals[number] for number in numbers)

    def removing(self, removal: Removal) -> int:
        """Note a removal before it is sent; returns its number, for `removed`."""
        number = len(self.removals)
        self.removals.append(removal)
        for key in removal.keys if removal.keys is not None else (None,):
            self._removals_of.setdefault((removal.instance, key), []).append(number)
        return number

    def removed(self, number: int, ended: float, *, is_confirmed: bool) -> None:
        """Note the answer to a removal."""
        self.removals[number] = replace(self.removals[number], ended=ended, is_confirmed=is_confirmed)

    def _finished(self, block: Block) -> Iterable[Write]:
        return (w for w in self.writes_of(block) if w.succeeded is not None and block[1] in w.succeeded)

    def _touched_since(self, block: Block, at: float) -> bool:
        return any(each.ended > at for each in self.removals_of(block))

    def verdicts(self, blocks: Sequence[Block], served: Mapping[Block, str]) -> list[str]:
        """Return the violations among the served blocks when all is quiet."""
        wrong = [*self.broken, *self.double_owners(), *self.halves(served)]
        for block in blocks:
            uri, due = served.get(block), self.due(block)
            if due is not None and uri != due:
                wrong.append(f"{block}: a confirmed write is lost: {due} expected, {uri} served")
            if uri is not None and (reason := self.objection(block, uri)) is not None:
                wrong.append(f"{block}: {uri} is served though {reason}")
        return wrong


def _reported(write: Write, block: Block) -> str:
    (start, end), uri = write.held_from_to, write.uris[block[1]]
    return f"{write.session_id[:8]} {write.outcome} sent {write.sent:.4f}, held {start:.4f} to {end:.4f} at {uri}"
