"""Pins, retention hints and reports of missing bytes, as clients meet them on both transports."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from test_transport_process import ManagerProcess
from test_transport_sites import Site, mask, unique

from kvcm.model.uri import LocationUri

BLOCK = 64  # bytes of a block of Site.instance


def _budgeted(site: Site, blocks: int = 10) -> str:
    return site.instance(site.group(pin_budget_bytes=blocks * BLOCK))


def _pin(site: Site, instance: str, keys: list[int], seconds: int = 60, owner: str = "me") -> Any:
    return site.api.ok("PinService.PinPrefix", instance_id=instance, block_keys=keys, owner=owner, ttl_seconds=seconds)


def _pins(site: Site, instance: str) -> list[Any]:
    return list(site.api.ok("PinService.ListPins", instance_id=instance).pins)


def _unpin(site: Site, instance: str, pin_id: str) -> None:
    site.api.ok("PinService.UnpinPrefix", instance_id=instance, pin_id=pin_id)


def test_a_pin_says_what_it_holds_and_is_listed(site: Site) -> None:
    instance = _budgeted(site)
    site.write(instance, [1, 2, 3])
    before = time.time()
    pin = _pin(site, instance, [1, 2, 9, 3], 60, "ops:ü")
    assert (pin.pinned_blocks, pin.pinned_bytes) == (2, 2 * BLOCK)
    assert before + 60 <= pin.deadline_ms / 1000 + 0.001 <= time.time() + 60.001
    (listed,) = _pins(site, instance)
    assert (listed.pin_id, listed.owner, listed.blocks, listed.bytes) == (pin.pin_id, "ops:ü", 2, 2 * BLOCK)
    assert (listed.deadline_ms, listed.last_block_key) == (pin.deadline_ms, 2)
    for _ in range(2):
        _unpin(site, instance, pin.pin_id)
    assert _pins(site, instance) == []


def test_a_prefix_can_be_named_by_its_tokens(site: Site) -> None:
    instance = _budgeted(site)
    tokens = list(range(12))
    started = site.api.ok("StartWriteCache", instance_id=instance, token_ids=tokens)
    site.finish(instance, started)
    pin = site.api.ok("PinService.PinPrefix", instance_id=instance, token_ids=tokens, owner="me", ttl_seconds=60)
    assert pin.pinned_blocks == 3


@pytest.mark.parametrize(
    ("retention", "text"),
    [
        ({"priority": 101}, "retention.priority is 101"),
        ({"priority": -101}, "retention.priority is -101"),
        ({"ttl_seconds": -1}, "retention.ttl_seconds is -1"),
    ],
)
def test_a_bad_hint_does_not_consume_the_session(site: Site, retention: dict[str, int], text: str) -> None:
    instance = site.instance()
    started = site.start(instance, [1])
    fields = {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": mask(1)}
    code, message = site.api.refused("FinishWriteCache", retention=retention, **fields)
    assert (code, text in message) == ("INVALID_ARGUMENT", True), message
    assert site.statuses(instance, [1]) == ["CLS_WRITING"]
    site.api.ok("FinishWriteCache", retention={"priority": -100, "ttl_seconds": 3600}, **fields)
    assert site.hits(instance, [1]) == [1]


def test_missing_files_are_confirmed_and_forgotten(site: Site, server: ManagerProcess) -> None:
    root = server.data_dir / unique("files")
    group = site.group(site.storage(nfs={"root_path": str(root), "key_count_per_file": 1}))
    instance = site.instance(group)
    written = [location["kv"] for location in site.write(instance, [1, 2, 3])]
    for uri in map(LocationUri.parse, written[1:]):
        Path(uri.path).parent.mkdir(parents=True, exist_ok=True)
        Path(uri.path).write_bytes(bytes(uri.size))
    parts = [{"block_key": key, "uri": uri} for key, uri in zip([1, 2, 3], written, strict=True)]
    stranger = {"block_key": 1, "uri": "file://elsewhere/x?size=64"}
    report = site.api.ok("PinService.ReportMissing", instance_id=instance, parts=[*parts[:2], stranger])
    assert (report.removed_locations, report.unconfirmed_parts) == (1, 2)
    assert site.hits(instance, [1, 2, 3]) == [2, 3]
    root.rename(server.data_dir / unique("unmounted"))
    code, message = site.api.refused("PinService.ReportMissing", instance_id=instance, parts=parts[1:])
    assert code == "IO_ERROR", message
    assert site.hits(instance, [1, 2, 3]) == [2, 3]
