"""A manager, a model and vLLM engines for benchmarks of connectors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(_TESTS / space) for space in ("engines", "store", ".")]

from engine_kinds import VLLM  # noqa: E402
from engine_process import EngineProcess, start_engine  # noqa: E402
from manager_process import ManagerProcess, start_manager  # noqa: E402

__all__ = ["EngineSite", "engine_site", "other_manager"]


@dataclass
class EngineSite:
    """Where engines run.

    Attributes:
        manager: their manager.
        model: its directory.
        folder: for logs.
    """

    manager: ManagerProcess
    model: Path
    folder: Path
    _started: int = 0

    def engine(
        self, instance_id: str | None, *, manager: ManagerProcess | None = None, **options: Any
    ) -> EngineProcess:
        """Start an engine: with the connector and this instance, or None without."""
        self._started += 1
        address = (manager or self.manager).address
        if instance_id is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "KVCMConnector",
                "kv_connector_module_path": "kvcm.connectors.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "manager": address,
                    "instance_group": "default",
                    "instance_id": instance_id,
                },
            }
        log = self.folder / f"engine-{self._started}.log"
        return start_engine(VLLM, self.model, log, **options)


@contextmanager
def other_manager(site: EngineSite) -> Iterator[ManagerProcess]:
    """Run a manager that may be killed."""
    manager = start_manager(site.folder / "other")
    try:
        yield manager
    finally:
        if manager.process.poll() is None:
            manager.stop()


@contextmanager
def engine_site(write_model: Callable[[Path], None]) -> Iterator[EngineSite]:
    """Run a manager beside a model."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        manager = start_manager(folder / "manager")
        try:
            yield EngineSite(manager, folder / "model", folder)
        finally:
            manager.stop()
