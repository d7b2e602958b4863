"""Stores of both kinds, as drills name them: filled, wiped, and found again."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from manager_site import Manager
from redis_servers import Standalone

DRILL = Path(__file__).parents[2] / "docs/examples/restore_drill.sh"
_SECONDS = 300


class DrillStore:
    """One store, empty in the beginning.

    Args:
        kind: rocksdb or redis.
        folder: for its data, and for the log of its manager.
        server: takes a deployment where the kind is redis.
    """

    def __init__(self, kind: str, folder: Path, server: Standalone) -> None:
        self.folder, self._server = folder / kind, server
        self._name = f"drill-{secrets.token_hex(8)}"
        self._uri = server.uri(self._name) if kind == "redis" else ""
        self.name = self._uri or str(self.folder / "data")
        place = {"kvcm.registry_storage.uri": self._uri} if self._uri else {"kvcm.data_dir": self.name}
        self.manager = Manager(self.folder, {
            **place,
            "kvcm.auth.mode": "required",
            "kvcm.auth.admin_key_file": str(folder / "admin.key"),  # of both: it is restored with the rest
            "kvcm.service.host": "127.0.0.1",
            "kvcm.storage.allowed_roots": str(folder),
            "kvcm.cluster_id": "drilled",
        })  # fmt: skip

    @property
    def options(self) -> list[str]:
        """The options for `kvcm index`."""
        if self._uri:
            return ["-e", f"kvcm.registry_storage.uri={self._uri}"]
        return ["--data-dir", self.name]

    def wipe(self) -> None:
        """Lose everything."""
        if not self._uri:
            shutil.rmtree(self.name)
            return
        with self._server.server.admin() as client:
            for key in client.scan_iter(f"{self._name}:*", count=1000):
                client.delete(key)


def kvcm(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    return subprocess.run(
        [sys.executable, "-m", "kvcm", *words], capture_output=True, text=True, timeout=_SECONDS, check=False
    )


def run_drill(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script as a person does, with the `kvcm` of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [str(DRILL), *words],
        cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=_SECONDS, check=False,
    )  # fmt: skip
