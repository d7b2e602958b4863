"""Writes the figures of `benchmarks/results/` into README.md and docs/, between the markers of each table.

`--check` changes nothing and fails when a document differs from the results.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Rows = list[dict[str, Any]]

_ONE_CLIENT = ", 1 client"


def match_table(rows: Rows) -> list[str]:
    """In-process rows of benchmarks/match.py."""
    header = ["| specs per block | encoded records | building messages | ratio |", "|---|---|---|---|"]
    return header + [
        f"| {row['case'].partition(' hits, ')[2].removesuffix(', in process')} | {row['value']:,.0f} µs | "
        f"{row['baseline']:,.0f} µs | {row['ratio']:.1f}× |"
        for row in rows
        if row["case"].endswith("in process")
    ]


def cpu_table(rows: Rows) -> list[str]:
    """What one client's calls cost the manager on every store, and Redis, of benchmarks/service.py."""
    header = [
        "| call | memory | RocksDB | Redis: manager + Redis | bare handler | managers / bare handler |",
        "|---|" + "---|" * 5,
    ]

    def line(call: str) -> str:
        *managers, _ = costs = _costs(rows, call)
        memory, rocksdb, redis, of_redis = map(_us, costs)
        bare, ratios = managers[0]["baseline"], ", ".join(f"{row['value'] / row['baseline']:.1f}" for row in managers)
        name = call.removesuffix(_ONE_CLIENT)
        return f"| {name} | {memory} µs | {rocksdb} µs | {redis} + {of_redis} µs | {bare:,.0f} µs | {ratios} |"

    return header + [line(call) for call in _calls(rows) if call.endswith(_ONE_CLIENT)]


def calls_table(rows: Rows) -> list[str]:
    """A row for each case and number of clients: CPU on every store over gRPC, of benchmarks/service.py."""
    header = [
        "| call | bare | memory | /bare, or per block | RocksDB | same | Redis: manager | same | Redis itself |",
        "|---|" + "---|" * 8,
    ]
    return header + [
        f"| {call} | {costs[0]['baseline']:,.0f} µs | "
        + "".join(f"{_us(row)} µs | {_beside_floor(row)} | " for row in costs[:3])
        + f"{_us(costs[3])} µs |"
        for call in _calls(rows)
        for costs in [_costs(rows, call)]
    ]


def transports_table(rows: Rows) -> list[str]:
    """A row for each case and number of clients: HTTP beside gRPC, and the tails of times, of benchmarks/service.py."""
    tail = {row["case"]: row["ratio"] for row in rows if row["metric"] == "p99/p50"}
    header = [
        "| call | gRPC | HTTP | HTTP/gRPC | tail/bare's, memory | HTTP | RocksDB | Redis |",
        "|---|" + "---|" * 7,
    ]
    http = {row["case"]: row for row in rows if row["metric"].startswith("server CPU")}
    tails = ("memory: {}", "memory: {}, HTTP", "rocksdb: {}", "redis: {}")
    return header + [
        f"| {call} | {row['baseline']:,.0f} µs | {row['value']:,.0f} µs | {row['ratio']:.2f} | "
        f"{' | '.join(f'{tail[each.format(call)]:.2f}' for each in tails)} |"
        for call in _calls(rows)
        for row in [http[f"memory: {call}, HTTP"]]
    ]


def _calls(rows: Rows) -> list[str]:
    """Return the cases of benchmarks/service.py, with the number of clients, without the store."""
    named = (row["case"].partition(": ") for row in rows if row["metric"].startswith("redis CPU per"))
    return [call for _, _, call in named]


def _costs(rows: Rows, call: str) -> list[dict[str, Any]]:
    """Return the CPU rows of a case: in memory, over RocksDB, on Redis, and of Redis itself."""
    found = {(row["case"], row["metric"].partition(" per ")[0]): row for row in rows if " CPU per " in row["metric"]}
    managers = [found[f"{store}: {call}", "server CPU"] for store in ("memory", "rocksdb", "redis")]
    return [*managers, found[f"redis: {call}", "redis CPU"]]


def _us(row: dict[str, Any]) -> str:
    """Return a time; one that is nothing beside what the process uses anyway may have been measured below 0."""
    return f"{max(0.0, row['value']):,.0f}"


def _beside_floor(row: dict[str, Any]) -> str:
    unit = " µs" if row["metric"] == "server CPU per write" else ""
    return f"{row['ratio']:.2f}{unit}"


class Costs(NamedTuple):
    """CPU in µs of the managers over memory, RocksDB and Redis, and of Redis itself."""

    memory: float
    rocksdb: float
    redis_manager: float
    redis: float


_SIZED_BLOCKS = 1_001_472
_BUSY = 0.7  # of a core; above that requests wait for one another
_EVICTIONS = (("memory", ", ordered"), ("rocksdb", ", ordered"), ("redis", ", in"))
"""Stores, and how their cases in benchmarks/reclaim.py go on."""
_ENGINE_REQUESTS, _ENGINE_BLOCKS, _NEW_SHARES = 5, 2048, (0.03, 0.10)
"""Requests that an engine sends a second, the blocks of each, and the share of them that is new and written."""


def sizing_table(rows: Rows) -> list[str]:
    """What a core serves, computed from the costs of benchmarks/service.py and its `--scaling`."""
    header = [
        f"| {_BUSY:.0%} of a core | manager, memory | manager, RocksDB | manager, Redis | Redis itself |",
        "|---|---|---|---|---|",
    ]
    lines = [
        _served("lookups of 1,024 known blocks, 1/s", 1, _lookup_costs()),
        _served("blocks written by 64, 1/s", 64, _call_costs(rows, "start + finish, 64 fresh blocks")),
        _served("blocks written by 1,024, 1/s", 1024, _call_costs(rows, "start + finish, 1,024 fresh blocks")),
        _served("blocks evicted, 1/s", 1, _eviction_costs()),
    ]
    for share in _NEW_SHARES:
        name, request = f"engines, {share:.0%} of blocks new", _engine_request(rows, share)
        lines.append(_served(f"{name}, while the cache fills", 1 / _ENGINE_REQUESTS, request))
        lines.append(_served(f"{name}, when it is full", 1 / _ENGINE_REQUESTS, _with_eviction(request, share)))
    return header + lines


def engines_line(rows: Rows) -> list[str]:
    """How many engines a manager serves, in words."""
    memory, rocksdb, redis = _engines(lambda share: _engine_request(rows, share))
    full_memory, full_rocksdb, full_redis = _engines(lambda share: _with_eviction(_engine_request(rows, share), share))
    return [
        f"A manager is one process with one event loop. With {_BUSY:.0%} of a core it serves {redis} engines on",
        f"a Redis, {rocksdb} over RocksDB and {memory} in memory while the cache fills. When it is full, and a block",
        f"is evicted for each new one, it serves {full_redis}, {full_rocksdb} and {full_memory}",
        "([how that is computed](docs/operations.md#sizing)).",
    ]


def _engines(request: Callable[[float], Costs]) -> list[str]:
    """Return how many engines a manager serves in memory, over RocksDB and on Redis, by what a request costs."""
    least, most = (
        [_rounded_down(_BUSY * 1e6 / _ENGINE_REQUESTS / us) for us in request(share)[:3]]
        for share in reversed(_NEW_SHARES)
    )
    return [f"{low} to {high}" if low < high else str(low) for low, high in zip(least, most, strict=True)]


def _call_costs(rows: Rows, call: str) -> Costs:
    return Costs(*(row["value"] for row in _costs(rows, f"{call}, 8 clients")))


def _lookup_costs() -> Costs:
    """Return what a lookup of 1,024 blocks of one chain costs, of 64 chains among a million blocks.

    Engines do not all ask for the same blocks, as clients of benchmarks/service.py do, and access times are written of
    all that were read.
    """
    rows = json.loads((RESULTS / "service_scaling.json").read_text())["rows"]
    found = {(row["case"], row["metric"]): row["value"] for row in rows}
    case, metric = f"1,024 hits of one chain, {_SIZED_BLOCKS:,} resident blocks", "server CPU per request"
    managers = (found[f"{store}: {case}", metric] for store in ("memory", "rocksdb", "redis"))
    return Costs(*managers, found[f"redis: {case}", "redis CPU per request"])


def _engine_request(rows: Rows, new_share: float) -> Costs:
    """Return what a lookup costs whose last blocks are new, with the write of these.

    Costs grow linearly with blocks, through those of 64 and 1,024. The miss at the end costs as much more than in
    memory as where all blocks are missing: either way the first blocks that the search cache does not have are read.
    """
    written = new_share * _ENGINE_BLOCKS
    hits = _linear(_call_costs(rows, "64 hits"), _lookup_costs(), _ENGINE_BLOCKS - written)
    writes = ("start + finish, 64 fresh blocks", "start + finish, 1,024 fresh blocks")
    write = _linear(*(_call_costs(rows, call) for call in writes), written)
    misses = _call_costs(rows, "1,024 misses")
    miss = Costs(0, max(0, misses.rocksdb - misses.memory), misses.redis_manager - misses.memory, misses.redis)
    return Costs(*map(sum, zip(hits, miss, write, strict=True)))


def _eviction_costs() -> Costs:
    """Return what the eviction of a block costs."""
    return Costs(*(_evicted_us(store, rest) for store, rest in _EVICTIONS), _evicted_us("redis", ", in", "Redis, both"))


def _evicted_us(store: str, rest: str, *metrics: str) -> float:
    rows = json.loads((RESULTS / "reclaim.json").read_text())["rows"]
    begin = f"{store}: leaf_lru, "
    found = {
        row["metric"]: row["value"]
        for row in rows
        if row["case"].startswith(begin) and f"chains of 256{rest}" in row["case"]
    }
    return sum(found[metric] for metric in metrics or ("choice and mark of a block", "deletion of a block"))


def eviction_table(rows: Rows) -> list[str]:
    """What the eviction of a block costs, by store and by how its order came to be."""
    cases = [row for row in rows if "leaf_lru, " in row["case"] and row["case"].endswith(", in process")]
    table = ["| | choice and mark | deletion | Redis |", "|---|---|---|---|"]
    for case in dict.fromkeys(row["case"] for row in cases):
        found = {row["metric"]: f"{row['value']:.0f} µs" for row in cases if row["case"] == case}
        both = found["choice and mark of a block"], found["deletion of a block"]
        name = case.removesuffix(", in process").replace("leaf_lru, ", "")
        table.append(f"| {name} | {' | '.join(both)} | {found.get('Redis, both', '')} |")
    return table


def _with_eviction(request: Costs, new_share: float) -> Costs:
    """Return what a request costs that evicts as many blocks as it writes."""
    blocks = new_share * _ENGINE_BLOCKS
    return Costs(*(us + blocks * evicted for us, evicted in zip(request, _eviction_costs(), strict=True)))


def _linear(of_64: Costs, of_1024: Costs, blocks: float) -> Costs:
    share = (blocks - 64) / (1024 - 64)
    return Costs(*(small + (large - small) * share for small, large in zip(of_64, of_1024, strict=True)))


def _served(name: str, units: float, costs: Costs) -> str:
    """Return a line with how many units a second a part of a core serves, where a call costs so much."""
    cells = ("–" if us < 1 else f"{_rounded_down(_BUSY * 1e6 * units / us):,}" for us in costs)
    return f"| {name} | {' | '.join(cells)} |"


def _rounded_down(number: float) -> int:
    """Return a number with two digits, and zeros."""
    unit = 10 ** max(0, len(str(int(number))) - 2)
    return int(number) // unit * unit


def turns_table(rows: Rows) -> list[str]:
    """Turns of benchmarks/reuse.py."""
    header = ["| turn | alone | with the manager | ratio |", "|---|---|---|---|"]
    return header + [
        f"| {row['case']} | {row['baseline']:.2f} s | {row['value']:.2f} s | {row['ratio']:.2f} |"
        for row in rows
        if row["metric"] == "time to first token"
    ]


def checks_table(rows: Rows) -> list[str]:
    """Checks of benchmarks/reuse.py."""
    header = ["| check | wanted |", "|---|---|"]
    return header + [f"| {row['case']} | {row['target']} |" for row in rows if row["metric"] == "holds"]


def costs_table(rows: Rows) -> list[str]:
    """All rows."""
    header = ["| what | figure | compared with | ratio | wanted |", "|---|---|---|---|---|"]
    return header + [
        f"| {row['case']}: {row['metric']} | {_figure(row)} | {_beside(row)} | {row['target']} |" for row in rows
    ]


def keys_table(rows: Rows) -> list[str]:
    """Return what a key costs a request."""
    lines = ["| call | without keys | a key adds | wanted |", "|---|---|---|---|"]
    return lines + [
        f"| {row['case']} | {row['baseline']:,.0f} µs | {row['value']:.1f} µs | {row['target']} |" for row in rows
    ]


def judged_table(rows: Rows) -> list[str]:
    """Rows with a target, and what they are about."""
    header = ["| what | figure | wanted |", "|---|---|---|"]
    return header + [
        f"| {row['case']}: {row['metric']} | {_figure(row)}{_share(row)} | {row['target']} |"
        for row in rows
        if row["target"]
    ]


def conversation_table(rows: Rows) -> list[str]:
    """A row per turn, and one for all, of benchmarks/conversation.py."""
    tokens = {row["case"]: row for row in rows if row["metric"] == "prompt tokens computed"}
    seconds = {row["case"]: row for row in rows if row["metric"] == "median time to first token"}
    header = [
        "| turn | computed alone | with KVCM | ratio | first token alone | with KVCM | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    return header + [
        f"| {case.removeprefix('turn ')} | {row['baseline']:,.0f} | {row['value']:,.0f} | {row['ratio']:.2f} | "
        f"{seconds[case]['baseline']:.2f} s | {seconds[case]['value']:.2f} s | {seconds[case]['ratio']:.2f} |"
        for case, row in tokens.items()
    ]


def passes_table(rows: Rows) -> list[str]:
    """What one pass over each trace takes, of benchmarks/optimizer.py."""
    header = [
        "| trace | policy, capacities | ours, all of them | libCacheSim, one of them | ratio |",
        "|---|---|---|---|---|",
    ]
    passes = [row for row in rows if row["metric"].startswith("one pass")]
    return header + [
        f"| {row['case'].replace(', ', ' | ', 1).replace(' at ', ', ')} | {row['value']:,.1f} ms | "
        f"{row['baseline']:,.1f} ms | {row['ratio']:.1f}× |"
        for row in passes
    ]


def compatibility_table(rows: Rows) -> list[str]:
    """A row per feature, a column per engine: how many tests have shown it, of benchmarks/compatibility.py."""
    engines = list(dict.fromkeys(row["metric"] for row in rows))
    shown = {(row["case"], row["metric"]): row["value"] for row in rows if row["ok"]}
    features = dict.fromkeys(row["case"] for row in rows)
    return [f"| feature | {' | '.join(engines)} |", "|---|" + "---|" * len(engines)] + [
        f"| {feature} | {' | '.join(_tests(shown.get((feature, engine))) for engine in engines)} |"
        for feature in features
    ]


def _tests(count: float | None) -> str:
    return "–" if count is None else "1 test" if count == 1 else f"{count:,.0f} tests"


def overload_table(rows: Rows) -> list[str]:
    """Requests offered and served, and the times of the served ones."""
    return costs_table([row for row in rows if not row["case"].partition(": ")[2].startswith("afterwards, ")])


def fleet_table(rows: Rows) -> list[str]:
    """A row per way to spread a fleet over managers, of benchmarks/fleet.py."""
    figures = {(row["case"], row["metric"]): row for row in rows}
    per_request, paced = "CPU of managers and Redis per request", "CPU of managers and Redis per request, at one pace"
    cases = [case for case, metric in figures if metric == per_request]

    def value(case: str, metric: str) -> float:
        return float(figures[case, metric]["value"])

    def beside_one(case: str) -> str:
        of_case = (row for (name, metric), row in figures.items() if name == case and metric.startswith(paced))
        row = next(of_case, None)
        return "" if row is None else f"{row['ratio']:.2f}"

    def cells(case: str) -> list[str]:
        full = f"{case}, full fleet, extrapolated"
        lookup = "GetCacheLocation at the slowed rate"
        return [
            case,
            f"{value(case, 'CPU of managers per request') / 1000:.1f} + "
            f"{value(case, 'CPU of Redis per request') / 1000:.1f} ms",
            beside_one(case),
            f"{value(case, f'{lookup}, p50'):.1f}, {value(case, f'{lookup}, p99'):.0f} ms",
            f"{value(full, 'cores of all managers'):.0f} + {value(full, 'cores of Redis'):.1f}",
            f"{value(case, 'calls that failed'):.0f}",
        ]

    header = [
        "| fleet on | CPU of a request, managers + Redis | beside one manager | lookup at the slowed rate, p50, p99 | "
        "cores of the full fleet, managers + Redis | failed |",
        "|---|---|---|---|---|---|",
    ]
    return header + [f"| {' | '.join(cells(case))} |" for case in cases]


def managers_table(rows: Rows) -> list[str]:
    """A row per case of benchmarks/managers.py."""
    figures = {(row["case"], row["metric"]): row for row in rows}
    totals = [row for row in rows if row["metric"] == "CPU of managers and Redis per write"]

    def part(case: str, name: str) -> str:
        return f"{figures[case, f'CPU of {name} per write']['value'] / 1000:.2f}"

    header = [
        "| start + finish of | CPU of a write, managers + Redis | value/baseline | wanted |",
        "|---|---|---|---|",
    ]
    return header + [
        f"| {row['case']} | {part(row['case'], 'managers')} + {part(row['case'], 'Redis')} ms | "
        f"{'' if row['ratio'] is None else format(row['ratio'], '.2f')} | {row['target']} |"
        for row in totals
    ]


def claims_table(_: Rows) -> list[str]:
    """A row for each file of results: what its script claims, and how many of its rows have a target and miss it."""
    lines = ["| what is claimed | script | figures | wanted | missed |", "|---|---|---|---|---|"]
    for result in sorted(RESULTS.glob("*.json")):
        script = _script_of(result.stem)
        judged = [row["ok"] for row in json.loads(result.read_text())["rows"] if row["ok"] is not None]
        places = [f"[{path.name}](../{path.relative_to(ROOT).as_posix()})" for path in (script, result)]
        lines.append(f"| {_claim_of(script)} | {' | '.join(places)} | {len(judged)} | {judged.count(False)} |")
    return lines


def games_table(_: Rows) -> list[str]:
    """A row for each game day."""
    metrics = (
        "faults", "calls answered well, outside", "calls answered well, inside", "prompts answered and compared",
        "prompts with wrong tokens", "blocks acknowledged", "acknowledged blocks lost",
    )  # fmt: skip
    titles = "| game | faults | calls answered outside of faults | inside | prompts | wrong | blocks | lost | missed |"
    lines = [titles, "|---" * 9 + "|"]
    for result in sorted(RESULTS.glob("gameday_*.json")):
        rows = json.loads(result.read_text())["rows"]
        seed, shown = result.stem.rpartition("_")[2], {row["metric"]: row for row in rows if "," not in row["case"]}
        figures = " | ".join(_reported(shown[metric]) for metric in metrics)
        lines.append(f"| [seed {seed}](seed_{seed}.md) | {figures} | {sum(row['ok'] is False for row in rows)} |")
    return lines


def _reported(row: dict[str, Any]) -> str:
    return f"{row['value']:.2f} %" if row["unit"] == "%" else f"{row['value']:,}"


def missed_table(_: Rows) -> list[str]:
    """Every row of any file that misses its target."""
    lines = ["| figures | what | figure | compared with | ratio | wanted |", "|---|---|---|---|---|---|"]
    for result in sorted(RESULTS.glob("*.json")):
        rows = [row for row in json.loads(result.read_text())["rows"] if row["ok"] is False]
        lines += [f"| {result.stem} {line}" for line in costs_table(rows)[2:]]
    return lines


def _script_of(result: str) -> Path:
    """Return the script or test that wrote a file of results: of the same name, or the one that it is a part of."""
    folder, name = (ROOT / "benchmarks" / "gpu", result[4:]) if result.startswith("gpu_") else (RESULTS.parent, result)
    found = [folder / f"{name}.py", *sorted(folder.glob(f"{name}_*.py")), folder / f"{name.rpartition('_')[0]}.py"]
    found.append(ROOT / "tests" / "deploy" / f"test_{name}.py")
    return next(path for path in found if path.exists())


def _claim_of(script: Path) -> str:
    """Return the first sentence of a script about itself."""
    text = (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n\n")[0]
    claim = " ".join(text.split()).removeprefix("Claim: ").partition(". ")[0].rstrip(".")
    return claim[:1].upper() + claim[1:]


def _figure(row: dict[str, Any], of: str = "value") -> str:
    value = row[of]
    digits = 0 if value == int(value) else 1 if value >= 10 else 3
    return f"{value:,.{digits}f} {row['unit']}".strip()


def _share(row: dict[str, Any]) -> str:
    return f", {row['ratio']:.1%} of {_figure(row, 'baseline')}" if row["baseline"] else ""


def _beside(row: dict[str, Any]) -> str:
    return f"{_figure(row, 'baseline')} | {row['ratio']:.2f}" if row["baseline"] else " | "


TABLES: list[tuple[str, str, str, Callable[[Rows], list[str]]]] = [
    ("README.md", "match", "match.json", match_table),
    ("README.md", "cpu", "service.json", cpu_table),
    ("README.md", "engines", "service.json", engines_line),
    ("README.md", "passes", "optimizer.json", passes_table),
    ("docs/performance.md", "calls", "service.json", calls_table),
    ("docs/performance.md", "transports", "service.json", transports_table),
    ("docs/operations.md", "sizing", "service.json", sizing_table),
    ("docs/performance.md", "scaling", "service_scaling.json", costs_table),
    ("docs/performance.md", "keys", "auth_cost.json", keys_table),
    ("docs/performance.md", "soak", "soak.json", judged_table),
    ("docs/performance.md", "overload", "overload.json", overload_table),
    ("docs/performance.md", "restarts", "restarts.json", judged_table),
    ("docs/performance.md", "fleet", "fleet.json", fleet_table),
    ("docs/performance.md", "managers", "managers.json", managers_table),
    ("docs/performance.md", "claims", "", claims_table),
    ("docs/performance.md", "missed", "", missed_table),
    ("docs/gameday/index.md", "games", "", games_table),
    ("docs/eviction.md", "eviction", "reclaim.json", eviction_table),
    ("docs/rest.md", "vitals", "vitals.json", judged_table),
    ("docs/metadata.md", "index", "index.json", costs_table),
    ("docs/metadata.md", "scale", "scale.json", costs_table),
    ("docs/metadata.md", "idle", "idle.json", judged_table),
    ("docs/metadata.md", "shared-writes", "shared_writes.json", judged_table),
    ("docs/residency.md", "residency", "residency.json", costs_table),
    ("docs/residency.md", "routing", "routing.json", costs_table),
    ("docs/metadata.md", "group-move", "group_move.json", judged_table),
    ("docs/engines.md", "compatibility", "compatibility.json", compatibility_table),
    ("docs/vllm.md", "conversation", "conversation.json", conversation_table),
    ("docs/vllm.md", "connector", "connector.json", judged_table),
    ("docs/demo.md", "turns", "reuse.json", turns_table),
    ("docs/demo.md", "checks", "reuse.json", checks_table),
]


def filled(text: str, marker: str, lines: list[str]) -> str:
    """Return the text with the lines between `<!-- marker:begin -->` and `<!-- marker:end -->`."""
    pattern = re.compile(rf"(<!-- {marker}:begin -->\n).*?(<!-- {marker}:end -->)", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"no marker {marker}")
    body = "".join(f"{line}\n" for line in lines)
    return pattern.sub(lambda found: found[1] + body + found[2], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail instead of writing")
    check = parser.parse_args().check
    stale = []
    for document, marker, result, table in TABLES:
        path = ROOT / document
        rows = json.loads((RESULTS / result).read_text())["rows"] if result else []
        text = path.read_text()
        new = filled(text, marker, table(rows))
        if new != text:
            stale.append(document)
            if not check:
                path.write_text(new)
    if check and stale:
        print(f"figures differ from benchmarks/results: {sorted(set(stale))}; run benchmarks/readme.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
