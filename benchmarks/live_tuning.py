"""Claim: a running manager behaves as its proposals predict.

A real manager keeps recent accesses while clients replay a trace over gRPC: look up a prefix, count the hits,
write all blocks. Then `kvcm optimize --from` looks at it, and what it rehearses of the present settings at three
capacities is compared with those hits. What it proposes is applied, the caches are emptied, and the same is
replayed again: again predicted and measured hit rates are compared. Beside that: what keeping accesses and estimating
needs costs a lookup.

The trace is the conversation trace of Mooncake where it is there (`KVCM_TRACES`, or shared/data/traces beside the
project), else a made-up one.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import grpc.aio
from capacity_site import BLOCK_BYTES, CapacitySite, GroupShape, dummy_storage
from report import Row, arguments, publish

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from manager_site import Manager, running

from kvcm.commands.optimize import apply_proposals, proposals_for, read_situation
from kvcm.optimizer.live.bytes_needed import ReuseSample
from kvcm.optimizer.live.proposals import GroupState, Proposal, measured_hit_rate
from kvcm.optimizer.live.recording import read_recording
from kvcm.optimizer.live.rehearsal import rehearse
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.terminal.admin_client import AdminClient

ROOT = Path(__file__).parents[1]
TRACE = "mooncake_conversation.jsonl.gz"
SHARES = {"g05": 0.05, "g15": 0.15, "g40": 0.40}
"""Groups, and their quotas as a part of all blocks."""
MARK = 0.9
POLICY = "lru"
TARGET = 0.95
MOST_POINTS = 1.0
CLIENTS = 2
SPREAD = 7919  # block keys are no small numbers
LOOKUP_KEYS = 1024
COST_SETTINGS = {
    "off": {},
    "recent accesses": {"kvcm.optimizer.recent_keys": str(1 << 22)},
    "estimate": {"kvcm.optimizer.sampled_keys": "8192"},
}


class Replayed(NamedTuple):
    """Blocks that lookups asked for, and those that they found."""

    asked: int
    found: int

    @property
    def hit_rate(self) -> float:
        """Return found blocks per block asked for."""
        return self.found / self.asked


def requests(count: int) -> tuple[str, list[list[int]]]:
    """Return a name and the keys of so many requests."""
    named = os.environ.get("KVCM_TRACES")
    places = [Path(named)] if named else [each / "shared/data/traces" for each in (ROOT, *ROOT.parents)]
    path = next((each / TRACE for each in places if (each / TRACE).exists()), None)
    if path is None:
        return "made up", list(itertools.islice(_made_up(random.Random(7)), count))
    with gzip.open(path) as file:
        lines = [json.loads(line) for line in itertools.islice(file, count)]
    return "mooncake_conversation", [[SPREAD * (each + 1) for each in line["hash_ids"]] for line in lines]


def _made_up(draw: random.Random) -> Iterator[list[int]]:
    """Yield turns of conversations, of which the latest go on most often."""
    talks: list[list[int]] = []
    while True:
        if talks and draw.random() < 0.6:
            talk = talks[-1 - min(int(draw.expovariate(0.1)), len(talks) - 1)]
        else:
            talk = []
            talks.append(talk)
        talk += [draw.getrandbits(62) for _ in range(draw.randint(1, 20))]
        yield list(talk)


class Tuned:
    """A manager with three groups.

    Args:
        site: its calls.
        manager: the process.
        turns: to replay.
    """

    def __init__(self, site: CapacitySite, manager: Manager, turns: Sequence[Sequence[int]]) -> None:
        self._site = site
        self._turns = turns
        self._meta = manager.connect().meta
        self.client = AdminClient(f"http://127.0.0.1:{manager.settings['kvcm.service.admin_http_port']}")

    async def create(self) -> None:
        """Create the groups."""
        blocks = len({key for keys in self._turns for key in keys})
        for name, share in SHARES.items():
            shape = GroupShape(name, max(64, int(share * blocks)), MARK, policy=POLICY)
            await self._site.create(shape)

    async def replay(self) -> dict[str, Replayed]:
        """Replay everything against all groups beside each other."""
        found = await asyncio.gather(*(self._replay(name) for name in SHARES))
        return dict(zip(SHARES, found, strict=True))

    async def _replay(self, name: str) -> Replayed:
        left, asked, found = iter(self._turns), 0, 0

        async def client() -> None:
            nonlocal asked, found
            for keys in left:
                hits = await self._site.read(name, keys)  # what comes before an await is old behind it
                asked, found = asked + len(keys), found + hits
                await self._site.write(name, keys)

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        return Replayed(asked, found)

    async def empty(self) -> None:
        """Remove all blocks, and wait until they are gone."""
        for name in SHARES:
            await self._meta.TrimCache(pb.TrimCacheRequest(instance_id=name, strategy=pb.TS_REMOVE_ALL_CACHE))
        await self._site.settle()
        assert not any((await self._site.blocks()).values())


@contextlib.asynccontextmanager
async def tuned(turns: Sequence[Sequence[int]]) -> AsyncIterator[Tuned]:
    """Run a manager that keeps all accesses inside the block."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcm-tuning-")))
        settings = {"kvcm.optimizer.recent_keys": str(1 << 26), "kvcm.data_dir": str(directory / "data")}
        manager = Manager(directory / "manager", settings)
        stack.enter_context(running(manager))
        address = f"127.0.0.1:{manager.settings['kvcm.service.admin_rpc_port']}"
        async with grpc.aio.insecure_channel(address) as channel:
            site = CapacitySite("rocksdb", manager, channel, directory / "events")
            await site.add_storage(dummy_storage("dummy"))
            made = Tuned(site, manager, turns)
            await made.create()
            yield made
            await site.close()
        assert not manager.failures(), f"the manager logged defects: {manager.failures()[:3]}"


async def predictions(count: int) -> list[Row]:
    """Compare predicted with measured hit rates, as the manager is and as it is proposed."""
    name, turns = requests(count)
    async with tuned(turns) as manager:
        measured = await manager.replay()
        looked = await asyncio.to_thread(read_situation, manager.client)
        proposals = await asyncio.to_thread(proposals_for, looked.situation, TARGET, 0)
        rows = [
            _compared(f"{name}, {count} requests, {_settings(each, proposed=False)}", rate(each), measured[_name(each)])
            for each in proposals
        ]
        rows += await asyncio.to_thread(_warm, f"{name}, {count} requests", manager.client, looked.situation.groups)
        changed = [each for each in proposals if each.is_change]
        await manager.empty()
        await asyncio.to_thread(apply_proposals, manager.client, looked, proposals, yes=True)
        again = await manager.replay()
    for each in changed:
        case = f"{name}, {count} requests, applied: {_settings(each, proposed=True)}"
        rows.append(_compared(case, each.proposed.outcome.hit_rate, again[_name(each)]))
        gain = 100 * (again[_name(each)].hit_rate - measured[_name(each)].hit_rate)
        rows.append(Row(case, "gain in hit rate", gain, "points", 100 * each.gain))
    return rows


def _warm(case: str, client: AdminClient, groups: Sequence[GroupState]) -> list[Row]:
    """Compare likewise, as if only the second half of the accesses had been kept: the caches were full before."""
    summary, *events = client.page("/v1/events/recent", 60.0).body.splitlines()
    reported = {**json.loads(summary), "dropped_events": len(events) // 2}
    recording = read_recording([json.dumps(reported).encode(), *events[len(events) // 2 :]])
    rows = []
    for state in groups:
        measured = measured_hit_rate(recording, state.block_bytes)
        if measured is not None:
            outcome = rehearse(recording, state.group, state.block_bytes, state.used_bytes)
            blocks = state.group.quota.capacity // BLOCK_BYTES
            shown = f"{case}, only their second half, {blocks:,} blocks"
            asked = sum(outcome.asked_blocks.values())
            rows.append(_compared(shown, outcome.hit_rate, Replayed(asked, round(measured * asked))))
    return rows


def rate(proposal: Proposal) -> float:
    """Return the rehearsal of the present settings."""
    return proposal.present.outcome.hit_rate


def _name(proposal: Proposal) -> str:
    return proposal.state.group.name


def _settings(proposal: Proposal, *, proposed: bool) -> str:
    group = proposal.proposed.group if proposed else proposal.state.group
    blocks = group.quota.capacity // next(iter(proposal.state.block_bytes.values()))
    return f"{group.policy_of('').name}, {blocks:,} blocks"


def _compared(case: str, predicted: float, measured: Replayed) -> Row:
    points = 100 * abs(predicted - measured.hit_rate)
    return Row(
        case,
        "predicted hit rate",
        100 * predicted,
        "%",
        baseline=100 * measured.hit_rate,
        ratio=points,
        target=f"within {MOST_POINTS:g} points of the measured one",
        ok=points <= MOST_POINTS,
    )


async def costs(rounds: int, repeat: int) -> list[Row]:
    """Compare lookups of managers that keep accesses or estimate needs with those of one that does neither."""
    seconds: dict[str, list[float]] = {name: [] for name in COST_SETTINGS}
    keys = [SPREAD * (each + 1) for each in range(LOOKUP_KEYS)]
    async with contextlib.AsyncExitStack() as stack:
        sites = {name: await stack.enter_async_context(_stored(more, keys)) for name, more in COST_SETTINGS.items()}
        for _ in range(rounds):
            for name, site in sites.items():
                begin = time.perf_counter()
                for _ in range(repeat):
                    assert await site.read("g", keys) == LOOKUP_KEYS
                seconds[name].append((time.perf_counter() - begin) / repeat)
    medians = {name: 1e6 * statistics.median(found) for name, found in seconds.items()}
    case = f"GetCacheLocation of {LOOKUP_KEYS:,} keys over gRPC"
    return [
        Row(f"{case}, {name}", "time per answer", value, "us", medians["off"], value / medians["off"])
        for name, value in medians.items()
    ]


@contextlib.asynccontextmanager
async def _stored(more: dict[str, str], keys: Sequence[int]) -> AsyncIterator[CapacitySite]:
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvcm-tuning-")))
        manager = Manager(directory / "manager", {"kvcm.data_dir": str(directory / "data"), **more})
        stack.enter_context(running(manager))
        address = f"127.0.0.1:{manager.settings['kvcm.service.admin_rpc_port']}"
        async with grpc.aio.insecure_channel(address) as channel:
            site = CapacitySite("rocksdb", manager, channel, directory / "events")
            await site.add_storage(dummy_storage("dummy"))
            await site.create(GroupShape("g", 2 * len(keys)))
            await site.write("g", keys)
            yield site
            await site.close()


def estimates(count: int) -> list[Row]:
    """Compare the estimate of a sample with exact reuse distances."""
    name, turns = requests(count)
    exact, sample = ReuseSample(1 << 20, share=1.0), ReuseSample(8192)
    for keys in turns:
        exact.read(keys, 16384)
    begin = time.perf_counter()
    for keys in turns:
        sample.read(keys, 16384)
    per_key = (time.perf_counter() - begin) / sum(map(len, turns)) * 1e6
    capacities, rates = exact.hit_curve()
    error = abs(rates - sample.hit_curve()[1])[capacities >= 0.02 * 16384 * len(exact)].max()
    case = f"{name}, {count} requests, {len(sample):,} of {len(exact):,} keys in the sample"
    return [
        Row(case, "largest error of the estimated hit rates", 100 * float(error), "points"),
        Row(case, "time per key", per_key, "us"),
    ]


def main() -> int:
    """Run it."""
    options = arguments(__doc__ or "").parse_args()
    quick = options.quick
    rows = asyncio.run(costs(3, 20) if quick else costs(20, 100))
    rows += estimates(200 if quick else 12_031)
    rows += asyncio.run(predictions(150 if quick else 3000))
    is_met = publish("Tuning of a running manager", rows, options.json)
    return 0 if is_met or quick else 1


if __name__ == "__main__":
    raise SystemExit(main())
