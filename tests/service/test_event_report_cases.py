"""ReportEvent, GetHostCacheState, GetCacheLocationsByBackend: good requests, documented refusals, what clients see."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from test_meta_cases import Fields, Refused
from test_pool_cases import pool_report, pool_spec
from test_residency_cases import change, report
from test_transport_drivers import Api, eventually
from test_transport_sites import Site, specs

KEYS = [-(2**63), 0, 1, 2**63 - 1]
L1P5, L2 = "ST_EVENT_REPORT_L1P5", "ST_EVENT_REPORT_L2"
HOST = "10.0.0.8:8080"
REGISTER: Fields = {"event_type": "EVENT_NODE_REGISTER", "node_register": {"mediums": ["hbm"]}}
HEARTBEAT: Fields = {"event_type": "EVENT_HEARTBEAT", "heartbeat": {"system_status": {"load": "0.42"}}}
HOST_DOWN: Fields = {"event_type": "EVENT_HOST_DOWN", "host_down": {}}
PARTS = [{"name": "F0", "size": 64}, {"name": "L1", "size": 32, "kind": "LSK_LINEAR_ATTENTION"}]


def block(key: int | str, medium: str = "hbm", *names: str, uri: str = "vllm://host/hbm") -> Fields:
    """Return a block of a snapshot, with the part `kv` unless others are named."""
    found = [{"name": name, "uri": uri} for name in names or ("kv",)]
    return {"block_key": str(key), "medium": medium, "specs": found}


def add(key: int | str, medium: str = "hbm", *names: str, **more: Any) -> Fields:
    """Return EVENT_BLOCK_ADD."""
    return {"event_type": "EVENT_BLOCK_ADD", "block_add": block(key, medium, *names, **more)}


def delete(key: int | str, medium: str = "hbm", *names: str) -> Fields:
    """Return EVENT_BLOCK_DELETE."""
    gone = {"block_key": str(key), "medium": medium, "spec_names": list(names or ("kv",))}
    return {"event_type": "EVENT_BLOCK_DELETE", "block_delete": gone}


def snapshot(*blocks: Fields) -> Fields:
    """Return EVENT_BLOCK_SNAPSHOT."""
    return {"event_type": "EVENT_BLOCK_SNAPSHOT", "block_snapshot": {"blocks": list(blocks)}}


def reporting_instance(site: Site, **changes: Any) -> str:
    """Register an instance whose group has a storage for events of each kind; `times` are of these."""
    times = changes.pop("times", {})
    events = [site.storage(event_report=times, storage_type=each) for each in (L1P5, L2)]
    group = site.group(event_report_storage_candidates=events, extra_info="{}")
    return site.instance(group, **changes)


def events(instance: str, *items: Fields, host: str = HOST, source: str | int = L1P5) -> Fields:
    """Return the fields of ReportEvent."""
    return {"instance_id": instance, "host_ip_port": host, "storage_type": source, "events": list(items)}


def _report(site: Site, **changes: Any) -> Fields:
    fields = events(reporting_instance(site), *(add(key) for key in KEYS))
    return {**fields, **changes}


def _state(site: Site, **changes: Any) -> Fields:
    return {"instance_id": site.instance(), "query_type": "QT_PREFIX_MATCH", "block_cache_keys": KEYS, **changes}


def _selector(kind: str | int = L1P5, strategy: str = "LSS_V6D_PREFIX") -> Fields:
    return {"backend_type": kind, "strategy": strategy}


def _locations(site: Site, **changes: Any) -> Fields:
    asked = {"query_type": "QT_BATCH_GET", "block_keys": KEYS, "backend_selectors": [_selector()]}
    return {"instance_id": site.instance(), **asked, **changes}


GOOD: dict[str, Callable[[Site], Fields]] = {
    "MetaService.ReportEvent": _report,
    "MetaService.GetHostCacheState": _state,
    "MetaService.GetCacheLocationsByBackend": _locations,
}


def _bad(make: Callable[..., Fields], rule: str, *texts: str, **changes: Any) -> Refused:
    return Refused(rule, lambda site: make(site, **changes), "INVALID_ARGUMENT", texts)


def _unknown(make: Callable[..., Fields]) -> Refused:
    return Refused("unknown instance", lambda s: make(s) | {"instance_id": "nobody"}, "INSTANCE_NOT_EXIST", ("nobody",))


def _bad_event(rule: str, *texts: str, event: Fields) -> Refused:
    return _bad(_report, rule, "events[1]", *texts, events=[add(1), event])


def _bad_key(rule: str, key: str) -> Refused:
    return _bad_event(rule, "block_key is ", "int64 or uint64", event=add(key))


REFUSED: dict[str, list[Refused]] = {
    "MetaService.ReportEvent": [
        _unknown(_report),
        Refused(
            "no storage for events in the group",
            lambda site: _report(site) | {"instance_id": site.instance()},
            "INSTANCE_NOT_EXIST",
            (L1P5, "event_report_storage_candidates", "AddStorage"),
        ),
        _bad(_report, "no storage type", "storage_type is 0", L1P5, L2, storage_type=0),
        _bad(_report, "a type without events", "storage_type is 4", L1P5, storage_type="ST_NFS"),
        _bad(_report, "no host", "host_ip_port is ''", "host:port", host_ip_port=""),
        _bad(_report, "a separator in the host", "host_ip_port is 'a#1'", "'#'", host_ip_port="a#1"),
        _bad(_report, "a long host", "host_ip_port", "1 to 256 bytes", host_ip_port="h" * 257),
        _bad(_report, "a snapshot and blocks", "a snapshot and single blocks", events=[snapshot(), add(1)]),
        _bad(_report, "a snapshot and deletions", "a snapshot and single", events=[delete(1), snapshot()]),
        _bad(_report, "two snapshots", "2 snapshots", "at most 1", events=[snapshot(), snapshot()]),
        _bad(_report, "host down and more", "EVENT_HOST_DOWN must be the only", events=[HOST_DOWN, REGISTER]),
        _bad_event("no type", "event_type is 0", "EVENT_BLOCK_ADD", event={"heartbeat": {}}),
        _bad_event("an unknown type", "event_type is 99", event={"event_type": 99, "heartbeat": {}}),
        _bad_event("no details", "needs heartbeat", "nothing is given", event={"event_type": "EVENT_HEARTBEAT"}),
        _bad_event(
            "other details",
            "EVENT_BLOCK_ADD, which needs block_add",
            "heartbeat is given",
            event={"event_type": "EVENT_BLOCK_ADD", "heartbeat": {}},
        ),
        _bad_key("no key", ""),
        _bad_key("a key in hex", "0x1"),
        _bad_key("a plus sign", "+1"),
        _bad_key("a blank", " 1"),
        _bad_key("digits of another script", "\u0661"),
        _bad_key("beyond uint64", str(2**64)),
        _bad_key("below int64", str(-(2**63) - 1)),
        _bad_event("a separator in the medium", "medium is 'a#'", "'#'", event=add(2, "a#")),
        _bad_event("no specs", "specs is required", event={**add(2), "block_add": {"block_key": "2", "medium": "m"}}),
        _bad_event("an unknown spec", "'tp9'", "location_spec_infos", event=add(2, "hbm", "tp9")),
        _bad_event("a spec twice", "['kv'] more than once", event=add(2, "hbm", "kv", "kv")),
        _bad_event("a strange uri", "uri is 'nowhere'", "<scheme>://", event=add(2, uri="nowhere")),
        _bad_event("a long uri", "uri has", "1024", event=add(2, uri="a://" + "u" * 1024)),
        _bad_event("the manager's parameter", "s_version", "the manager adds", event=add(2, uri="a://b?s_version=1")),
        _bad_event(
            "nothing to delete",
            "spec_names is required",
            event={"event_type": "EVENT_BLOCK_DELETE", "block_delete": {"block_key": "2", "medium": "hbm"}},
        ),
        _bad_event("an unknown spec to delete", "'tp9'", event=delete(2, "hbm", "tp9")),
        _bad_event(
            "a separator in a medium of a registration",
            "node_register.mediums is 'a#'",
            event={"event_type": "EVENT_NODE_REGISTER", "node_register": {"mediums": ["a#"]}},
        ),
        _bad(
            _report,
            "a seventeenth medium",
            "events[16]",
            "medium 'm16' is one more than the 16",
            events=[add(1, f"m{number}") for number in range(17)],
        ),
        _bad(
            _report,
            "a block twice in a snapshot",
            "key 1 in medium 'hbm' 2 times",
            events=[snapshot(block(1), block(1))],
        ),
        _bad(
            _report,
            "one bad block in a snapshot",
            "events[1]: block_snapshot.blocks[1]: block_key is 'x'",
            events=[REGISTER, snapshot(block(1), block("x"))],
        ),
        _bad(_report, "a large snapshot", "65537 entries, at most 65536", events=[snapshot(*[block(1)] * 65537)]),
        _bad(_report, "too many events", "events has 65537 entries", events=[HEARTBEAT] * 65537),
    ],
    "MetaService.GetHostCacheState": [
        _unknown(_state),
        _bad(_state, "no query type anywhere", "query_type is 0", "default_query_type", query_type="QT_UNSPECIFIED"),
        _bad(_state, "another query type", "query_type is 1", "QT_PREFIX_MATCH_WITH_MAMBA", query_type="QT_BATCH_GET"),
        _bad(_state, "a negative count", "top_k_host_count is -1", "at least 0", top_k_host_count=-1),
        _bad(_state, "a negative count of peers", "p2p_host_count is -1", p2p_host_count=-1),
        _bad(_state, "a negative older count", "global_kvs_host_count is -1", global_kvs_host_count=-1),
        _bad(_state, "another type", "backend_types has 4", "ST_TAIRMEMPOOL", L2, backend_types=["ST_NFS"]),
        _bad(_state, "too many keys", "block_cache_keys has 65537 entries", block_cache_keys=range(65537)),
    ],
    "MetaService.GetCacheLocationsByBackend": [
        _unknown(_locations),
        _bad(_locations, "no keys", "block_keys and token_ids", block_keys=[]),
        _bad(_locations, "another query type", "query_type is 2", "QT_BATCH_GET", query_type="QT_PREFIX_MATCH"),
        _bad(_locations, "no selector", "backend_selectors is required", backend_selectors=[]),
        _bad(_locations, "no type", "backend_selectors[0]", "backend_type is 0", backend_selectors=[_selector(0)]),
        _bad(_locations, "an unknown type", "backend_type is 99", backend_selectors=[_selector(99)]),
        _bad(
            _locations,
            "a strategy of other storages",
            "strategy is 1",
            "LSS_WEIGHTED_RANDOM with ST_NFS",
            backend_selectors=[_selector("ST_NFS")],
        ),
        _bad(
            _locations,
            "a strategy for storages",
            "strategy is 3",
            f"LSS_V6D_COVERAGE with {L1P5}",
            backend_selectors=[_selector(strategy="LSS_WEIGHTED_RANDOM")],
        ),
        _bad(_locations, "too few names", "has 1 entries", "4 keys", location_spec_names=["kv"]),
        _bad(_locations, "an empty name", "location_spec_names[1] is empty", location_spec_names=["kv", "", "a", "b"]),
        _bad(_locations, "too many keys", "block_keys", "65537", block_keys=range(65537)),
    ],
}


# Reporters: what the original's document says, in its order.


def _send(api: Api, instance: str, *items: Fields, **more: Any) -> Any:
    return api.ok("ReportEvent", **events(instance, *items, **more))


def _results(api: Api, instance: str, *items: Fields, **more: Any) -> tuple[int, list[int], Any]:
    answer = api.call("ReportEvent", **events(instance, *items, **more))
    return answer.header.status.code, list(answer.item_results), answer


def _local(api: Api, instance: str, keys: Sequence[int] = KEYS, **more: Any) -> dict[str, int]:
    asked = {"query_type": "QT_PREFIX_MATCH", "block_cache_keys": keys, **more}
    return {host.host_ip_port: host.local for host in api.ok("GetHostCacheState", instance_id=instance, **asked).hosts}


def _found(api: Api, instance: str, keys: Sequence[int], *selectors: Fields, **more: Any) -> list[list[dict[str, str]]]:
    asked = {"query_type": "QT_BATCH_GET", "block_keys": keys, "backend_selectors": selectors or [_selector()], **more}
    answer = api.ok("GetCacheLocationsByBackend", instance_id=instance, **asked)
    return [[specs(location) for location in vector.locations] for vector in answer.key_locations]


OK, INVALID, OUT, LIMITED = 1, 5, 10, 13


def test_blocks_are_answered_with_the_generation_that_they_belong_to(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api))
    first = _send(each_api, instance, add(2**64 - 1), add("5", uri="a://b/c?size=4"))
    assert re.fullmatch("[0-9a-f]{32}", first.committed_snapshot_version)
    assert (first.snapshot_required, list(first.item_results), first.extra_info) == (True, [], "{}")
    second = _send(each_api, instance, HEARTBEAT)
    assert (second.snapshot_required, second.committed_snapshot_version) == (False, first.committed_snapshot_version)
    version = f"s_version={first.committed_snapshot_version}"
    assert _found(each_api, instance, [-1, 5, 6]) == [
        [{"kv": f"vllm://host/hbm?{version}"}],
        [{"kv": f"a://b/c?size=4&{version}"}],
        [],
    ]


def test_an_empty_request_touches_nothing(each_api: Api) -> None:
    answer = _send(each_api, Site(each_api).instance(), source=0, host="")
    assert answer.ByteSize() == answer.header.ByteSize() + 2


def test_registrations_and_heartbeats_begin_no_generation(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api))
    for event in (REGISTER, HEARTBEAT, REGISTER):
        answer = _send(each_api, instance, event)
        assert (answer.snapshot_required, answer.committed_snapshot_version) == (True, "")
    assert _results(each_api, instance, add("x"))[2].committed_snapshot_version == ""
    assert _send(each_api, instance, delete(1)).committed_snapshot_version


def test_events_are_no_transaction(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api))
    code, results, answer = _results(each_api, instance, add(1), add("x"), HEARTBEAT, add(2, "hbm", "tp9"), add(2))
    assert (code, results) == (INVALID, [OK, INVALID, OK, INVALID, OK])
    assert "events[1]" in answer.header.status.message
    assert _local(each_api, instance, [1, 2]) == {HOST: 2}


def test_the_last_event_of_a_part_wins(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api))
    _send(each_api, instance, add(1), delete(1), add(1, uri="a://new"), add(2), delete(2))
    (one,), two = _found(each_api, instance, [1, 2])
    assert (one["kv"].partition("?")[0], two) == ("a://new", [])


def test_parts_come_and_go_on_their_own(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api), location_spec_infos=PARTS)
    _send(each_api, instance, add(1, "hbm", "F0"), add(1, "hbm", "L1"), add(2, "hbm", "F0", "L1"))
    _send(each_api, instance, delete(2, "hbm", "L1"), delete(9, "nowhere", "F0"))
    assert [sorted(location) for (location,) in _found(each_api, instance, [1, 2])] == [["F0", "L1"], ["F0"]]
    assert _local(each_api, instance, [1, 2]) == {HOST: 2}
    assert _local(each_api, instance, [1, 2], query_type="QT_PREFIX_MATCH_WITH_MAMBA") == {HOST: 1}


def test_a_snapshot_replaces_all_media(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api))
    old = _send(each_api, instance, add(1), add(2, "mem"), add(3, "disk")).committed_snapshot_version
    answer = _send(each_api, instance, REGISTER, snapshot(block(1, "disk"), block(2)), HEARTBEAT)
    assert answer.committed_snapshot_version not in {"", old}
    assert not answer.snapshot_required
    assert _local(each_api, instance, [1, 2, 3]) == {HOST: 2}
    assert _local(each_api, instance, [1, 2, 3], medium=["disk"]) == {HOST: 1}
    code, results, limited = _results(each_api, instance, HEARTBEAT, snapshot())
    assert (code, results) == (LIMITED, [OK, LIMITED])
    assert 0 < limited.retry_after_ms <= 30_000
    assert limited.committed_snapshot_version == answer.committed_snapshot_version
    assert _local(each_api, instance, [1, 2, 3]) == {HOST: 2}


def test_a_snapshot_with_a_bad_block_changes_nothing(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api))
    _send(each_api, instance, add(1))
    assert _results(each_api, instance, snapshot(block(2), block("x")))[:2] == (INVALID, [INVALID])
    assert _local(each_api, instance, [1]) == {HOST: 1}
    assert _local(each_api, instance, [2]) == {}
    _send(each_api, instance, snapshot())
    assert _local(each_api, instance, [1]) == {}


def test_a_host_that_is_down_has_to_register(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api))
    _send(each_api, instance, add(1))
    for _ in range(2):
        assert _send(each_api, instance, HOST_DOWN).committed_snapshot_version == ""
    assert _local(each_api, instance, [1]) == {}
    assert _results(each_api, instance, add(1), HEARTBEAT, REGISTER, add(2))[:2] == (OUT, [OUT, OUT, OK, OK])
    assert (_local(each_api, instance, [1]), _local(each_api, instance, [2])) == ({}, {HOST: 1})


def test_blocks_that_differ_in_their_key_alone_are_read_as_others_are(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api), location_spec_infos=PARTS)
    long = "a://" + "u" * 1000
    keys = ["7", "-7", str(2**64 - 9), "0", "-0", "18446744073709551616", "", "1x", "+1", "007"]
    for make in (add, delete):
        for names in (("F0",), ("F0", "L1")):
            more: Fields = {"uri": long} if make is add else {}
            code, results, _ = _results(each_api, instance, *[make(key, "hbm", *names, **more) for key in keys])
            assert (code, results) == (INVALID, [OK] * 5 + [INVALID] * 4 + [OK])
            found = _found(each_api, instance, [7, -7, -9, 0, 1])
            held = [sorted(location) for locations in found for location in locations]
            if make is add:
                assert held == [sorted(names)] * 4
    assert found == [[]] * 5


def test_sources_and_hosts_are_independent(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api))
    _send(each_api, instance, add(1))
    _send(each_api, instance, add(2), source=L2)
    _send(each_api, instance, add(1), host=f"{HOST}@1")
    assert _local(each_api, instance, [1, 2]) == {HOST: 2, f"{HOST}@1": 1}
    _send(each_api, instance, HOST_DOWN)
    assert _local(each_api, instance, [2]) == {HOST: 1}
    assert _found(each_api, instance, [2], _selector(L1P5), _selector(L2))[0][0]["kv"].startswith("vllm://host/hbm?")


def test_a_silent_host_is_hidden_then_unregistered(site: Site) -> None:
    instance = reporting_instance(site, times={"heartbeat_timeout_ms": 300, "cleanup_grace_ms": 1500})
    version = _send(site.api, instance, add(1)).committed_snapshot_version
    eventually(lambda: _local(site.api, instance, [1]) == {})
    assert _found(site.api, instance, [1]) == [[]]
    assert _send(site.api, instance, add(2)).committed_snapshot_version == version
    assert _local(site.api, instance, [2]) == {}, "added blocks count after a heartbeat"
    _send(site.api, instance, HEARTBEAT)
    assert _local(site.api, instance, [1, 2]) == {HOST: 2}
    eventually(lambda: _results(site.api, instance, add(1))[0] == OUT)


def test_a_storage_that_is_disabled_takes_its_reporters_along(site: Site) -> None:
    storage = site.storage(event_report={}, storage_type=L2)
    instance = site.instance(site.group(event_report_storage_candidates=[storage]))
    _send(site.api, instance, add(1), source=L2)
    site.api.ok("AdminService.DisableStorage", storage_unique_name=storage)
    code, message = site.api.refused("ReportEvent", **events(instance, add(1), source=L2))
    assert (code, "enabled" in message) == ("INSTANCE_NOT_EXIST", True)
    eventually(lambda: _local(site.api, instance, [1]) == {})
    site.api.ok("AdminService.EnableStorage", storage_unique_name=storage)
    eventually(lambda: _local(site.api, instance, [1]) == {HOST: 1})


# What routers make of it.


def test_an_instance_that_nothing_was_reported_of_has_no_hosts(each_api: Api) -> None:
    instance = Site(each_api).instance(default_query_type="QT_PREFIX_MATCH")
    assert _local(each_api, instance) == {}
    assert _local(each_api, instance, query_type="QT_UNSPECIFIED") == {}
    assert _local(each_api, instance, []) == {}


def test_prefixes_lie_in_all_memory_of_a_host_and_reports_of_ours_count(each_api: Api) -> None:
    site = Site(each_api)
    instance = reporting_instance(site)
    site.write(instance, [1, 2])
    _send(each_api, instance, add(1), add(2, "mem"), add(4))
    each_api.ok("ResidencyService.ReportResidency", **report(instance, HOST, changes=[change(added=[3])]))
    assert _local(each_api, instance, [1, 2, 3, 4, 5]) == {HOST: 4}
    assert _local(each_api, instance, [1, 2], medium=["hbm"]) == {HOST: 1}
    assert _local(each_api, instance, [3], medium=["hbm"]) == {HOST: 1}
    assert _local(each_api, instance, [1, 2], medium=["HBM"]) == {}
    asked = {"query_type": "QT_PREFIX_MATCH", "block_cache_keys": [1, 2, 3, 4, 5]}
    (host,) = each_api.ok("GetHostCacheState", instance_id=instance, **asked).hosts
    assert (host.storage_prefix_blocks, getattr(host, "global"), host.p2p_1_total_match) == (2, 4, 0)
    scores = each_api.ok("ResidencyService.Score", instance_id=instance, block_keys=[1, 2, 3, 4, 5]).engines
    assert [(e.engine, e.gpu_tokens, e.host_tokens) for e in scores] == [(HOST, 4, 16)]


def _joint(api: Api, instance: str, keys: Sequence[int], **more: Any) -> dict[str, tuple[int, int, int, int]]:
    asked = {"query_type": "QT_PREFIX_MATCH", "block_cache_keys": keys, **more}
    hosts = api.ok("GetHostCacheState", instance_id=instance, **asked).hosts
    return {h.host_ip_port: (h.local, h.p2p_1_fetch, h.p2p_1_total_match, getattr(h, "global")) for h in hosts}


def test_one_peer_fills_what_a_host_lacks(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api))
    _send(each_api, instance, add(1), add(4), host="a:1")
    _send(each_api, instance, *[add(key) for key in (1, 2, 3, 4, 5)], host="b:1")
    _send(each_api, instance, *[add(key) for key in (2, 3)], host="c:1", source=L2)
    _send(each_api, instance, add(2), host="d:1", source=L2)
    _send(each_api, instance, add(2), add(3), host="e:1", source=L2)
    keys = [1, 2, 3, 4, 5]
    assert _joint(each_api, instance, keys) == {"b:1": (5, 0, 0, 5), "a:1": (1, 0, 0, 1)}
    assert _joint(each_api, instance, keys, p2p_host_count=2) == {"b:1": (5, 0, 5, 5), "a:1": (1, 2, 4, 1)}
    assert _joint(each_api, instance, keys, p2p_host_count=1)["a:1"] == (1, 0, 1, 1)
    backends = {"backend_types": [L2]}
    assert _joint(each_api, instance, keys, top_k_host_count=2, **backends)["a:1"] == (1, 0, 0, 4)
    assert _joint(each_api, instance, keys, top_k_host_count=1, **backends)["a:1"] == (1, 0, 0, 1)
    assert _joint(each_api, instance, keys, top_k_host_count=2)["a:1"] == (1, 0, 0, 1)
    assert _joint(each_api, instance, keys, global_kvs_host_count=2, enable_p2p=True)["a:1"] == (1, 0, 0, 4)
    assert _joint(each_api, instance, keys, top_k_host_count=1 << 20, **backends)["a:1"] == (1, 0, 0, 4)


def test_memory_pools_fill_what_hosts_lack_and_files_do_not(each_api: Api) -> None:
    site = Site(each_api)
    pool = site.storage(**pool_spec())
    each_api.ok("PoolService.ReportPool", **pool_report(pool))
    reports = site.storage(event_report={}, storage_type=L2)
    instance = site.instance(site.group(pool, event_report_storage_candidates=[reports]))
    site.write(instance, [2], node_id="node-1")
    _send(each_api, instance, add(1), add(3), source=L2)
    asked = {"top_k_host_count": 1}
    assert _joint(each_api, instance, [1, 2, 3, 4], backend_types=["ST_TAIRMEMPOOL"], **asked) == {HOST: (1, 0, 0, 3)}
    assert _joint(each_api, instance, [1, 2, 3, 4], global_kvs_host_count=1) == {HOST: (1, 0, 0, 3)}
    assert _joint(each_api, instance, [1, 2, 3, 4], backend_types=[L2], **asked) == {HOST: (1, 0, 0, 1)}
    (first, second, *_) = _found(
        each_api, instance, [1, 2], _selector("ST_TAIRMEMPOOL", "LSS_WEIGHTED_RANDOM"), _selector(L2)
    )
    assert [len(first), len(second)] == [1, 1]
    assert second[0] == site.match(instance, [2], node_id="node-1")[0]
    assert _found(each_api, instance, [2], _selector("ST_NFS", "LSS_UNSPECIFIED")) == [[]]


def test_a_draft_model_takes_one_block_off(each_api: Api) -> None:
    model = {"model_name": "m", "dtype": "bf16", "use_eagle_pop": True}
    instance = reporting_instance(Site(each_api), model_deployment=model)
    _send(each_api, instance, add(1), add(2), host="a:1")
    _send(each_api, instance, add(1), host="b:1")
    _send(each_api, instance, add(2), add(3), host="c:1", source=L2)
    assert _joint(each_api, instance, [1, 2, 3]) == {"a:1": (1, 0, 0, 1)}
    assert _joint(each_api, instance, [1, 2, 3], p2p_host_count=2) == {"a:1": (1, 1, 2, 1), "b:1": (0, 2, 2, 0)}


@pytest.mark.parametrize(
    ("strategy", "peer", "held"),
    [
        ("LSS_V6D_PREFIX", "b", [1, 1, 0, 0]),
        ("LSS_V6D_COVERAGE", "c", [1, 0, 1, 1]),
        ("LSS_UNSPECIFIED", "b", [1, 1, 0, 0]),
    ],
)
def test_one_peer_is_chosen_for_all_keys(each_api: Api, strategy: str, peer: str, held: list[int]) -> None:
    instance = reporting_instance(Site(each_api))
    holdings = {"a": [2, 3], "b": [1, 2], "bb": [1, 2], "c": [1, 3, 4], "d": [1, 3, 4]}
    for host, keys in holdings.items():
        _send(each_api, instance, *[add(key, uri=f"v6d://{host}/x") for key in keys], host=f"{host}:1", source=L2)
    found = _found(each_api, instance, [1, 2, 3, 4], _selector(L2, strategy))
    assert [len(locations) for locations in found] == held
    assert {location["kv"].split("?")[0] for locations in found for location in locations} == {f"v6d://{peer}/x"}


def test_names_filter_each_key_before_a_peer_is_chosen(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api), location_spec_infos=PARTS)
    _send(each_api, instance, add(1, "hbm", "F0"), add(2, "hbm", "F0"), host="a:1")
    _send(each_api, instance, add(1, "hbm", "F0", "L1"), add(2, "mem", "L1"), host="b:1")
    asked = {"location_spec_names": ["F0", "L1"]}
    assert [[*location] for (location,) in _found(each_api, instance, [1, 2], **asked)] == [["F0"], ["L1"]]
    assert [[*location] for (location,) in _found(each_api, instance, [1, 1], **asked)] == [["F0"], ["L1"]]
    assert _found(each_api, instance, [1, 2], location_spec_names=["no", "no"]) == [[], []]
    assert _found(each_api, instance, [1, 2], block_mask={"offset": 1})[0] == []


def test_the_fastest_memory_of_a_peer_is_answered(each_api: Api) -> None:
    instance = reporting_instance(Site(each_api))
    _send(each_api, instance, add(1, "nvme", uri="a://disk"), add(1, "DRAM", uri="a://mem"), add(1, "", uri="a://none"))
    ((location,),) = _found(each_api, instance, [1])
    assert location["kv"].startswith("a://none?")
    _send(each_api, instance, add(1, "GPU", uri="a://gpu"))
    ((location,),) = _found(each_api, instance, [1])
    assert location["kv"].startswith("a://gpu?")


def test_nothing_that_was_reported_is_in_answers_about_storages(each_api: Api) -> None:
    site = Site(each_api)
    instance = reporting_instance(site)
    _send(each_api, instance, *[add(key) for key in KEYS])
    asked = {"instance_id": instance, "block_keys": KEYS, "query_type": "QT_PREFIX_MATCH"}
    assert not each_api.ok("GetCacheLocation", **asked).locations
    assert each_api.ok("GetCacheLocationLen", **asked).cache_location_len == 0
    assert site.statuses(instance, KEYS) == ["CLS_NOT_FOUND"] * len(KEYS)
