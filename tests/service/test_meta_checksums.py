"""Checksums of parts on both transports: told at the finish, answered with the uris, believed in reports."""

from __future__ import annotations

from typing import Any

import pytest
from test_transport_sites import Site, mask

K_V = {
    "location_spec_infos": [{"name": "k", "size": 8}, {"name": "v", "size": 8}],
    "location_spec_groups": [{"name": "only k", "spec_names": ["k"]}, {"name": "only v", "spec_names": ["v"]}],
}
MOST = 2**64 - 1


def _told(**checksums: int) -> dict[str, Any]:
    return {"location_specs": [{"name": name, "checksum": checksum} for name, checksum in checksums.items()]}


def _answered(site: Site, instance: str, keys: list[int], **fields: Any) -> list[dict[str, int]]:
    fields = {"query_type": "QT_BATCH_GET"} | fields
    answer = site.api.ok("GetCacheLocation", instance_id=instance, block_keys=keys, **fields)
    return [{spec.name: spec.checksum for spec in location.location_specs} for location in answer.locations]


def _mismatches(site: Site, group: str) -> dict[str, int]:
    """The counter of corrupt parts of a group by storage."""
    return {
        tags["storage"]: series.metric_value.int_value
        for series in site.api.ok("AdminService.GetMetrics").metrics
        if series.metric_name == "kvcm_checksum_mismatch_total"
        and (tags := {tag.tag_key: tag.tag_value for tag in series.metric_tags})["group"] == group
    }


def test_what_is_told_at_the_finish_is_answered_with_the_uris(site: Site) -> None:
    instance = site.instance(**K_V)
    started = site.start(instance, [1, 2])
    site.finish(instance, started, locations=[_told(v=MOST, k=1), _told(k=2**63)])
    assert _answered(site, instance, [1, 2]) == [{"k": 1, "v": MOST}, {"k": 2**63, "v": 0}]
    assert _answered(site, instance, [1], query_type="QT_PREFIX_MATCH") == [{"k": 1, "v": MOST}]
    assert _answered(site, instance, [1], location_spec_names=["v"]) == [{"v": MOST}]
    (found,) = site.metas(instance, [1], detail_level=1)
    assert [spec.get("checksum") for spec in found["locations"][0]["location_specs"]] == ["1", str(MOST)]


@pytest.mark.parametrize(("told", "recorded"), [(5, 5), (-1, MOST), (-(2**63), 2**63), (0, 0)])
def test_the_checksum_of_a_location_with_one_part_is_that_of_the_part(site: Site, told: int, recorded: int) -> None:
    """It has a sign on the wire, and 64 bits either way."""
    instance = site.instance()
    site.finish(instance, site.start(instance, [1]), locations=[{"checksum": told}])
    assert _answered(site, instance, [1]) == [{"kv": recorded}]
    answer = site.api.ok("GetCacheLocation", instance_id=instance, block_keys=[1], query_type="QT_BATCH_GET")
    assert [location.checksum for location in answer.locations] == [told]


def test_clients_that_send_back_what_they_were_given_tell_nothing(site: Site) -> None:
    instance = site.instance(**K_V)
    started = site.start(instance, [1, 2])
    site.finish(instance, started, locations=list(started.locations))
    assert _answered(site, instance, [1, 2]) == [{"k": 0, "v": 0}] * 2
    (found,) = site.metas(instance, [1], detail_level=1)
    assert [set(spec) for spec in found["locations"][0]["location_specs"]] == [{"name", "uri"}] * 2


@pytest.mark.parametrize(
    ("locations", "texts"),
    [
        ([_told(k=1)], ["locations has 1 entries", "2"]),
        ([{}, {}, _told(k=1)], ["locations has 3 entries", "2"]),
        ([_told(k=1), _told(w=1)], ["locations[1]", "'w'"]),
        ([{}] * 65_537, ["locations has 65537 entries", "at most 65536"]),
        ([{"location_specs": [{}] * 1025}, {}], ["locations[0] has 1025 location_specs", "at most 1024"]),
        (
            [{"location_specs": [{"name": "k", "checksum": 1}, {"name": "k", "checksum": 2}]}, {}],
            ["locations[0]", "'k' twice"],
        ),
    ],
)
def test_locations_that_do_not_fit_do_not_consume_the_session(
    site: Site, locations: list[dict[str, Any]], texts: list[str]
) -> None:
    instance = site.instance(**K_V)
    started = site.start(instance, [1, 2])
    fields = {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": mask(2)}
    code, message = site.api.refused("FinishWriteCache", locations=locations, **fields)
    assert (code, [text for text in texts if text not in message]) == ("INVALID_ARGUMENT", []), message
    assert site.statuses(instance, [1, 2]) == ["CLS_WRITING"] * 2
    site.finish(instance, started, locations=[_told(k=1), _told(v=2)])
    assert _answered(site, instance, [1, 2]) == [{"k": 1, "v": 0}, {"k": 0, "v": 2}]


def test_a_corrupt_part_is_believed_with_its_checksum_only(site: Site) -> None:
    storage = site.storage()
    group = site.group(storage)
    instance = site.instance(group)
    started = site.start(instance, [1, 2])
    site.finish(instance, started, locations=[_told(kv=MOST), _told(kv=7)])
    uris = [location.location_specs[0].uri for location in started.locations]
    assert _mismatches(site, group) == {storage: 0}

    def report(checksum: int) -> tuple[int, int]:
        part = {"block_key": 1, "uri": uris[0], "mismatched_checksum": checksum}
        answer = site.api.ok("PinService.ReportMissing", instance_id=instance, parts=[part])
        return answer.removed_locations, answer.unconfirmed_parts

    assert report(7) == (0, 1)
    assert site.hits(instance, [1, 2]) == [1, 2]
    assert report(MOST) == (1, 0)
    assert site.hits(instance, [1, 2]) == [2]
    assert report(MOST) == (0, 1)
    assert _mismatches(site, group) == {storage: 1}
    assert len(site.start(instance, [1]).locations) == 1
