"""A plug-in of pytest that keeps the tests that need a GPU: those marked so, and those that take it if there is one."""

from __future__ import annotations

import pytest

__all__ = ["pytest_collection_modifyitems"]

_MODULES_ON_ANY_DEVICE = "device_under_test"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that run the same without a GPU."""
    kept = [item for item in items if _needs_gpu(item) or _takes_gpu(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _needs_gpu(item: pytest.Item) -> bool:
    return any(mark.kwargs.get("reason") == "needs a GPU" for mark in item.iter_markers("skipif"))


def _takes_gpu(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and hasattr(item.module, _MODULES_ON_ANY_DEVICE)
