"""Pages of the console in a browser: which there are, their regions, and that secrets are shown once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from console_pages import EXAMPLES, PAGES
from console_site import AUDIT_LOG, ROLES, ConsoleSite, ask, post
from test_transport_drivers import eventually
from watched_pages import Watch, faults_of, keyboard_faults, watched

from kvcm.console.pages import ROUTES

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def test_every_page_is_looked_at() -> None:
    served = {path for method, path, _ in ROUTES if method == "GET"}
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
def test_pages_of_the_menu_are_shown_or_refused_in_words(browser: Browser, secured: ConsoleSite, role: str) -> None:
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


_SIGN_IN = "<!doctype html><html><body><main><h1>Sign in</h1></main></body></html>"


@pytest.mark.parametrize("answer", [{"status": 502, "body": _SIGN_IN}, {"status": 200, "body": _SIGN_IN}, {}])
def test_the_last_data_is_stale_until_an_answer(browser: Browser, site: ConsoleSite, answer: dict[str, Any]) -> None:
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


WORD = "swordfish-of-the-storage"
ADDRESS = f"redis://kvcm:{WORD}@127.0.0.1:1/0"
PASSWORD = "a password of eve"


def page(site: ConsoleSite, path: str, key: str) -> str:
    return ask(site, "GET", path, cookie=f"kvcm_key={key}").text


def form(site: ConsoleSite, path: str, key: str, **fields: str) -> int:
    """Send a form of a visitor; returns the status."""
    return post(site, path, fields, cookie=f"kvcm_key={key}").status


@pytest.fixture(scope="module")
def cake(secured: ConsoleSite) -> ConsoleSite:
    """A site with a storage, a group and a note whose addresses hold a password."""
    mooncake = {"local_hostname": "127.0.0.1:1", "protocol": "tcp"}
    addresses = {"metadata_connstring": ADDRESS, "master_service_entry": ADDRESS.replace("redis", "etcd")}
    with secured.rest() as rest:
        rest.put("/v1/storages/cake", {"mooncake": {**mooncake, **addresses}})
        group = {"storage_candidates": ["cake"], "global_quota_group_name": "everybody", "max_instance_count": 1}
        rest.put("/v1/groups/cakes", {**group, "quota": {"capacity": 1 << 20}, "user_data": f"see {ADDRESS}"})
    return secured


@pytest.mark.parametrize("role", ["admin", "operator", "viewer", "limited"])
def test_no_page_shows_the_passwords_of_addresses(cake: ConsoleSite, role: str) -> None:
    own = ["/console/groups/cakes", "/console/groups/cakes/limits", "/console/storages/cake"]
    for path in (*map(cake.path, PAGES), *own, "/console/storages/cake/limits", "/console/storages/cake/remove"):
        assert WORD not in page(cake, path, cake.keys[role]), path


def test_redacted_addresses_are_marked_on_pages(cake: ConsoleSite) -> None:
    for path in ("groups/cakes", "storages/cake"):
        assert "&lt;redacted&gt;@127.0.0.1:1/0" in page(cake, f"/console/{path}", cake.keys["admin"])


@pytest.mark.parametrize("role", ["operator", "viewer", "limited"])
def test_only_administrators_see_the_passwords_of_addresses(cake: ConsoleSite, role: str) -> None:
    paths = ("storages", "storages?with_status=true", "storages/cake", "storages/cake/status", "groups", "groups/cakes")
    for path in (*paths, "usage", "alerts", "tasks", "managers", "events/recent"):
        answer = ask(cake, "GET", f"/v1/{path}", authorization=f"Bearer {cake.keys[role]}")
        assert WORD not in answer.text, path


def test_changes_by_a_form_are_audited_with_the_account_and_without_secrets(cake: ConsoleSite) -> None:
    with cake.rest() as rest:
        rest.put("/v1/accounts/eve", {"password": PASSWORD, "role": "ROLE_ADMIN"})
    signed_in = post(cake, "/console/login", {"user_name": "eve", "password": PASSWORD})
    key = signed_in.cookies["kvcm_key"].partition("=")[2].partition(";")[0]
    assert form(cake, "/console/storages/cake/limits", key, capacity_bytes="3 GiB", used_percentage="") == 303
    made = {"name": "mallory", "password": "a password of mallory", "role": "ROLE_USER"}
    assert form(cake, "/console/accounts/+add", key, **made) == 303
    assert form(cake, "/console/logout", key) == 303
    log = cake.process.data_dir.parent / AUDIT_LOG

    def entries() -> list[dict[str, Any]]:
        return [
            entry for line in log.read_text().splitlines() if (entry := json.loads(line))["principal"] == "account/eve"
        ]

    eventually(lambda: any(each["call"] == "Logout" for each in entries()))
    found = {(each["call"], each["action"]): each for each in entries()}
    changed = found["UpdateStorage", "change"]
    assert (changed["name"], changed["after"]["capacity_bytes"]) == ("cake", 3 << 30)
    assert found["AddAccount", "add"]["name"] == "mallory"
    assert found["Logout", "remove"]["name"] == key.split("_")[1]
    whole = log.read_text()
    for secret in (WORD, PASSWORD, made["password"], key.split("_", 2)[2]):
        assert secret not in whole
