"""Real engines, the models that they run and a manager; every test of this directory is marked `engines`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from engine_kinds import VLLM, EngineKind
from engine_process import EngineProcess, StartEngine, start_engine

_SPACE = Path(__file__).parent
sys.path.insert(0, str(_SPACE.parent / "faults"))  # mounts that fail on command
sys.path.insert(0, str(_SPACE.parent / "connectors" / "events"))  # a manager that takes reports
_SECONDS = 400  # of a test with the start of its engines


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory, so that none of them runs with those that need no engine."""
    for item in items:
        if item.path.is_relative_to(_SPACE):
            item.add_marker("engines")
            if not item.get_closest_marker("timeout"):
                item.add_marker(pytest.mark.timeout(_SECONDS))


@pytest.fixture(scope="session")
def model_named(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the directory of a model of `tiny_models`, which is written when it is first asked for."""
    from tiny_models import WRITERS

    directory = tmp_path_factory.mktemp("models")

    def find(name: str) -> Path:
        model = directory / name
        if not model.exists():
            WRITERS[name](model)
        return model

    return find


@pytest.fixture(scope="session")
def tiny_llama(model_named: Callable[[str], Path]) -> Path:
    """Return the model on which all engines print the same tokens."""
    return model_named("llama")


def _starter(logs: Path, started: list[EngineProcess]) -> StartEngine:
    numbers = count()  # several may be started at the same time

    def start(kind: EngineKind, model: Path, **options: Any) -> EngineProcess:
        if kind.missing:
            pytest.skip(kind.missing)
        engine = start_engine(kind, model, logs / f"{kind.name}-{next(numbers)}.log", **options)
        started.append(engine)
        return engine

    return start


@pytest.fixture(scope="module")
def shared_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """Start engines for the tests of a file: a start takes most of the time. They end with the last of those tests."""
    started: list[EngineProcess] = []
    yield _starter(tmp_path_factory.mktemp("engines"), started)
    with ThreadPoolExecutor() as threads:
        list(threads.map(EngineProcess.close, started))


@pytest.fixture
def new_engine(tmp_path: Path) -> Iterator[StartEngine]:
    """Start engines for one test, which may kill them."""
    started: list[EngineProcess] = []
    yield _starter(tmp_path, started)
    for engine in started:
        engine.close()


@pytest.fixture(scope="session")
def plain_vllm(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """VLLM without us on the small Llama, one for all files: its answers are the reference."""
    if VLLM.missing:
        pytest.skip(VLLM.missing)
    with start_engine(VLLM, tiny_llama, tmp_path_factory.mktemp("plain") / "vllm.log") as engine:
        yield engine
