"""Passwords of accounts that are there: who changes them, and what ends with the old ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from secured import Secured, secured
from test_transport_drivers import Api, eventually
from test_transport_sites import unique

_SET = "AccessService.SetPassword"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("passwords")
    with secured(folder, f"kvcm.audit.log_file={folder / 'audit.jsonl'}") as running:
        yield running


@pytest.fixture
def admin(server: Secured) -> Iterator[Api]:
    with server.api() as api:
        yield api


def account(api: Api, role: str = "ROLE_USER") -> str:
    """Add an account whose password is `old`."""
    name = unique("user")
    api.ok("AdminService.AddAccount", user_name=name, password="old", role=role)
    return name


def logged_in(api: Api, name: str, password: str = "old") -> str:
    """Log in and return the authorization."""
    return f"Bearer {api.ok('AccessService.Login', user_name=name, password=password).secret}"


def lasts(api: Api, authorization: str) -> bool:
    return api.attempt("AccessService.WhoAmI", authorization).status == 200


def loaded(api: Api, *accounts: tuple[str, str], **flags: bool) -> Any:
    """Load the present configuration with these accounts, names and roles, in the place of those that are there."""
    document = json.loads(api.ok("AdminService.GenConfigSnapshot").config_snapshot)
    document["accounts"] = [{"user_name": name, "role": role} for name, role in accounts]
    return api.ok("AdminService.LoadConfigSnapshot", config_snapshot=json.dumps(document), **flags)


def test_who_logs_out_ends_this_login_and_nothing_else(admin: Api) -> None:
    name = account(admin)
    login, other = logged_in(admin, name), logged_in(admin, name)
    key = admin.ok("AccessService.CreateKey", name=unique("own"), role="ROLE_VIEWER")
    own = f"Bearer {key.secret}"
    for shown in (login, own):
        assert admin.attempt("AccessService.Logout", shown).status == 200
    assert [lasts(admin, each) for each in (login, other, own)] == [False, True, True]


def test_an_administrator_changes_any_password_and_the_logins_of_that_account_end(admin: Api) -> None:
    name, other = account(admin), account(admin)
    logins, others = [logged_in(admin, name) for _ in range(2)], logged_in(admin, other)
    admin.ok(_SET, user_name=name, password="new")
    assert [lasts(admin, login) for login in (*logins, others)] == [False, False, True]
    assert admin.attempt("AccessService.Login", "", user_name=name, password="old").status == 401
    assert lasts(admin, logged_in(admin, name, "new"))


def test_whoever_is_logged_in_changes_the_own_password_with_the_old_one(admin: Api) -> None:
    name = account(admin)
    login = logged_in(admin, name)
    assert admin.attempt(_SET, login, user_name=name, password="new", old_password="old").status == 200
    assert not lasts(admin, login)
    assert lasts(admin, logged_in(admin, name, "new"))


@pytest.mark.parametrize("role", ["ROLE_USER", "ROLE_ADMIN"])
def test_nobody_changes_the_own_password_without_the_old_one(server: Secured, role: str) -> None:
    """Who finds a login of somebody else, an administrator's too, does not become that account."""
    with server.api() as api:
        name = account(api, role)
        login = logged_in(api, name)
        for old in ({}, {"old_password": "wrong"}):
            turn = api.attempt(_SET, login, user_name=name, password="new", **old)
            assert (turn.status, "old_password is not" in turn.text) == (403, True)
        assert lasts(api, login)
        assert lasts(api, logged_in(api, name))


def test_only_an_administrator_changes_the_password_of_another(server: Secured) -> None:
    with server.api() as api:
        other = account(api)
        changes = {"user_name": other, "password": "new", "old_password": "old"}
        for role, status in (("ROLE_USER", 403), ("ROLE_OPERATOR", 403), ("ROLE_ADMIN", 200)):
            turn = api.attempt(_SET, logged_in(api, account(api, role)), **changes)
            assert (turn.status, "may not administer" in turn.text) == (status, status == 403)


def test_an_account_of_a_snapshot_is_given_a_password(admin: Api) -> None:
    name = unique("loaded")
    loaded(admin, (name, "ROLE_OPERATOR"))
    assert admin.attempt("AccessService.Login", "", user_name=name, password="new").status == 401
    admin.ok(_SET, user_name=name, password="new")
    assert lasts(admin, logged_in(admin, name, "new"))


def test_logins_end_when_a_snapshot_takes_their_account_or_its_role(admin: Api) -> None:
    kept, demoted, gone = (account(admin, "ROLE_ADMIN") for _ in range(3))
    logins = [logged_in(admin, name) for name in (kept, demoted, gone)]
    wanted = ((kept, "ROLE_ADMIN"), (demoted, "ROLE_USER"))
    loaded(admin, *wanted, prune=True, dry_run=True)
    assert [lasts(admin, login) for login in logins] == [True, True, True]
    loaded(admin, *wanted, prune=True)
    assert [lasts(admin, login) for login in logins] == [True, False, False]


def test_changes_of_passwords_are_audited_without_them(server: Secured) -> None:
    path: Path = server.process.data_dir.parent / "audit.jsonl"
    with server.api() as api:
        name = account(api)
        login = logged_in(api, name)
        for old in ("swordfish-old", "old"):
            api.attempt(_SET, login, user_name=name, password="swordfish-new", old_password=old)

    def entries() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in path.read_text().splitlines()]
        return [each for each in found if each["call"] == "SetPassword" and each["principal"] == f"account/{name}"]

    refused, change, key, done = eventually(lambda: found if len(found := entries()) == 4 else [])
    hidden = {"user_name": name, "password": "…", "old_password": "…"}
    assert [(each["action"], each["after"]) for each in (refused, done)] == [("call", hidden)] * 2
    assert (refused["code"], done["code"]) == ("UNSPECIFIED", "OK")
    assert (change["action"], change["kind"], change["name"]) == ("change", "account", name)
    assert (key["action"], key["kind"], key["before"]["account"]) == ("remove", "key", name)
    assert "swordfish" not in path.read_text() + server.process.log_text()
