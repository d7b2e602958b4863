"""Real traces: they lie beside the project, not in it. Tests of them, and of whole pages, run in `.ci/run`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from kvcm.optimizer.readers import read_trace
from kvcm.optimizer.trace import Trace

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Leave the cache directory of the user alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCM_CACHE_DIRECTORY", str(tmp_path_factory.mktemp("cache")))
        yield


@cache
def _directory() -> Path | None:
    named = os.environ.get("KVCM_TRACES")
    places = [Path(named)] if named else [each / "shared/data/traces" for each in (ROOT, *ROOT.parents)]
    return next((each for each in places if each.is_dir()), None)


@cache
def _read(name: str) -> Trace:
    return read_trace(_path(name), use_cache=False)


def _path(name: str) -> Path:
    directory = _directory()
    path = directory / f"{name}.jsonl.gz" if directory is not None else None
    if path is None or not path.exists():
        pytest.skip(f"the trace {name} is not there: KVCM_TRACES names the directory of traces")
    return path


@pytest.fixture(scope="session")
def real_trace() -> Callable[[str], Trace]:
    """Return what reads mooncake_conversation, mooncake_synthetic or agentic_composed, once each."""
    return _read


@pytest.fixture(scope="session")
def real_trace_path() -> Callable[[str], Path]:
    """Return what finds the file of a real trace."""
    return _path


@pytest.hookimpl(tryfirst=True)  # before marks are selected by
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"real_trace", "real_trace_path", "html"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("ci")
