"""The release before this one, with the helpers of tests/e2e."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from previous_release import Release, previous_release


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """The release before this one, unpacked."""
    return previous_release(tmp_path_factory.mktemp("previous"))
