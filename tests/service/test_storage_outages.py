"""A directory that goes away while a client reads and writes: no request fails, and its blocks come back with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site, mask, specs, unique

BLOCK_BYTES = 64
CHAIN = 8  # blocks
_PROBED_OFTEN = ("kvcm.storage.probe_interval_ms=50", "kvcm.storage.probe_timeout_ms=2000")


class Engine:
    """A client that moves bytes as an engine does, and fails the test when a request is not answered as it should."""

    def __init__(self, site: Site, instance: str, roots: Sequence[Path]) -> None:
        self._site = site
        self._instance = instance
        self._roots = roots
        self._chains = count()
        self.written: list[list[int]] = []

    def write(self) -> set[str]:
        """Write a new chain; returns the names of the storages it was to go to."""
        number = next(self._chains)
        return self.write_chain(list(range(CHAIN * number, CHAIN * (number + 1))))

    def write_chain(self, keys: list[int]) -> set[str]:
        """Write what is missing of a chain; what cannot be written is told so."""
        started = self._site.start(self._instance, keys)
        uris = [specs(location)["kv"] for location in started.locations]
        lacking = keys[len(keys) - len(uris) :]
        stored = [self._put(uri, key) for uri, key in zip(uris, lacking, strict=True)]
        self._site.finish(self._instance, started, mask(flags=stored))
        if all(stored) and keys not in self.written:
            self.written.append(keys)
        return {uri.partition("://")[2].partition("/")[0] for uri in uris}

    def read(self, keys: Sequence[int]) -> int:
        """Return how many blocks of a chain are found; what is found is what was written."""
        found = self._site.match(self._instance, keys)
        blocks = [self._get(location["kv"]) for location in found]
        for key, block in zip(keys, blocks, strict=False):
            assert block in {_bytes_of(key), None}
        return sum(block is not None for block in blocks)

    def is_all_there(self) -> bool:
        """Whether every block that was written is found."""
        return all(self.read(keys) == CHAIN for keys in self.written)

    def _put(self, uri: str, key: int) -> bool:
        path = _path_of(uri)
        if not any(root.is_dir() for root in self._roots if path.is_relative_to(root)):
            return False
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_bytes_of(key))
        return True

    def _get(self, uri: str) -> bytes | None:
        try:
            return _path_of(uri).read_bytes()
        except FileNotFoundError:
            return None


def _path_of(uri: str) -> Path:
    return Path("/" + uri.partition("://")[2].partition("/")[2].partition("?")[0])


def _bytes_of(key: int) -> bytes:
    return key.to_bytes(8, "big") * (BLOCK_BYTES // 8)


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    with manager(tmp_path_factory.mktemp("manager"), *_PROBED_OFTEN) as running:
        yield running


def _states(process: ManagerProcess, storage: str) -> list[str]:
    return [event["state"] for event in process.events("storage_health") if event["storage"] == storage]


def test_a_storage_that_goes_away_costs_hits_only_while_it_is_away(process: ManagerProcess, tmp_path: Path) -> None:
    root, other_root, aside = tmp_path / "a", tmp_path / "b", tmp_path / "aside"
    names = [unique("a"), unique("b")]
    with process.api() as api:
        site = Site(api)
        for name, path in zip(names, (root, other_root), strict=True):
            nfs = {"root_path": str(path), "key_count_per_file": 1}
            api.ok("AdminService.AddStorage", storage={"global_unique_name": name, "nfs": nfs})
        engine = Engine(site, site.instance(site.group(*names)), [root, other_root])
        assert [engine.write() for _ in range(3)] == [{names[0]}] * 3
        assert engine.is_all_there()
        before = list(engine.written)

        root.rename(aside)
        eventually(lambda: _while_it_works(engine) and _states(process, names[0])[-1:] == ["down"])
        assert [engine.read(keys) for keys in before] == [0] * 3
        assert engine.write() == {names[1]}
        assert engine.write_chain(before[0]) == {names[1]}
        assert engine.read(before[0]) == CHAIN

        aside.rename(root)
        eventually(lambda: _while_it_works(engine) and _states(process, names[0])[-1:] == ["up"])
        assert engine.is_all_there()
        assert _states(process, names[0])[-3:] == ["degraded", "down", "up"]
        assert _states(process, names[1]) == []


def _while_it_works(engine: Engine) -> bool:
    engine.write()
    engine.is_all_there()
    return True
