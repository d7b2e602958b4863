"""A manager with everything that the console shows: storages in every state, groups, blocks, pins, open sessions."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rest_client import RestClient, component
from test_transport_drivers import Api
from test_transport_process import ManagerProcess, manager
from test_transport_sites import instance_fields, mask

__all__ = ["AUDIT_LOG", "HOSTILE", "PASSWORD", "ROLES", "ConsoleSite", "ask", "open_site", "post", "secured_site"]

HOSTILE = "<img src=x onerror=document.title='taken'>\"'&amp;"
"""A name that must stay text."""

PASSWORD = "a good password"
"""Of the account `grace`, an operator."""

AUDIT_LOG = "audit.jsonl"
"""Beside the data of a site where keys are required."""

ROLES = ("viewer", "operator", "admin")
_BLOCK_BYTES = 64 << 10
_GROUPS = {
    # name: quota in blocks, storages in order of preference, blocks written, bytes that may be pinned
    "team/a": (512, ("disk",), 64, 0),
    "chat": (64, ("disk", "slow"), 60, 1 << 30),
    "legacy": (64, ("old",), 16, 1 << 30),
    HOSTILE: (16, ("disk",), 4, 0),
}


@dataclass(frozen=True)
class ConsoleSite:
    """A running manager with data.

    Attributes:
        process: it.
        keys: text of a key by role; of `limited`, a viewer of the group `chat` alone; of `engine`, which only matches.
    """

    process: ManagerProcess
    keys: dict[str, str]

    @property
    def base(self) -> str:
        """Where its console is, without a slash at the end."""
        return f"http://{self.process.address.admin_http}"

    def path(self, example: str) -> str:
        """Return a path with what only this site knows: `{key}` is the id of some key."""
        if "{key}" not in example:
            return example
        with self.rest() as rest:
            return example.replace("{key}", rest.items("/v1/keys")[0]["key_id"])

    @contextlib.contextmanager
    def rest(self) -> Iterator[RestClient]:
        """Return a client of its resources, as an administrator."""
        client = _Keyed(self.process.address.admin_http, self.keys.get("admin", ""))
        try:
            yield client
        finally:
            client.connection.close()

    @contextlib.contextmanager
    def api(self) -> Iterator[Api]:
        """Return a client of its calls, as an administrator."""
        with self.process.api("http", self.keys.get("admin", "")) as api:
            yield api

    def write(self, instance: str, keys: Sequence[int], *, is_finished: bool = True) -> None:
        """Write blocks of one chain; a session that is not finished stays open."""
        with self.api() as api:
            started = api.ok("StartWriteCache", instance_id=instance, block_keys=keys, write_timeout_seconds=3600)
            if is_finished:
                api.ok(
                    "FinishWriteCache", instance_id=instance, write_session_id=started.write_session_id,
                    success_blocks=mask(len(started.locations)),
                )  # fmt: skip


class _Keyed(RestClient):
    def __init__(self, address: str, key: str) -> None:
        super().__init__(address)
        self._key = key

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        shown = {"authorization": f"Bearer {self._key}"} if self._key else {}
        answer = super().ask(method, path, body, **shown, **headers)
        assert answer.status < 400, answer
        return answer


@contextlib.contextmanager
def open_site(directory: Path, *settings: str) -> Iterator[ConsoleSite]:
    """Run a manager without authentication."""
    with manager(directory, *settings) as process:
        site = ConsoleSite(process, {})
        _fill(site, directory)
        yield site


@contextlib.contextmanager
def secured_site(directory: Path) -> Iterator[ConsoleSite]:
    """Run a manager that asks for keys, with a key of every role."""
    audit = f"kvcm.audit.log_file={directory / AUDIT_LOG}"
    settings = ("kvcm.auth.mode=required", "kvcm.service.host=127.0.0.1", audit)
    with manager(directory, *settings) as process:
        site = ConsoleSite(process, {"admin": (process.data_dir / "admin.key").read_text().strip()})
        _fill(site, directory)
        with site.rest() as rest:
            for role in ("viewer", "operator"):
                order = {"name": f"some-{role}", "role": f"ROLE_{role.upper()}"}
                site.keys[role] = rest.post("/v1/keys", order).body["secret"]
            limited = {"name": "limited", "role": "ROLE_VIEWER", "instance_groups": ["chat"]}
            site.keys["limited"] = rest.post("/v1/keys", limited).body["secret"]
        yield site


def _fill(site: ConsoleSite, directory: Path) -> None:
    with site.rest() as rest:
        _add_storages(rest, directory)
        _add_groups(site, rest)
        rest.put("/v1/accounts/grace", {"password": PASSWORD, "role": "ROLE_OPERATOR"})
        engine = {"name": "an-engine", "role": "ROLE_ENGINE", "instance_groups": ["chat"], "verbs": ["MATCH"]}
        site.keys["engine"] = rest.post("/v1/keys", {**engine, "ttl_seconds": 86400}).body["secret"]
        for group, blocks in (("chat", 32), ("legacy", 16)):
            pin = {"instance_id": f"instance of {group}", "block_keys": [str(key) for key in range(blocks)]}
            rest.post("/v1/pins", {**pin, "owner": "tests", "ttl_seconds": 3600})
        rest.patch("/v1/storages/off", {"is_available": False})
        rest.post("/v1/storages/old/drain")
    site.write("instance of chat", range(1000, 1004), is_finished=False)
    with site.api() as api:  # some traffic
        for _ in range(5):
            keys = list(range(40, 80))
            api.ok("GetCacheLocation", instance_id="instance of chat", block_keys=keys, query_type="QT_PREFIX_MATCH")


def _add_storages(rest: RestClient, directory: Path) -> None:
    for name in ("disk", "slow", "old", "off"):
        (directory / name).mkdir()
        spec = {"nfs": {"root_path": f"{directory / name}/", "key_count_per_file": 8}, "capacity_bytes": 64 << 20}
        rest.put(f"/v1/storages/{name}", spec)
    rest.put("/v1/storages/nothing", {"dummy": {"root_path": "nothing", "key_count_per_file": 1}})
    rest.put("/v1/storages/node", {"tair_mem_pool": {"node_id": "node-1", "capacity_bytes": 1 << 20}})


def _add_groups(site: ConsoleSite, rest: RestClient) -> None:
    for name, (blocks, storages, written, pinned) in _GROUPS.items():
        group = {
            "storage_candidates": storages, "global_quota_group_name": "everybody", "max_instance_count": 100,
            "quota": {"capacity": blocks * _BLOCK_BYTES}, "pin_budget_bytes": pinned,
            "cache_config": {"reclaim_strategy": {"trigger_strategy": {"used_percentage": 2.0}}},
        }  # fmt: skip
        rest.put(f"/v1/groups/{component(name)}", group)
        instance = f"instance of {name}"
        parts = [{"name": f"tp{rank}", "size": _BLOCK_BYTES // 2} for rank in range(2)]
        with site.api() as api:
            api.ok("RegisterInstance", **instance_fields(instance, name, block_size=64, location_spec_infos=parts))
        site.write(instance, range(written))


class Answer:
    """What came back.

    Attributes:
        status: of HTTP.
        headers: all of them.
        text: the page.
    """

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.text = response.status, response.headers, response.read().decode()

    @property
    def cookies(self) -> dict[str, str]:
        """What the browser is to keep, with its attributes, by name."""
        return {each.partition("=")[0]: each for each in self.headers.get_all("set-cookie", [])}


def ask(site: ConsoleSite, method: str, path: str, body: str | None = None, **headers: str) -> Answer:
    """Send a request with exactly this path, and nothing that a browser would add."""
    connection = http.client.HTTPConnection(site.process.address.admin_http, timeout=60)
    try:
        connection.request(method, path, body, headers)
        return Answer(connection.getresponse())
    finally:
        connection.close()


def post(site: ConsoleSite, path: str, form: dict[str, str], **headers: str) -> Answer:
    """Send a form as a page of the console does."""
    return ask(site, "POST", path, urlencode(form), origin=site.base, **headers)
