"""Memory pools over the wire: whoever names a node is given the memory of that node, and nobody else is."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from test_pool_cases import MIB, pool_spec
from test_transport_drivers import eventually
from test_transport_sites import Site, masked, unique

from kvcm.model.uri import LocationUri

KEYS = [1, 2, 3]


class PoolSite:
    """A group on pools of two nodes, each told of, and an instance in it."""

    def __init__(self, site: Site, *more: str) -> None:
        self.site = site
        self.nodes = unique("node"), unique("node")
        self.pools = [site.storage(**pool_spec(node)) for node in self.nodes]
        for pool in range(2):
            self.report(pool)
        self.instance = site.instance(site.group(*self.pools, *more))

    def report(self, pool: int, generation: int = 7, **fields: Any) -> Any:
        return self.site.api.ok(
            "PoolService.ReportPool",
            storage_unique_name=self.pools[pool],
            node_id=self.nodes[pool],
            generation=generation,
            capacity_bytes=MIB,
            **fields,
        )

    def storages(self, found: list[dict[str, str]]) -> list[str]:
        return [LocationUri.parse(uri).storage for entry in found for uri in entry.values()]

    def length(self, **fields: Any) -> int:
        query = {"block_keys": KEYS, "query_type": "QT_PREFIX_MATCH", **fields}
        answer = self.site.api.ok("GetCacheLocationLen", instance_id=self.instance, **query)
        return int(answer.cache_location_len)


def test_memory_is_given_to_its_own_node_alone(site: Site) -> None:
    shared = site.storage()
    pools = PoolSite(site, shared)
    first, second = pools.nodes
    (uris,) = ([*entry.values()] for entry in site.write(pools.instance, KEYS[:1], node_id=first))
    place = LocationUri.parse(uris[0])
    assert (place.scheme, place.storage, place.node_id, place.size) == ("pace", pools.pools[0], first, 64)
    site.write(pools.instance, KEYS[1:], node_id=first)
    assert pools.storages(site.match(pools.instance, KEYS, node_id=first)) == [pools.pools[0]] * 3
    for other in (second, "", "elsewhere"):
        assert site.match(pools.instance, KEYS, node_id=other) == []
        assert pools.length(node_id=other) == 0
    assert pools.length(node_id=first) == 3
    # For them the blocks are not there: they write them to where they can.
    assert pools.storages(site.write(pools.instance, KEYS, node_id=second)) == [pools.pools[1]] * 3
    assert pools.storages(site.write(pools.instance, KEYS)) == [shared] * 3
    assert masked(site.start(pools.instance, KEYS, node_id=first)) == 3
    assert pools.storages(site.match(pools.instance, KEYS, node_id=second)) == [pools.pools[1]] * 3
    assert pools.storages(site.match(pools.instance, KEYS)) == [shared] * 3
    assert pools.storages(site.match(pools.instance, KEYS, "QT_BATCH_GET", node_id=first)) == [pools.pools[0]] * 3


def test_a_new_generation_forgets_what_was_there_and_its_space_comes_back(site: Site) -> None:
    pools = PoolSite(site)
    node = pools.nodes[0]
    site.write(pools.instance, KEYS, node_id=node)
    site.write(pools.instance, KEYS, node_id=pools.nodes[1])
    assert not pools.report(0).is_new_generation
    assert pools.report(0, 8).is_new_generation
    assert eventually(lambda: not site.match(pools.instance, KEYS, node_id=node) or None)
    assert len(site.match(pools.instance, KEYS, node_id=pools.nodes[1])) == 3
    site.write(pools.instance, KEYS, node_id=node)
    assert len(site.match(pools.instance, KEYS, node_id=node)) == 3


def test_memory_that_is_as_it_was_handed_out_is_not_given_up(site: Site) -> None:
    pools = PoolSite(site)
    site.write(pools.instance, KEYS, node_id=pools.nodes[0])
    (entry, *_) = site.match(pools.instance, KEYS, node_id=pools.nodes[0])
    part = {"block_key": KEYS[0], "uri": entry["kv"]}
    answer = site.api.ok("PinService.ReportMissing", instance_id=pools.instance, parts=[part])
    assert (answer.removed_locations, answer.unconfirmed_parts) == (0, 1)


def test_a_pool_that_is_full_is_no_error_of_a_storage(site: Site) -> None:
    """A block of 64 bytes takes a page, so that the pool is full long before its capacity is used."""
    pools = PoolSite(site)
    keys = list(range(1, 1 + MIB // 4096))
    site.write(pools.instance, keys, node_id=pools.nodes[0])
    fields = {"instance_id": pools.instance, "block_keys": [10_000], "node_id": pools.nodes[0]}
    refusal = site.api.refused("StartWriteCache", **fields)
    assert refusal.code == "REACH_MAX_ENTITY_CAPACITY", refusal
    assert "no room" in refusal.message
    site.api.ok("RemoveCache", instance_id=pools.instance, block_keys=keys[:10])
    assert eventually(lambda: site.api.call("StartWriteCache", **fields).locations or None)


def test_a_pool_that_is_full_makes_way_for_the_next_candidate_in_the_same_call(site: Site) -> None:
    shared = site.storage()
    pools = PoolSite(site, shared)
    node = pools.nodes[0]
    keys = list(range(1, 1 + MIB // 4096))
    assert set(pools.storages(site.write(pools.instance, keys, node_id=node))) == {pools.pools[0]}
    assert pools.storages(site.write(pools.instance, [10_000, 10_001], node_id=node)) == [shared] * 2
    site.api.ok("RemoveCache", instance_id=pools.instance, block_keys=keys[:10])
    numbers = count(20_000)
    assert eventually(
        lambda: pools.storages(site.write(pools.instance, [next(numbers)], node_id=node)) == [pools.pools[0]] or None
    ), "it is not passed over for good"


def test_a_pool_is_listed_and_told_to_engines_with_its_node_and_size(site: Site) -> None:
    name = site.storage(**pool_spec("n.1"))
    (listed,) = [s for s in site.api.ok("AdminService.ListStorage").storage if s.global_unique_name == name]
    assert (listed.tair_mem_pool.node_id, listed.tair_mem_pool.capacity_bytes) == ("n.1", MIB)
    fields = {"instance_id": unique("instance"), "instance_group": site.group(name), "block_size": 4}
    specs = {"location_spec_infos": [{"name": "kv", "size": 64}]}
    model = {"model_deployment": {"model_name": "m", "dtype": "bf16"}}
    configs = site.api.ok("RegisterInstance", **fields, **specs, **model).storage_configs
    assert configs == (
        f'[{{"type":"pace","is_available":true,"global_unique_name":"{name}","storage_spec":'
        f'{{"enable_vipserver":false,"domain":"","timeout":0,"node_id":"n.1","capacity_bytes":{MIB}}}}}]'
    )


@pytest.mark.parametrize("change", [{"node_id": "other"}, {"capacity_bytes": 2 * MIB}])
def test_node_and_size_of_a_pool_never_change(site: Site, change: dict[str, Any]) -> None:
    name = site.storage(**pool_spec())
    spec = pool_spec()["tair_mem_pool"] | change
    storage = {"global_unique_name": name, "tair_mem_pool": spec}
    refusal = site.api.refused("AdminService.UpdateStorage", storage=storage)
    assert refusal.code == "INVALID_ARGUMENT"
    assert "remove it and add it again" in refusal.message
