"""`kvcm key`, `login` and `whoami` as operators run them, against a manager that asks for keys."""

from __future__ import annotations

import contextlib
import os
import pty
import stat
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command_runner import Commands
from secured import Secured, secured
from test_transport_drivers import eventually
from test_transport_sites import Site, unique


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A manager that asks for keys."""
    with secured(tmp_path_factory.mktemp("secured")) as running:
        yield running


@pytest.fixture
def group(server: Secured) -> str:
    """A group of the test's own."""
    with server.api() as api:
        return Site(api).group()


def _as(server: Secured, key: str) -> Commands:
    return Commands(server.process, KVCM_KEY=key)


@pytest.fixture
def admin(server: Secured) -> Commands:
    """Commands of the administrator."""
    return _as(server, server.admin_key)


@pytest.fixture
def passwords(tmp_path: Path) -> Callable[[str], str]:
    """Write a password into a file and return its path."""

    def write(password: str) -> str:
        file = tmp_path / password
        file.touch(0o600)
        file.write_text(f"{password}\n")
        return str(file)

    return write


def test_an_engine_gets_a_key_in_its_own_file(server: Secured, admin: Commands, group: str, tmp_path: Path) -> None:
    name, out = unique("engine"), tmp_path / "key"
    create = ("key", "create", "--name", name, "--role", "engine", "--group", group, "--verb", "match")
    shown = admin.ok(*create, "--verb", "write", "--ttl", "30d", "--out", str(out))
    secret = out.read_text().strip()
    assert (stat.S_IMODE(out.stat().st_mode), secret.startswith("kvcm_")) == (0o600, True)
    assert (secret in shown, f"the secret is in {out}" in shown) == (False, True)
    (listed,) = [each for each in admin.json("key", "list")["keys"] if each["name"] == name]
    assert (listed["role"], listed["instance_groups"], listed["verbs"]) == ("ROLE_ENGINE", [group], ["MATCH", "WRITE"])
    assert 0 < listed["expires_at_ms"] - listed["created_at_ms"] <= 30 * 86_400_000 + 1000
    text = admin.ok("key", "list")
    assert (name in text, "match, write" in text, secret in text) == (True, True, False)
    engine = Commands(server.process, KVCM_KEY_FILE=str(out))
    assert engine.json("whoami")["key"]["name"] == name
    assert "kvcm whoami" in engine.refused("storage", "disable", "nfs_01", exit_code=3)


def test_a_secret_that_cannot_be_written_is_never_made(admin: Commands, tmp_path: Path) -> None:
    name = unique("viewer")
    create = ("key", "create", "--name", name, "--role", "viewer", "--out")
    assert "No such file" in admin.refused(*create, str(tmp_path / "nowhere" / "key"))
    taken = tmp_path / "taken"
    taken.write_text("old")
    assert "exists: choose another name" in admin.refused(*create, str(taken))
    assert name not in admin.ok("key", "list")
    admin.ok(*create, str(taken), "--force")
    assert taken.read_text().startswith("kvcm_")


def test_a_key_is_printed_once_when_there_is_no_file(server: Secured, admin: Commands) -> None:
    made = admin.json("key", "create", "--name", unique("viewer"), "--role", "viewer")
    assert _as(server, made["secret"]).json("whoami")["key"]["role"] == "ROLE_VIEWER"
    assert admin.ok("key", "create", "--name", unique("viewer"), "--role", "viewer").count("kvcm_") == 1


def test_a_key_is_rotated_and_the_old_one_goes_on_for_a_while(server: Secured, admin: Commands) -> None:
    old = admin.json("key", "create", "--name", unique("operator"), "--role", "operator")
    key_id = old["key"]["key_id"]
    new = admin.json("key", "rotate", key_id, "--overlap", "1h")
    assert new["key"]["name"] == old["key"]["name"]
    for each in (old, new):
        assert _as(server, each["secret"]).json("whoami")["key"]["key_id"] == each["key"]["key_id"]
    assert "End key" in admin.refused("key", "rotate", new["key"]["key_id"], "--overlap", "0", exit_code=2)
    newest = admin.json("key", "rotate", new["key"]["key_id"], "--overlap", "0", "--yes")
    assert "does not know the key" in _as(server, new["secret"]).refused("whoami", exit_code=3)
    assert _as(server, newest["secret"]).json("whoami")["is_required"] is True


def test_a_revoked_key_is_turned_away_at_once(server: Secured, admin: Commands) -> None:
    made = admin.json("key", "create", "--name", unique("viewer"), "--role", "viewer")
    key_id = made["key"]["key_id"]
    assert "give --yes" in admin.refused("key", "revoke", key_id, exit_code=2)
    admin.ok("key", "revoke", key_id, "--yes")
    assert "does not know the key" in _as(server, made["secret"]).refused("whoami", exit_code=3)
    assert key_id not in admin.ok("key", "list")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--role", "king"), "--role is 'king', must be one of viewer, operator, admin, engine"),
        (("--role", "engine", "--group", "*", "--verb", "fly"), "--verb is 'fly', must be one of match, write"),
        (("--role", "viewer", "--ttl", "soon"), "time 'soon' must be"),
    ],
)
def test_keys_of_nothing_are_refused(admin: Commands, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in admin.refused("key", "create", "--name", "never", *arguments)


def test_a_person_logs_in_with_a_password(
    server: Secured, admin: Commands, passwords: Callable[[str], str], tmp_path: Path
) -> None:
    name, out = unique("person"), tmp_path / "key"
    right, wrong = passwords("correct horse battery"), passwords("wrong")
    admin.ok("account", "add", name, "--role", "operator", "--password-file", right)
    no_one = Commands(server.process, KVCM_KEY="")
    login = ("login", name, "--ttl", "15m", "--out", str(out), "--password-file")
    assert "the secret is in" in no_one.ok(*login, right)
    person = Commands(server.process, KVCM_KEY_FILE=str(out))
    me = person.json("whoami")["key"]
    assert (me["account"], me["role"]) == (name, "ROLE_OPERATOR")
    assert (name in admin.ok("key", "list"), name in admin.ok("key", "list", "--logins")) == (False, True)
    refusal = no_one.refused(*login, wrong, "--force", exit_code=3)
    assert "refuses the login: user name or password is wrong" in refusal
    assert Path(out).read_text().startswith("kvcm_")
    assert "give --password-file" in no_one.refused("login", name, exit_code=2)


def test_admins_and_owners_change_passwords(server: Secured, admin: Commands, passwords: Callable[[str], str]) -> None:
    name = unique("person")
    set_password = ("account", "password", name, "--password-file")
    assert "'never' does not exist" in admin.refused("account", "password", "never", *set_password[3:], passwords("a"))
    admin.ok("account", "add", name, "--password-file", passwords("first"))
    assert admin.ok(*set_password, passwords("second")) == ""
    no_one = Commands(server.process, KVCM_KEY="")
    login = ("login", name, "--password-file")
    assert "is wrong" in no_one.refused(*login, passwords("first"), exit_code=3)
    person = _as(server, no_one.json(*login, passwords("second"))["secret"])
    third = (*set_password, passwords("third"))
    assert "give --old-password-file" in person.refused(*third, exit_code=2)
    assert "old_password is not" in person.refused(*third, "--old-password-file", passwords("first"), exit_code=3)
    person.ok(*third, "--old-password-file", passwords("second"))
    assert "does not know the key" in person.refused("whoami", exit_code=3)
    assert no_one.json(*login, passwords("third"))["key"]["account"] == name


def test_passwords_are_asked_for_on_a_terminal_that_does_not_show_them(
    server: Secured, admin: Commands, passwords: Callable[[str], str]
) -> None:
    name = unique("person")
    admin.ok("account", "add", name, "--password-file", passwords("first"))
    key = Commands(server.process, KVCM_KEY="").json("login", name, "--password-file", passwords("first"))["secret"]
    environment = {**os.environ, "KVCM_MANAGER": f"http://{server.process.address.admin_http}", "KVCM_KEY": key}
    terminal, its_side = pty.openpty()
    arguments = [sys.executable, "-m", "kvcm", "account", "password", name]
    with subprocess.Popen(
        arguments, stdin=its_side, stdout=its_side, stderr=its_side, env=environment, start_new_session=True
    ) as command:
        shown = ""
        for prompt, answer in (("Old password", "first"), ("Password", "second"), ("Repeat", "second")):
            while prompt not in shown:
                shown += os.read(terminal, 1024).decode()
            eventually(lambda: not termios.tcgetattr(terminal)[3] & termios.ECHO)
            os.write(terminal, f"{answer}\n".encode())
        assert command.wait(30) == 0, shown
    os.close(its_side)
    with contextlib.suppress(OSError):  # the end of the output of a terminal
        while more := os.read(terminal, 1024):
            shown += more.decode()
    os.close(terminal)
    assert "first" not in shown
    assert "second" not in shown
    Commands(server.process, KVCM_KEY="").ok("login", name, "--password-file", passwords("second"))
