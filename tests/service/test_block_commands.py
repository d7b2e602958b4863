"""`kvcm get`, `trim` and `pin` as operators run them."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from command_runner import Commands
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess, manager, run_kvcm
from test_transport_sites import Site

from kvcm.cache.archive import ArchiveReader, Rows
from kvcm.model.keys import block_keys_from_tokens

BLOCK = 64
TOKENS = list(range(100, 120))
KEYS = block_keys_from_tokens(TOKENS, 4)


def _texts(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))


def test_get_tells_where_a_prompt_lies_run_by_run(site: Site, commands: Commands) -> None:
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
def test_prompts_that_are_none_are_refused(
    site: Site, commands: Commands, arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in commands.refused("get", site.instance(), *arguments)


def test_blocks_of_a_storage_that_is_off_are_there_and_cannot_be_loaded(site: Site, commands: Commands) -> None:
    off, on = site.storage(), site.storage()
    instance = site.instance(site.group(off, on))
    site.write(instance, KEYS)
    commands.ok("storage", "disable", off)
    found = commands.json("get", instance, "--keys", _texts(KEYS))
    assert (found["matched_blocks"], found["runs"][0]["state"], found["runs"][0]["storage"]) == (0, "serving", off)


def _accesses(process: ManagerProcess, directory: Path) -> Mapping[int, Any]:
    """Stop a manager and return when each of its blocks was last read, and how often."""
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    file = directory / "export"
    done = run_kvcm(directory, "index", "export", str(file), "--force", "--data-dir", str(process.data_dir))
    assert done.returncode == 0, done.stderr
    with file.open("rb") as opened:
        frames = [frame for frame in ArchiveReader(opened, str(file)).frames() if isinstance(frame, Rows)]
    return {row.key: tuple(row.access) for frame in frames for row in frame.rows}


def test_looking_is_no_access(tmp_path: Path) -> None:
    with manager(tmp_path) as process, process.api() as api:
        site = Site(api)
        instance = site.instance()
        site.write(instance, KEYS)
        before = _accesses(process, tmp_path)
    with manager(tmp_path) as process:
        for _ in range(3):
            assert Commands(process).json("get", instance, "--keys", _texts(KEYS))["matched_blocks"] == 5
        assert _accesses(process, tmp_path) == before
    with manager(tmp_path) as process, process.api() as api:
        assert len(Site(api).match(instance, KEYS)) == 5  # as an engine looks
        after = _accesses(process, tmp_path)
    assert sorted(after) == sorted(before) == sorted(KEYS)
    assert all(after[key] != before[key] for key in KEYS)


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


def test_a_trim_by_time_takes_what_was_written_then(site: Site, commands: Commands) -> None:
    instance = site.instance()
    site.write(instance, KEYS)
    trim = ("trim", instance, "--yes")
    commands.ok(*trim, "--written-before", "2020-01-01T00:00")
    assert site.hits(instance, KEYS) == KEYS
    commands.ok(*trim, "--written-from", "2020-01-01T00:00+01:00")
    assert eventually(lambda: site.hits(instance, KEYS) == [])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "give one of --all, --metadata-only"),
        (("--all", "--metadata-only"), "give one of --all, --metadata-only"),
        (("--written-from", "yesterday"), "--written-from is 'yesterday', must be unix seconds"),
        (("--written-before", "2100-01-01"), "must be from 1970 to 2038"),
    ],
)
def test_a_trim_says_exactly_what(commands: Commands, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in commands.refused("trim", "any", *arguments)
