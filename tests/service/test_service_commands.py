"""`kvcm get`, `trim`, `pin`, `group`, `usage`, `quota`, `instance`, `account` and `storage` as operators run them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from command_runner import Commands
from ports import free_port
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess, run_kvcm
from test_transport_sites import Site, unique

from kvcm.model.keys import block_keys_from_tokens

BLOCK = 64
TOKENS = list(range(100, 120))
KEYS = block_keys_from_tokens(TOKENS, 4)


def _texts(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def test_get_reports_where_a_prompt_lies_run_by_run(site: Site, commands: Commands) -> None:
    storage = site.storage()
    instance = site.instance(site.group(storage))
    uris = [each["kv"] for each in site.write(instance, KEYS[:3])]
    site.start(instance, KEYS[3:4])
    shown = commands.ok("get", instance, "--tokens", _texts([*TOKENS, 7]))
    assert "an engine can load the first 3 of 5 blocks, 12 tokens" in shown
    for part in ("0–2", "serving", "writing", "missing", "192 B", storage):
        assert part in shown
    found = commands.json("get", instance, "--tokens", _texts(TOKENS))
    assert (found["matched_blocks"], found["matched_tokens"], found["blocks"]) == (3, 12, 5)
    serving, writing, missing = found["runs"]
    assert (serving["start"], serving["blocks"], serving["state"], serving["storage"]) == (0, 3, "serving", storage)
    assert (serving["first_uri"], serving["last_uri"], serving["bytes"]) == (uris[0], uris[2], 3 * BLOCK)
    assert (serving["first_key"], serving["last_key"]) == (str(KEYS[0]), str(KEYS[2]))
    assert (writing["start"], writing["state"], missing["start"], missing["state"]) == (3, "writing", 4, "missing")


def test_keys_and_files_name_the_same_blocks(site: Site, commands: Commands, tmp_path: Path) -> None:
    instance = site.instance()
    site.write(instance, KEYS)
    tokens, keys = tmp_path / "tokens", tmp_path / "keys.json"
    tokens.write_text("\n".join(map(str, TOKENS)))
    keys.write_text(json.dumps([str(key) for key in KEYS]))
    wanted = commands.json("get", instance, "--tokens", _texts(TOKENS))
    assert wanted["matched_blocks"] == 5
    assert commands.json("get", instance, "--keys", _texts(KEYS)) == wanted
    assert commands.json("get", instance, "--tokens-file", str(tokens)) == wanted
    assert commands.json("get", instance, "--keys-file", str(keys)) == wanted
    piped = commands.run("get", instance, "--tokens-file", "-", "--json", typed=tokens.read_text())
    assert json.loads(piped.stdout) == wanted


def test_a_long_prompt_is_asked_in_pages(site: Site, commands: Commands) -> None:
    keys = list(range(1, 10_001))
    instance = site.instance()
    site.write(instance, keys[:9000])
    found = commands.json("get", instance, "--keys", _texts(keys))
    assert (found["matched_blocks"], [run["blocks"] for run in found["runs"]]) == (9000, [9000, 1000])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give one of --tokens, --tokens-file, --keys and --keys-file, not 0"),
        (("--tokens", "1", "--keys", "2"), "not 2"),
        (("--tokens", "1,2,three"), "--tokens has 'three', must be whole numbers"),
        (("--tokens", "1,2,3"), "3 tokens fill no block: one has 4 tokens"),
        (("--keys", "9223372036854775808"), "--keys has a number that does not fit 64 bits"),
        (("--keys-file", "/nowhere/at/all"), "/nowhere/at/all: No such file"),
    ],
)
def test_what_is_no_prompt_is_refused(site: Site, commands: Commands, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in commands.refused("get", site.instance(), *arguments)


def test_blocks_of_a_storage_that_is_off_are_there_and_cannot_be_loaded(site: Site, commands: Commands) -> None:
    off, on = site.storage(), site.storage()
    instance = site.instance(site.group(off, on))
    site.write(instance, KEYS)
    commands.ok("storage", "disable", off)
    found = commands.json("get", instance, "--keys", _texts(KEYS))
    assert (found["matched_blocks"], found["runs"][0]["state"], found["runs"][0]["storage"]) == (0, "serving", off)


def test_pins_are_added_listed_and_removed(site: Site, commands: Commands) -> None:
    instance = site.instance(site.group(pin_budget_bytes=1 << 20))
    site.write(instance, KEYS[:3])
    add = ("pin", "add", instance, "--owner", "someone", "--ttl", "10m", "--tokens", _texts(TOKENS))
    added = commands.json(*add)
    assert (added["pinned_blocks"], added["pinned_bytes"]) == (3, 3 * BLOCK)
    (listed,) = commands.json("pin", "list", instance)["pins"]
    assert (listed["pin_id"], listed["owner"]) == (added["pin_id"], "someone")
    commands.ok("pin", "remove", instance, added["pin_id"])
    assert commands.json("pin", "list", instance) == {"pins": []}
    assert "3 of 5 blocks, 192 B, until" in commands.ok(*add)
    assert "nothing is pinned" in commands.refused(*add[:-2], "--keys", "99")
    assert "time 'long' must be" in commands.refused(*add[:6], "long", *add[7:])


def test_a_trim_removes_everything_after_a_question(site: Site, commands: Commands) -> None:
    instance = site.instance()
    site.write(instance, KEYS)
    assert "Remove all blocks of instance" in commands.refused("trim", instance, "--all", exit_code=2)
    assert site.hits(instance, KEYS) == KEYS
    commands.ok("trim", instance, "--all", "--yes")
    assert eventually(lambda: site.hits(instance, KEYS) == [])


def test_a_trim_by_time_removes_the_blocks_written_then(site: Site, commands: Commands) -> None:
    instance = site.instance()
    site.write(instance, KEYS)
    trim = ("trim", instance, "--yes")
    commands.ok(*trim, "--written-before", "2020-01-01T00:00")
    assert site.hits(instance, KEYS) == KEYS
    commands.ok(*trim, "--written-from", "2020-01-01T00:00+01:00")
    assert eventually(lambda: site.hits(instance, KEYS) == [])


@pytest.fixture
def group(site: Site, commands: Commands) -> str:
    """A group with a quota, and everything else as it is by default."""
    name = unique("made")
    assert commands.ok("group", "create", name, "--storage", site.storage(), "--quota", "10GiB") == ""
    return name


def test_a_group_is_created_with_everything_that_can_be_said(site: Site, commands: Commands) -> None:
    name, first, second = unique("made"), site.storage(), site.storage()
    options = (
        f"--storage {first} --storage {second} --quota 10GiB --quota-type dummy=5GiB --global-quota all"
        f" --guarantee {first}=1GiB --pin-budget 1MiB --policy lfu --high 0.9 --low 0.7 --share fixed"
        " --delete-delay-ms 5 --max-instances 3 --max-keys 1000 --prefer always-mooncake --user-data ours"
    )
    made = commands.json("group", "create", name, *options.split())
    shown = commands.json("group", "show", name)
    assert shown == {**made, "block_store": "registry"}
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


def test_omitted_options_have_defaults_that_work(group: str, site: Site, commands: Commands) -> None:
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


def test_a_storage_that_is_not_there_is_reported(commands: Commands) -> None:
    name = unique("made")
    done = commands.run("group", "create", name, "--storage", "nowhere", "--quota", "1GiB")
    assert (done.exit_code, "['nowhere'] do not exist" in done.stderr) == (0, True)


def test_a_dry_run_creates_nothing(commands: Commands) -> None:
    shown = commands.ok("group", "create", "never", "--storage", "x", "--quota", "1GiB", "--dry-run")
    assert ("nothing was created" in shown, "1.0 GiB" in shown) == (True, True)
    assert "does not exist" in commands.refused("group", "show", "never")


def test_an_update_changes_the_given_fields_and_nothing_else(group: str, commands: Commands) -> None:
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


def test_a_group_is_deleted_after_a_question(group: str, commands: Commands) -> None:
    assert "Forget group" in commands.refused("group", "delete", group, exit_code=2)
    commands.ok("group", "delete", group, "--yes")
    assert "does not exist" in commands.refused("group", "show", group)


def test_usage_is_that_of_group_usage(group: str, commands: Commands) -> None:
    assert commands.json("usage", group)["groups"][0]["total"]["capacity_bytes"] == 10 << 30
    assert commands.ok("usage", group) == commands.ok("group", "usage", group)


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


_REFUSALS = {
    "trim any": {
        "": "give one of --all, --metadata-only",
        "--all --metadata-only": "give one of --all, --metadata-only",
        "--written-from yesterday": "--written-from is 'yesterday', must be unix seconds",
        "--written-before 2100-01-01": "must be from 1970 to 2038",
    },
    "group update default": {
        "--quota 10gb": "size '10gb' must be",
        "--quota-type floppy=1GiB": "--quota-type names 'floppy', must be one of hf3fs, mooncake",
        "--quota-type 1GiB": "--quota-type '1GiB' must be a name and a size",
        "--policy clock": "--policy is 'clock', must be one of leaf_lru",
        "--prefer tape": "--prefer is 'tape', must be one of always-3fs",
        "--share fair": "--share is 'fair', must be one of group_lru",
        "--ttl soon": "time 'soon' must be",
    },
    "storage add never": {
        "--type floppy": "--type is 'floppy', must be one of file, hf3fs",
        "--type file --set colour=red": "has no field 'colour', it has root_path, key_count_per_file",
        "--type file --set root_path": "--set 'root_path' is not FIELD=VALUE",
        "--type file --set key_count_per_file=many": "is 'many', must be a whole number below 2147483648",
        "--type pace --set enable_vipserver=yes": "is 'yes', must be true or false",
        "--type pace --set capacity_bytes=4Gigs": "size '4Gigs' must be",
        "--type mooncake --root /x": "has no field 'root_path'",
    },
}


@pytest.mark.parametrize(
    ("command", "options"), [(command, each) for command in _REFUSALS for each in _REFUSALS[command]]
)
def test_options_that_mean_nothing_are_refused(commands: Commands, command: str, options: str) -> None:
    assert _REFUSALS[command][options] in commands.refused(*command.split(), *options.split())


def test_an_update_changes_the_given_fields_and_reports_them(commands: Commands, storage: str) -> None:
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


def test_the_usage_of_a_group_is_shown_and_printed_as_json_with_numbers(site: Site, commands: Commands) -> None:
    storage = unique("storage")
    config = {"global_unique_name": storage, "dummy": {}, "capacity_bytes": 1 << 20}
    site.api.ok("AdminService.AddStorage", storage=config)
    group = site.group(storage, capacity=3 << 20)
    instance = site.instance(group)
    site.write(instance, range(32))
    shown = commands.ok("group", "usage", group)
    for text in (group, instance, f"storage {storage}", "2.0 KiB", "3.0 MiB", "× 3.00", "lru"):
        assert text in shown, shown
    assert f"storage {storage} is oversubscribed: its groups may use 3.00 times its capacity" in shown
    report = commands.json("group", "usage", group)
    assert [each["name"] for each in report["groups"]] == [group]
    assert report["groups"][0]["total"]["used_bytes"] == 32 * BLOCK
    assert report["groups"][0]["types"][0]["storage_type"] == "ST_DUMMY"
    assert report["storages"][0]["usage"]["capacity_bytes"] == 1 << 20
    assert {group, "default"} <= {each["name"] for each in commands.json("group", "usage")["groups"]}


def test_tables_in_a_pipe_are_as_wide_as_they_need_to_be(site: Site, commands: Commands) -> None:
    group = site.group()
    done = commands.run("group", "usage", group, COLUMNS="")
    assert "evict above" in done.stdout.splitlines()[0]


def test_global_quotas_are_set_listed_and_removed(commands: Commands) -> None:
    name, other = unique("quota"), unique("quota")
    assert commands.ok("quota", "set", name, "--capacity", "10GiB", "--mark", "0.75") == ""
    assert commands.ok("quota", "set", other, "--capacity", "500MB") == ""
    listed = {each["name"]: each for each in commands.json("quota", "list")["global_quotas"]}
    assert listed[name] == {"name": name, "capacity_bytes": 10 << 30, "used_percentage": 0.75}
    assert listed[other]["capacity_bytes"] == 500_000_000
    shown = {line.partition(" ")[0]: line for line in commands.ok("quota", "list").splitlines()}
    assert ("10.0 GiB" in shown[name], "75 %" in shown[name], "90 %" in shown[other]) == (True, True, True)
    assert commands.ok("quota", "remove", name) == ""
    assert name not in {each["name"] for each in commands.json("quota", "list")["global_quotas"]}
    assert commands.refused("quota", "remove", name) == f"kvcm: global quota {name!r} does not exist\n"


def test_a_scrub_deletes_only_when_it_is_reported_to(site: Site, commands: Commands, tmp_path: Path) -> None:
    root = tmp_path / "root"
    storage = site.storage(nfs={"root_path": str(root), "key_count_per_file": 1})
    instance = site.instance(site.group(storage))
    (uri,) = site.write(instance, [1])[0].values()
    known = Path("/" + uri.partition("://")[2].partition("/")[2].partition("?")[0])
    known.parent.mkdir(parents=True, exist_ok=True)
    orphan = known.with_name(f"{known.name}x")
    for path in (known, orphan):
        path.write_bytes(bytes(BLOCK))
        os.utime(path, (time.time() - 7200,) * 2)
    shown = commands.ok("storage", "scrub", storage)
    assert "nothing was deleted: give --delete for that" in shown
    assert "64 B" in shown
    assert commands.json("storage", "scrub", storage)["orphans"] == 1
    assert orphan.exists()
    assert "nothing was deleted" not in commands.ok("storage", "scrub", storage, "--min-age", "10000")
    assert commands.json("storage", "scrub", storage, "--delete")["deleted"] == 1
    assert (orphan.exists(), known.exists()) == (False, True)
    assert "nowhere" in commands.refused("storage", "scrub", "nowhere")


def test_garbage_is_freed_only_when_it_is_reported_to(site: Site, commands: Commands, tmp_path: Path) -> None:
    storage = site.storage(nfs={"root_path": str(tmp_path / "root"), "key_count_per_file": 1})
    instance = site.instance(site.group(storage))
    site.write(instance, [1, 2])  # and never the bytes
    arguments = ("storage", "garbage", "--instance", instance, "--check-bytes")
    shown = commands.ok(*arguments)
    assert "nothing was freed: give --delete for that" in shown
    assert "2 B" not in shown  # blocks, of which there are two
    assert site.hits(instance, [1, 2]) == [1, 2]
    found = commands.json(*arguments, "--delete")
    assert (found["blocks"], found["without_bytes"], found["freed_bytes"]) == (2, 2, 2 * BLOCK)
    assert site.hits(instance, [1, 2]) == []
    assert "nobody" in commands.refused("storage", "garbage", "--instance", "nobody")


def test_a_manager_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = run_kvcm(tmp_path, "group", "usage", "--manager", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvcm: no manager answers at {url}: Connection refused\n"
