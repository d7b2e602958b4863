"""`kvcm optimize --from` a real manager: its proposals, and `--apply`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from command_runner import Commands
from secured import Tenants
from test_transport_process import ManagerProcess, manager_of_module
from test_transport_sites import Site

from kvcm.commands.optimize import LiveSituation, apply_proposals, proposals_for, read_situation
from kvcm.optimizer.live.proposals import Proposal
from kvcm.terminal.admin_client import AdminClient

_CHAINS = 8
_TURNS = 210
_BLOCKS = 6
_OLD_QUOTA = 24  # blocks


keeping = manager_of_module("kvcm.optimizer.recent_keys=200000")


@pytest.fixture(scope="module")
def driven(keeping: ManagerProcess) -> Iterator[tuple[str, float]]:
    """A group that engines of one instance walk in circles through, and which part of the blocks they found."""
    with keeping.api("grpc") as api:
        site = Site(api)
        block_bytes = 1 << 20
        group = site.group(quota={"capacity": _OLD_QUOTA * block_bytes})
        instance = site.instance(group, location_spec_infos=[{"name": "kv", "size": block_bytes}])
        found = 0
        for turn in range(_TURNS):
            keys = [1000 * (turn % _CHAINS) + block for block in range(_BLOCKS)]
            found += len(site.match(instance, keys))
            started = api.call("StartWriteCache", instance_id=instance, block_keys=keys)
            if started.write_session_id:
                site.finish(instance, started)
        yield group, found / (_TURNS * _BLOCKS)


@pytest.fixture(scope="module")
def commands(keeping: ManagerProcess) -> Commands:
    return Commands(keeping)


def url_of(server: ManagerProcess) -> str:
    return f"http://{server.address.admin_http}"


def proposed(server: ManagerProcess, group: str) -> tuple[AdminClient, LiveSituation, list[Proposal]]:
    """Look at a manager as the command does."""
    client = AdminClient(url_of(server))
    looked = read_situation(client)
    made = [each for each in proposals_for(looked.situation, 0.95, 1) if each.state.group.name == group]
    return client, looked, made


def group_of(commands: Commands, name: str) -> dict[str, Any]:
    found: dict[str, Any] = commands.json("group", "show", name)
    return found


def test_it_reports_the_measured_hit_rate_and_better_settings(
    keeping: ManagerProcess, driven: tuple[str, float], commands: Commands, tmp_path: Path
) -> None:
    group, measured = driven
    files = tmp_path / "live.json", tmp_path / "live.csv", tmp_path / "live.html"
    outputs = [
        word
        for option, file in zip(("--json", "--csv", "--report"), files, strict=True)
        for word in (option, str(file))
    ]
    text = commands.ok("optimize", "--from", url_of(keeping), "--workers", "1", *outputs)
    assert group in text
    assert "recorded: " in text
    (shown,) = [each for each in json.loads(files[0].read_text())["groups"] if each["group"] == group]
    assert shown["measured_hit_rate"] == pytest.approx(measured)
    assert shown["attainable_hit_rate"] == pytest.approx(1 - _CHAINS / _TURNS, abs=0.01)
    assert abs(shown["present"]["hit_rate"] - measured) <= 0.05
    assert shown["proposed"]["hit_rate"] >= 0.95 * shown["attainable_hit_rate"]
    assert shown["proposed"]["quota_bytes"] > shown["present"]["quota_bytes"]
    rows = [row for row in csv.DictReader(files[1].read_text().splitlines()) if row["group"] == group]
    assert len(rows) == len(shown["trials"]) + 1
    assert f"Group {group}" in files[2].read_text()


def test_nothing_changes_without_a_yes(keeping: ManagerProcess, driven: tuple[str, float], commands: Commands) -> None:
    before = group_of(commands, driven[0])
    done = commands.run("optimize", "--from", url_of(keeping), "--workers", "1", "--apply")
    assert (done.exit_code, "give --yes" in done.stderr) == (2, True)
    assert group_of(commands, driven[0]) == before


def test_a_change_by_another_client_meanwhile_stays(
    keeping: ManagerProcess, driven: tuple[str, float], commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    group, _ = driven
    client, looked, made = proposed(keeping, group)
    commands.ok("group", "update", group, "--user-data", "somebody else")
    before = group_of(commands, group)
    with pytest.raises(typer.Exit):
        apply_proposals(client, looked, made, yes=True)
    assert f"{group}: not changed: " in capsys.readouterr().err
    assert group_of(commands, group) == before


def test_the_proposal_is_applied_and_nothing_else(
    keeping: ManagerProcess, driven: tuple[str, float], commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    group, _ = driven
    before = group_of(commands, group)
    client, looked, made = proposed(keeping, group)
    apply_proposals(client, looked, made, yes=True)
    assert f"{group}: changed" in capsys.readouterr().out
    after, wanted = group_of(commands, group), made[0].proposed.group
    assert after["quota"]["capacity"] == wanted.quota.capacity
    assert after["version"] == before["version"] + 1
    after["quota"]["capacity"] = before["quota"]["capacity"]
    after["version"] = before["version"]
    for each in (before, after):
        each["cache_config"]["reclaim_strategy"].pop("policy", None)
    assert after == before


def test_a_manager_that_keeps_nothing_names_the_setting(server: ManagerProcess) -> None:
    refusal = Commands(server).refused("optimize", "--from", url_of(server))
    assert "kvcm.optimizer.recent_keys" in refusal


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give traces, or --from"),
        (("trace.jsonl", "--from", "http://127.0.0.1:1"), "give traces, or --from"),
        (("--from", "http://127.0.0.1:1"), "no manager answers"),
        (("--from", "http://127.0.0.1:1", "--target", "100"), "--target is 100"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(server: ManagerProcess, arguments: tuple[str, ...], said: str) -> None:
    done = Commands(server).run("optimize", *arguments)
    assert done.exit_code != 0
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_only_an_administrator_may(tenants: Tenants) -> None:
    commands = Commands(tenants.server.process)
    url = url_of(tenants.server.process)
    assert "asks for a key" in commands.refused("optimize", "--from", url, exit_code=3)
    for role in ("viewer", "operator"):
        refusal = commands.refused("optimize", "--from", url, exit_code=3, KVCM_KEY=tenants.keys[role])
        assert ("administrators" in refusal, tenants.keys[role] in refusal) == (True, False)
    refusal = commands.refused("optimize", "--from", url, KVCM_KEY=tenants.server.admin_key)
    assert "recent_keys" in refusal
