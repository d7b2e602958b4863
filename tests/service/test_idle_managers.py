"""What managers ask Redis while nobody asks them: next to nothing, however many instances there are."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from redis_servers import RedisServer, cluster, standalone
from test_several_managers import node, settings_of
from test_transport_sites import instance_fields

from kvcm.protocol import meta_service_pb2 as meta
from kvcm.store.redis import tracking

INSTANCES = 10
WINDOW_SECONDS = 3.0
WINDOWS = 10  # a recount, or a report of vitals, falls into some of them, and a busy machine may be late
MOST_PER_SECOND = 50  # and manager; 27 as measured
MOST_IN_A_CLUSTER = 100  # three masters, each with a time that is written twice a second


@contextlib.contextmanager
def servers_of(kind: str, directory: Path) -> Iterator[tuple[str, Sequence[RedisServer]]]:
    """Run servers that nothing else uses; their uri, and those that count commands."""
    if kind == "cluster":
        with cluster(directory) as nodes:
            yield nodes.uri("idle"), nodes.nodes
    else:
        with standalone(directory) as alone:
            yield alone.uri("idle"), [alone.server]


@pytest.mark.parametrize(("kind", "most"), [("standalone", MOST_PER_SECOND), ("cluster", MOST_IN_A_CLUSTER)])
async def test_idle_managers_ask_for_almost_nothing(
    kind: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "_PONG_SECONDS", 600.0)  # a busy machine may be late; this is about commands
    with servers_of(kind, tmp_path / "redis") as (uri, servers):
        settings = settings_of(uri, tmp_path)
        async with node(settings) as leader, node(settings):
            for number in range(INSTANCES):
                fields = instance_fields(f"i{number}", "default", location_spec_infos=[{"name": "kv", "size": 100}])
                answer = await leader.meta.RegisterInstance(meta.RegisterInstanceRequest(**fields))
                assert answer.header.status.code == meta.OK
            rates: list[float] = []
            while not rates or rates[-1] > 2 * most:
                assert len(rates) < WINDOWS, rates
                rates.append(await commands_per_second(servers))


async def commands_per_second(servers: Sequence[RedisServer]) -> float:
    """Count for a while what the servers were asked, also by scripts."""
    begin, before = time.monotonic(), calls(servers)
    await asyncio.sleep(WINDOW_SECONDS)
    return (calls(servers) - before) / (time.monotonic() - begin)


def calls(servers: Sequence[RedisServer]) -> int:
    """Return how many commands they were asked so far."""
    count = 0
    for server in servers:
        with server.admin() as admin:
            count += sum(each["calls"] for each in admin.info("commandstats").values())
    return count
