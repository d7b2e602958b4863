"""A storage that hangs on to the memory of loads."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcm.connectors.transfer import MOVERS, Failure, FileMover, TransferItem, TransferResult
from kvcm.connectors.transfer.mover import not_moved
from kvcm.model.storages import StorageConfig

__all__ = ["LateStorage", "use_late_storage"]


class LateStorage:
    """A storage that is busy with everything behind the first blocks, and may change that memory later.

    Args:
        mover: does the rest.
        blocks: that are loaded in time.
    """

    def __init__(self, mover: FileMover, blocks: int) -> None:
        self._mover = mover
        self._left = blocks
        self.late: list[memoryview] = []

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        prompt = min(self._left, len(items))
        self._left -= prompt
        self.late += [buffer for item in items[prompt:] for buffer in item.buffers]
        pending = not_moved(Failure.PENDING, "the deadline passed while the storage was busy with the item")
        return self._mover.load(items[:prompt], deadline_seconds) + [pending] * (len(items) - prompt)

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        return self._mover.save(items, deadline_seconds)

    def close(self) -> None:
        self._mover.close()

    def scribble(self) -> None:
        """Change the memory of the loads that are late."""
        for buffer in self.late:
            buffer[:] = b"\x7f" * len(buffer)


def use_late_storage(monkeypatch: pytest.MonkeyPatch, blocks: int) -> list[LateStorage]:
    """Let engines that are made from now on have late file storages; return those."""
    made: list[LateStorage] = []

    def make(configs: Sequence[StorageConfig]) -> LateStorage:
        made.append(LateStorage(FileMover.for_storages(configs), blocks))
        return made[-1]

    monkeypatch.setitem(MOVERS, "file", make)
    return made
