"""What changes by a form is written down with who did it; secrets are on no page and in no entry."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlencode

import pytest
from console_pages import PAGES
from console_site import AUDIT_LOG, ConsoleSite
from test_transport_drivers import eventually

WORD = "swordfish-of-the-storage"
ADDRESS = f"redis://kvcm:{WORD}@127.0.0.1:1/0"
PASSWORD = "a password of eve"


def form(site: ConsoleSite, path: str, key: str = "", **fields: str) -> tuple[int, dict[str, str], str]:
    """Send a form as a browser does; returns status, headers and page."""
    connection = http.client.HTTPConnection(site.process.address.admin_http, timeout=30)
    sent = {"origin": site.base, "content-type": "application/x-www-form-urlencoded", "cookie": f"kvcm_key={key}"}
    try:
        connection.request("POST", path, urlencode(fields), sent)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
    finally:
        connection.close()


def page(site: ConsoleSite, path: str, key: str) -> str:
    connection = http.client.HTTPConnection(site.process.address.admin_http, timeout=30)
    try:
        connection.request("GET", path, headers={"cookie": f"kvcm_key={key}"} if key else {})
        return connection.getresponse().read().decode()
    finally:
        connection.close()


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


def test_what_is_left_out_of_a_page_is_seen_to_be(cake: ConsoleSite) -> None:
    for path in ("groups/cakes", "storages/cake"):
        assert "&lt;redacted&gt;@127.0.0.1:1/0" in page(cake, f"/console/{path}", cake.keys["admin"])


@pytest.mark.parametrize("role", ["operator", "viewer", "limited"])
def test_only_administrators_are_told_the_passwords_of_addresses(cake: ConsoleSite, role: str) -> None:
    connection = http.client.HTTPConnection(cake.process.address.admin_http, timeout=30)
    headers = {"authorization": f"Bearer {cake.keys[role]}"}
    paths = ("storages", "storages?with_status=true", "storages/cake", "storages/cake/status", "groups", "groups/cakes")
    for path in (*paths, "usage", "alerts", "tasks", "managers", "events/recent"):
        connection.request("GET", f"/v1/{path}", headers=headers)
        assert WORD not in connection.getresponse().read().decode(), path
    connection.close()


def test_what_a_form_changes_is_audited_with_the_account_and_without_secrets(cake: ConsoleSite) -> None:
    with cake.rest() as rest:
        rest.put("/v1/accounts/eve", {"password": PASSWORD, "role": "ROLE_ADMIN"})
    _, headers, _ = form(cake, "/console/login", user_name="eve", password=PASSWORD)
    key = headers["set-cookie"].partition("kvcm_key=")[2].partition(";")[0]
    assert form(cake, "/console/storages/cake/limits", key, capacity_bytes="3 GiB", used_percentage="")[0] == 303
    made = {"name": "mallory", "password": "a password of mallory", "role": "ROLE_USER"}
    assert form(cake, "/console/accounts/+add", key, **made)[0] == 303
    assert form(cake, "/console/logout", key)[0] == 303
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
