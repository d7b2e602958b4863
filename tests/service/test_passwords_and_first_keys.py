"""Passwords, the administrator's first key, and files with secrets."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from redis_servers import Standalone
from secured import Secured, secured
from test_transport_drivers import Api, eventually
from test_transport_process import manager, run_kvcm
from test_transport_sites import unique

from kvcm.app import ensure_admin_key
from kvcm.config import ConfigError, Settings, is_exposed
from kvcm.model.principals import ANONYMOUS, AccountRole, CallContext, PresentedKey, Role, call_context, new_key
from kvcm.protocol.kvcm.v1 import access_service_pb2 as pb
from kvcm.registry.api_keys import NewKey
from kvcm.registry.registry import Registry
from kvcm.service.access_api import AccessApi, network_of
from kvcm.service.rejections import RateLimitedError, UnauthenticatedError
from kvcm.storage.directory import StorageDirectory

_SET = "AccessService.SetPassword"


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("passwords")
    with secured(folder, f"kvcm.audit.log_file={folder / 'audit.jsonl'}") as running:
        yield running


@pytest.fixture
def admin(audited: Secured) -> Iterator[Api]:
    with audited.api() as api:
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


def test_a_logout_ends_this_login_and_nothing_else(admin: Api) -> None:
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


def test_a_login_changes_its_own_password_with_the_old_one(admin: Api) -> None:
    name = account(admin)
    login = logged_in(admin, name)
    assert admin.attempt(_SET, login, user_name=name, password="new", old_password="old").status == 200
    assert not lasts(admin, login)
    assert lasts(admin, logged_in(admin, name, "new"))


@pytest.mark.parametrize("role", ["ROLE_USER", "ROLE_ADMIN"])
def test_no_login_changes_its_own_password_without_the_old_one(audited: Secured, role: str) -> None:
    """A stolen login, an administrator's too, does not give its finder the account."""
    with audited.api() as api:
        name = account(api, role)
        login = logged_in(api, name)
        for old in ({}, {"old_password": "wrong"}):
            turn = api.attempt(_SET, login, user_name=name, password="new", **old)
            assert (turn.status, "old_password is not" in turn.text) == (403, True)
        assert lasts(api, login)
        assert lasts(api, logged_in(api, name))


def test_only_an_administrator_changes_the_password_of_another(audited: Secured) -> None:
    with audited.api() as api:
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


def test_changes_of_passwords_are_audited_without_them(audited: Secured) -> None:
    path: Path = audited.process.data_dir.parent / "audit.jsonl"
    with audited.api() as api:
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
    assert "swordfish" not in path.read_text() + audited.process.log_text()


@pytest.mark.parametrize(
    ("peer", "network"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("%5B2001:db8:1:2::1%5D", "2001:db8:1:2::/64"),  # as gRPC has it
        ("[2001:db8:1:3::1]", "2001:db8:1:3::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("unix", "unix"),
    ],
)
def test_of_ipv6_a_network_stands_for_all_addresses_in_it(peer: str, network: str) -> None:
    assert network_of(peer) == network


async def _outcomes(api: AccessApi, peers: Iterable[str]) -> list[type[Exception]]:
    outcomes: list[type[Exception]] = []
    for peer in peers:
        before = call_context.set(CallContext(ANONYMOUS, "Login", peer))
        with pytest.raises((UnauthenticatedError, RateLimitedError)) as refused:
            await api.log_in(pb.LoginRequest(user_name="u", password="wrong"))
        outcomes.append(refused.type)
        call_context.reset(before)
    return outcomes


async def test_the_addresses_of_an_ipv6_network_share_their_tries() -> None:
    api = AccessApi(Registry(StorageDirectory("cluster", [])), is_required=True, clock=lambda: 0.0)
    peers = [*(f"2001:db8::{number:x}" for number in range(1, 12)), "2001:db8:0:1::1", "10.0.0.7"]
    assert await _outcomes(api, peers) == [*[UnauthenticatedError] * 10, RateLimitedError, *[UnauthenticatedError] * 2]


class Start:
    """Starts of managers of one deployment.

    Attributes:
        file: with the administrator's key.
        registry: the one that they share.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "admin.key"
        self.registry = Registry(StorageDirectory("cluster", []))

    async def run(self, **settings: Any) -> list[str]:
        """Start a manager as far as the administrator's key and return the names of the logged events."""
        given = {"auth_mode": "required", "data_dir": str(self.file.parent), **settings}
        with structlog.testing.capture_logs() as events:
            await ensure_admin_key(self.registry, Settings(**given))
        return [event["event"] for event in events]

    def shown(self) -> PresentedKey:
        key = PresentedKey.parse(self.file.read_text().strip())
        assert key is not None
        return key

    def is_let_in(self, presented: PresentedKey) -> bool:
        key = self.registry.keys.authenticate(presented)
        return key is not None and self.registry.keys.use(key)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(tmp_path)


async def test_without_an_administrator_a_key_is_made_and_taken_over_at_the_next_start(start: Start) -> None:
    assert await start.run() == ["admin_key_made"]
    assert await start.run() == []
    assert start.is_let_in(start.shown())
    assert len(start.registry.keys.all()) == 1


_VIEWER = NewKey("v", Role.ROLE_VIEWER)
_ADMIN_OF_A_GROUP = NewKey("g", Role.ROLE_ADMIN, ("a",))
_ADMIN_WITH_AN_END = NewKey("t", Role.ROLE_ADMIN, ttl_seconds=3600)
_ADMIN_OF_A_CERTIFICATE = NewKey("c", Role.ROLE_ADMIN, certificate_name="spiffe://a")


async def _prepare(registry: Registry, other: NewKey | None) -> None:
    """Make another key, or without one a login of an administrator's account."""
    if other is not None:
        await registry.keys.create(other)
        return
    await registry.accounts.add("eve", "password", AccountRole.ROLE_ADMIN)
    await registry.keys.log_in("eve", Role.ROLE_ADMIN, 3600)


@pytest.mark.parametrize("other", [_VIEWER, _ADMIN_OF_A_GROUP, _ADMIN_WITH_AN_END, _ADMIN_OF_A_CERTIFICATE, None])
async def test_a_key_is_made_unless_another_administers_for_ever(start: Start, other: NewKey | None) -> None:
    await _prepare(start.registry, other)
    assert await start.run() == ["admin_key_made"]
    assert start.is_let_in(start.shown())


@pytest.mark.parametrize(
    ("other", "settings"),
    [(NewKey("a", Role.ROLE_ADMIN), {}), (_ADMIN_OF_A_CERTIFICATE, {"tls_client_ca_file": "/ca.pem"})],
)
async def test_no_key_is_made_beside_a_lasting_admin(start: Start, other: NewKey, settings: dict[str, str]) -> None:
    await start.registry.keys.create(other)
    assert await start.run(**settings) == []
    assert not start.file.exists()


@pytest.mark.parametrize("other", [_VIEWER, _ADMIN_OF_A_GROUP, _ADMIN_OF_A_CERTIFICATE, None])
async def test_without_a_place_for_a_key_there_must_be_an_administrator(start: Start, other: NewKey | None) -> None:
    await _prepare(start.registry, other)
    with pytest.raises(ConfigError, match="admin_key_file"):
        await start.run(data_dir="")
    await start.registry.keys.create(_ADMIN_WITH_AN_END)
    assert await start.run(data_dir="") == []


@pytest.mark.parametrize("is_rotated", [True, False])
async def test_a_key_that_was_rotated_or_revoked_does_not_come_back(start: Start, is_rotated: bool) -> None:
    await start.run()
    old = start.shown()
    if is_rotated:
        await start.registry.keys.rotate(old.id, 0, 0)
    else:
        await start.registry.keys.create(_ADMIN_WITH_AN_END)
        await start.registry.keys.revoke(old.id)
    for _ in range(2):
        assert await start.run() == ["admin_key_ended"]
        assert not start.is_let_in(old)
    assert start.shown() == old  # the manager does not overwrite a file that may be mounted
    start.file.write_text(new_key().text)
    start.file.chmod(0o600)
    assert await start.run() == []
    assert start.is_let_in(start.shown())


async def test_a_rotated_key_goes_on_for_the_overlap(start: Start) -> None:
    await start.run()
    await start.registry.keys.rotate(start.shown().id, 3600, 0)
    assert await start.run() == []
    assert start.is_let_in(start.shown())


async def test_after_the_last_administrator_s_key_is_revoked_the_error_says_to_remove_the_file(start: Start) -> None:
    await start.run()
    old = start.shown()
    await start.registry.keys.revoke(old.id)
    with pytest.raises(ConfigError, match="remove the file"):
        await start.run()
    assert start.registry.keys.all() == []
    start.file.unlink()
    assert await start.run() == ["admin_key_made"]
    assert start.is_let_in(start.shown())
    assert not start.is_let_in(old)


async def test_a_file_with_another_secret_for_a_known_key_is_refused(start: Start) -> None:
    await start.run()
    old = start.shown()
    other = PresentedKey(old.id, new_key().secret)
    start.file.write_text(other.text)
    with pytest.raises(ConfigError, match=f"{old.id}.*another secret") as refused:
        await start.run()
    assert other.secret not in str(refused.value)
    assert start.is_let_in(old)


async def test_a_file_with_someone_else_s_key_is_no_administrator_s(start: Start) -> None:
    _, presented = await start.registry.keys.create(NewKey("v", Role.ROLE_VIEWER))
    assert presented is not None
    start.file.write_text(presented.text)
    start.file.chmod(0o600)
    with pytest.raises(ConfigError, match="no administrator's"):
        await start.run()


_KEYED = ("kvcm.auth.mode=required", "kvcm.service.host=127.0.0.1")
_REQUIRED = ("-e", "kvcm.auth.mode=required", "-e", "kvcm.service.host=127.0.0.1")


def test_a_mounted_key_is_the_administrator_s(tmp_path: Path) -> None:
    file = tmp_path / "mounted"
    file.write_text(new_key().text + "\n")
    file.chmod(0o644)
    with manager(tmp_path, *_KEYED, f"kvcm.auth.admin_key_file={file}") as process:
        with process.api(key=file.read_text().strip()) as api:
            assert api.ok("AccessService.WhoAmI").key.name == "admin"
        assert process.events("admin_key_readable")
        assert not (process.data_dir / "admin.key").exists()


@pytest.mark.parametrize("text", ["", "kvcm_abc", "two\nlines", "\xff"])
def test_a_file_without_a_key_is_an_error_that_does_not_show_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mounted"
    file.write_text(text, encoding="latin-1")
    ended = run_kvcm(tmp_path, "serve", *_REQUIRED, "-e", f"kvcm.auth.admin_key_file={file}")
    assert ended.returncode == 1
    assert "kvcm.auth.admin_key_file" in ended.stderr
    assert len(text) < 3 or text not in ended.stderr


def test_keys_made_without_authentication_count_when_it_is_required(tmp_path: Path) -> None:
    with manager(tmp_path) as process, process.api() as api:
        made = api.ok("AccessService.CreateKey", name="prepared", role="ROLE_ADMIN").secret
        assert not api.ok("AccessService.WhoAmI").is_required
    with manager(tmp_path, *_KEYED) as process, process.api(key=made) as api:
        answer = api.ok("AccessService.WhoAmI")
        assert (answer.is_required, answer.key.name) == (True, "prepared")
        assert not (process.data_dir / "admin.key").exists()


def test_the_risks_of_the_settings_are_logged_at_start(tmp_path: Path) -> None:
    with manager(tmp_path / "off") as process:
        assert eventually(lambda: process.events("not_authenticated"))[0]["level"] == "info"
    with manager(tmp_path / "insecure", "--insecure") as process:
        assert eventually(lambda: process.events("not_authenticated"))[0]["level"] == "warning"
    with manager(tmp_path / "required", "kvcm.auth.mode=required") as process:
        assert eventually(lambda: process.events("not_encrypted"))
        assert process.events("not_authenticated") == []


def test_a_key_that_is_revoked_at_one_manager_ends_at_all(tmp_path: Path, redis_standalone: Standalone) -> None:
    shared = f"kvcm.registry_storage.uri={redis_standalone.uri(unique('keys'))}"
    with secured(tmp_path / "a", shared) as first:
        with manager(tmp_path / "b", *_KEYED, shared) as process:
            second = Secured(process, first.admin_key)
            key = first.key("travels", "ROLE_VIEWER")
            with second.api(key=key) as api, first.api() as admin:
                eventually(lambda: api.attempt("AccessService.WhoAmI").status == 200)
                (listed,) = [each for each in admin.ok("AccessService.ListKeys").keys if each.name == "travels"]
                admin.ok("AccessService.RevokeKey", key_id=listed.key_id)
                eventually(lambda: api.attempt("AccessService.WhoAmI").status == 401)


_ANOTHER = 12345


@pytest.mark.parametrize(("mode", "exposed"), [(0o600, False), (0o400, False), (0o640, True), (0o604, True)])
def test_the_owner_s_own_file_is_for_the_owner_alone(tmp_path: Path, mode: int, exposed: bool) -> None:
    file = tmp_path / "secret"
    file.touch()
    file.chmod(mode)
    assert is_exposed(file) is exposed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize(("mode", "exposed"), [(0o440, False), (0o640, False), (0o444, True)])
def test_a_mounted_secret_is_read_through_its_group(tmp_path: Path, mode: int, exposed: bool) -> None:
    file = tmp_path / "secret"
    file.touch()
    os.chown(file, _ANOTHER, os.getegid())
    file.chmod(mode)
    assert is_exposed(file) is exposed
