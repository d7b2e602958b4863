"""`kvcm storage` as operators run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_runner import Commands
from test_transport_process import ManagerProcess
from test_transport_sites import Site, unique


@pytest.fixture
def storage(commands: Commands) -> str:
    """A storage that moves no bytes."""
    name = unique("stored")
    assert commands.ok("storage", "add", name, "--type", "dummy", "--root", name) == ""
    return name


def _listed(commands: Commands, name: str) -> Any:
    return next((each for each in commands.json("storage", "list")["storages"] if each["name"] == name), None)


def test_a_storage_is_added_shown_and_removed(commands: Commands, tmp_path: Path) -> None:
    name, root = unique("stored"), str(tmp_path / "root")
    options = ("--root", root, "--capacity", "1GiB", "--mark", "0.5", "--set", "key_count_per_file=8")
    commands.ok("storage", "add", name, "--type", "file", *options)
    shown = commands.json("storage", "show", name)
    assert (shown["nfs"], shown["capacity_bytes"]) == ({"root_path": f"{root}/", "key_count_per_file": 8}, 1 << 30)
    text = commands.ok("storage", "show", name)
    assert ("1.0 GiB" in text, "50 %" in text, f"{root}/" in text) == (True, True, True)
    assert _listed(commands, name)["type"] == "file"
    assert "give --yes" in commands.refused("storage", "remove", name, exit_code=2)
    assert _listed(commands, name) is not None
    commands.ok("storage", "remove", name, "--yes")
    assert _listed(commands, name) is None
    assert commands.refused("storage", "show", name) == f"kvcm: storage {name!r} does not exist\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--type", "floppy"), "--type is 'floppy', must be one of file, hf3fs"),
        (("--type", "file", "--set", "colour=red"), "has no field 'colour', it has root_path, key_count_per_file"),
        (("--type", "file", "--set", "root_path"), "--set 'root_path' is not FIELD=VALUE"),
        (("--type", "file", "--set", "key_count_per_file=many"), "is 'many', must be a whole number below 2147483648"),
        (("--type", "pace", "--set", "enable_vipserver=yes"), "is 'yes', must be true or false"),
        (("--type", "pace", "--set", "capacity_bytes=4Gigs"), "size '4Gigs' must be"),
        (("--type", "mooncake", "--root", "/x"), "has no field 'root_path'"),
    ],
)
def test_what_no_storage_is_made_of_is_refused(commands: Commands, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in commands.refused("storage", "add", "never", *arguments)


def test_an_update_changes_what_is_given_and_tells_it(commands: Commands, storage: str) -> None:
    dry = commands.ok("storage", "update", storage, "--capacity", "2GiB", "--dry-run")
    assert ("capacity_bytes: 0 B → 2.0 GiB" in dry, "nothing was changed" in dry) == (True, True)
    assert commands.json("storage", "show", storage)["capacity_bytes"] == 0
    assert commands.json("storage", "update", storage, "--capacity", "2GiB") == {
        "changed": True,
        "changes": [{"field": "capacity_bytes", "old": 0, "new": 2 << 30}],
    }
    assert commands.json("storage", "show", storage)["dummy"]["root_path"] == f"{storage}/"
    assert "nothing to change" in commands.ok("storage", "update", storage, "--capacity", "2GiB")


def test_a_storage_is_switched_off_and_on(commands: Commands, storage: str) -> None:
    commands.ok("storage", "disable", storage)
    assert _listed(commands, storage)["is_enabled"] is False
    commands.ok("storage", "enable", storage)
    assert _listed(commands, storage)["is_enabled"] is True


def test_a_drain_is_begun_listed_and_cancelled(commands: Commands, storage: str) -> None:
    commands.ok("storage", "drain", storage)
    assert storage in [each["storage_unique_name"] for each in commands.json("storage", "drains")["drains"]]
    assert storage in commands.ok("storage", "drains")
    commands.ok("storage", "cancel", storage)
    assert storage not in commands.ok("storage", "drains")
    commands.ok("storage", "drain", storage)
    commands.ok("storage", "drain", storage, "--cancel")
    assert _listed(commands, storage)["is_draining"] is False


def test_a_drain_is_waited_for(server: ManagerProcess, commands: Commands) -> None:
    with server.api() as api:
        site = Site(api)
        storage = site.storage()
        instance = site.instance(site.group(storage))
        site.write(instance, range(100))
        done = commands.run("storage", "drain", storage, "--wait")
        assert (done.exit_code, done.stdout) == (0, "")
        assert site.hits(instance, range(100)) == []
    left = {each["storage_unique_name"]: each["left_bytes"] for each in commands.json("storage", "drains")["drains"]}
    assert left[storage] == 0
