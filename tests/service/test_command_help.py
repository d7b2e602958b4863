"""Every command, argument and option says what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from test_transport_process import run_kvcm
from typer.main import get_command

from kvcm.cli import app
from kvcm.refusals import EXIT_CODES


def _tree(command: Any, path: str = "kvcm") -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from _tree(each, f"{path} {name}")


TREE = dict(_tree(get_command(app)))
LEAVES = {path: command for path, command in TREE.items() if not hasattr(command, "commands")}


def test_the_nouns_are_there() -> None:
    nouns = {path.split()[1] for path in TREE if " " in path}
    assert nouns >= {
        "serve", "storage", "group", "quota", "instance", "account", "key", "login", "whoami", "usage", "get", "trim",
        "pin", "index", "doctor", "trace",
    }  # fmt: skip
    assert len(LEAVES) > 40


@pytest.mark.parametrize("path", TREE)
def test_a_command_says_what_it_does(path: str) -> None:
    text = TREE[path].help or ""
    assert text.strip().endswith((".", "`")), text
    assert text[0].isupper()


@pytest.mark.parametrize("path", LEAVES)
def test_every_argument_and_option_has_a_sentence(path: str) -> None:
    silent = [each.name for each in LEAVES[path].params if not (each.help or "").strip().endswith((".", ";"))]
    assert not silent


@pytest.mark.parametrize("path", LEAVES)
def test_no_option_takes_a_secret(path: str) -> None:
    taken = {option for each in LEAVES[path].params for option in each.opts}
    assert not taken & {"--key", "--password", "--secret", "--token"}


@pytest.mark.parametrize("path", [path for path in LEAVES if path.split()[1] not in {"serve", "index", "trace"}])
def test_every_command_reaches_its_manager_in_the_same_way(path: str) -> None:
    taken = {option for each in LEAVES[path].params for option in each.opts}
    assert taken >= {"--manager", "--data-manager", "--key-file", "--ca-file", "--cert-file", "--cert-key-file"}


def test_the_exit_codes_are_in_the_help(tmp_path: Any) -> None:
    done = run_kvcm(tmp_path, "--help")
    shown = " ".join(done.stdout.split())
    assert [f"{code}: {meaning}" in shown for code, meaning in EXIT_CODES.items()] == [True] * len(EXIT_CODES)
    assert sorted(EXIT_CODES) == [0, 1, 2, 3]
    assert isinstance(app, typer.Typer)
