"""What a read finds, by its mode: pure functions over what is resident of the blocks it names.

What is resident of a block is a byte with a bit per spec; 0 is a block that is not there at all. A masked block is one
that the engine has itself: it is not asked for, ends no prefix, and is never part of a window (wire.md 5.1 and 5.3,
design.md decision 13).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcm.optimizer.groups.layout import SpecKind, SpecLayout
from kvcm.optimizer.trace import QueryMode

__all__ = ["Answer", "Needs", "answer", "padded"]


class Answer(NamedTuple):
    """What a read found.

    Attributes:
        external: blocks of the answer.
        internal: masked blocks before its end.
        reach: blocks of the prompt that need not be computed.
        positions: of the answered blocks.
    """

    external: int
    internal: int
    reach: int
    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class Needs:
    """What of a block a read needs, as bits.

    Attributes:
        full: of every block.
        state: of the last block of a prefix.
        windows: of the last so-many blocks of a prefix: pairs of blocks and bits.
        is_all: whether blocks consist of one spec that every block has to have, so that any that is there will do.
    """

    full: int
    state: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    is_all: bool = False

    @classmethod
    def of(cls, specs: Sequence[SpecLayout], names: Sequence[str] | None = None) -> Needs:
        """Return the needs of a read of these specs; of those it names, if it names any."""
        bits = [(1 << bit, spec) for bit, spec in enumerate(specs) if names is None or spec.name in names]
        full = sum(bit for bit, spec in bits if spec.kind is SpecKind.FULL)
        return cls(
            full=full,
            state=sum(bit for bit, spec in bits if spec.kind is SpecKind.STATE),
            windows=tuple((spec.window_blocks, bit) for bit, spec in bits if spec.kind is SpecKind.WINDOW),
            is_all=full == len(specs) == 1,
        )

    @property
    def any(self) -> int:
        """Return all bits."""
        return self.full | self.state | sum(bit for _, bit in self.windows)

    @property
    def is_flat(self) -> bool:
        """Whether a prefix may end anywhere."""
        return not (self.state or self.windows)

    def met_by(self, here: int) -> bool:
        """Return whether a single block has what every block has to have, or, if nothing, any of the rest."""
        return here & self.full == self.full and bool(here & self.any)

    def count(self, present: bytes, masked: Sequence[bool] | None = None) -> int:
        """Return how many blocks, of those that are not masked, have what every block has to have."""
        if masked is None and self.is_all:
            return len(present) - present.count(0)
        is_masked = padded(masked, len(present))
        return sum(not is_masked[place] and self.met_by(here) for place, here in enumerate(present))


def answer(
    mode: QueryMode, present: bytes, needs: Needs, *, masked: Sequence[bool] | None = None, window: int = 0
) -> Answer:
    """Return what a read finds.

    Args:
        mode: prefix, batch or window.
        present: what is resident of each block that it names.
        needs: what it needs.
        masked: by position; positions behind its end are not masked.
        window: blocks of the window; nothing is found where it has none.
    """
    if mode is QueryMode.PREFIX and masked is None and needs.is_all:
        end = present.find(0) if 0 in present else len(present)
        return Answer(end, 0, end, range(end))
    is_masked = padded(masked, len(present))
    if mode is QueryMode.BATCH:
        return _batch(present, needs, is_masked)
    if mode is QueryMode.WINDOW:
        return _window(present, needs, is_masked, window)
    return _prefix(present, needs, is_masked)


def padded(masked: Sequence[bool] | None, length: int) -> list[bool]:
    """Return whether each of so many positions is masked; those behind the end are not."""
    given = [] if masked is None else [*masked[:length]]
    return given + [False] * (length - len(given))


def _batch(present: bytes, needs: Needs, is_masked: Sequence[bool]) -> Answer:
    found = [place for place, here in enumerate(present) if not is_masked[place] and needs.met_by(here)]
    internal = sum(is_masked)
    return Answer(len(found), internal, len(found) + internal, found)


def _window(present: bytes, needs: Needs, is_masked: Sequence[bool], window: int) -> Answer:
    run = 0
    for place in range(len(present) - 1, -1, -1):
        run = run + 1 if not is_masked[place] and needs.met_by(present[place]) else 0
        if run == window > 0:
            return Answer(window, 0, place + window, range(place, place + window))
    return Answer(0, 0, 0, ())


def _prefix(present: bytes, needs: Needs, is_masked: Sequence[bool]) -> Answer:
    end = 0
    runs = dict.fromkeys((bit for _, bit in needs.windows), 0)
    for place, here in enumerate(present):
        if is_masked[place]:
            here = needs.any
        if here & needs.full != needs.full:
            break
        for bit in runs:
            runs[bit] = runs[bit] + 1 if here & bit else 0
        has_windows = all(runs[bit] >= min(blocks, place + 1) for blocks, bit in needs.windows)
        if has_windows and here & needs.any and here & needs.state == needs.state:
            end = place + 1
        elif needs.is_flat:
            break
    internal = sum(is_masked[:end])
    return Answer(end - internal, internal, end, [place for place in range(end) if not is_masked[place]])
