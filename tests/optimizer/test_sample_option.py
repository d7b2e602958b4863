"""`kvcm optimize --sample`: estimates with bars, in place of replays."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest
from optimize_runner import run

from kvcm.optimizer.curves import sampled_curve
from kvcm.optimizer.policy_spec import parse_policy
from kvcm.optimizer.readers import read_trace
from kvcm.optimizer.replay import replay
from kvcm.optimizer.trace import Trace

FIELDS = ["policy", "capacity_blocks", "hit_rate", "low", "high", "of", "rate", "repeats"]
POLICIES = ["lru", "leaf_lru", "belady", "sieve", "ttl:seconds=20:fixed"]
CAPACITIES = [500, 160, 1000, 5000]
BLOCKS = 2000
READ = ("--block-tokens", 10, "--no-cache")


@pytest.fixture
def chains_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Requests for 100 chains of 20 blocks, or the first blocks of them, some more often than others."""
    monkeypatch.chdir(tmp_path)
    chance = random.Random(5)
    wanted = [*range(100), *(min(99, int(chance.expovariate(0.04))) for _ in range(500))]
    rows = [
        {"timestamp": 100 * number, "input_length": 10 * length, "output_length": 1,
         "hash_ids": [20 * chain + place for place in range(length)]}
        for number, chain in enumerate(wanted)
        for length in [20 if number < 100 else chance.randint(5, 20)]
    ]  # fmt: skip
    path = tmp_path / "chains.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> Trace:
    return read_trace(path, block_tokens=10, use_cache=False)


def asked(*options: object, sample: str = "0.25") -> tuple[object, ...]:
    listed = ",".join(map(str, CAPACITIES))
    return (*READ, "--policies", ",".join(POLICIES), "--capacities", listed, "--sample", sample, *options)


def test_rows_are_what_samples_tell(chains_file: Path) -> None:
    run(chains_file, *asked("--json", "a.json", sample="0.25:repeats=5:seed=7"))
    rows = json.loads(Path("a.json").read_text())
    assert [list(row) for row in rows] == [FIELDS] * len(POLICIES) * len(CAPACITIES)
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        (policy, capacity) for policy in POLICIES for capacity in CAPACITIES
    ]
    trace = read(chains_file)
    for row in rows:
        spec = parse_policy(row["policy"])
        curve = sampled_curve(trace, spec, rate=0.25, repeats=5, seed=7, capacities=CAPACITIES)
        place = curve.capacities.tolist().index(row["capacity_blocks"])
        rate, error = curve.hit_rates[place], curve.errors[place]
        assert (row["hit_rate"], row["low"], row["high"]) == (rate, max(0, rate - error), min(1, rate + error))
        assert row["of"] == ("prefix" if spec.name in {"lru", "leaf_lru", "belady"} else "object")
        assert (row["rate"], row["repeats"]) == (0.25, 5)


def test_true_rates_lie_in_the_bars_or_near_them(chains_file: Path) -> None:
    run(chains_file, *asked("--json", "a.json"))
    trace = read(chains_file)
    assert trace.unique_blocks == BLOCKS
    for row in json.loads(Path("a.json").read_text()):
        counted = replay(trace, parse_policy(row["policy"]), row["capacity_blocks"])
        hits = counted.hits.prefix_blocks if row["of"] == "prefix" else counted.hits.object_blocks
        true = hits / trace.totals.blocks
        assert row["low"] - 0.01 <= true <= row["high"] + 0.01, row
        if row["capacity_blocks"] >= BLOCKS and not row["policy"].startswith("ttl"):
            assert row["low"] == row["high"] == pytest.approx(true)
        elif row["capacity_blocks"] < BLOCKS:
            assert 0 < row["high"] - row["low"] < 0.15, row


def test_csv_has_the_same_rows(chains_file: Path) -> None:
    run(chains_file, *asked("--json", "a.json", "--csv", "a.csv"))
    with Path("a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [{name: str(value) for name, value in row.items()} for row in json.loads(Path("a.json").read_text())] == rows


def test_the_table_says_what_its_bars_are(chains_file: Path) -> None:
    said = run(chains_file, *READ, "--policies", "lru,sieve", "--capacities", "25%", "--sample", "0.25:repeats=4")
    assert "estimates from 4 samples of 0.25 of the blocks" in said
    assert "95 % t interval" in said
    assert "all samples miss" in said
    row, _ = json.loads(Path("chains.json").read_text())
    (line,) = (line for line in said.splitlines() if line.startswith("lru "))
    assert f"{row['hit_rate']:.2%}" in line
    assert f"± {(row['high'] - row['low']) / 2:.2%}" in line
    assert "prefix" in line
    assert "object" in said


def test_files_are_named_like_the_trace_and_there_is_no_report(chains_file: Path, tmp_path: Path) -> None:
    assert "html" not in run(chains_file, *asked())
    assert {path.name for path in tmp_path.iterdir()} == {"chains.jsonl", "chains.json", "chains.csv"}


def test_rows_of_several_traces_name_theirs(chains_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(chains_file.read_bytes())
    options = (*READ, "--policies", "fifo", "--capacities", 500, "--sample", "0.25")
    run(chains_file, other, *options, "--json", "a.json")
    rows = json.loads(Path("a.json").read_text())
    assert [(next(iter(row)), row["trace"]) for row in rows] == [("trace", "chains.jsonl"), ("trace", "other.jsonl")]


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        ("much", ("'much'", "above 0, up to 0.5")),
        ("0", ("'0'", "above 0")),
        ("nan", ("'nan'", "above 0")),
        ("0.6", ("'0.6'", "0.5")),
        ("0.01", ("0.01", "0.05 to 0.5", "chains")),
        ("0.25:repeats=1", ("'repeats=1'", "2 to 31")),
        ("0.25:repeats=32", ("'repeats=32'", "2 to 31")),
        ("0.25:seed=-1", ("'seed=-1'", "0 to 4294967295")),
        ("0.25:seed", ("'seed'", "0 to 4294967295")),
        ("0.25:points=3", ("'points=3'", "repeats=N, seed=N")),
        ("0.05", ("160", "191 blocks or more")),
    ],
)
def test_a_sample_that_cannot_be_drawn_is_one_line(chains_file: Path, sample: str, named: tuple[str, ...]) -> None:
    line = run(chains_file, *asked("--json", "a.json", sample=sample), fails=True)
    assert all(each in line for each in ("--sample", *named)), line
    assert not Path("a.json").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--report", "a.html"), "--json and --csv"),
        (("--csv-original", "out"), "--json and --csv"),
        (("--original-config", "config.json"), "--json and --csv"),
        (("--mode", "request"), "--sample: block"),
    ],
    ids=lambda value: value[0].strip("-"),
)
def test_what_needs_replays_is_refused(chains_file: Path, options: tuple[str, ...], named: str) -> None:
    assert named in run(chains_file, *asked(*options), fails=True)
    assert not Path("chains.json").exists()


def test_a_running_manager_is_not_sampled(chains_file: Path) -> None:
    assert "--sample 0.1" in run("--from", "http://127.0.0.1:1", "--sample", "0.1", fails=True)
