"""What a real manager keeps of recent accesses, and what it estimates of them."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_transport_drivers import Api
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site

from kvcm.optimizer.readers import read_trace

_SETTINGS = ("kvcm.optimizer.recent_keys=20000", "kvcm.optimizer.sampled_keys=4096")


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    with manager(tmp_path_factory.mktemp("keeping"), *_SETTINGS) as process:
        yield process


@pytest.fixture
def kept_api(keeping: ManagerProcess) -> Iterator[Api]:
    with keeping.api("grpc") as api:
        yield api


def page(server: ManagerProcess, path: str) -> bytes:
    connection = http.client.HTTPConnection(server.address.admin_http, timeout=30)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()
    finally:
        connection.close()


def recent(server: ManagerProcess, instance: str) -> list[dict[str, Any]]:
    """Return the kept events of an instance."""
    lines = [json.loads(line) for line in page(server, "/v1/events/recent").splitlines()]
    assert lines[0]["type"] == "recent"
    assert lines[0]["kept_events"] == len(lines) - 1
    return [line for line in lines if line["source"] == instance]


def needed(server: ManagerProcess, group: str) -> list[float]:
    """Return the bytes that a group is said to need."""
    lines = page(server, "/metrics").decode().splitlines()
    found = [line for line in lines if line.startswith("kvcm_optimizer_bytes_needed{") and f'"{group}"' in line]
    return [float(line.rpartition(" ")[2]) for line in found]


def test_reads_and_writes_are_kept_with_what_became_of_them(keeping: ManagerProcess, kept_api: Api) -> None:
    site = Site(kept_api)
    instance = site.instance()
    site.write(instance, [1, 2])
    assert len(site.match(instance, [1, 2, 3])) == 2
    site.match(instance, [1, 2, 3], peek=True)
    events = recent(keeping, instance)
    assert [event["type"] for event in events] == ["StartWriteCache", "FinishWriteCache", "GetCacheLocation"]
    started, finished, read = events
    assert (started["keys"], started["refused_keys"], started["block_mask"]) == ([1, 2], 0, 0)
    assert finished["write_session_id"] == started["write_session_id"]
    assert (read["query_type"], read["keys"], read["hit_keys"], read["tokens"]) == ("prefix_match", [1, 2, 3], 2, [])


def test_write_masks_are_part_of_what_is_kept(keeping: ManagerProcess, kept_api: Api) -> None:
    site = Site(kept_api)
    instance = site.instance()
    site.write(instance, [1, 2, 3])
    site.write(instance, [1, 2, 3, 4])
    masks = [event["block_mask"] for event in recent(keeping, instance) if event["type"] == "StartWriteCache"]
    assert masks == [0, 3]


def test_tokens_of_prompts_are_not_kept(keeping: ManagerProcess, kept_api: Api) -> None:
    site = Site(kept_api)
    instance = site.instance()
    kept_api.ok("GetCacheLocation", instance_id=instance, query_type="QT_PREFIX_MATCH", token_ids=list(range(640)))
    (read,) = recent(keeping, instance)
    assert read["keys"]
    assert read["tokens"] == []


def test_what_groups_need_is_in_a_scrape(keeping: ManagerProcess, kept_api: Api) -> None:
    site = Site(kept_api)
    group = site.group()
    instance = site.instance(group)
    for _ in range(4):
        site.match(instance, list(range(5000)))  # some are in the sample
    sizes = needed(keeping, group)
    assert len(sizes) == 5
    assert sizes == sorted(sizes)
    assert sizes[0] > 0


def test_nothing_is_kept_or_estimated_unless_a_setting_says_so(server: ManagerProcess, api: Api) -> None:
    site = Site(api)
    group = site.group()
    site.match(site.instance(group), list(range(5000)))
    (summary,) = page(server, "/v1/events/recent").splitlines()
    assert json.loads(summary)["most_keys"] == 0
    assert needed(server, group) == [0] * 5


def test_a_write_that_is_refused_as_a_whole_is_kept(keeping: ManagerProcess, kept_api: Api) -> None:
    site = Site(kept_api)
    instance = site.instance(site.group(quota={"capacity": 1}))
    kept_api.refused("StartWriteCache", instance_id=instance, block_keys=[1, 2])
    (refused,) = recent(keeping, instance)
    assert (refused["type"], refused["write_session_id"], refused["refused_keys"]) == ("StartWriteCache", "", 2)


def test_recent_accesses_are_read_as_a_trace_of_events(keeping: ManagerProcess, kept_api: Api, tmp_path: Path) -> None:
    site = Site(kept_api)
    instance = site.instance()
    site.match(instance, [1, 2, 3])
    site.write(instance, [1, 2, 3])
    site.match(instance, [1, 2, 4])
    path = tmp_path / "recent.jsonl"
    path.write_bytes(page(keeping, "/v1/events/recent"))
    trace = read_trace(path, format="publisher_log", block_tokens=16, use_cache=False)
    assert trace.bad_line_count == 0
    number = trace.instance_names.index(instance)
    own = [request for request in range(len(trace)) if trace.instances[request] == number]
    assert [(int(trace.read_blocks[each]), bool(trace.writes[each])) for each in own] == [
        (3, False),
        (0, True),
        (3, False),
    ]
