"""Event hashes of blocks: given when a write starts, and answered with the locations from then on."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from test_transport_drivers import post
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site, mask, specs

VLLM = [7536218907325174565, 9048537298590080561, 17270480062156288726 - (1 << 64)]  # events have them without a sign
SGLANG = [8635429971592222890, 1256577331724852459]
HASHES = [*VLLM, *SGLANG, -(1 << 63), 1, 0]
KEYS = list(range(1, 1 + len(HASHES)))
TWO_PARTS: dict[str, Any] = {
    "location_spec_infos": [{"name": "k", "size": 512}, {"name": "v", "size": 512}],
    "location_spec_groups": [{"name": "k", "spec_names": ["k"]}, {"name": "v", "spec_names": ["v"]}],
}


def answered(site: Site, instance: str, keys: Sequence[int], **fields: Any) -> list[int]:
    """The event hash of every location that a match answers."""
    query = {"query_type": "QT_BATCH_GET", **fields}
    answer = site.api.ok("GetCacheLocation", instance_id=instance, block_keys=keys, **query)
    return [location.event_hash for location in answer.locations]


def check_answers(site: Site, instance: str) -> None:
    """Every call that answers these blocks has their hashes."""
    assert answered(site, instance, KEYS) == HASHES
    assert answered(site, instance, KEYS, location_spec_names=["v"]) == HASHES
    assert answered(site, instance, KEYS, query_type="QT_PREFIX_MATCH") == HASHES
    answer = site.api.ok("GetCacheLocation", instance_id=instance, block_keys=KEYS, query_type="QT_BATCH_GET")
    assert [sorted(specs(location)) for location in answer.locations] == [["k", "v"]] * len(KEYS)
    metas = site.api.ok("GetCacheMeta", instance_id=instance, block_keys=KEYS, detail_level=1)
    assert [location.event_hash for location in metas.locations] == HASHES
    shown = [[place.get("event_hash") for place in json.loads(text)["locations"]] for text in metas.metas]
    assert shown == [[str(each)] * 2 if each else [None] * 2 for each in HASHES]


@pytest.mark.parametrize("store", ["memory", "rocksdb", "redis"])
def test_every_store_keeps_the_hashes_of_blocks(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Before the finish, after it, when locations are joined, and after a restart where the store outlives one."""
    uri = {"memory": "memory://", "rocksdb": f"local://{tmp_path}/metadata"}.get(store)
    if uri is None:
        uri = request.getfixturevalue("redis_standalone").uri(f"t{secrets.token_hex(6)}")
    setting = f"kvcm.registry_storage.uri={uri}"
    with manager(tmp_path, setting) as process, process.api() as api:
        site = Site(api)
        instance = site.instance(**TWO_PARTS)
        started = site.start(instance, KEYS, event_hashes=HASHES, location_spec_group_names=["k"] * len(KEYS))
        assert [location.event_hash for location in started.locations] == HASHES
        site.finish(instance, started)
        assert answered(site, instance, KEYS) == HASHES
        site.write(instance, KEYS, event_hashes=HASHES, location_spec_group_names=["v"] * len(KEYS))
        check_answers(site, instance)
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    if store != "memory":
        with manager(tmp_path, setting) as process, process.api() as api:
            check_answers(Site(api), instance)


def test_checksums_of_a_finish_leave_hashes_as_they_are(site: Site) -> None:
    instance = site.instance()
    started = site.start(instance, KEYS, event_hashes=HASHES)
    site.finish(instance, started, locations=[{"checksum": 2**63 - 1} for _ in KEYS])
    answer = site.api.ok("GetCacheLocation", instance_id=instance, block_keys=KEYS, query_type="QT_BATCH_GET")
    assert [(each.event_hash, each.checksum) for each in answer.locations] == [(each, 2**63 - 1) for each in HASHES]


def test_only_blocks_that_are_written_get_a_hash(site: Site) -> None:
    """A masked block keeps the hash of its own writer."""
    instance = site.instance()
    site.write(instance, [2])
    site.write(instance, [4], event_hashes=[-4])
    site.write(instance, [1, 2, 3, 4, 3, 5], event_hashes=[10, 20, 30, 40, 31, 50])
    assert answered(site, instance, [1, 2, 3, 4, 5]) == [10, 0, 30, -4, 50]


def test_of_several_locations_the_fastest_with_a_hash_counts(site: Site) -> None:
    instance = site.instance(**TWO_PARTS)
    site.write(instance, [1], location_spec_group_names=["k"])
    site.write(instance, [1], location_spec_group_names=["v"], event_hashes=[7])
    assert answered(site, instance, [1]) == [7]


@pytest.mark.parametrize("hashes", [[1], [1, 2, 3, 4], range(65_537)], ids=["fewer", "more", "too many"])
def test_another_number_of_hashes_than_keys_is_refused_and_changes_nothing(site: Site, hashes: Sequence[int]) -> None:
    instance = site.instance()
    fields = {"instance_id": instance, "block_keys": [1, 2, 3]}
    code, message = site.api.refused("StartWriteCache", **fields, event_hashes=hashes)
    assert code == "INVALID_ARGUMENT"
    assert f"event_hashes has {len(hashes)} entries" in message
    assert site.statuses(instance, [1, 2, 3]) == ["CLS_NOT_FOUND"] * 3
    assert not site.start(instance, [1, 2, 3]).block_mask.offset


def test_hashes_belong_to_the_keys_that_tokens_stand_for(site: Site) -> None:
    instance = site.instance(block_size=2)
    tokens = {"instance_id": instance, "token_ids": [1, 2, 3, 4, 5]}
    _, message = site.api.refused("StartWriteCache", **tokens, event_hashes=[1] * 5)
    assert "event_hashes has 5 entries for 2 block keys" in message
    started = site.api.ok("StartWriteCache", **tokens, event_hashes=[8, 9])
    site.finish(instance, started, mask(2))
    query = {"query_type": "QT_PREFIX_MATCH", **tokens}
    assert [each.event_hash for each in site.api.ok("GetCacheLocation", **query).locations] == [8, 9]


@pytest.mark.parametrize("written", [str, int], ids=["texts", "numbers"])
def test_json_has_hashes_as_texts_and_takes_numbers(
    server: ManagerProcess, site: Site, written: Callable[[int], object]
) -> None:
    body = {"instance_id": site.instance(), "block_keys": KEYS, "event_hashes": list(map(written, HASHES))}
    wrong = {**body, "event_hashes": [*HASHES[1:], 1 << 63]}
    with closing(HTTPConnection(server.address.http, timeout=60)) as connection:
        answer = post(connection, "/api/startWriteCache", json.dumps(body).encode())
        refused = post(connection, "/api/startWriteCache", json.dumps(wrong).encode())
    assert [each["event_hash"] for each in json.loads(answer.body)["locations"]] == list(map(str, HASHES))
    assert refused.status == 400
    assert "event_hashes[7]: is out of the range of sfixed64" in refused.headers["x-kvcm-error"]
