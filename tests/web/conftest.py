"""A real browser, where there is one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from console_site import ConsoleSite, open_site, secured_site

sys.path.append(str(Path(__file__).parents[1] / "optimizer"))  # the report is one of its traces

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Return a Chromium without a window; the test is skipped where there is none.

    Of a module and no longer: while it is open its event loop counts as running, and tests that are coroutines fail.
    """
    playwright = pytest.importorskip("playwright.sync_api")
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleSite]:
    """A manager with data and without authentication; tests share it and change things of their own only."""
    with open_site(tmp_path_factory.mktemp("open")) as found:
        yield found


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleSite]:
    """The same where keys are required."""
    with secured_site(tmp_path_factory.mktemp("secured")) as found:
        yield found
