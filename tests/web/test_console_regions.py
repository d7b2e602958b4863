"""Regions of pages that keep themselves up to date, while the manager does not answer as it should."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from console_site import ConsoleSite
    from playwright.sync_api import Browser

_SIGN_IN = "<!doctype html><html><body><main><h1>Sign in</h1></main></body></html>"


@pytest.mark.parametrize("answer", [{"status": 502, "body": _SIGN_IN}, {"status": 200, "body": _SIGN_IN}, {}])
def test_what_was_seen_last_stays_and_is_called_old_until_the_manager_answers(
    browser: Browser, site: ConsoleSite, answer: dict[str, Any]
) -> None:
    address = f"{site.base}/console/managers"
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(address)
        stale = page.locator("#stale")
        seen = page.locator("#managers h2").inner_text()
        assert not stale.is_visible()
        page.route(
            address, lambda route: route.fulfill(**answer, content_type="text/html") if answer else route.abort()
        )
        stale.wait_for(state="visible")
        assert page.locator("#managers h2").inner_text() == seen
        page.unroute(address)
        stale.wait_for(state="hidden")
        assert page.locator("#managers h2").inner_text() == seen
    finally:
        context.close()
