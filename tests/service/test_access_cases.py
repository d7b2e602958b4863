"""The calls of AccessService: a good request and each documented refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from test_meta_cases import Fields, Refused, invalid
from test_transport_sites import Site, unique

ENGINE = {"role": "ROLE_ENGINE", "instance_groups": ["default"]}


def key(site: Site, **changes: Any) -> Any:
    """Make a key and return the answer."""
    return site.api.ok("AccessService.CreateKey", **{"name": unique("key"), "role": "ROLE_VIEWER", **changes})


def account(site: Site, password: str = "right", role: str = "ROLE_USER") -> str:
    """Add an account and return its name."""
    name = unique("user")
    site.api.ok("AdminService.AddAccount", user_name=name, password=password, role=role)
    return name


def _login(site: Site) -> Fields:
    return {"user_name": account(site), "password": "right"}


GOOD: dict[str, Callable[[Site], Fields]] = {
    "AccessService.CreateKey": lambda _site: {"name": unique("key"), **ENGINE, "verbs": ["MATCH"], "ttl_seconds": 60},
    "AccessService.ListKeys": lambda _site: {"with_logins": True},
    "AccessService.RotateKey": lambda site: {"key_id": key(site).key.key_id, "overlap_seconds": 60},
    "AccessService.RevokeKey": lambda site: {"key_id": key(site).key.key_id},
    "AccessService.Login": _login,
    "AccessService.Logout": lambda _site: {},
    "AccessService.SetPassword": lambda site: {"user_name": account(site), "password": "new", "old_password": "right"},
    "AccessService.WhoAmI": lambda _site: {},
}


def _create(rule: str, *texts: str, **changes: Any) -> Refused:
    return invalid(rule, lambda _site: {"name": unique("key"), **ENGINE, **changes}, *texts)


def _no_key(call: str) -> list[Refused]:
    return [
        invalid("no key", lambda _site: {}, call, "key_id", "is required"),
        invalid("no such key", lambda _site: {"key_id": "nobody"}, "'nobody'", "does not exist"),
    ]


def _taken(site: Site) -> Fields:
    return {"name": key(site).key.name, "role": "ROLE_VIEWER"}


def _taken_certificate(site: Site) -> Fields:
    name = key(site, certificate_name=unique("spiffe://engine/")).key.certificate_name
    return {"name": unique("key"), "role": "ROLE_VIEWER", "certificate_name": name}


def _certified(site: Site) -> Fields:
    return {"key_id": key(site, certificate_name=unique("dns")).key.key_id}


def _rotate(site: Site, **changes: Any) -> Fields:
    return {"key_id": key(site).key.key_id, **changes}


def _set_password(rule: str, *texts: str, **changes: Any) -> Refused:
    return invalid(rule, lambda site: {"user_name": account(site), "password": "new", **changes}, *texts)


def _login_with(rule: str, *texts: str, **fields: Any) -> Refused:
    return invalid(rule, lambda _site: {"user_name": "u", "password": "p", **fields}, *texts)


REFUSED: dict[str, list[Refused]] = {
    "AccessService.CreateKey": [
        _create("a name with a slash", "name 'a/b'", "1 to 128 characters", name="a/b"),
        _create("no role", "role is 0", "ROLE_ENGINE=4", role="ROLE_UNSPECIFIED"),
        _create("an engine without groups", "instance_groups is empty", instance_groups=[]),
        _create("a group that is none", "instance_groups[0]", instance_groups=["a\0b"]),
        _create("too many groups", "instance_groups has 1001", instance_groups=[f"g{n}" for n in range(1001)]),
        _create("a verb that is none", "verbs[0] is 0", "MATCH=1", verbs=["ENGINE_VERB_UNSPECIFIED"]),
        _create("verbs of a viewer", "verbs", "ROLE_VIEWER", role="ROLE_VIEWER", verbs=["MATCH"]),
        _create("a time before now", "ttl_seconds is -1", ttl_seconds=-1),
        _create("a time beyond all", "ttl_seconds is 1000000000", ttl_seconds=10**9),
        _create("a long name of a certificate", "certificate_name has 1025", certificate_name="n" * 1025),
        Refused("a name that is taken", _taken, "DUPLICATE_ENTITY", ("rotate or revoke",)),
        Refused("a certificate that is taken", _taken_certificate, "DUPLICATE_ENTITY", ("certificate_name",)),
    ],
    "AccessService.ListKeys": [],
    "AccessService.RotateKey": [
        *_no_key("RotateKey"),
        invalid("a key of a certificate", _certified, "a certificate", "lasting secret"),
        invalid("an overlap before now", lambda site: _rotate(site, overlap_seconds=-1), "-1"),
        invalid("a time before now", lambda site: _rotate(site, ttl_seconds=-1), "-1"),
    ],
    "AccessService.RevokeKey": _no_key("RevokeKey"),
    "AccessService.Login": [
        _login_with("no name", "Login", "user_name", "is required", user_name=""),
        _login_with("no password", "Login", "password", password=""),
        _login_with("a long password", "password has 1025", "at most 1024", password="p" * 1025),
        _login_with("a time beyond a day", "ttl_seconds is 86400", "43200", ttl_seconds=86_400),
    ],
    "AccessService.SetPassword": [
        _set_password("no name", "SetPassword", "user_name", "is required", user_name=""),
        _set_password("no such account", "'nobody'", "does not exist", user_name="nobody"),
        _set_password("no password", "SetPassword", "password", "is required", password=""),
        _set_password("a long password", "password", "1025", "1024", password="p" * 1025),
    ],
    "AccessService.Logout": [],
    "AccessService.WhoAmI": [],
}
