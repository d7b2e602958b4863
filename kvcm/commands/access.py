"""`kvcm account`, `kvcm key`, `kvcm login` and `kvcm whoami`: authentication and permissions of users and engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kvcm.commands.connection import Connection, account_names, group_names, key_ids
from kvcm.commands.options import AsJson, Yes, confirm, noun, one_of, prompt_password, with_options
from kvcm.commands.output import format_expiry, plain, print_below, print_fields, print_json, print_table, private_file
from kvcm.model.units import parse_duration
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import access_service_pb2 as access_pb
from kvcm.terminal.exit_codes import exit_on_call_errors

__all__ = ["PasswordFile", "account_app", "key_app", "login", "whoami"]

account_app = noun("account", "Accounts of people with passwords; programs have keys.")
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--password-file", metavar="FILE", help="File with the password, readable by you only; else you are asked."
    ),
]
_ROLES = {"user": pb.ROLE_USER, "operator": pb.ROLE_OPERATOR, "admin": pb.ROLE_ADMIN}


@account_app.command("list")
@with_options
def list_accounts(connection: Connection, as_json: AsJson = False) -> None:
    """List the accounts and what they may do."""
    with exit_on_call_errors():
        answer = connection.admin().call("ListAccount", pb.ListAccountRequest(), pb.ListAccountResponse)
    roles = {number: name for name, number in _ROLES.items()}
    accounts = [(each.user_name, roles.get(each.role, str(each.role))) for each in answer.accounts]
    if as_json:
        print_json({"accounts": [{"name": name, "role": role} for name, role in accounts]})
    else:
        print_table(("account", "role"), accounts, words=("role",))


@account_app.command("add")
@with_options
def add_account(
    connection: Connection,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the account, not taken yet.")],
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="user (looks), operator or admin.")] = "user",
    password_file: PasswordFile = None,
) -> None:
    """Add an account; `kvcm login NAME` makes a key of its password."""
    with exit_on_call_errors():
        one_of("--role", role, _ROLES)
        password = prompt_password(password_file, is_new=True)
        request = pb.AddAccountRequest(user_name=name, password=password, role=_ROLES[role])
        connection.admin().call("AddAccount", request, pb.CommonResponse)


@account_app.command("password")
@with_options
def set_password(
    connection: Connection,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The account.", autocompletion=account_names)],
    password_file: PasswordFile = None,
    old_password_file: Annotated[
        Path | None,
        typer.Option(
            "--old-password-file",
            metavar="FILE",
            help="File with the present password; needed when the account changes its own password.",
        ),
    ] = None,
) -> None:
    """Change the password of an account, or give it one, and end its logins."""
    with exit_on_call_errors():
        client, old = connection.admin(), ""
        me = client.call("WhoAmI", access_pb.WhoAmIRequest(), access_pb.WhoAmIResponse)
        if old_password_file is not None or me.key.account == name:
            old = prompt_password(old_password_file, is_new=False, option="--old-password-file")
        new = prompt_password(password_file, is_new=True)
        request = access_pb.SetPasswordRequest(user_name=name, password=new, old_password=old)
        client.call("SetPassword", request, pb.CommonResponse)


@account_app.command("remove")
@with_options
def remove_account(
    connection: Connection,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The account.", autocompletion=account_names)],
    yes: Yes = False,
) -> None:
    """Delete an account."""
    confirm(f"Delete account {name}?", yes=yes)
    with exit_on_call_errors():
        connection.admin().call("DeleteAccount", pb.DeleteAccountRequest(user_name=name), pb.CommonResponse)


# `kvcm key`, `login` and `whoami`.

key_app = noun("key", "Keys of engines and programs: what they may do, and until when.")
_KEY_ROLES: Mapping[str, access_pb.Role] = {
    "viewer": access_pb.ROLE_VIEWER,
    "operator": access_pb.ROLE_OPERATOR,
    "admin": access_pb.ROLE_ADMIN,
    "engine": access_pb.ROLE_ENGINE,
}
_VERBS: Mapping[str, access_pb.EngineVerb] = {
    "match": access_pb.MATCH,
    "write": access_pb.WRITE,
    "remove": access_pb.REMOVE,
    "pin": access_pb.PIN,
    "report": access_pb.REPORT,
    "score": access_pb.SCORE,
}
KeyId = Annotated[
    str, typer.Argument(metavar="KEY_ID", help="Id of the key, as `kvcm key list` shows it.", autocompletion=key_ids)
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", help="Write the secret to this new file, readable by you only; else print it."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file of --out if it exists.")]
Ttl = Annotated[str, typer.Option("--ttl", metavar="TIME", help="When it ends, as in 30d, 12h or 15m; 0 is never.")]


@key_app.command("list")
@with_options
def list_keys(
    connection: Connection,
    logins: Annotated[bool, typer.Option("--logins", help="Also the keys that logins made.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the keys that have not ended, without their secrets."""
    with exit_on_call_errors():
        answer = connection.admin().call(
            "ListKeys", access_pb.ListKeysRequest(with_logins=logins), access_pb.ListKeysResponse
        )
    if as_json:
        print_json({"keys": [plain(each) for each in answer.keys]})
        return
    columns = ("key", "name", "role", "groups", "made", "ends", "last used")
    rows = (
        (
            each.key_id,
            _name(each),
            _permissions(each),
            _groups(each),
            format_expiry(each.created_at_ms),
            format_expiry(each.expires_at_ms),
            format_expiry(each.last_used_at_ms),
        )
        for each in answer.keys
    )
    print_table(columns, rows, words=columns)


@key_app.command("create")
@with_options
def create_key(
    connection: Connection,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="Of the engine or program; no other key has it.")],
    role: Annotated[str, typer.Option("--role", metavar="ROLE", help="viewer, operator, admin or engine.")],
    groups: Annotated[
        list[str] | None,
        typer.Option(
            "--group",
            metavar="NAME",
            help="An instance group that it may use; repeatable, '*' for all. Engines need one, others have all.",
            autocompletion=group_names,
        ),
    ] = None,
    verbs: Annotated[
        list[str] | None,
        typer.Option(
            "--verb", metavar="VERB", help="What an engine may do: match, write, remove, pin; repeatable. None is all."
        ),
    ] = None,
    ttl: Ttl = "0",
    certificate_name: Annotated[
        str,
        typer.Option(
            "--certificate-name",
            metavar="NAME",
            help="Authenticate by client certificates of this URI, DNS name or email, instead of a secret.",
        ),
    ] = "",
    out: Out = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a key. Its secret is shown this once."""
    with exit_on_call_errors():
        request = access_pb.CreateKeyRequest(
            name=name,
            role=_KEY_ROLES[one_of("--role", role, _KEY_ROLES)],
            instance_groups=groups or (),
            verbs=[_VERBS[one_of("--verb", verb, _VERBS)] for verb in verbs or ()],
            ttl_seconds=parse_duration(ttl),
            certificate_name=certificate_name,
        )
        with _output(out, force=force) as file:
            answer = connection.admin().call("CreateKey", request, access_pb.CreateKeyResponse)
            _write(answer, file)
    _print_created(answer, out, as_json=as_json)


@key_app.command("rotate")
@with_options
def rotate_key(
    connection: Connection,
    key_id: KeyId,
    overlap: Annotated[
        str,
        typer.Option("--overlap", metavar="TIME", help="How long the old key goes on, as in 1h; 0 ends it at once."),
    ] = "1h",
    ttl: Ttl = "0",
    out: Out = None,
    force: Force = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make a key with the rights of another, which ends after --overlap: give the new one to the engine before that."""
    with exit_on_call_errors():
        request = access_pb.RotateKeyRequest(
            key_id=key_id, overlap_seconds=parse_duration(overlap), ttl_seconds=parse_duration(ttl)
        )
        if not request.overlap_seconds:
            confirm(f"End key {key_id} at once, before engines have the new one?", yes=yes)
        with _output(out, force=force) as file:
            answer = connection.admin().call("RotateKey", request, access_pb.CreateKeyResponse)
            _write(answer, file)
    _print_created(answer, out, as_json=as_json)


@key_app.command("revoke")
@with_options
def revoke_key(connection: Connection, key_id: KeyId, yes: Yes = False) -> None:
    """End a key at once: requests that show it are rejected."""
    confirm(f"End key {key_id}?", yes=yes)
    with exit_on_call_errors():
        connection.admin().call("RevokeKey", access_pb.RevokeKeyRequest(key_id=key_id), admin_pb.CommonResponse)


@with_options
def login(
    connection: Connection,
    name: Annotated[str, typer.Argument(metavar="ACCOUNT", help="The account.", autocompletion=account_names)],
    password_file: PasswordFile = None,
    ttl: Annotated[str, typer.Option("--ttl", metavar="TIME", help="How long the key lasts, at most 12h.")] = "1h",
    out: Out = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Turn an account's password into a key that ends soon.

    `kvcm login alice --out ~/.kvcm-key`, then `export KVCM_KEY_FILE=~/.kvcm-key`: commands show it from then on.
    """
    with exit_on_call_errors():
        password = prompt_password(password_file, is_new=False)
        request = access_pb.LoginRequest(user_name=name, password=password, ttl_seconds=parse_duration(ttl))
        with _output(out, force=force) as file:
            answer = connection.without_key().call("Login", request, access_pb.CreateKeyResponse)
            _write(answer, file)
    _print_created(answer, out, as_json=as_json)


@with_options
def whoami(connection: Connection, as_json: AsJson = False) -> None:
    """Show the principal of this command line, and its permissions."""
    with exit_on_call_errors():
        answer = connection.admin().call("WhoAmI", access_pb.WhoAmIRequest(), access_pb.WhoAmIResponse)
    if as_json:
        print_json(plain(answer))
    elif not answer.is_required:
        typer.echo("authentication is disabled: all clients may do everything (kvcm.auth.mode is off)")
    else:
        print_fields(_fields(answer.key))


# ── keys as people read them ──


def _fields(key: access_pb.Key) -> list[tuple[str, str]]:
    return [
        ("key", key.key_id),
        ("name", _name(key)),
        ("role", _role(key)),
        ("groups", _groups(key)),
        ("verbs", _verbs(key)),
        ("made", format_expiry(key.created_at_ms)),
        ("ends", format_expiry(key.expires_at_ms)),
        *([("certificate", key.certificate_name)] if key.certificate_name else ()),
    ]


def _name(key: access_pb.Key) -> str:
    return f"{key.name} (login of {key.account})" if key.account else key.name


def _role(key: access_pb.Key) -> str:
    return next((name for name, number in _KEY_ROLES.items() if number == key.role), str(key.role))


def _permissions(key: access_pb.Key) -> str:
    """Return its role, and the verbs of an engine that may not do all of them."""
    has_limits = bool(key.verbs) and not set(key.verbs).issuperset(_VERBS.values())
    return f"{_role(key)}: {_verbs(key)}" if key.role == access_pb.ROLE_ENGINE and has_limits else _role(key)


def _groups(key: access_pb.Key) -> str:
    return ", ".join(key.instance_groups) or "*"


def _verbs(key: access_pb.Key) -> str:
    if key.role != access_pb.ROLE_ENGINE:
        return ""
    return ", ".join(name for name, number in _VERBS.items() if number in key.verbs or not key.verbs)


# ── secrets ──


@contextmanager
def _output(path: Path | None, *, force: bool) -> Iterator[BinaryIO | None]:
    """Yield the file for a secret, open before one is made: a secret that cannot be written is lost."""
    if path is None:
        yield None
        return
    with private_file(path, force=force) as file:
        yield file


def _write(answer: access_pb.CreateKeyResponse, file: BinaryIO | None) -> None:
    if file is not None:
        file.write(f"{answer.secret}\n".encode())


def _print_created(answer: access_pb.CreateKeyResponse, out: Path | None, *, as_json: bool) -> None:
    if as_json:
        print_json({**plain(answer), **({"secret": ""} if out is not None else {})})
        return
    print_fields(_fields(answer.key))
    if out is not None:
        print_below(f"the secret is in {out}")
    elif answer.secret:
        print_below("the secret is shown this once:", answer.secret)
