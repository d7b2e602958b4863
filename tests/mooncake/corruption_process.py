"""Objects of a Mooncake store that change behind a real manager's back: runs in the store's network, ends with 0.

corruption_process.py SPEC DATA_DIR      the storage's spec as JSON, an empty directory for the manager
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from random import Random

for folder in ("store", "faults", "connectors", "contract"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from corruption_media import Medium  # noqa: E402
from corruption_site import PART_BYTES, SPECS, BlockSite, opened_site  # noqa: E402
from manager_process import start_manager  # noqa: E402
from waiting import until  # noqa: E402

from kvcm.connectors.transfer import Failure  # noqa: E402
from kvcm.model.mooncake import MooncakeClient, open_client  # noqa: E402
from kvcm.model.storages import MooncakeStorageSpec  # noqa: E402
from kvcm.model.uri import LocationUri  # noqa: E402
from kvcm.protocol import admin_service_pb2  # noqa: E402

KEYS = list(range(1, 9))


class MooncakeMedium(Medium):
    """A store, and a client that keeps to no rules of ours.

    Args:
        spec: of the storage.
        client: of the store.
    """

    def __init__(self, spec: MooncakeStorageSpec, client: MooncakeClient) -> None:
        self._spec = spec
        self._client = client

    def config(self, name: str) -> admin_service_pb2.StorageConfig:
        names = ("local_hostname", "metadata_connstring", "protocol", "master_service_entry")
        fields = {name: getattr(self._spec, name) for name in names}
        return admin_service_pb2.StorageConfig(global_unique_name=name, mooncake=fields)

    def peek(self, uri: LocationUri) -> bytes:
        assert uri.key is not None
        return self._client.get(uri.key)

    def poke(self, uri: LocationUri, data: bytes, start: int = 0) -> None:
        """Replace an object by a changed one, as soon as no client reads it."""
        changed = bytearray(self.peek(uri))
        changed[start : start + len(data)] = data
        replace = self._client.upsert  # type: ignore[attr-defined]
        until(lambda: replace(uri.key, bytes(changed)) == 0, "the object is replaced")


def scenario(site: BlockSite) -> None:
    """Change objects, detect it, save again; twice."""
    random = Random(4)
    site.save(KEYS)
    for byte in (0, PART_BYTES - 1, PART_BYTES // 2):
        before = site.match(KEYS)
        both, one = random.sample(KEYS, 2)
        parts = [(both, "tp0"), (both, "tp1"), (one, random.choice(SPECS))]
        for part in parts:
            site.medium.flip(site.places(before)[part], byte)
        site.assert_found_out(KEYS, dict.fromkeys(parts, Failure.CORRUPT), before)


def main() -> None:
    spec = MooncakeStorageSpec(**json.loads(sys.argv[1]))
    manager = start_manager(Path(sys.argv[2]))
    try:
        client = open_client(spec, segment_bytes=0, buffer_bytes=16 << 20)
        with opened_site(manager, MooncakeMedium(spec, client)) as site:
            scenario(site)
    finally:
        manager.stop()
    sys.stdout.flush()
    os._exit(0)  # the client is C++ that may end the process otherwise


if __name__ == "__main__":
    main()
