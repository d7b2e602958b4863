"""A scrape is answered while the metadata store is away, with what was heard of it last."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_servers import RedisServer, standalone
from test_prometheus import Scrape
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tuple[RedisServer, str]]:
    with standalone(tmp_path / "redis") as made:
        yield made.server, made.uri("away")


@pytest.fixture
def shared(store: tuple[RedisServer, str], tmp_path: Path) -> Iterator[ManagerProcess]:
    with manager(tmp_path / "manager", f"kvcm.registry_storage.uri={store[1]}") as process:
        yield process


def test_what_was_heard_last_is_told_while_the_store_does_not_answer(
    store: tuple[RedisServer, str], shared: ManagerProcess
) -> None:
    with shared.api() as api:
        site = Site(api)
        group = site.group()
        site.write(site.instance(group), [1, 2, 3])
        assert Scrape(shared).of("kvcm_group_used_bytes", group=group, tier="total") == 192
        store[0].pause()
        try:
            for _ in range(3):
                away = Scrape(shared)
                assert away.of("kvcm_group_used_bytes", group=group, tier="total") == 192
                assert away.of("kvcm_index_keys", group=group) == 3
        finally:
            store[0].resume()


def test_followers_tell_what_others_wrote(
    store: tuple[RedisServer, str], shared: ManagerProcess, tmp_path: Path
) -> None:
    with manager(tmp_path / "second", f"kvcm.registry_storage.uri={store[1]}") as second, shared.api() as api:
        site = Site(api)
        group = site.group()
        site.write(site.instance(group), [1, 2])
        assert Scrape(shared).of("kvcm_index_keys", group=group) == 2
        keys = ("kvcm_index_keys", frozenset({("group", group)}))
        eventually(lambda: Scrape(second).values.get(keys) == 2)  # a group is heard of within a second
        assert sum(Scrape(process).of("kvcm_leader") for process in (shared, second)) == 1
