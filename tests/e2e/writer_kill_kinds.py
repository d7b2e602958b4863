"""Kinds of storage that writers are killed on, each for the time of a block."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf import json_format
from writer_kill_process import STORAGE, KillSettings, command_of
from writer_kills import KillReport

sys.path.insert(0, str(Path(__file__).parents[1] / "mooncake"))
from mooncake_rig import Site, missing

from kvcm.connectors.node import DEFAULT_POOL_DIRECTORY
from kvcm.protocol import admin_service_pb2 as pb

_PACKED_KEYS = 8
_LEASE_SECONDS = 5.0  # the default of Mooncake: a busy machine takes its time to read
_OWNED_BYTES = 1 << 31
_POOL_BYTES = 1 << 32  # what killed writers were given is theirs until their sessions end
_NODE = "writers"
_SECONDS_PER_WRITER = 40.0  # at most, with everything that is checked


@dataclass(frozen=True, slots=True)
class _Place:
    """A storage that is there.

    Attributes:
        config: its configuration in the manager.
        environment: variables of every process that uses it.
    """

    config: pb.StorageConfig
    environment: Mapping[str, str] = field(default_factory=dict)


_Made = contextlib.AbstractContextManager[_Place]


def _directory(keys_per_file: int) -> Callable[[Path], _Made]:
    def made(directory: Path) -> _Made:
        spec = pb.NfsStorageSpec(root_path=f"{directory}/kv/", key_count_per_file=keys_per_file)
        return contextlib.nullcontext(_Place(pb.StorageConfig(global_unique_name=STORAGE, nfs=spec)))

    return made


@contextlib.contextmanager
def _mooncake(directory: Path) -> Iterator[_Place]:
    site = Site(directory, _LEASE_SECONDS)
    try:
        site.owner(_OWNED_BYTES)
        with site.entered():
            spec = pb.MooncakeStorageSpec(**site.spec)
            yield _Place(pb.StorageConfig(global_unique_name=STORAGE, mooncake=spec))
    finally:
        site.close()


@contextlib.contextmanager
def _memory_pool(_directory: Path) -> Iterator[_Place]:
    with tempfile.TemporaryDirectory(prefix="kvcm-writers-", dir=DEFAULT_POOL_DIRECTORY) as memory:
        spec = pb.TairMemPoolStorageSpec(node_id=_NODE, capacity_bytes=_POOL_BYTES)
        config = pb.StorageConfig(global_unique_name=STORAGE, tair_mem_pool=spec)
        yield _Place(config, {"KVCM_NODE_ID": _NODE, "KVCM_POOL_DIRECTORY": memory})


KINDS: dict[str, Callable[[Path], _Made]] = {
    "one file per block": _directory(1),
    "packed files": _directory(_PACKED_KEYS),
    "mooncake": _mooncake,
    "memory pool": _memory_pool,
}
"""Name → the storage, in a directory of its own."""


def impossible(kind: str) -> str:
    """Return why this machine cannot have a kind, "" when it can."""
    return missing() if kind == "mooncake" else ""


def kill_writers(kind: str, directory: Path, kills: int, stops: int, seed: int) -> KillReport:
    """Kill and stop writers.

    Args:
        kind: of the storage, see KINDS.
        directory: for everything.
        kills: writers to kill.
        stops: writers to stop past the end of a session.
        seed: of where they end.
    """
    with KINDS[kind](directory) as place:
        settings = KillSettings(json_format.MessageToJson(place.config), str(directory), kills, stops, seed)
        with (directory / "writers.log").open("w+b") as log:
            done = subprocess.run(
                command_of(settings),
                env={**os.environ, **place.environment},
                stdout=subprocess.PIPE,
                stderr=log,
                timeout=60 + (kills + 3 * stops) * _SECONDS_PER_WRITER,
                check=False,
            )
            log.seek(0)
            assert done.returncode == 0, log.read().decode(errors="replace")[-3000:]
    return KillReport(**json.loads(done.stdout.splitlines()[-1]))
