"""`kvcm group` and `kvcm usage` as operators run them."""

from __future__ import annotations

from typing import Any

import pytest
from command_runner import Commands
from test_transport_sites import Site, unique


@pytest.fixture
def group(site: Site, commands: Commands) -> str:
    """A group with a quota, and everything else as it is by default."""
    name = unique("made")
    assert commands.ok("group", "create", name, "--storage", site.storage(), "--quota", "10GiB") == ""
    return name


def test_a_group_is_created_with_everything_that_can_be_said(site: Site, commands: Commands) -> None:
    name, first, second = unique("made"), site.storage(), site.storage()
    made = commands.json(
        *("group", "create", name, "--storage", first, "--storage", second, "--quota", "10GiB"),
        *(
            "--quota-type",
            "dummy=5GiB",
            "--global-quota",
            "all",
            "--guarantee",
            f"{first}=1GiB",
            "--pin-budget",
            "1MiB",
        ),
        *("--policy", "lfu", "--high", "0.9", "--low", "0.7", "--share", "fixed", "--delete-delay-ms", "5"),
        *("--max-instances", "3", "--max-keys", "1000", "--prefer", "always-mooncake", "--user-data", "ours"),
    )
    shown = commands.json("group", "show", name)
    assert shown == made
    strategy = shown["cache_config"]["reclaim_strategy"]
    assert (shown["storage_candidates"], shown["quota"]["capacity"]) == ([first, second], 10 << 30)
    assert shown["quota"]["quota_config"] == [{"storage_type": "ST_DUMMY", "capacity": 5 << 30}]
    assert shown["storage_guarantees"] == [{"storage_unique_name": first, "guaranteed_bytes": 1 << 30}]
    assert strategy["trigger_strategy"] == {"used_size": 0, "used_percentage": 0.9, "hysteresis": 0.2}
    assert (strategy["policy"]["name"], strategy["share"], strategy["delay_before_delete_ms"]) == ("lfu", "fixed", 5)
    assert shown["cache_config"]["data_storage_strategy"] == "CPS_ALWAYS_MOONCAKE"
    assert shown["cache_config"]["meta_indexer_config"]["max_key_count"] == 1000
    assert (shown["global_quota_group_name"], shown["pin_budget_bytes"], shown["user_data"]) == ("all", 1 << 20, "ours")
    text = commands.ok("group", "show", name)
    for part in ("5.0 GiB", f"guaranteed on {first}", "90 %", "70 %", "lfu", "fixed"):
        assert part in text


def test_what_is_not_said_has_defaults_that_work(group: str, site: Site, commands: Commands) -> None:
    shown = commands.json("group", "show", group)
    assert (shown["global_quota_group_name"], shown["version"]) == (group, 1)
    assert shown["cache_config"]["reclaim_strategy"]["trigger_strategy"]["used_percentage"] == 0.8
    site.write(site.instance(group), range(4))
    rows = commands.ok("group", "list").splitlines()
    (row,) = [line for line in rows if line.startswith(f"{group} ")]
    assert ("10.0 GiB" in row, "80 %" in row, "leaf_lru" in row) == (True, True, True)
    assert group in [each["name"] for each in commands.json("group", "list")["groups"]]


def test_a_group_without_storage_or_quota_or_of_a_taken_name_is_refused(group: str, commands: Commands) -> None:
    assert "a group needs --storage" in commands.refused("group", "create", "never", "--quota", "1GiB")
    assert "a group needs --storage" in commands.refused("group", "create", "never", "--storage", "x")
    assert "exists" in commands.refused("group", "create", group, "--storage", "x", "--quota", "1")


def test_a_storage_that_is_not_there_is_told(commands: Commands) -> None:
    name = unique("made")
    done = commands.run("group", "create", name, "--storage", "nowhere", "--quota", "1GiB")
    assert (done.exit_code, "['nowhere'] do not exist" in done.stderr) == (0, True)


def test_a_dry_run_creates_nothing(commands: Commands) -> None:
    shown = commands.ok("group", "create", "never", "--storage", "x", "--quota", "1GiB", "--dry-run")
    assert ("nothing was created" in shown, "1.0 GiB" in shown) == (True, True)
    assert "does not exist" in commands.refused("group", "show", "never")


def test_an_update_changes_what_is_given_and_nothing_else(group: str, commands: Commands) -> None:
    before = commands.json("group", "show", group)
    dry = commands.ok("group", "update", group, "--quota", "20GiB", "--dry-run")
    assert dry == "quota.capacity: 10.0 GiB → 20.0 GiB\nnothing was changed: leave --dry-run out for that\n"
    assert commands.json("group", "show", group) == before
    assert commands.ok("group", "update", group, "--quota", "20GiB") == "quota.capacity: 10.0 GiB → 20.0 GiB\n"
    after = commands.json("group", "show", group)
    assert after == {**before, "quota": {**before["quota"], "capacity": 20 << 30}, "version": 2}
    assert "nothing to change" in commands.ok("group", "update", group, "--quota", "20GiB")
    assert commands.json("group", "show", group)["version"] == 2


def test_limits_of_types_and_guarantees_are_added_changed_and_taken_away(group: str, commands: Commands) -> None:
    def types() -> Any:
        return {
            each["storage_type"]: each["capacity"]
            for each in commands.json("group", "show", group)["quota"]["quota_config"]
        }

    (storage,) = commands.json("group", "show", group)["storage_candidates"]
    commands.ok("group", "update", group, "--quota-type", "file=1GiB", "--quota-type", "dummy=2GiB")
    commands.ok("group", "update", group, "--quota-type", "file=3GiB", "--guarantee", f"{storage}=1MiB")
    assert types() == {"ST_NFS": 3 << 30, "ST_DUMMY": 2 << 30}
    commands.ok("group", "update", group, "--quota-type", "file=none", "--guarantee", f"{storage}=none")
    assert types() == {"ST_DUMMY": 2 << 30}
    assert commands.json("group", "show", group)["storage_guarantees"] == []


def test_a_low_mark_stays_where_it_is_said(group: str, commands: Commands) -> None:
    commands.ok("group", "update", group, "--high", "0.95", "--low", "0.9")
    text = commands.ok("group", "show", group)
    assert ("95 %" in text, "90 %" in text) == (True, True)
    assert "--low is 0.96" in commands.refused("group", "update", group, "--low", "0.96")
    assert "--high is 0, must be above 0" in commands.refused("group", "update", group, "--high", "0")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--quota", "10gb"), "size '10gb' must be"),
        (("--quota-type", "floppy=1GiB"), "--quota-type names 'floppy', must be one of hf3fs, mooncake"),
        (("--quota-type", "1GiB"), "--quota-type '1GiB' must be a name and a size"),
        (("--policy", "clock"), "--policy is 'clock', must be one of leaf_lru"),
        (("--prefer", "tape"), "--prefer is 'tape', must be one of always-3fs"),
        (("--share", "fair"), "--share is 'fair', must be one of group_lru"),
        (("--ttl", "soon"), "time 'soon' must be"),
    ],
)
def test_options_that_mean_nothing_are_refused(
    group: str, commands: Commands, arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in commands.refused("group", "update", group, *arguments)


def test_a_group_is_deleted_after_a_question(group: str, commands: Commands) -> None:
    assert "Forget group" in commands.refused("group", "delete", group, exit_code=2)
    commands.ok("group", "delete", group, "--yes")
    assert "does not exist" in commands.refused("group", "show", group)


def test_usage_is_that_of_group_usage(group: str, commands: Commands) -> None:
    assert commands.json("usage", group)["groups"][0]["total"]["capacity_bytes"] == 10 << 30
    assert commands.ok("usage", group) == commands.ok("group", "usage", group)
