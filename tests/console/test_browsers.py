"""Which requests of browsers are let in."""

from __future__ import annotations

import pytest

from kvcm.console.visits import foreign_request, is_encrypted

_ADDRESSES = ["127.0.0.1:6492", "[::1]:6492", "10.1.2.3:6492"]
_NAMES = ["localhost", "localhost:6492", "kvcm.localhost", "manager-1:6492"]


@pytest.mark.parametrize("host", _ADDRESSES + _NAMES)
def test_addresses_and_names_of_the_own_network_open_an_open_console(host: str) -> None:
    assert not foreign_request("GET", {"host": host}, is_open=True)


@pytest.mark.parametrize(
    "host", ["evil.example:6492", "127.0.0.1.evil.example", "", ":6492", "[::1", "localhost.evil.example"]
)
def test_a_name_that_anybody_can_own_does_not(host: str) -> None:
    assert "open the console by an address" in foreign_request("GET", {"host": host}, is_open=True)


def test_where_keys_are_required_any_name_will_do() -> None:
    assert not foreign_request("GET", {"host": "kvcm.example.com"}, is_open=False)


_FOREIGN_ORIGINS = [{"origin": origin} for origin in ("null", "https://evil.example", "http://127.0.0.1:6493")]
_FOREIGN_SITES = [{"origin": "http://127.0.0.1:6492", "sec-fetch-site": site} for site in ("cross-site", "same-site")]


@pytest.mark.parametrize("headers", [{}, *_FOREIGN_ORIGINS, *_FOREIGN_SITES])
@pytest.mark.parametrize("is_open", [True, False])
def test_changing_requests_come_from_a_page_of_the_console(headers: dict[str, str], is_open: bool) -> None:
    assert "page of the console" in foreign_request("POST", {"host": "127.0.0.1:6492", **headers}, is_open=is_open)


def test_a_form_of_the_console_is_let_in() -> None:
    headers = {"host": "127.0.0.1:6492", "origin": "http://127.0.0.1:6492", "sec-fetch-site": "same-origin"}
    assert not foreign_request("POST", headers, is_open=True)


def test_a_proxy_may_speak_tls() -> None:
    assert is_encrypted("https", {})
    assert is_encrypted("http", {"origin": "https://kvcm.example.com"})
    assert not is_encrypted("http", {"origin": "http://kvcm.example.com"})


@pytest.mark.parametrize("host", ["", "[::1", "kvcm/console/login?", "kvcm#", "kvcm:80/x"])
def test_a_malformed_host_is_refused_in_words(host: str) -> None:
    assert "must be a name" in foreign_request("GET", {"host": host}, is_open=False)
    assert foreign_request("POST", {"host": host, "origin": "null"}, is_open=False)


def test_a_malformed_origin_is_foreign() -> None:
    assert foreign_request("POST", {"host": "kvcm", "origin": "http://[kvcm"}, is_open=False)
