"""Every page of the console in a real browser: in two widths, light and dark, with the keyboard alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from console_pages import EXAMPLES, PAGES
from console_site import ROLES, ConsoleSite
from watched_pages import Watch, faults_of, keyboard_faults, watched

from kvcm.console.pages import PAGES as MODULES

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_every_page_is_looked_at() -> None:
    served = {path for module in MODULES for method, path, _ in module.ROUTES if method == "GET"}
    assert served == EXAMPLES.keys()


@pytest.fixture(scope="module")
def window(browser: Browser, site: ConsoleSite) -> Iterator[Watch]:
    """Return one window for many pages, as people have it."""
    with watched(browser, site) as watch:
        yield watch


@pytest.mark.parametrize("path", PAGES)
def test_a_page_can_be_seen_read_and_used_by_everybody(window: Watch, site: ConsoleSite, path: str) -> None:
    assert window.go(site.path(path)).status == 200
    assert keyboard_faults(window) == []
    assert faults_of(window) == []
    assert window.page.title() != "taken"
    assert window.faults == []


@pytest.mark.parametrize("role", ROLES)
def test_what_the_menu_leads_to_is_shown_or_refused_in_words(browser: Browser, secured: ConsoleSite, role: str) -> None:
    with watched(browser, secured, role) as watch:
        links = watch.page.eval_on_selector_all(".menu a", "all => all.map(each => each.getAttribute('href'))")
        served = [path for path in links if path in EXAMPLES]
        assert served
        for path in served:
            status = watch.go(path).status
            assert status == 200 or (status == 403 and "needs" in watch.said), (path, status, watch.said)


def test_the_first_tab_leads_past_the_menu(browser: Browser, site: ConsoleSite) -> None:
    with watched(browser, site) as watch:
        watch.go("/console/")
        watch.page.keyboard.press("Tab")
        assert watch.page.evaluate("document.activeElement.textContent") == "Skip to content"
        watch.page.keyboard.press("Enter")
        assert watch.page.evaluate("document.activeElement.id") == "content"
        watch.page.keyboard.press("Tab")
        assert watch.page.evaluate("document.activeElement.closest('main') !== null")


def test_pages_work_without_scripts(browser: Browser, site: ConsoleSite) -> None:
    with watched(browser, site, java_script_enabled=False) as watch:
        for path, *_ in EXAMPLES.values():
            assert watch.go(site.path(path)).status == 200
            assert watch.page.locator("h1").count() == 1
