"""Requests that no form and no link of the console makes: what others may send to it."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from urllib.parse import quote

import pytest
from console_site import ConsoleSite, ask, post
from test_transport_process import manager

_SAID = "kvcm_said"


def sent_raw(site: ConsoleSite, head: bytes) -> bytes:
    """Return the first line of the answer to a request of these bytes."""
    host, _, port = site.process.address.admin_http.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head)
        return connection.makefile("rb").readline()


_THROUGH_OPEN_PATHS = ["login/../groups", "login/../../v1/groups", "static/../groups"]
_ENCODED = ["%6cogin/%2e%2e/groups", "static/..%2fgroups", "login%2f..%2fgroups"]
_NEARLY = ["/groups", "login/", "logins", "groups", ""]
_WAYS_IN = ["//console/groups", *(f"/console/{end}" for end in _THROUGH_OPEN_PATHS + _ENCODED + _NEARLY)]


@pytest.mark.parametrize("path", _WAYS_IN)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "OPTIONS"])
def test_no_way_of_writing_a_path_lets_strangers_in(secured: ConsoleSite, method: str, path: str) -> None:
    answer = ask(secured, method, path)
    assert answer.status in {303, 403, 404, 405}
    assert "team/a" not in answer.text
    if answer.status == 303:
        assert answer.headers["location"].startswith("/console/login?next=%2Fconsole%2F")


_NO_KEY = ["", "kvcm_key", "kvcm_key=", "kvcm_key=; kvcm_key=", 'kvcm_key="{key}"', "other={key}"]
_TWO_KEYS = ["kvcm_key={key}; kvcm_key={key}", "kvcm_key=kvcm_0123456789abcdef_nothing; kvcm_key={key}"]


@pytest.mark.parametrize("cookie", _NO_KEY + _TWO_KEYS)
def test_a_cookie_without_a_valid_key_leads_to_signing_in(secured: ConsoleSite, cookie: str) -> None:
    answer = ask(secured, "GET", "/console/groups", cookie=cookie.replace("{key}", secured.keys["viewer"]))
    assert answer.status == 303


@pytest.mark.parametrize("others", ['settings={"a": [1, 2]}', "a@b=c", "x", "=;;=", "a=\x80\xff"])
def test_cookies_of_other_services_of_the_host_lock_no_user_out(secured: ConsoleSite, others: str) -> None:
    for cookie in (f"{others}; kvcm_key={secured.keys['viewer']}", f"kvcm_key={secured.keys['viewer']}; {others}"):
        assert ask(secured, "GET", "/console/groups", cookie=cookie).status == 200


def test_a_link_has_the_manager_say_nothing(site: ConsoleSite) -> None:
    answer = ask(site, "GET", "/console/groups?said=Call+555-0100+at+once")
    assert answer.status == 200
    assert "555-0100" not in answer.text


def test_notices_are_shown_once_and_not_to_regions(site: ConsoleSite) -> None:
    done = post(site, "/console/storages/slow/enable", {})
    assert (done.status, done.headers["location"]) == (303, "/console/storages/slow")
    kept = done.cookies[_SAID]
    assert "HttpOnly" in kept
    assert "samesite=strict" in kept.lower()
    cookie = kept.partition(";")[0]
    region = ask(site, "GET", "/console/storages/slow", cookie=cookie, **{"hx-request": "true"})
    assert (region.cookies, "is read and written again" in region.text) == ({}, False)
    page = ask(site, "GET", "/console/storages/slow", cookie=cookie)
    assert "Storage slow is read and written again." in page.text
    assert "Max-Age=0" in page.cookies[_SAID]


def test_notices_fit_into_a_cookie_with_any_names(site: ConsoleSite) -> None:
    name = "\U0001f642" * 64  # as long as names may be
    with site.rest() as rest:
        rest.put(f"/v1/accounts/{quote(name)}", {"password": "a good password", "role": "ROLE_USER"})
    done = post(site, f"/console/accounts/{quote(name)}/delete", {"name": name})
    assert done.status == 303
    assert len(done.cookies[_SAID]) < 4096
    page = ask(site, "GET", "/console/accounts", cookie=done.cookies[_SAID].partition(";")[0])
    assert f"Account {name} was deleted." in page.text


@pytest.fixture(params=["open", "secured"])
def either(request: pytest.FixtureRequest, site: ConsoleSite, secured: ConsoleSite) -> ConsoleSite:
    """A manager without authentication, and one with it."""
    return site if request.param == "open" else secured


@pytest.mark.parametrize("host", [b"[::1", b"", b"kvcm/console/login?", b"["])
def test_a_malformed_host_is_refused_and_breaks_nothing(either: ConsoleSite, host: bytes) -> None:
    for path in (b"/", b"/console/", b"/console/login"):
        line = sent_raw(either, b"GET %s HTTP/1.1\r\nhost: %s\r\nconnection: close\r\n\r\n" % (path, host))
        assert line.split()[1] in {b"400", b"403"}


def test_a_malformed_origin_is_foreign(either: ConsoleSite) -> None:
    for origin in ("http://[", "null", "", "//", f"{either.base}.evil.example"):
        assert ask(either, "POST", "/console/login", "key=x", origin=origin).status == 403


@pytest.mark.parametrize(
    "path", [b"/console/groups/\xc3\xa9", b"/console/storages/\xff/limits", b"/console/groups/%ff"]
)
def test_paths_that_are_no_text_are_not_found(site: ConsoleSite, path: bytes) -> None:
    line = sent_raw(site, b"GET %s HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n" % path)
    assert line.split()[1] in {b"400", b"404"}


def test_forms_of_very_many_fields_are_not_taken_apart(secured: ConsoleSite) -> None:
    answer = ask(secured, "POST", "/console/login", "a&" * 500_000, origin=secured.base)
    assert answer.status == 400
    assert "1000 fields at most" in answer.text


def test_a_long_chain_is_explored_in_pieces_and_shown_as_one(site: ConsoleSite) -> None:
    keys = " ".join(map(str, [*range(32), *range(50_000, 53_000)]))
    text = post(site, "/console/explorer", {"instance": "instance of chat", "kind": "keys", "numbers": keys}).text
    assert "The first 32 of 3,032 blocks are found" in text
    assert "The match ends at block 32: it is not there" in text
    assert "Blocks 32 to 3,031" in text


@pytest.mark.parametrize(("tokens", "said"), [(63, "63 tokens fill 0 blocks of 64"), (64, "The block is not found")])
def test_tokens_have_to_fill_a_block(site: ConsoleSite, tokens: int, said: str) -> None:
    form = {"instance": "instance of chat", "kind": "tokens", "numbers": "7," * tokens}
    assert said in post(site, "/console/explorer", form).text


def test_entity_tags_of_any_letters_are_refused_in_words(site: ConsoleSite) -> None:
    form = {"etag": "\U0001f642", "capacity_bytes": "1 GiB", "used_percentage": ""}
    answer = post(site, "/console/storages/slow/limits", form)
    assert answer.status in {400, 412}


def test_the_overview_lists_the_groups_that_matter_and_leads_to_all(tmp_path: Path) -> None:
    with manager(tmp_path) as process:
        site = ConsoleSite(process, {})
        with site.rest() as rest:
            rest.put("/v1/storages/disk", {"dummy": {"root_path": "x"}})
            for number in range(60):
                quota = {"capacity": 0 if number == 59 else 1 << 20}
                group = {"storage_candidates": ["disk"], "global_quota_group_name": "all", "quota": quota}
                rest.put(f"/v1/groups/number-{number}", {**group, "max_instance_count": 1})
            count = len(rest.items("/v1/groups"))
        text = ask(site, "GET", "/console/").text
        shown = re.findall(r'<h3><a href="/console/groups/([\w-]+)"', text)
        assert shown[0] == "number-59", "it has no quota"
        assert f"{count - len(shown)} more are not listed" in text
        assert len(re.findall(r'<h3><a href="/console/groups/', ask(site, "GET", "/console/groups").text)) == count


@pytest.mark.parametrize(
    "path",
    [
        *("nothing", "groups/", "groups/%2E%2E", "groups/%3F", "instances/none", "instances/none/remove"),
        *(f"groups/none{page}" for page in ("", "/limits", "/curve", "/remove")),
        *(f"storages/none{page}" for page in ("", "/limits", "/drain", "/remove")),
        *("keys/none/revoke", "accounts/none/delete", "tasks/drain:none/cancel"),
    ],
)
def test_missing_resources_are_not_found(site: ConsoleSite, path: str) -> None:
    answer = ask(site, "GET", f"/console/{path}")
    assert answer.status == 404, answer.text
    assert 'role="alert"' in answer.text
