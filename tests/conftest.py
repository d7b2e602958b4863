"""Fixtures for the tests of every package: servers that are shared by the whole run, and index backends on them."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from thoroughness import examples, is_thorough

from kvcm.telemetry.logs import LEVELS, set_level

for folder in ("store", "contract", "gpu_tier", "index", "service"):
    sys.path.insert(0, str(Path(__file__).parent / folder))


def _import_triton_to_be_interpreted() -> None:
    """Let Triton's own functions be interpretable: that is settled when it is first imported, by whichever test."""
    if importlib.util.find_spec("triton") is None:
        return
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language  # noqa: F401

    if before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = before


# Examples of property tests follow from their code, so that a commit passes or fails alike wherever it is tried; a
# thorough run goes on looking. How long an example takes says how busy the machine is.
_UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, max_examples=examples(100), **_UNTIMED)
settings.register_profile("thorough", **_UNTIMED)
settings.load_profile("thorough" if is_thorough() else "repeatable")

_import_triton_to_be_interpreted()

# Cycles are collected seldom, and what was imported never: that took an eighth of the suite's CPU time, in pauses that
# fall into what tests measure.
gc.set_threshold(100_000, 20, 100)


def pytest_collection_finish() -> None:
    """Leave everything that exists before the first test out of later collections."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter's end find them again: native modules report as leaked all that is left then."""
    gc.unfreeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Let events of all levels be seen again: commands that a test ran in this process may have set theirs."""
    if structlog.is_configured():
        set_level(LEVELS["INFO"])
        structlog.reset_defaults()


# Tests of these folders run in .ci/run: documents, images, browsers, mounts that fail. An edit does not wait for them.
_IN_CI = ("deploy", "docs", "faults", "gameday", "package", "web")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `make test` leaves out."""
    folders = [Path(__file__).parent / name for name in _IN_CI]
    for item in items:
        if any(item.path.is_relative_to(folder) for folder in folders):
            item.add_marker(pytest.mark.ci)


pytest_plugins = ["redis_servers", "shared_managers", "feature_records", "quick_level"]
