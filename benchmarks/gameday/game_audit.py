"""Reads every acknowledged block at the end of a game, as an engine would, and hands it to be judged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice

from game_ledger import Block, Found

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.results import Location, MatchMode, Outcome
from kvcm.connectors.transfer import TransferEngine, TransferItem
from kvcm.connectors.transfer.mover import checksum_of
from kvcm.model.storages import NfsStorageSpec, StorageConfig

__all__ = ["read_blocks"]

_AT_ONCE = 256
_SECONDS = 20.0


def read_blocks(
    addresses: Sequence[str], roots: dict[str, str], blocks: Iterable[Block]
) -> dict[tuple[str, int], Found]:
    """Return the bytes that a reader gets of each block.

    Args:
        addresses: of the managers.
        roots: of the storages, by name.
        blocks: to read.
    """
    configs = [StorageConfig(name, NfsStorageSpec(f"{root}/", 1)) for name, root in roots.items()]
    engine = TransferEngine.for_storages(configs, 2, checksums=True)
    keys: defaultdict[str, list[int]] = defaultdict(list)
    for block in blocks:
        keys[block.instance].append(block.key)
    found: dict[tuple[str, int], Found] = {}
    for instance, listed in keys.items():
        with ManagerClient(addresses, instance, ClientSettings(_SECONDS)) as client:
            left = iter(listed)
            while some := list(islice(left, _AT_ONCE)):
                places = client.match(some, MatchMode.BATCH)
                if places.outcome is not Outcome.OK:
                    reason = f"{instance} cannot be asked: {places.outcome.name} {places.reason}"
                    found |= {(instance, key): Found({}, reason) for key in some}
                    continue
                pairs = zip(some, places.locations, strict=True)
                found |= {(instance, key): _read(engine, place) for key, place in pairs if place is not None}
    engine.close()
    return found


def _read(engine: TransferEngine, place: Location) -> Found:
    """Load a block without comparing, and return the checksums of its bytes."""
    buffers = {spec: bytearray(uri.size) for spec, uri in place.uris.items()}
    items = [TransferItem(uri, [memoryview(buffers[spec])]) for spec, uri in place.uris.items()]
    results = dict(zip(place.uris, engine.load(items, _SECONDS), strict=True))
    parts = {
        spec: (str(uri), checksum_of([memoryview(buffers[spec])]) if results[spec].ok else None)
        for spec, uri in place.uris.items()
    }
    return Found(parts, next((result.reason for result in results.values() if not result.ok), ""))
