"""Signing in, accounts, keys, and what a role is offered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pytest
from console_site import HOSTILE, PASSWORD, ROLES, ConsoleSite
from rest_client import RestClient
from test_transport_sites import instance_fields
from watched_pages import Watch, sign_in, watched

from kvcm.console.pages import ROUTES

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def log_in(watch: Watch, name: str, password: str) -> None:
    watch.go("/console/login")
    watch.page.get_by_label("User name").fill(name)
    watch.page.get_by_label("Password").fill(password)
    watch.press("Sign in")


def status_with(site: ConsoleSite, key: str) -> int:
    """Return the status that the manager answers to a request with a key."""
    client = RestClient(site.process.address.admin_http)
    try:
        return client.get("/v1/whoami", authorization=f"Bearer {key}").status
    finally:
        client.connection.close()


def test_people_sign_in_with_a_password_and_out(browser: Browser, secured: ConsoleSite) -> None:
    with watched(browser, secured) as watch:
        watch.go("/console/storages")
        assert watch.page.url.endswith("/console/login?next=%2Fconsole%2Fstorages")
        watch.page.get_by_label("User name").fill("grace")
        watch.page.get_by_label("Password").fill("wrong")
        watch.press("Sign in")
        assert watch.said
        assert watch.page.get_by_label("User name").input_value() == "grace"
        assert watch.page.get_by_label("Password").input_value() == ""
        watch.page.get_by_label("Password").fill(PASSWORD)
        watch.press("Sign in")
        assert watch.page.url == f"{secured.base}/console/storages", "where it was going"
        (cookie,) = watch.page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (True, "Strict", "/console/")
        assert cookie["expires"] == -1, "until the browser is closed"
        watch.press("grace", role="link")
        assert "operator" in watch.page.locator("main").inner_text()
        assert status_with(secured, cookie["value"]) == 200
        watch.press_in(watch.page.locator("header").get_by_role("button", name="Sign out"))
        assert watch.page.context.cookies() == []
        assert status_with(secured, cookie["value"]) == 401, "a revoked cookie is rejected"
        watch.go("/console/")
        assert "/console/login" in watch.page.url


def test_a_key_of_ones_own_outlives_signing_out(browser: Browser, secured: ConsoleSite) -> None:
    with watched(browser, secured, "viewer") as watch:
        watch.go("/console/")
        watch.press_in(watch.page.locator("header").get_by_role("button", name="Sign out"))
        assert watch.page.context.cookies() == []
    assert status_with(secured, secured.keys["viewer"]) == 200


@pytest.mark.parametrize("key", ["nonsense", "kvcm_aaaaaaaaaaaaaaaa_" + "A" * 43])
def test_a_wrong_key_is_refused_in_words(browser: Browser, secured: ConsoleSite, key: str) -> None:
    with watched(browser, secured) as watch:
        watch.go("/console/login")
        watch.page.get_by_label("API key").fill(key)
        watch.press("Sign in")
        assert "This key is not known" in watch.said
        assert key not in watch.page.content()
        assert watch.page.context.cookies() == []


@pytest.mark.parametrize("path", ["https://example.org/", "//example.org", "/console/../v1/keys", "/\\example.org"])
def test_signing_in_leads_nowhere_else(browser: Browser, secured: ConsoleSite, path: str) -> None:
    with watched(browser, secured) as watch:
        watch.page.goto(f"{secured.base}/console/login?next={path}")
        watch.page.get_by_label("API key").fill(secured.keys["viewer"])
        watch.press("Sign in")
        assert watch.page.url.startswith(f"{secured.base}/")


@pytest.mark.parametrize("role", [*ROLES, "limited"])
def test_actions_that_a_role_lacks_are_not_offered(browser: Browser, secured: ConsoleSite, role: str) -> None:
    offered = {
        "/console/storages": ["Add a storage"],
        "/console/storages/disk": ["Disable", "Drain", "Change its capacity", "Remove"],
        "/console/accounts": ["Add an account", "Set the password of grace"],
        "/console/keys": ["Make a key", "Rotate the key of an-engine", "Revoke the key of an-engine"],
        "/console/instances/instance%20of%20chat": ["Look up a prefix", "Remove"],
    }
    found = {}
    with watched(browser, secured, role) as watch:
        for path, names in offered.items():
            watch.go(path)
            found[path] = [name for name in names if watch.page.get_by_role("link", name=name, exact=True).count()]
    expected = {
        "limited": [[], [], [], [], ["Look up a prefix"]],
        "viewer": [[], [], [], [], ["Look up a prefix"]],
        "operator": [[], ["Disable", "Drain"], [], [], ["Look up a prefix"]],
        "admin": [*offered.values()],
    }
    assert list(found.values()) == expected[role]


_NAMES = {
    "storages": "disk", "accounts": "grace", "instances": "instance%20of%20chat", "keys": "{key}", "groups": "chat",
    "tasks": "drain:old",
}  # fmt: skip
_FOR_ALL = {"/console/login", "/console/logout", "/console/explorer"}


def test_actions_that_are_not_offered_are_refused(browser: Browser, secured: ConsoleSite) -> None:
    posts = {path for method, path, _ in ROUTES if method == "POST"} - _FOR_ALL
    taken = {}
    with watched(browser, secured, "viewer") as watch, secured.rest() as rest:
        before = state(rest)
        for path in sorted(posts):
            name = "off" if path.endswith("/enable") else secured.path(_NAMES.get(path.split("/")[2], ""))
            form = {"name": "an-engine" if "keys" in path else unquote(name), "password": "x", "ttl_seconds": "1h"}
            form |= {"storage": "disk", "capacity": "1 GiB"}
            if path.endswith("+add"):
                form |= {"name": "new", "kind": "dummy", "role": "ROLE_OPERATOR"}
            address = secured.base + path.replace("{name}", name)
            answer = watch.page.request.post(address, form=form, headers={"origin": secured.base}, max_redirects=0)
            taken[path] = answer.status
        assert state(rest) == before
    assert {path: status for path, status in taken.items() if status < 400} == {}
    assert len([path for path, status in taken.items() if status == 403]) > len(taken) / 2, "the others are no sense"


def state(rest: RestClient) -> list[Any]:
    """Return everything that is configured."""
    found = [rest.items(f"/v1/{kind}") for kind in ("storages", "groups", "instances", "accounts", "keys")]
    return [{**each, "last_used_at_ms": 0} for documents in found for each in documents]


def test_an_account_limited_to_groups_sees_only_those(browser: Browser, secured: ConsoleSite) -> None:
    with watched(browser, secured, "limited") as watch:
        menu = watch.page.locator(".menu a").all_inner_texts()
        assert "Storages" not in menu
        assert "Instances" in menu
        watch.go("/console/instances")
        text = watch.page.locator("main").inner_text()
        assert "instance of chat" in text
        assert "team/a" not in text
        assert watch.go("/console/instances/instance%20of%20team%2Fa").status in {403, 404}
        assert watch.go("/console/storages").status == 403


def test_an_account_is_added_given_a_password_and_deleted(browser: Browser, secured: ConsoleSite) -> None:
    with watched(browser, secured, "admin") as watch:
        watch.go("/console/accounts")
        watch.press("Add an account", role="link")
        watch.page.get_by_label("User name").fill(HOSTILE)
        watch.page.get_by_label("Role").select_option("ROLE_OPERATOR")
        watch.page.get_by_label("Password").fill("first password")
        watch.press("Add")
        assert f"Account {HOSTILE} was added" in watch.said
        watch.press("Add an account", role="link")
        watch.page.get_by_label("User name").fill(HOSTILE)
        watch.page.get_by_label("Password").fill("first password")
        watch.press("Add")
        assert watch.page.locator(".said.bad, .field.wrong").count(), "there is one already"
        with watched(browser, secured) as other:
            log_in(other, HOSTILE, "first password")
            other.go("/console/me")
            other.press("Change my password", role="link")
            other.page.get_by_label("Present password").fill("no")
            other.page.get_by_label("New password").fill("second password")
            other.press("Set")
            assert "old_password is not the password" in other.page.locator(".field.wrong").inner_text()
            other.page.get_by_label("Present password").fill("first password")
            other.page.get_by_label("New password").fill("second password")
            other.press("Set")
            assert "/console/login" in other.page.url, "its logins have ended"
            log_in(other, HOSTILE, "second password")
            watch.go("/console/accounts")
            watch.press(f"Set the password of {HOSTILE}", role="link")
            watch.page.get_by_label("New password").fill("third password")
            watch.press("Set")
            assert "another password" in watch.said
            other.go("/console/me")
            assert "/console/login" in other.page.url
        watch.press(f"Delete {HOSTILE}", role="link")
        watch.page.get_by_label("to go on").fill(HOSTILE)
        watch.press("Delete it")
        assert "was deleted" in watch.said
        assert watch.page.get_by_role("link", name=f"Delete {HOSTILE}").count() == 0


def test_a_key_is_made_shown_once_rotated_and_revoked(browser: Browser, secured: ConsoleSite) -> None:
    with watched(browser, secured, "admin", permissions=["clipboard-read", "clipboard-write"]) as watch:
        watch.go("/console/keys")
        watch.press("Make a key", role="link")
        watch.page.get_by_label("Name", exact=True).fill("chat-engine")
        watch.press("Make it")
        assert "instance_groups is empty" in watch.page.locator("fieldset.wrong").inner_text()
        watch.page.get_by_label("chat", exact=True).press("Space")
        watch.page.get_by_label("Match: read what is there").press("Space")
        watch.page.get_by_label("Ends after").fill("soon")
        watch.press("Make it")
        assert "'soon'" in watch.page.locator(".field.wrong").inner_text()
        assert watch.page.get_by_label("chat", exact=True).is_checked()
        watch.page.get_by_label("Ends after").fill("30d")
        watch.press("Make it")
        secret = watch.page.locator("#secret").inner_text()
        assert status_with(secured, secret) == 200
        watch.press("Copy")
        watch.page.get_by_text("Copied").wait_for()
        assert watch.page.evaluate("navigator.clipboard.readText()") == secret
        assert secret not in watch.page.url
        watch.press("To the keys", role="link")
        assert secret.split("_", 2)[2] not in watch.page.content()
        watch.press("Rotate the key of chat-engine", role="link")
        watch.page.get_by_label("The old key goes on for").fill("")
        watch.press("Rotate it")
        following = watch.page.locator("#secret").inner_text()
        assert (status_with(secured, secret), status_with(secured, following)) == (401, 200)
        watch.press("To the keys", role="link")
        watch.press("Revoke the key of chat-engine", role="link")
        watch.page.get_by_label("to go on").fill("chat-engine")
        watch.press("Revoke it")
        assert "was revoked" in watch.said
        assert status_with(secured, following) == 401


def test_whose_key_was_revoked_signs_in_again(browser: Browser, secured: ConsoleSite) -> None:
    with secured.rest() as rest:
        made = rest.post("/v1/keys", {"name": "short-lived", "role": "ROLE_VIEWER"}).body
        with watched(browser, secured) as watch:
            sign_in(watch, made["secret"])
            rest.delete(f"/v1/keys/{made['key']['key_id']}")
            watch.go("/console/instances")
            assert "/console/login?next=%2Fconsole%2Finstances" in watch.page.url


def test_an_instance_is_removed_by_its_name(browser: Browser, secured: ConsoleSite) -> None:
    name = f"to remove / {HOSTILE}"
    with secured.api() as api:
        api.ok("RegisterInstance", **instance_fields(name, "chat"))
    with watched(browser, secured, "admin") as watch:
        watch.go("/console/instances")
        watch.press(name, role="link")
        watch.press("Remove", role="link")
        watch.page.get_by_label("to go on").fill("something else")
        watch.press("Remove it")
        assert "The name that was typed is not" in watch.said
        watch.page.get_by_label("to go on").fill(name)
        watch.press("Remove it")
        assert "was removed" in watch.said
        assert watch.page.get_by_role("link", name=name, exact=True).count() == 0
