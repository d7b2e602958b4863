"""An engine's transfers on a mount that fails, and what of them must be true whatever happens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fault_mount import FaultMount
from storage_rig import content
from waiting import until

from kvcm.connectors.transfer import Failure, TransferEngine, TransferItem, TransferResult
from kvcm.model.storages import NfsStorageSpec, StorageConfig
from kvcm.model.uri import LocationUri

BLOCK_BYTES = 150_000  # no whole number of pages, and more than one request of the kernel
SLOTS = 4
_STORAGE = "nfs"
_THREADS = 4  # whatever the machine has
_SPARE_SECONDS = 30.0  # that two busy cores may take beyond a deadline


@dataclass(frozen=True, slots=True)
class Moved:
    """What became of a call.

    Attributes:
        results: per item.
        seconds: that the caller was held.
    """

    results: list[TransferResult]
    seconds: float

    @property
    def ok(self) -> list[bool]:
        """Which items moved."""
        return [result.ok for result in self.results]

    @property
    def failures(self) -> set[Failure | None]:
        """Why items did not move."""
        return {result.failure for result in self.results}


class Transfers:
    """Saves and loads blocks on a mount. The bytes of a block follow from its uri.

    Every call checks that saved bytes lie in the directory behind the mount, that loaded bytes are the saved ones, and
    that the call ended within the caller's deadline.

    Args:
        mount: of the storage.
    """

    def __init__(self, mount: FaultMount) -> None:
        self.mount = mount
        storage = StorageConfig(_STORAGE, NfsStorageSpec(str(mount.path), SLOTS))
        self.engine = TransferEngine.for_storages([storage], threads=_THREADS)
        (mount.directory / "cluster").mkdir(exist_ok=True)

    def uris(self, name: str, packed_files: int = 2, files: int = 4) -> list[LocationUri]:
        """Return addresses of new blocks: some share a file, some have one of their own."""
        place = f"{self.mount.path}/cluster/inst/kv/{name}"
        packed = [(f"{place}-p{number}", slot) for number in range(packed_files) for slot in range(SLOTS)]
        paths: list[tuple[str, int | None]] = [*packed, *((f"{place}-s{number}", None) for number in range(files))]
        return [LocationUri("file", _STORAGE, path, BLOCK_BYTES, slot) for path, slot in paths]

    def save(self, uris: Sequence[LocationUri], deadline_seconds: float = 20.0) -> Moved:
        """Save blocks."""
        moved = self.save_unread(uris, deadline_seconds)
        for uri, ok in zip(uris, moved.ok, strict=True):
            assert not ok or self.stored(uri) == self.content(uri), f"{uri} counts as saved"
        return moved

    def save_unread(self, uris: Sequence[LocationUri], deadline_seconds: float = 20.0) -> Moved:
        """Save blocks without a check of the stored bytes."""
        items = [TransferItem(uri, _pieces(bytearray(self.content(uri)))) for uri in uris]
        begin = time.monotonic()
        moved = Moved(self.engine.save(items, deadline_seconds), time.monotonic() - begin)
        _assert_in_time(moved, deadline_seconds)
        return moved

    def content(self, uri: LocationUri) -> bytes:
        """Return the bytes of a block: they follow from its address below the mount."""
        return content(str(uri._replace(path=uri.path.removeprefix(str(self.mount.path)))))

    def load(self, uris: Sequence[LocationUri], deadline_seconds: float = 20.0) -> Moved:
        """Load blocks."""
        blocks = [bytearray(BLOCK_BYTES) for _ in uris]
        items = [TransferItem(uri, _pieces(block)) for uri, block in zip(uris, blocks, strict=True)]
        begin = time.monotonic()
        moved = Moved(self.engine.load(items, deadline_seconds), time.monotonic() - begin)
        _assert_in_time(moved, deadline_seconds)
        for uri, ok, block in zip(uris, moved.ok, blocks, strict=True):
            assert not ok or block == self.content(uri), f"{uri} counts as loaded"
        return moved

    def stored(self, uri: LocationUri) -> bytes:
        """Return the bytes of a block as they lie in the directory behind the mount."""
        path = self.mount.directory / uri.path.removeprefix(f"{self.mount.path}/")
        if not path.exists():
            return b""
        with path.open("rb") as file:
            file.seek(uri.offset)
            return file.read(uri.size)

    def until_all_load(self, uris: Sequence[LocationUri]) -> None:
        """Return when all blocks load with the engine as it is."""
        until(lambda: all(self.load(uris).ok), "the engine loads again")

    def until_all_save(self, uris: Sequence[LocationUri]) -> None:
        """Return when all blocks can be saved with the engine as it is."""
        until(lambda: all(self.save(uris).ok), "the engine saves again")


def _pieces(block: bytearray) -> list[memoryview]:
    view = memoryview(block)
    return [view[:1000], view[1000:100_001], view[100_001:]]


def _assert_in_time(moved: Moved, deadline_seconds: float) -> None:
    assert moved.seconds < deadline_seconds + _SPARE_SECONDS, f"held for {moved.seconds} s"
