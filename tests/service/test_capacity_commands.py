"""`kvcm group`, `storage`, `quota` and `pin` as operators run them, against a manager that runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from command_runner import Commands
from ports import free_port
from test_transport_process import run_kvcm
from test_transport_sites import Site, unique

BLOCK = 64


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


def test_a_size_that_is_none_is_refused_before_anybody_is_asked(commands: Commands) -> None:
    assert "size '10gb' must be a number of bytes" in commands.refused("quota", "set", "q", "--capacity", "10gb")


def test_a_scrub_deletes_only_when_it_is_told_to(site: Site, commands: Commands, tmp_path: Path) -> None:
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


def test_garbage_is_freed_only_when_it_is_told_to(site: Site, commands: Commands, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "arguments",
    [("group", "usage"), ("quota", "list"), ("quota", "remove", "x"), ("storage", "scrub", "x"), ("pin", "list", "x")],
)
def test_a_manager_that_is_not_there_is_one_line_and_exit_code_2(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    done = run_kvcm(tmp_path, *arguments, "--manager", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvcm: no manager answers at {url}: Connection refused\n"
