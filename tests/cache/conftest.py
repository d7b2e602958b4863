"""The manager that most tests of this folder work with."""

from collections.abc import Iterator

import pytest
from cache_rig import Rig, opened


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A manager on memory and dummy storages, with one group and one instance."""
    with opened() as made:
        yield made
