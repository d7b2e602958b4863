"""`kvcm account`: people who log in with a password."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcm.commands.completion import account_names
from kvcm.commands.connection import Connection
from kvcm.commands.options import AsJson, Yes, asked_password, confirm, noun, with_options
from kvcm.commands.shown import print_json, print_table
from kvcm.model.errors import InvalidArgumentError
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import access_service_pb2 as access_pb
from kvcm.refusals import asking

__all__ = ["PasswordFile", "account_app"]

account_app = noun("account", "Accounts of people, who log in with a password; programs have keys.")

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
    with asking():
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
    with asking():
        if role not in _ROLES:
            raise InvalidArgumentError(f"--role is {role!r}, must be one of {', '.join(_ROLES)}")
        password = asked_password(password_file, is_new=True)
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
            help="File with the present password; it is wanted of whoever is logged in as the account.",
        ),
    ] = None,
) -> None:
    """Change the password of an account, or give it one, and end its logins."""
    with asking():
        client, old = connection.admin(), ""
        me = client.call("WhoAmI", access_pb.WhoAmIRequest(), access_pb.WhoAmIResponse)
        if old_password_file is not None or me.key.account == name:
            old = asked_password(old_password_file, is_new=False, option="--old-password-file")
        new = asked_password(password_file, is_new=True)
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
    with asking():
        connection.admin().call("DeleteAccount", pb.DeleteAccountRequest(user_name=name), pb.CommonResponse)
