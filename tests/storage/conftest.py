"""What memory pools are tested with."""

from __future__ import annotations

import pytest
from fake_clock import FakeClock

from kvcm.store.memory import MemoryTable


@pytest.fixture
def clock() -> FakeClock:
    """Time as the test says."""
    return FakeClock()


@pytest.fixture
def table() -> MemoryTable:
    """The documents of a pool."""
    return MemoryTable()
