"""All commands but `serve`, which opens a manager itself."""

from __future__ import annotations

import typer

from kvcm.commands import storage_config as _storage_config  # noqa: F401 - adds its commands to those of storage
from kvcm.commands.account import account_app
from kvcm.commands.blocks import get, trim
from kvcm.commands.doctor import doctor
from kvcm.commands.group import group_app, group_usage
from kvcm.commands.index import index_app
from kvcm.commands.instance import instance_app
from kvcm.commands.key import key_app, login, who_am_i
from kvcm.commands.optimize import optimize
from kvcm.commands.pin import pin_app
from kvcm.commands.quota import quota_app
from kvcm.commands.snapshot import snapshot_app
from kvcm.commands.storage import storage_app
from kvcm.commands.trace import trace_app

__all__ = ["add_commands"]

_APPS = (
    storage_app,
    group_app,
    quota_app,
    instance_app,
    pin_app,
    account_app,
    key_app,
    index_app,
    snapshot_app,
    trace_app,
)


def add_commands(app: typer.Typer) -> None:
    """Add them to the command line."""
    for each in _APPS:
        app.add_typer(each)
    app.command("usage")(group_usage)
    app.command("get")(get)
    app.command("trim")(trim)
    app.command("login")(login)
    app.command("whoami")(who_am_i)
    app.command("doctor")(doctor)
    app.command("optimize")(optimize)
