"""`kvcm instance` and `kvcm account` as operators run them."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_runner import Commands
from test_transport_sites import Site, unique

REGISTER = ("--model", "m", "--dtype", "bf16", "--block-size", "4", "--spec", "tp0=1KiB", "--spec", "tp1=1KiB")


def test_an_instance_is_registered_listed_shown_and_removed(site: Site, commands: Commands) -> None:
    name, group = unique("Qwen/instance"), site.group()
    for _ in range(2):  # again with the same settings is no error
        commands.ok("instance", "register", name, "--group", group, *REGISTER)
    (listed,) = commands.json("instance", "list", "--group", group)["instances"]
    shown = commands.json("instance", "show", name)
    assert listed == shown
    assert (shown["instance_id"], shown["block_size"]) == (name, 4)
    assert [(each["name"], each["size"]) for each in shown["location_spec_infos"]] == [("tp0", 1024), ("tp1", 1024)]
    assert "2.0 KiB" in commands.ok("instance", "list", "--group", group)
    assert "part tp1" in commands.ok("instance", "show", name)
    assert "give --yes" in commands.refused("instance", "remove", name, exit_code=2)
    commands.ok("instance", "remove", name, "--yes")
    assert commands.json("instance", "list", "--group", group) == {"instances": []}
    assert name in commands.refused("instance", "show", name)


def test_a_part_without_a_size_is_refused(site: Site, commands: Commands) -> None:
    arguments = ("register", "never", "--group", site.group(), *REGISTER[:-1], "tp1")
    assert "--spec 'tp1' must be a name and a size" in commands.refused("instance", *arguments)


def test_accounts_come_and_go_and_passwords_are_no_arguments(commands: Commands, tmp_path: Path) -> None:
    name, file = unique("person"), tmp_path / "password"
    file.write_text("correct horse battery\n")
    file.chmod(0o640)
    add = ("account", "add", name, "--role", "admin", "--password-file", str(file))
    assert f"password file {file} has mode 640: others can read" in commands.refused(*add)
    file.chmod(0o600)
    assert commands.ok(*add) == ""
    assert {"name": name, "role": "admin"} in commands.json("account", "list")["accounts"]
    assert name in commands.ok("account", "list")
    assert "give --password-file" in commands.refused("account", "add", "never", exit_code=2)
    assert "--role is 'king'" in commands.refused("account", "add", "never", "--role", "king")
    assert "give --yes" in commands.refused("account", "remove", name, exit_code=2)
    commands.ok("account", "remove", name, "--yes")
    assert name not in commands.ok("account", "list")


@pytest.mark.parametrize(("text", "lines"), [("", 0), ("a\nb\n", 2), ("\n", 1)])
def test_a_password_file_has_one_line(commands: Commands, tmp_path: Path, text: str, lines: int) -> None:
    file = tmp_path / "password"
    file.write_text(text)
    file.chmod(0o600)
    refused = commands.refused("account", "add", "never", "--password-file", str(file))
    assert f"has {lines} lines, must be one line" in refused
