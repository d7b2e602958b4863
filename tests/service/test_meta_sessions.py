"""Write sessions on both transports: each ends exactly once (invariant 3; wire.md 5.7, decision 17)."""

from __future__ import annotations

import time
from typing import Any

import pytest
from test_transport_drivers import eventually
from test_transport_sites import Site, mask, masked


def _finish(site: Site, instance: str, started: Any, success: dict[str, Any]) -> str:
    fields = {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": success}
    status = site.api.call("FinishWriteCache", **fields).header.status
    return str(status.message) if status.code != 1 else "OK"


def _renew(site: Site, instance: str, started: Any, seconds: int, granted: int) -> None:
    """Renew a session, which is open for so many seconds from the moment of the call."""
    fields = {"instance_id": instance, "write_session_id": started.write_session_id}
    begin = time.time()
    answer = site.api.ok("LeaseService.RenewWriteSession", write_timeout_seconds=seconds, **fields)
    assert begin - 0.01 <= answer.write_session_deadline_ms / 1000 - granted <= time.time() + 0.01


def test_a_session_can_be_finished_once_invariant_3(site: Site) -> None:
    instance = site.instance()
    started = site.start(instance, [1])
    site.finish(instance, started)
    assert "write_session_id was finished before" in _finish(site, instance, started, mask(0))
    assert _finish(site, instance, started, mask(1)) == "OK"  # the same once more is answered as before
    assert site.hits(instance, [1]) == [1]


def test_a_session_expires_at_its_deadline_and_its_blocks_can_be_written_again(site: Site) -> None:
    instance = site.instance()
    begin = time.monotonic()
    started = site.start(instance, [1, 2], write_timeout_seconds=2)
    assert masked(site.start(instance, [1, 2])) == 2
    eventually(lambda: site.statuses(instance, [1, 2]) == ["CLS_NOT_FOUND"] * 2)
    assert time.monotonic() - begin >= 2.0 - 0.01
    assert "expired" in _finish(site, instance, started, mask(2))
    assert site.hits(instance, [1, 2]) == []
    assert len(site.write(instance, [1, 2])) == 2
    assert site.hits(instance, [1, 2]) == [1, 2]


def test_a_renewed_session_outlives_its_first_deadline(site: Site) -> None:
    instance = site.instance()
    renewed = site.start(instance, [1], write_timeout_seconds=2)
    site.start(instance, [2], write_timeout_seconds=2)
    _renew(site, instance, renewed, 60, 60)
    eventually(lambda: site.statuses(instance, [2]) == ["CLS_NOT_FOUND"])
    assert site.statuses(instance, [1]) == ["CLS_WRITING"]
    site.finish(instance, renewed)
    assert site.hits(instance, [1]) == [1]


@pytest.mark.parametrize(
    ("asked", "granted"),
    [(0, 30), (7, 7), (2**31 - 1, 3600)],
)
def test_a_timeout_is_30_s_by_default_and_one_hour_at_most(site: Site, asked: int, granted: int) -> None:
    instance = site.instance()
    started = site.start(instance, [1], write_timeout_seconds=asked)
    _renew(site, instance, started, asked, granted)
    assert _finish(site, instance, started, mask(1)) == "OK"


def test_locations_in_a_finish_are_ignored(site: Site) -> None:
    instance = site.instance()
    started = site.start(instance, [1])
    (written,) = started.locations
    elsewhere = [{"type": "ST_NFS", "location_specs": [{"name": "kv", "uri": "file://evil/etc/passwd?size=1"}]}]
    fields = {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": mask(1)}
    site.api.ok("FinishWriteCache", locations=elsewhere, **fields)
    assert site.match(instance, [1]) == [{"kv": written.location_specs[0].uri}]
