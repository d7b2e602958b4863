"""`kvcm snapshot` as operators run it, against managers that run."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_transport_drivers import Api
from test_transport_process import ManagerProcess, manager, run_kvcm
from test_transport_sites import group_spec

pytestmark = pytest.mark.e2e


class Place(NamedTuple):
    """A manager of a test's own, and a directory for its files."""

    server: ManagerProcess
    api: Api
    directory: Path

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        url = f"http://{self.server.address.admin_http}"
        return run_kvcm(self.directory, "snapshot", *arguments, "--manager", url, **environment)

    def answered(self, answer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command that asks, and answer."""
        url = f"http://{self.server.address.admin_http}"
        command = [sys.executable, "-m", "kvcm", "snapshot", *arguments, "--manager", url]
        return subprocess.run(
            command, cwd=self.directory, input=answer, capture_output=True, text=True, timeout=60, check=False,
            env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
        )  # fmt: skip

    def saved(self) -> Any:
        """Return a snapshot, saved as `snap`."""
        done = self.run("save", "snap")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        return json.loads((self.directory / "snap").read_text())

    def write(self, document: Any) -> None:
        (self.directory / "snap").write_text(json.dumps(document))

    def group(self, name: str) -> Any:
        return self.api.ok("AdminService.GetInstanceGroup", name=name).instance_group


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ManagerProcess, Api]]:
    with manager(tmp_path_factory.mktemp("manager")) as server, server.api() as api:
        yield server, api


@pytest.fixture
def place(running: tuple[ManagerProcess, Api], tmp_path: Path) -> Place:
    server, api = running
    return Place(server, api, tmp_path)


def test_a_snapshot_is_saved_as_a_whole_for_its_owner_alone(place: Place) -> None:
    file = place.directory / "snap"
    file.write_text("old")
    file.chmod(0o644)
    document = place.saved()
    assert document["format"] == "kvcm-config"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(place.directory.iterdir()) == [file]
    shown = place.run("save")
    assert shown.returncode == 0
    del document["created_at_ms"]
    again = json.loads(shown.stdout)
    assert again.pop("created_at_ms").isdigit()
    assert again == document


def test_a_snapshot_that_cannot_be_written_leaves_the_old_one(place: Place) -> None:
    done = place.run("save", "nowhere/snap")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvcm: ")


def test_diff_says_by_its_exit_code_whether_there_is_a_difference(place: Place) -> None:
    document = place.saved()
    same = place.run("diff", "snap")
    assert (same.returncode, same.stdout, same.stderr) == (0, "no difference\n", "")
    document["groups"][0]["quota"]["capacity"] = "77"
    document["quotas"].append({"name": "new", "capacity_bytes": "5"})
    place.write(document)
    other = place.run("diff", "snap")
    assert (other.returncode, other.stderr) == (1, "")
    for text in ("change", "quota.capacity", "30000000000", "77", "add", "new", "1 to add, 1 to change"):
        assert text in other.stdout, other.stdout
    assert place.run("diff", "snap", "--json").returncode == 1
    changes = json.loads(place.run("diff", "snap", "--json").stdout)["changes"]
    assert [(each["action"], each["kind"], each["name"]) for each in changes] == [
        ("change", "group", "default"),
        ("add", "quota", "new"),
    ]
    assert changes[0]["new"]["quota"]["capacity"] == "77"
    assert place.group("default").quota.capacity == 30_000_000_000


def test_diff_names_resources_that_are_not_in_the_file(place: Place) -> None:
    document = place.saved()
    place.api.ok("AdminService.CreateInstanceGroup", instance_group=group_spec("extra", "nfs_01"))
    done = place.run("diff", "snap")
    assert (done.returncode, "not in the snapshot, stays" in done.stdout) == (1, True)
    place.write(document)
    pruned = place.run("load", "snap", "--prune", "--yes")
    assert (pruned.returncode, "1 to remove" in pruned.stdout) == (0, True), pruned
    assert place.run("diff", "snap").returncode == 0


@pytest.mark.parametrize("command", ["diff", "load"])
def test_a_bad_file_is_refused_in_one_line(place: Place, command: str) -> None:
    document = place.saved()
    document["groups"][0]["qouta"] = {}
    place.write(document)
    (place.directory / "binary").write_bytes(b"\xff\xfe")
    for file, text in (("snap", "groups[0].qouta is unknown, allowed is quota"), ("binary", "UTF-8"), ("none", "none")):
        done = place.run(command, file)
        assert (done.returncode, done.stdout) == (2 if command == "diff" else 1, "")
        assert done.stderr.startswith("kvcm: ")
        assert text in done.stderr
        assert done.stderr.count("\n") == 1


def test_without_a_manager_the_exit_code_is_2(place: Place) -> None:
    place.saved()
    for arguments in (("save",), ("diff", "snap"), ("load", "snap", "--yes")):
        done = run_kvcm(place.directory, "snapshot", *arguments, "--manager", "http://127.0.0.1:1")
        assert (done.returncode, done.stdout) == (2, ""), done


def test_load_shows_and_asks(place: Place) -> None:
    document = place.saved()
    document["groups"][0]["user_data"] = "loaded"
    place.write(document)
    for answer, code in (("n\n", 1), ("", 1)):
        refused = place.answered(answer, "load", "snap")
        assert (refused.returncode, "user_data" in refused.stdout) == (code, True)
        assert place.group("default").user_data != "loaded"
    dry = place.run("load", "snap", "--dry-run")
    assert (dry.returncode, "1 to change" in dry.stdout) == (0, True)
    assert place.group("default").user_data != "loaded"
    done = place.answered("y\n", "load", "snap")
    assert (done.returncode, done.stdout.endswith("loaded\n")) == (0, True), done
    assert place.group("default").user_data == "loaded"
    again = place.run("load", "snap")
    assert (again.returncode, again.stdout) == (0, "no difference\n")


def test_load_for_scripts(place: Place) -> None:
    document = place.saved()
    document["accounts"].append({"user_name": "ann", "role": "ROLE_ADMIN"})
    place.write(document)
    refused = place.run("load", "snap", "--json")
    assert (refused.returncode, "--yes" in refused.stderr) == (1, True)
    done = place.run("load", "snap", "--json", "--yes")
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)
    assert answer["loaded"] is True
    assert [(each["action"], each["name"], each["old"]) for each in answer["changes"]] == [("add", "ann", None)]
    piped = place.answered((place.directory / "snap").read_text(), "load", "-", "--yes")
    assert (piped.returncode, piped.stdout) == (0, "no difference\nloaded\n")


def test_texts_that_would_drive_the_terminal_are_shown_as_json(place: Place) -> None:
    document = place.saved()
    document["groups"][0]["user_data"] = "\x1b[2Jgone"
    place.write(document)
    done = place.run("diff", "snap")
    assert ("\x1b" in done.stdout, "\\u001b[2Jgone" in done.stdout) == (False, True)
