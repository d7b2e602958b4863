"""Clients and managers of this release and the one before it understand each other, either one being older."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from manager_site import Manager, running
from previous_release import THIS, Release

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

_CLIENT = Path(__file__).parent / "release_client.py"


@pytest.fixture(scope="module")
def managers(tmp_path_factory: pytest.TempPathFactory, previous: Release) -> Iterator[dict[str, Manager]]:
    """One manager of each release."""
    folder = tmp_path_factory.mktemp("managers")
    both = {
        name: Manager(folder / name, {"kvcm.data_dir": str(folder / name / "data")}) for name in ("this", "previous")
    }
    both["previous"].code = previous.code
    with running(*both.values()):
        yield both
    assert [manager.failures() for manager in both.values()] == [[], []]


def _reported(client: Release, manager: Manager, name: str, folder: Path) -> dict[str, Any]:
    """Run a client of a release against a manager and return the outcomes that it printed."""
    ports = ("rpc", "http", "admin_rpc", "admin_http")
    place = {port: f"127.0.0.1:{manager.settings[f'kvcm.service.{port}_port']}" for port in ports}
    asked = json.dumps({**place, "name": name, "folder": str(folder)})
    done = subprocess.run(
        [sys.executable, str(_CLIENT), asked], env=client.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reported: dict[str, Any] = json.loads(done.stdout)
    return reported


def test_the_outcomes_of_clients_depend_on_no_release(
    managers: dict[str, Manager], previous: Release, tmp_path: Path
) -> None:
    asked = {"own": (THIS, "this"), "older": (previous, "this"), "newer": (THIS, "previous")}
    with ThreadPoolExecutor() as pool:
        begun = {
            name: pool.submit(_reported, client, managers[manager], name, tmp_path / name)
            for name, (client, manager) in asked.items()
        }
        reported = {name: each.result() for name, each in begun.items()}
    _assert_all_went_well(reported["own"])
    assert reported["older"] == reported["own"]
    assert reported["newer"] == reported["own"]


def _assert_all_went_well(reported: dict[str, Any]) -> None:
    engine = reported["engine"]
    assert (engine["prefix"], engine["left"], engine["pin"], engine["pins"]) == (24, 20, [6, 6 * 4096], [["me", 6]])
    assert engine["loaded"] == engine["checksums"] == [True] * 24
    assert all(
        engine[step] for step in ("register", "renew", "saved", "finish", "released", "abort", "unpin", "remove")
    )
    assert {words: outcome for words, outcome in reported["commands"].items() if outcome != [0, ""]} == {}
    assert [status for status, _ in reported["resources"].values()] == [201, 201, 200, 200, 200, 200, 200, 200, 400]
