"""A manager process that tests share, and others that they may kill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from manager_process import ManagerProcess, start_manager


@pytest.fixture(scope="session")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    """One manager for all tests that leave it alive; each uses an instance of its own."""
    running = start_manager(tmp_path_factory.mktemp("manager"))
    running.allow_instances("default", 10_000)
    yield running
    running.stop()


@pytest.fixture
def new_manager(tmp_path: Path) -> Iterator[Callable[..., ManagerProcess]]:
    """Start managers that the test may kill; whatever still runs is ended. Arguments as those of `start_manager`."""
    started: list[ManagerProcess] = []

    def start(ports: dict[str, int] | None = None, **arguments: Any) -> ManagerProcess:
        started.append(start_manager(tmp_path / "manager", ports, **arguments))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.stop()


@pytest.fixture
def instance_id() -> str:
    """Return a name that no other test uses."""
    return f"test-{uuid4().hex[:12]}"
