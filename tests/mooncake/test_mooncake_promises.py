"""The suite of promises (tests/contract/test_storage_promises.py) on a real Mooncake master.

The manager's client is a process of its own, and so are the engine that saves, the one that loads and the owner of the
memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from uuid import uuid4

import pytest
import test_storage_promises as suite
from mooncake_rig import Process, Site
from storage_rig import content

from kvcm.model.storages import MooncakeStorageSpec, StorageConfig
from kvcm.storage.backend import StorageBackend
from kvcm.storage.mooncake import MooncakeStorage

pytestmark = pytest.mark.e2e

for _name, _test in vars(suite).items():
    if _name.startswith("test_"):
        globals()[_name] = _test
storage = suite.storage


class MooncakeSetting:
    """A deployment of its own in a store.

    Args:
        site: of the store; opened while the thread is in its network.
        engine: saves.
        other_engine: loads.
    """

    storage = "mc"  # as the participants call it
    scheme = "mooncake"
    holds_bytes = True
    sees_bytes = True
    lists_objects = False
    knows_space = False
    makes_objects = False

    def __init__(self, site: Site, engine: Process, other_engine: Process) -> None:
        self._config = StorageConfig("mc", MooncakeStorageSpec(**site.spec))
        self._cluster_id = f"c{uuid4().hex[:8]}"
        self._engine = engine
        self._other_engine = other_engine
        self._checksums: dict[str, int] = {}
        self.opened: list[StorageBackend] = []

    async def open(self, *, is_new: bool = True) -> StorageBackend:
        """Open it with a client of its own; it knows no difference between new and old."""
        self.opened.append(MooncakeStorage.open(self._config, self._cluster_id))
        return self.opened[-1]

    async def save(self, uris: Sequence[str]) -> None:
        answer = self._engine.ask("save", uris=list(uris))
        assert answer["failures"] == [None] * len(uris), answer["reasons"]
        self._checksums |= zip(uris, answer["checksums"], strict=True)

    async def load(self, uris: Sequence[str]) -> list[bytes | None]:
        checksums = [self._checksums.get(uri, 0) for uri in uris]
        answer = self._other_engine.ask("load", uris=list(uris), checksums=checksums)
        return [
            None if failure is not None else content(uri) if equal else b"other bytes"
            for uri, failure, equal in zip(uris, answer["failures"], answer["equal"], strict=True)
        ]


@pytest.fixture
def setting(shared_site: Site, engine: Process, other_engine: Process) -> Iterator[MooncakeSetting]:
    with shared_site.entered():
        setting = MooncakeSetting(shared_site, engine, other_engine)
        yield setting
        for each in setting.opened:
            each.close()


def test_the_whole_suite_is_run_here() -> None:
    assert {name for name in vars(suite) if name.startswith("test_")} < set(globals())
