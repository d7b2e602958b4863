"""`kvcm optimize` and `kvcm trace`: what they write, and how they refuse."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest
from original_documents import document, group, instance
from traces import HAND, HAND_HITS, HAND_IDS
from typer.testing import CliRunner

from kvcm.cli import app
from kvcm.optimizer.curves import sampled_curves
from kvcm.optimizer.groups.original import OriginalConfig, write_original_csv
from kvcm.optimizer.options import parse_policy
from kvcm.optimizer.pooling import Engines, Topology, compare_pooling, parse_routing
from kvcm.optimizer.readers import read_trace
from kvcm.optimizer.replay import reference_replay
from kvcm.optimizer.trace import Trace

ROW_FIELDS = [
    "policy", "capacity_blocks", "prefix_hit_blocks", "prefix_hit_tokens", "object_hit_blocks", "full_hit_requests",
    "block_hit_rate", "token_hit_rate", "accesses_per_second",
]  # fmt: skip


def run(*arguments: object, fails: bool = False) -> str:
    """Return what the command says: its output, or the one line of its refusal."""
    done = CliRunner().invoke(app, ["optimize", *map(str, arguments)])
    assert done.exit_code == (2 if fails else 0), done.output
    if not fails:
        return done.output
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("kvcm: ")
    return line


@pytest.fixture
def hand_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hand.jsonl"
    columns = zip(HAND.times_us.tolist(), HAND.input_tokens.tolist(), HAND_IDS, strict=True)
    rows = [
        {"timestamp": time // 1000, "input_length": tokens, "output_length": 1, "hash_ids": ids}
        for time, tokens, ids in columns
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_json_has_a_row_for_each_policy_and_capacity(hand_file: Path, tmp_path: Path) -> None:
    policies = ["lru", "fifo", "lfu", "sieve", "leaf_lru", "belady"]
    options = ("--policies", ",".join(policies), "--capacities", "4,5,6,8", "--json", "a.json")
    run(hand_file, "--block-tokens", 10, *options)
    rows = json.loads((tmp_path / "a.json").read_text())
    assert [list(row) for row in rows] == [ROW_FIELDS] * 24
    for policy in policies:
        assert tuple(row["prefix_hit_blocks"] for row in rows if row["policy"] == policy) == HAND_HITS[policy]
    assert [row["policy"] for row in rows] == [policy for policy in policies for _ in range(4)]
    assert [row["capacity_blocks"] for row in rows] == [4, 5, 6, 8] * 6
    one = reference_replay(HAND, parse_policy("lfu"), 5).row()
    (same,) = (row for row in rows if row["policy"] == "lfu" and row["capacity_blocks"] == 5)
    assert {**same, "accesses_per_second": 0} == {**one, "accesses_per_second": 0}
    assert all(row["accesses_per_second"] > 0 for row in rows)


def test_csv_has_the_same_rows(hand_file: Path, tmp_path: Path) -> None:
    run(hand_file, "--block-tokens", 10, "--json", "a.json", "--csv", "a.csv", "--capacities", "50%,3")
    with (tmp_path / "a.csv").open() as file:
        read = list(csv.DictReader(file))
    assert [{name: str(value) for name, value in row.items()} for row in json.loads(Path("a.json").read_text())] == read
    assert {row["capacity_blocks"] for row in read} == {"4", "3"}


def test_traces_of_one_name_are_reported_apart(hand_file: Path, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    other = tmp_path / "below" / hand_file.name
    other.write_bytes(hand_file.read_bytes())
    options = ("--block-tokens", 10, "--policies", "lru", "--capacities", 4, "--json", "a.json")
    run(hand_file, other, *options)
    assert {row["trace"] for row in json.loads(Path("a.json").read_text())} == {str(hand_file), str(other)}
    assert "twice" in run(hand_file, hand_file, *options, fails=True)


@pytest.mark.parametrize(("mode", "hits"), [("block", [0, 2]), ("request", [1, 2])])
def test_mode_request_evicts_behind_the_request(tmp_path: Path, mode: str, hits: list[int]) -> None:
    # With a capacity of 2 blocks, block 3 evicts block 1 before the lookup of 1.
    path = tmp_path / "flat.jsonl"
    rows = [{"timestamp": time, "input_length": 20, "hash_ids": ids} for time, ids in enumerate([[1, 2], [3, 1], [2]])]
    path.write_text("".join(json.dumps(row | {"output_length": 0}) + "\n" for row in rows))
    options = ("--block-tokens", 10, "--policies", "lru", "--capacities", "2,3", "--mode", mode)
    run(path, *options, "--json", tmp_path / "a.json")
    assert [row["object_hit_blocks"] for row in json.loads((tmp_path / "a.json").read_text())] == hits


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--policies", "lrx"), ("policies", "'lrx'", "did you mean lru?")),
        (("--mode", "line"), ("--mode", "'line'", "block, request")),
        (("--workers", "-1"), ("--workers", "-1", "1024")),
        (("--deployment", "deepseek_v9"), ("deployment", "'deepseek_v9'", "deepseek_v3")),
    ],
    ids=lambda value: value[0].strip("-"),
)
def test_a_wrong_option_names_allowed_values(hand_file: Path, options: tuple[str, ...], named: tuple[str, ...]) -> None:
    line = run(hand_file, "--block-tokens", 10, "--json", "a.json", *options, fails=True)
    assert all(each in line for each in named), line
    assert not Path("a.json").exists()


def test_files_that_cannot_be_used_are_named(hand_file: Path, tmp_path: Path) -> None:
    assert "missing.jsonl" in run(tmp_path / "missing.jsonl", "--json", "a", fails=True)
    assert "nowhere" in run(hand_file, "--block-tokens", 10, "--json", "nowhere/a", "--policies", "lru", fails=True)


def test_a_trace_is_never_written_over(hand_file: Path, tmp_path: Path) -> None:
    trace = hand_file.rename(tmp_path / "hand.json")
    before = trace.read_bytes()
    for output in ((), ("--csv", "hand.json"), ("--report", tmp_path / "below" / ".." / "hand.json")):
        (tmp_path / "below").mkdir(exist_ok=True)
        assert "written over" in run("hand.json", "--block-tokens", 10, *output, fails=True)
    assert trace.read_bytes() == before
    assert not (tmp_path / "hand.html").exists()


def test_results_have_a_file_each(hand_file: Path, tmp_path: Path) -> None:
    options = (hand_file, "--block-tokens", 10, "--policies", "lru")
    assert "a.json: is given for two results" in run(*options, "--json", "a.json", "--csv", "./a.json", fails=True)
    (tmp_path / "below").mkdir()
    assert "below: is a folder" in run(*options, "--json", "a.json", "--csv", "below", fails=True)
    assert not (tmp_path / "a.json").exists()


def test_outputs_are_named_like_the_trace_unless_said(hand_file: Path, tmp_path: Path) -> None:
    run(hand_file, "--block-tokens", 10, "--policies", "lru", "--capacities", 4)
    assert {path.name for path in tmp_path.iterdir()} >= {"hand.html", "hand.json", "hand.csv"}
    assert "Take" in (tmp_path / "hand.html").read_text()


@pytest.mark.parametrize("specs", [[], ["tp0"]])
def test_requests_that_do_more_than_read_a_prefix_are_replayed_as_groups(tmp_path: Path, specs: list[str]) -> None:
    """Blocks count as whole, whichever location specs a request names."""
    path = tmp_path / "schema.jsonl"
    read = {"instance_id": "a", "trace_id": "t", "tokens": [], "sw_size": 0, "location_spec_names": specs}
    write = {"instance_id": "a", "trace_id": "t", "timestamp_us": 1, "tokens": [], "keys": [1, 2, 3]}
    batch = {**read, "timestamp_us": 2, "keys": [3, 9, 1], "query_type": "batch_get", "block_mask": []}
    masked = {**read, "timestamp_us": 3, "keys": [1, 2], "query_type": "prefix_match", "block_mask": [True, False]}
    path.write_text("".join(json.dumps(each) + "\n" for each in (write, batch, masked)))
    trace = read_trace(path, block_tokens=10, use_cache=False)
    assert not trace.is_plain
    run(path, "--block-tokens", 10, "--no-cache", "--capacities", "100%", "--json", tmp_path / "a.json")
    rows = json.loads((tmp_path / "a.json").read_text())
    assert [row["policy"] for row in rows] == ["lru", "leaf_lru", "lfu", "fifo", "sieve", "s3fifo"]
    assert {row["prefix_hit_blocks"] for row in rows} == {4}, "what is there, wherever it stands, masked or not"
    line = run(path, "--block-tokens", 10, "--no-cache", "--report", tmp_path / "a.html", fails=True)
    assert "query modes" in line


def test_the_originals_files_come_from_plain_options(hand_file: Path, tmp_path: Path) -> None:
    options = ("--block-tokens", 10, "--policies", "leaf_lru", "--capacities", 5)
    assert "out/instance_hit_rates.csv" in run(hand_file, *options, "--csv-original", "out")
    config = OriginalConfig.plain(["instance"], 5, policy="leaf_lru")
    (expected,) = write_original_csv(read_trace(hand_file, block_tokens=10), config, tmp_path / "expected")
    assert (tmp_path / "out/instance_hit_rates.csv").read_bytes() == expected.read_bytes()
    assert not (tmp_path / "hand.html").exists(), "results that were not asked for"


def test_the_originals_files_come_from_its_configuration(hand_file: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(document(group(instance("instance")), trace_type="qwen_bailian"))
    run(hand_file, "--original-config", "config.json", "--csv-original", "out")
    assert len((tmp_path / "out/instance_hit_rates.csv").read_text().splitlines()) == 1 + len(HAND)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--csv-original", "out"), "one of each"),
        (("--original-config", "config.json"), "--csv-original DIR"),
        (("--csv-original", "out", "--original-config", "missing.json"), "missing.json"),
    ],
    ids=["several", "no folder", "no file"],
)
def test_settings_that_the_original_lacks_are_refused(hand_file: Path, options: tuple[str, ...], named: str) -> None:
    assert named in run(hand_file, "--block-tokens", 10, *options, fails=True)


ROUTED_FIELDS = [
    "routing", "caches", "engines", "engine_blocks", "pool_blocks", "own_share", "pool_share", "computed_share",
    "token_hit_rate", "block_hit_rate", "busiest_requests", "busiest_computed", "mean_wait_seconds",
    "longest_wait_seconds",
]  # fmt: skip
SIZES = ("--engines", 2, "--engine-capacity", 5, "--pool-capacity", "100%")


def test_routing_has_a_row_for_each_policy_with_and_without_a_pool(hand_file: Path, tmp_path: Path) -> None:
    said = run(hand_file, "--block-tokens", 10, "--routing", "kvcm,round_robin", *SIZES)
    assert {path.name for path in tmp_path.iterdir()} == {"hand.jsonl", "hand.json", "hand.csv"}, "and no report"
    rows = json.loads((tmp_path / "hand.json").read_text())
    assert [list(row) for row in rows] == [ROUTED_FIELDS] * 4
    assert [(row["routing"], row["caches"]) for row in rows] == [
        (policy, caches) for policy in ("kvcm", "round_robin") for caches in ("local", "local+pool")
    ]
    assert [(row["engines"], row["engine_blocks"], row["pool_blocks"]) for row in rows] == [(2, 5, 0), (2, 5, 8)] * 2
    engines = Engines(2, 5, 32_200.0, pool_blocks=8)
    expected = compare_pooling(HAND, engines, routing=parse_routing("kvcm"), topologies=[Topology.BOTH]).rows[0]
    assert rows[1] == expected.row()
    assert all(sum(row[f"{name}_share"] for name in ("own", "pool", "computed")) == pytest.approx(1) for row in rows)
    for row in rows:
        assert f"{row['own_share']:.1%}" in said
    assert "engines of 5 blocks, a pool of 8" in said


def test_engines_have_their_part_of_the_pool_unless_said(hand_file: Path, tmp_path: Path) -> None:
    run(hand_file, "--block-tokens", 10, "--routing", "kvcm", "--engines", 2, "--pool-capacity", 6, "--json", "a.json")
    (local, both) = json.loads((tmp_path / "a.json").read_text())
    assert (local["engine_blocks"], both["engine_blocks"], both["pool_blocks"]) == (3, 3, 6)


def test_a_report_with_routing_has_the_same_rows(hand_file: Path, tmp_path: Path) -> None:
    asked = ("--block-tokens", 10, "--routing", "consistent_hash:load_factor=0", *SIZES, "--policies", "lru")
    run(hand_file, *asked, "--json", "a.json")
    run(hand_file, *asked, "--report", "b.html", "--json", "b.json")
    assert json.loads((tmp_path / "a.json").read_text()) == json.loads((tmp_path / "b.json").read_text())
    assert "consistent_hash:load_factor=0" in (tmp_path / "b.html").read_text()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--routing", "random"), ("--routing", "'random'", "round_robin, least_loaded, consistent_hash, kvcm")),
        (("--routing", "kvcm", "--engines", 0), ("engines is 0", "1 to 64")),
        (("--routing", "kvcm", "--engine-capacity", "0"), ("--engine-capacity is '0'", "10%")),
        (("--routing", "kvcm", "--pool-capacity", "5,6"), ("--pool-capacity is '5,6'", "10%")),
        (("--routing", "kvcm", "--sample", "0.1"), ("--routing kvcm", "--sample")),
        (("--routing", "kvcm", "--csv-original", "out"), ("--routing kvcm", "--csv-original")),
        (("--routing", "kvcm", "--deployment", "output_token=-1"), ("output_token_seconds", "-1")),
    ],
    ids=lambda value: "-".join(map(str, value[-2:])),
)
def test_routing_that_cannot_be_replayed_is_one_line(
    hand_file: Path, options: tuple[object, ...], named: tuple[str, ...]
) -> None:
    line = run(hand_file, "--block-tokens", 10, "--json", "a.json", *options, fails=True)
    assert all(each in line for each in named), line
    assert not Path("a.json").exists()


ESTIMATE_FIELDS = ["policy", "capacity_blocks", "hit_rate", "low", "high", "of", "rate", "repeats"]
POLICIES = ["lru", "leaf_lru", "belady", "sieve", "ttl:seconds=20:fixed"]
CAPACITIES = [500, 160, 1000, 5000]
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


def test_rows_equal_the_reports_of_samples(chains_file: Path) -> None:
    run(chains_file, *asked("--json", "a.json", sample="0.25:repeats=5:seed=7"))
    rows = json.loads(Path("a.json").read_text())
    assert [list(row) for row in rows] == [ESTIMATE_FIELDS] * len(POLICIES) * len(CAPACITIES)
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        (policy, capacity) for policy in POLICIES for capacity in CAPACITIES
    ]
    trace = read(chains_file)
    for row in rows:
        spec = parse_policy(row["policy"])
        (curve,) = sampled_curves(trace, [spec], rate=0.25, repeats=5, seed=7, capacities=CAPACITIES)
        place = curve.capacities.tolist().index(row["capacity_blocks"])
        rate, error = curve.hit_rates[place], curve.errors[place]
        assert (row["hit_rate"], row["low"], row["high"]) == (rate, max(0, rate - error), min(1, rate + error))
        assert row["of"] == ("prefix" if spec.name in {"lru", "leaf_lru", "belady"} else "object")
        assert (row["rate"], row["repeats"]) == (0.25, 5)


def test_files_are_named_like_the_trace_and_there_is_no_report(chains_file: Path, tmp_path: Path) -> None:
    assert "html" not in run(chains_file, *asked())
    assert {path.name for path in tmp_path.iterdir()} == {"chains.jsonl", "chains.json", "chains.csv"}


@pytest.mark.parametrize(
    ("sample", "named"),
    [
        ("much", ("'much'", "above 0, up to 0.5")),
        ("nan", ("'nan'", "above 0")),
        ("0.01", ("0.01", "0.05 to 0.5", "chains")),
        ("0.25:repeats=1", ("'repeats=1'", "2 to 31")),
        ("0.25:seed=-1", ("'seed=-1'", "0 to 4294967295")),
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
    [(("--report", "a.html"), "--json and --csv"), (("--mode", "request"), "--sample: block")],
    ids=lambda value: value[0].strip("-"),
)
def test_options_that_need_replays_are_refused(chains_file: Path, options: tuple[str, ...], named: str) -> None:
    assert named in run(chains_file, *asked(*options), fails=True)
    assert not Path("chains.json").exists()


def test_options_of_a_running_manager_and_of_files_are_not_mixed(chains_file: Path) -> None:
    assert "--apply" in run(chains_file, *READ, "--apply", fails=True)
    assert "--routing kvcm" in run("--from", "http://127.0.0.1:1", "--routing", "kvcm", fails=True)
    assert "--sample 0.1" in run("--from", "http://127.0.0.1:1", "--sample", "0.1", fails=True)
