"""RemoveCache, TrimCache and GetCacheMeta on both transports (wire.md 5.8, decisions 13 and 15)."""

from __future__ import annotations

import time
from typing import Any

import pytest
from test_transport_sites import Site, mask, specs

BOTH = pytest.mark.parametrize("plane", ["", "AdminService."], ids=["meta", "admin"])


@BOTH
@pytest.mark.parametrize(
    ("block_mask", "left"),
    [({}, []), (mask(1), [1]), (mask(-1), [1, 2, 3]), (mask(flags=[False, True]), [2]), (mask(9), [1, 2, 3])],
)
def test_remove_cache_removes_the_unmasked_keys_at_once(
    site: Site, plane: str, block_mask: dict[str, Any], left: list[int]
) -> None:
    instance = site.instance(site.group(site.storage(), delay_ms=60_000))
    site.write(instance, [1, 2, 3])
    site.api.ok(f"{plane}RemoveCache", instance_id=instance, block_keys=[1, 2, 3], block_mask=block_mask)
    assert site.hits(instance, [1, 2, 3]) == left
    expected = ["CLS_SERVING" if key in left else "CLS_NOT_FOUND" for key in (1, 2, 3)]
    assert site.statuses(instance, [1, 2, 3]) == expected


@BOTH
def test_removing_unknown_keys_and_removing_twice_is_fine(site: Site, plane: str) -> None:
    instance = site.instance()
    site.write(instance, [1])
    for _ in range(2):
        site.api.ok(f"{plane}RemoveCache", instance_id=instance, block_keys=[1, 404])
    assert site.hits(instance, [1]) == []


def test_finishing_a_write_does_not_bring_removed_blocks_back(site: Site) -> None:
    instance = site.instance()
    started = site.start(instance, [1, 2])
    site.api.ok("RemoveCache", instance_id=instance, block_keys=[1])
    finished = site.finish(instance, started, mask(2))
    assert "1 blocks were removed" in finished.header.status.message
    assert site.hits(instance, [1, 2]) == [2]
    assert site.statuses(instance, [1, 2]) == ["CLS_NOT_FOUND", "CLS_SERVING"]


# ── TrimCache ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("strategy", ["TS_REMOVE_ALL_CACHE", "TS_REMOVE_ALL_META"])
def test_trim_removes_every_block_of_the_instance_and_of_no_other(site: Site, strategy: str) -> None:
    group = site.group()
    instance, other = site.instance(group), site.instance(group)
    keys = list(range(3000))
    site.write(instance, keys)
    site.write(other, [1])
    site.api.ok("TrimCache", instance_id=instance, strategy=strategy)
    assert site.hits(instance, keys) == []
    assert site.hits(other, [1]) == [1]
    site.api.ok("TrimCache", instance_id=instance, strategy=strategy)


def test_trim_by_timestamp_removes_what_was_written_from_begin_until_before_end(site: Site) -> None:
    instance, earliest = site.instance(), int(time.time())
    site.write(instance, [1])
    written = int(site.metas(instance, [1], detail_level=1)[0]["locations"][0]["written_at"])
    for begin, end in ((0, written), (written + 1, 2**31 - 1)):
        site.api.ok(
            "TrimCache", instance_id=instance, strategy="TS_TIMESTAMP", begin_timestamp=begin, end_timestamp=end
        )
        assert site.hits(instance, [1]) == [1]
    assert earliest <= written <= time.time()
    site.api.ok(
        "TrimCache",
        instance_id=instance,
        strategy="TS_TIMESTAMP",
        begin_timestamp=written,
        end_timestamp=written + 1,
    )
    assert site.hits(instance, [1]) == []


# ── GetCacheMeta ─────────────────────────────────────────────────────────────────────────────────────────────────────


@BOTH
def test_get_cache_meta_has_one_entry_per_key_and_no_id_of_another_for_a_miss(site: Site, plane: str) -> None:
    instance = site.instance()
    (written,) = site.write(instance, [1])
    site.start(instance, [2])
    answer = site.api.ok(f"{plane}GetCacheMeta", instance_id=instance, block_keys=[1, 404, 2])
    served, missing, writing = answer.locations
    assert (specs(served), served.spec_size) == (written, 1)
    assert (missing.type, missing.spec_size, specs(missing)) == (0, 0, {})
    assert set(specs(writing)) == {"kv"}
    assert answer.metas[1] == '{"status":"CLS_NOT_FOUND"}'
    assert site.statuses(instance, [1, 404, 2]) == ["CLS_SERVING", "CLS_NOT_FOUND", "CLS_WRITING"]


@BOTH
@pytest.mark.parametrize(
    ("block_mask", "count"), [(mask(1), 2), (mask(-1), 0), (mask(3), 0), (mask(flags=[False, True]), 2)]
)
def test_get_cache_meta_has_no_entry_for_a_masked_key(
    site: Site, plane: str, block_mask: dict[str, Any], count: int
) -> None:
    instance = site.instance()
    site.write(instance, [1, 2, 3])
    fields = {"instance_id": instance, "block_keys": [1, 2, 3], "block_mask": block_mask}
    answer = site.api.ok(f"{plane}GetCacheMeta", **fields)
    assert (len(answer.locations), len(answer.metas)) == (count, count)
