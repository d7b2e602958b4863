"""`kvcm key`, `login` and `whoami`: who may call, and as whom this command line does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kvcm.commands.account import PasswordFile
from kvcm.commands.completion import account_names, group_names, key_ids
from kvcm.commands.connection import Connection
from kvcm.commands.options import AsJson, Yes, asked_password, confirm, noun, with_options
from kvcm.commands.shown import plain, print_below, print_fields, print_json, print_table, shown_end
from kvcm.model.errors import InvalidArgumentError
from kvcm.private_files import private_file
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import access_service_pb2 as pb
from kvcm.refusals import asking
from kvcm.spans import parse_span

__all__ = ["key_app", "login", "who_am_i"]

key_app = noun("key", "Keys of engines and programs: what they may do, and until when.")

_ROLES: Mapping[str, pb.Role] = {
    "viewer": pb.ROLE_VIEWER,
    "operator": pb.ROLE_OPERATOR,
    "admin": pb.ROLE_ADMIN,
    "engine": pb.ROLE_ENGINE,
}
_VERBS: Mapping[str, pb.EngineVerb] = {"match": pb.MATCH, "write": pb.WRITE, "remove": pb.REMOVE, "pin": pb.PIN}

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
    """List the keys that have not ended; nobody can see their secrets any more."""
    with asking():
        answer = connection.admin().call("ListKeys", pb.ListKeysRequest(with_logins=logins), pb.ListKeysResponse)
    if as_json:
        print_json({"keys": [plain(each) for each in answer.keys]})
        return
    columns = ("key", "name", "role", "groups", "made", "ends", "last used")
    rows = (
        (
            each.key_id,
            _name(each),
            _may(each),
            _groups(each),
            shown_end(each.created_at_ms),
            shown_end(each.expires_at_ms),
            shown_end(each.last_used_at_ms),
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
            help="Let in whoever shows a client certificate of this URI, DNS name or email, instead of a secret.",
        ),
    ] = "",
    out: Out = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a key. Its secret is shown this once."""
    with asking():
        request = pb.CreateKeyRequest(
            name=name,
            role=_ROLES[_one_of("--role", role, _ROLES)],
            instance_groups=groups or (),
            verbs=[_VERBS[_one_of("--verb", verb, _VERBS)] for verb in verbs or ()],
            ttl_seconds=parse_span(ttl),
            certificate_name=certificate_name,
        )
        with _output(out, force=force) as file:
            answer = connection.admin().call("CreateKey", request, pb.CreateKeyResponse)
            _write(answer, file)
    _print_made(answer, out, as_json=as_json)


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
    with asking():
        request = pb.RotateKeyRequest(key_id=key_id, overlap_seconds=parse_span(overlap), ttl_seconds=parse_span(ttl))
        if not request.overlap_seconds:
            confirm(f"End key {key_id} at once, before anybody has the new one?", yes=yes)
        with _output(out, force=force) as file:
            answer = connection.admin().call("RotateKey", request, pb.CreateKeyResponse)
            _write(answer, file)
    _print_made(answer, out, as_json=as_json)


@key_app.command("revoke")
@with_options
def revoke_key(connection: Connection, key_id: KeyId, yes: Yes = False) -> None:
    """End a key at once: whoever shows it is turned away."""
    confirm(f"End key {key_id}?", yes=yes)
    with asking():
        connection.admin().call("RevokeKey", pb.RevokeKeyRequest(key_id=key_id), admin_pb.CommonResponse)


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
    with asking():
        password = asked_password(password_file, is_new=False)
        request = pb.LoginRequest(user_name=name, password=password, ttl_seconds=parse_span(ttl))
        with _output(out, force=force) as file:
            answer = connection.without_key().call("Login", request, pb.CreateKeyResponse)
            _write(answer, file)
    _print_made(answer, out, as_json=as_json)


@with_options
def who_am_i(connection: Connection, as_json: AsJson = False) -> None:
    """Show whom the manager takes this command line for, and what that one may do."""
    with asking():
        answer = connection.admin().call("WhoAmI", pb.WhoAmIRequest(), pb.WhoAmIResponse)
    if as_json:
        print_json(plain(answer))
    elif not answer.is_required:
        typer.echo("the manager asks nobody for a key: everybody may do everything (kvcm.auth.mode is off)")
    else:
        print_fields(_fields(answer.key))


# ── keys as people read them ──


def _fields(key: pb.Key) -> list[tuple[str, str]]:
    return [
        ("key", key.key_id),
        ("name", _name(key)),
        ("role", _role(key)),
        ("groups", _groups(key)),
        ("verbs", _verbs(key)),
        ("made", shown_end(key.created_at_ms)),
        ("ends", shown_end(key.expires_at_ms)),
        *([("certificate", key.certificate_name)] if key.certificate_name else ()),
    ]


def _name(key: pb.Key) -> str:
    return f"{key.name} (login of {key.account})" if key.account else key.name


def _role(key: pb.Key) -> str:
    return next((name for name, number in _ROLES.items() if number == key.role), str(key.role))


def _may(key: pb.Key) -> str:
    """Return its role, and the verbs of an engine that may not do all of them."""
    has_limits = bool(key.verbs) and not set(key.verbs).issuperset(_VERBS.values())
    return f"{_role(key)}: {_verbs(key)}" if key.role == pb.ROLE_ENGINE and has_limits else _role(key)


def _groups(key: pb.Key) -> str:
    return ", ".join(key.instance_groups) or "*"


def _verbs(key: pb.Key) -> str:
    if key.role != pb.ROLE_ENGINE:
        return ""
    return ", ".join(name for name, number in _VERBS.items() if number in key.verbs or not key.verbs)


def _one_of(option: str, value: str, allowed: Mapping[str, int]) -> str:
    if value not in allowed:
        raise InvalidArgumentError(f"{option} is {value!r}, must be one of {', '.join(allowed)}")
    return value


# ── secrets ──


@contextmanager
def _output(path: Path | None, *, force: bool) -> Iterator[BinaryIO | None]:
    """Yield the file for a secret, open before one is made: a secret that cannot be written is lost."""
    if path is None:
        yield None
        return
    with private_file(path, force=force) as file:
        yield file


def _write(answer: pb.CreateKeyResponse, file: BinaryIO | None) -> None:
    if file is not None:
        file.write(f"{answer.secret}\n".encode())


def _print_made(answer: pb.CreateKeyResponse, out: Path | None, *, as_json: bool) -> None:
    if as_json:
        print_json({**plain(answer), **({"secret": ""} if out is not None else {})})
        return
    print_fields(_fields(answer.key))
    if out is not None:
        print_below(f"the secret is in {out}")
    elif answer.secret:
        print_below("the secret is shown this once:", answer.secret)
