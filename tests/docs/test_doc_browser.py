"""The site in a real browser: usable on a telephone and in the dark, by everybody, and without a network."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)  # the first test builds the site
_PAGES = ("quickstart", "configuration", "alerts")
_SIZES = ({"width": 1280, "height": 900}, {"width": 390, "height": 844})
_SCHEMES = ("light", "dark")


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder, and return its address."""
    handler = functools.partial(_Silent, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_pages_are_for_everybody(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("chromium is not installed")
    with served(site) as address, playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        scheme = cycle(_SCHEMES)  # an odd number of pages: each is seen in both
        for size in _SIZES:
            for name in _PAGES:
                page = browser.new_page(viewport=size, color_scheme=next(scheme))
                asked: list[str] = []
                faults: list[str] = []
                page.on("request", lambda request, asked=asked: asked.append(request.url))
                page.on("pageerror", lambda error, faults=faults: faults.append(str(error)))
                page.goto(f"{address}/{name}.html")
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} scrolls sideways"
                found = axe.run(page).response["violations"]
                serious = [each["id"] for each in found if each["impact"] in ("serious", "critical")]
                assert not serious, f"{name} at {size['width']}: {serious}"
                assert not faults
                assert all(url.startswith(address) for url in asked), asked
                page.close()
        page = browser.new_page(viewport=_SIZES[0])
        page.goto(f"{address}/index.html")
        page.get_by_role("textbox", name="Search").fill("hysteresis")
        page.locator(".md-search-result__item a", has_text="Eviction").first.wait_for()
        browser.close()
