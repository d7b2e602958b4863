"""What is wrong, judged from facts: each rule with what makes it true, and with what does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvcm.model.groups import (
    CacheConfig,
    CacheReclaimStrategy,
    EvictionPolicy,
    InstanceGroup,
    InstanceGroupQuota,
    TriggerStrategy,
)
from kvcm.model.storages import StorageType
from kvcm.reclaim.workers import Backlog
from kvcm.service.alerts.cluster import cluster_alerts
from kvcm.service.alerts.groups import group_alerts
from kvcm.service.alerts.lately import Lately
from kvcm.service.alerts.storages import storage_alerts
from kvcm.service.alerts.values import Alert, Facts, Severity
from kvcm.service.alerts.wording import counted, joined, lasting, percent
from kvcm.service.usage_values import (
    DrainState,
    DrainStatus,
    GlobalQuotaUsage,
    GroupStorageUsage,
    GroupUsage,
    InstanceUsage,
    StorageStatus,
    StorageUsage,
    TypeUsage,
    Usage,
    UsageReport,
)
from kvcm.storage.health import HealthState

GIB = 1 << 30
NOW = 1_000_000.0


def configured(ratio: float = 0.8, delay_ms: int = 0, storages: tuple[str, ...] = ("disk",), ttl: int = 0) -> Any:
    strategy = CacheReclaimStrategy(
        trigger_strategy=TriggerStrategy(used_percentage=ratio),
        delay_before_delete_ms=delay_ms,
        policy=EvictionPolicy(ttl_seconds=ttl),
    )
    return InstanceGroup("g", storages, quota=InstanceGroupQuota(10 * GIB), cache_config=CacheConfig(strategy))


def usage(used: float, capacity: int = 10, mark: float = 8, deleting: float = 0) -> Usage:
    high = int(mark * GIB) if mark >= 0 else -1
    return Usage(int(used * GIB), int(deleting * GIB), capacity * GIB, high, high)


def used_by(total: Usage, **fields: Any) -> GroupUsage:
    parts: dict[str, Any] = {"types": (), "storages": (), "instances": (), "pinned_bytes": 0}
    parts |= {"pin_budget_bytes": 0, "refused_writes": 0, **fields}
    return GroupUsage("g", total, **parts)


def status(name: str = "disk", health: HealthState = HealthState.SH_UP, **fields: Any) -> StorageStatus:
    return replace(StorageStatus(name, is_enabled=True, health=health, since_ms=int((NOW - 600) * 1000)), **fields)


def facts(group: GroupUsage | None = None, config: InstanceGroup | None = None, **fields: Any) -> Facts:
    groups = () if group is None else (group,)
    report = UsageReport(groups, fields.pop("storage_usages", ()), fields.pop("quotas", ()))
    given: dict[str, Any] = {"storages": {"disk": status()}, "types": {"disk": StorageType.ST_NFS}, "leader": "m1"}
    return Facts(NOW, report, {"g": config or configured()}, **{**given, "node_id": "m1", **fields})


def only(found: Any) -> Alert:
    (alert,) = found
    assert isinstance(alert, Alert)
    return alert


def of_group(group: GroupUsage, config: InstanceGroup | None = None, **fields: Any) -> Alert:
    return only(group_alerts(facts(group, config, **fields)))


def test_a_group_below_its_mark_is_fine_and_so_is_one_at_a_high_mark() -> None:
    assert list(group_alerts(facts(used_by(usage(7.9))))) == []
    assert list(group_alerts(facts(used_by(usage(9.5, mark=9.6))))) == []


def test_what_refuses_writes_at_its_limit_is_a_page_and_what_only_refuses_is_a_ticket() -> None:
    full = of_group(used_by(usage(9.9)), refused={"g": 53})
    assert (full.name, full.severity) == ("KvcmGroupFull", Severity.ALERT_PAGE)
    assert full.summary == "Group g is full and refused 53 writes in the last 5 minutes."
    assert full.reason.startswith("Its quota is 99 % used (9.9 GiB of 10.0 GiB).")
    short = of_group(used_by(usage(7)), refused={"g": 1})
    assert short.severity is Severity.ALERT_TICKET
    assert short.summary == "Group g is short of room and refused 1 write in the last 5 minutes."
    assert of_group(used_by(usage(9.9))).severity is Severity.ALERT_TICKET
    assert of_group(used_by(usage(9.2))).name == "KvcmGroupNearlyFull"


@pytest.mark.parametrize(
    ("group", "config", "fields", "reason", "advice"),
    [
        (used_by(usage(9.9), pinned_bytes=6 * GIB), None, {}, "6.0 GiB (60.6 % of it) are pinned", "end pins"),
        (
            *(used_by(usage(9.9, deleting=4)), configured(delay_ms=60_000), {"deleting": {"g": {"disk": 4 * GIB}}}),
            *("4.0 GiB are evicted and wait for their deletion, which comes 60 s later (delay_before", "shorten that"),
        ),
        (
            used_by(usage(9.9, deleting=4)),
            configured(storages=("disk", "spare")),
            {
                "deleting": {"g": {"disk": 4 * GIB}},
                "storages": {
                    "disk": status(health=HealthState.SH_DOWN, reason="not mounted"),
                    "spare": status("spare"),
                },
            },
            "wait for their deletion, since storage disk is down (not mounted)",
            "bring storage disk back",
        ),
        (
            used_by(usage(9.9, deleting=4)),
            None,
            {"deleting": {"g": {"disk": 4 * GIB}}, "backlogs": {"disk": Backlog(waiting=9, failures=3)}},
            "storage disk fails to delete them",
            "look why storage disk does not delete",
        ),
        (
            *(used_by(usage(9.9)), None, {"writing": {"g": 3 * GIB}}),
            *("3.0 GiB are reserved for writes that are not finished", "open write sessions"),
        ),
        (
            *(used_by(usage(9.9, mark=-1)), configured(ratio=1.5), {}),
            *("Nothing is evicted for want of room: the mark is 1.5, which is off", "to 0.8"),
        ),
        (
            *(used_by(usage(9.9, mark=-1)), configured(ratio=0, ttl=7200), {}),
            *("the mark is not set, and blocks leave by age alone, after 2 hours", "to 0.8"),
        ),
        (used_by(usage(9.9)), None, {"leader": ""}, "No manager leads, so nothing is evicted", "why no manager leads"),
        (
            *(used_by(usage(9.9)), None, {}),
            *("eviction begins at 8.0 GiB and does not make room as fast as", "so that eviction begins earlier"),
        ),
    ],
    ids=["pins", "delay", "down", "failing", "writes", "off", "unset", "leaderless", "busy"],
)
def test_what_holds_a_full_group_is_told(
    group: GroupUsage, config: InstanceGroup | None, fields: dict[str, Any], reason: str, advice: str
) -> None:
    alert = of_group(group, config, **fields)
    assert reason.lower() in alert.reason.lower()
    assert advice.lower() in alert.advice.lower()
    assert "Or raise the limit: the group's quota (quota.capacity)." in alert.advice


def test_the_most_telling_holder_comes_first_and_trifles_are_left_out() -> None:
    group = used_by(usage(9.9), pinned_bytes=GIB // 100)
    alert = of_group(group, writing={"g": 2 * GIB}, deleting={"g": {"disk": 5 * GIB}})
    assert alert.reason.index("5.0 GiB") < alert.reason.index("2.0 GiB")
    assert "pinned" not in alert.reason


def test_a_limit_of_blocks_is_told_in_blocks() -> None:
    group = used_by(usage(1), instances=(InstanceUsage("m", 1000, 1000, GIB, "lru"),))
    alert = of_group(group, refused={"g": 2})
    assert "The key limit of instance m is 100 % used (1,000 of 1,000 blocks)." in alert.reason
    assert "Eviction begins at 800 blocks" in alert.reason
    assert "max_key_count" in alert.advice


def test_a_shared_quota_and_a_shared_storage_tell_what_others_use() -> None:
    quota = GlobalQuotaUsage("team", usage(9.9), ("g", "h"))
    alert = of_group(used_by(usage(2)), refused={"g": 1}, quotas=(quota,))
    assert "The global quota team is 99 % used" in alert.reason
    assert "Other groups use 7.9 GiB of it." in alert.reason
    assert "kvcm quota set team" in alert.advice
    off = of_group(used_by(usage(2)), refused={"g": 1}, quotas=(replace(quota, usage=usage(9.9, mark=-1)),))
    assert "Nothing is evicted because of it: the mark of the global quota team is off." in off.reason
    shared = StorageUsage("disk", usage(9.9), 0, 2.0, 0, 0)
    group = used_by(usage(2), storages=(GroupStorageUsage("disk", 2 * GIB, 0),))
    alert = of_group(group, refused={"g": 1}, storage_usages=(shared,))
    assert "Storage disk is 99 % used" in alert.reason
    assert "Other groups use 7.9 GiB of it." in alert.reason


def test_the_limit_of_one_storage_is_none_while_another_has_room() -> None:
    full = StorageUsage("disk", usage(9.9), 0, 0, 0, 0)
    both = {"disk": status(), "spare": status("spare")}
    roomy = facts(used_by(usage(2)), configured(storages=("disk", "spare")), storages=both, storage_usages=(full,))
    assert list(group_alerts(roomy)) == []
    half = replace(full, storage_unique_name="spare", usage=usage(5))
    limited = replace(roomy, usage=replace(roomy.usage, storages=(full, half)))
    assert list(group_alerts(limited)) == []
    fuller = replace(half, usage=usage(9.95))
    reason = only(group_alerts(replace(roomy, usage=replace(roomy.usage, storages=(full, fuller))))).reason
    assert "Storage disk is 99 % used" in reason
    drained = {**both, "spare": status("spare", is_draining=True)}
    assert only(group_alerts(replace(roomy, storages=drained))).name == "KvcmGroupFull"


def test_a_type_s_quota_limits_the_storages_of_that_type() -> None:
    group = used_by(usage(2), types=(TypeUsage(StorageType.ST_NFS, usage(1, capacity=1)),))
    assert "Its quota for storages of type file is 100 % used" in of_group(group).reason


def test_a_medium_that_others_filled_is_a_limit() -> None:
    filled = {"disk": status(medium_bytes=100 * GIB, medium_free_bytes=GIB)}
    alert = of_group(used_by(usage(2)), refused={"g": 1}, storages=filled)
    assert "The medium of storage disk is 99 % used (99.0 GiB of 100.0 GiB)." in alert.reason
    assert "What lies beside the blocks takes the room." in alert.reason
    roomy = {"disk": status(medium_bytes=100 * GIB, medium_free_bytes=7 * GIB)}
    assert list(group_alerts(facts(used_by(usage(2)), storages=roomy))) == []


def test_a_group_without_a_storage_says_what_each_of_them_lacks() -> None:
    storages = {
        "a": status("a", health=HealthState.SH_DOWN, reason="mount is gone"),
        "b": status("b", is_enabled=False),
        "c": status("c", is_draining=True),
    }
    alert = of_group(used_by(usage(1)), configured(storages=("a", "b", "c", "d")), storages=storages)
    assert (alert.name, alert.severity) == ("KvcmGroupWithoutStorage", Severity.ALERT_PAGE)
    assert alert.reason == (
        "Storage a is down (mount is gone), storage b is disabled, storage c is being drained and storage d is not "
        "configured."
    )


def test_what_stays_above_its_mark_is_stuck() -> None:
    alert = of_group(used_by(usage(8.5), pinned_bytes=8 * GIB))
    assert alert.name == "KvcmReclaimStuck"
    assert "stays 512.0 MiB above the mark" in alert.summary
    assert "are pinned" in alert.reason


def storage_alert(name: str, **fields: Any) -> Alert:
    return only(each for each in storage_alerts(facts(**fields)) if each.name == name)


def test_storages() -> None:
    assert list(storage_alerts(facts())) == []
    down = storage_alert("KvcmStorageDown", storages={"disk": status(health=HealthState.SH_DOWN, reason="no answer")})
    assert (down.summary, down.reason) == (
        "Storage disk is down for 10 minutes: its blocks are not read.",
        "No answer.",
    )
    assert storage_alert("KvcmStorageDegraded", storages={"disk": status(health=HealthState.SH_DEGRADED)})
    off = storage_alert("KvcmStorageDisabled", storages={"disk": status(is_enabled=False)})
    assert (off.severity, "kvcm storage enable disk" in off.advice) == (Severity.ALERT_INFO, True)
    full = storage_alert("KvcmStorageNearlyFull", storage_usages=(StorageUsage("disk", usage(9.6), 0, 0.5, 0, 0),))
    assert full.summary == "Storage disk is 96 % full."
    medium = {"disk": status(medium_bytes=100 * GIB, medium_free_bytes=GIB)}
    assert (
        storage_alert("KvcmStorageNearlyFull", storages=medium).summary
        == "The medium of storage disk has 1.0 GiB left."
    )
    over = StorageUsage("disk", usage(1), 0, 2.25, 0, 0)
    assert "2.25 times" in storage_alert("KvcmStorageOversubscribed", storage_usages=(over,)).summary
    idle = (StorageUsage("disk", usage(1), 0, 0.5, 0, 0),)
    failing = storage_alert("KvcmDeletionsFail", storage_usages=idle, backlogs={"disk": Backlog(4, 0, 7)})
    assert failing.reason == "4 locations wait, 7 attempts failed, 0 hang."
    wrong = storage_alert("KvcmChecksumMismatch", mismatches={("g", "disk"): 2})
    assert "returned wrong bytes to group g 2 times" in wrong.summary
    drain = DrainStatus("disk", False, DrainState.DRAIN_RUNNING, 0, GIB, "3 locations are pinned")
    waits = storage_alert("KvcmDrainWaits", drains=(drain,))
    assert (waits.summary, waits.reason) == (
        "The drain of storage disk waits, 1.0 GiB are left.",
        "3 locations are pinned.",
    )
    done = replace(drain, state=DrainState.DRAIN_DONE)
    assert list(storage_alerts(facts(drains=(done, replace(drain, reason=""))))) == []


def test_managers_and_what_they_share() -> None:
    assert list(cluster_alerts(facts(certificates={"server": 0.0}))) == []
    for name, severity, fields in (
        ("KvcmNoLeader", Severity.ALERT_PAGE, {"leader": ""}),
        ("KvcmSeveralLeaders", Severity.ALERT_PAGE, {"leaders": ("m1", "m2")}),
        ("KvcmStoreAway", Severity.ALERT_PAGE, {"store_trouble": "connection refused"}),
        ("KvcmAccessesDropped", Severity.ALERT_PAGE, {"dropped_accesses": 5}),
        ("KvcmWriteSessionsOverdue", Severity.ALERT_TICKET, {"overdue_sessions": 2}),
        ("KvcmLoopLag", Severity.ALERT_TICKET, {"lag_seconds": 0.25}),
        ("KvcmCertificateEnds", Severity.ALERT_TICKET, {"certificates": {"server": NOW + 10 * 86_400}}),
        ("KvcmCertificateEnds", Severity.ALERT_PAGE, {"certificates": {"server": NOW - 3600}}),
    ):
        alert = only(cluster_alerts(facts(**fields)))
        assert (alert.name, alert.severity) == (name, severity)
        assert all(text.endswith(".") for text in (alert.summary, alert.reason, alert.advice))
    ends = only(cluster_alerts(facts(certificates={"server": NOW + 10 * 86_400, "client_ca": NOW + 86_400_000})))
    assert ends.summary == "The certificate (server) of manager m1 ends in 10 days."


def test_counters_count_only_as_long_as_it_is_lately() -> None:
    lately: Lately[str] = Lately(300)
    lately.note({}, 0)
    assert lately.growth({"g": 3}) == {"g": 3}
    for at in range(10, 310, 10):
        lately.note({"g": 3}, at)
    assert lately.growth({"g": 3}) == {"g": 3}  # since the note of 0
    lately.note({"g": 3}, 310)
    assert lately.growth({"g": 3}) == {}
    assert lately.growth({"g": 4, "h": 1}) == {"g": 1, "h": 1}


def test_numbers_in_sentences() -> None:
    assert [percent(part, 1000) for part in (5, 991, 9999, 1000)] == ["0.5 %", "99.1 %", "1000 %", "100 %"]
    assert percent(99_999, 100_000) == "99.9 %"
    assert percent(0, 0) == "100 %"
    assert (counted(1, "write"), counted(1234, "write")) == ("1 write", "1,234 writes")
    assert [lasting(s) for s in (0.25, 5, 119, 130, 7300, 3 * 86_400)] == [
        *("250 ms", "5 s", "119 s", "2 minutes", "2 hours", "3 days")
    ]
    assert (joined(["a"]), joined(["a", "b", "c"]), joined([])) == ("a", "a, b and c", "")
