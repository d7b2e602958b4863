"""A real manager process for tests, and ports that lead nowhere."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from manager_process import ManagerProcess
from ports import free_port

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.results import MatchMode

if TYPE_CHECKING:  # torch takes seconds to import, and most tests here do without
    import torch
    from reuse_cases import Connect, Find, Stored

    from kvcm.connectors.results import Location
    from kvcm.connectors.transformers import KVReuse


@pytest.fixture
def closed_port() -> int:
    """Return a port that refuses connections."""
    return free_port()


@pytest.fixture
def pool_directory(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in shared memory, or one for the time being where there is none."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="kvcm-test-", dir=shared))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def node(pool_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be on the node of `pool_parts`, with its pools in the test's directory."""
    from pool_parts import NODE

    monkeypatch.setenv("KVCM_NODE_ID", NODE)
    monkeypatch.setenv("KVCM_POOL_DIRECTORY", str(pool_directory))
    for name in ("CLUSTER_ID", "POOL_CREATE"):
        monkeypatch.delenv(f"KVCM_{name}", raising=False)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return the root of a storage of files that has a cluster's directory."""
    root = tmp_path / "store"
    (root / "cluster").mkdir(parents=True)
    return root


@pytest.fixture
def black_hole() -> Iterator[int]:
    """Return the port of a listener that accepts connections and says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield int(listener.getsockname()[1])


@pytest.fixture
def connect(manager: ManagerProcess, instance_id: str) -> Iterator[Connect]:
    """Connect models to the shared manager; all are closed at the end."""
    from reuse_cases import BLOCK, MODEL, PATIENT

    from kvcm.connectors.transformers import KVReuse

    def connect(model: Any = MODEL, address: str = manager.address, **arguments: Any) -> KVReuse:
        arguments = {"block_tokens": BLOCK, "settings": PATIENT} | arguments
        return opened.enter_context(KVReuse.connect(model, address, "default", instance_id, **arguments))

    with ExitStack() as opened:
        yield connect


@pytest.fixture
def client(manager: ManagerProcess, instance_id: str) -> Iterator[ManagerClient]:
    """Return a client of the test's instance."""
    with ManagerClient(manager.address, instance_id) as client:
        yield client


@pytest.fixture
def stored(client: ManagerClient) -> Stored:
    """Read the stored bytes of the blocks of some tokens."""
    from reuse_cases import read_block

    def read(reuse: KVReuse, tokens: list[int]) -> list[bytes | None]:
        locations = client.match(reuse.block_keys(tokens), MatchMode.BATCH, timeout_seconds=20).locations
        return [None if location is None else read_block(location.uris["tp0"]) for location in locations]

    return read


@pytest.fixture
def find(client: ManagerClient) -> Find:
    """Return where the full blocks of some tokens are stored."""

    def find(reuse: KVReuse, ids: torch.Tensor) -> list[Location]:
        keys = reuse.block_keys(ids[0].tolist())
        found = client.match(keys, MatchMode.BATCH, timeout_seconds=20).locations
        return [location for location in found if location is not None]

    return find
