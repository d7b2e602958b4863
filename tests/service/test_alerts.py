"""Alerts and vitals: faults, since when they last, and the state of the managers."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_clock import FakeClock
from hypothesis import given
from hypothesis import strategies as st

from kvcm.cache.drains import StorageDrains
from kvcm.cache.manager import CacheManager
from kvcm.cache.removal import Remover
from kvcm.model.groups import (
    CacheConfig,
    CacheReclaimStrategy,
    EvictionPolicy,
    InstanceGroup,
    InstanceGroupQuota,
    TriggerStrategy,
)
from kvcm.model.instances import Instance, ModelDeployment
from kvcm.model.nodes import METHODS, Endpoint, GroupTotals, Vitals
from kvcm.model.principals import CallContext, Principal, Verb, call_context
from kvcm.model.storages import DummyStorageSpec, StorageConfig, StorageType
from kvcm.reclaim.deletion_executor import Backlog, DeletionExecutor
from kvcm.registry.leadership import Leadership
from kvcm.registry.registry import Registry
from kvcm.residency.residency import Engine, Report, Residency
from kvcm.service import alert_watch, alerts, usage_values, vitals_history
from kvcm.service.alert_watch import AlertSources, AlertWatch, RecentGrowth
from kvcm.service.storage_api import DrainView
from kvcm.service.usage_report import UsageView
from kvcm.service.vitals import ManagerView
from kvcm.service.vitals_history import Rates, Series, quantile, rates_between
from kvcm.storage.directory import StorageDirectory
from kvcm.storage.health import HealthState, StorageHealth
from kvcm.store.memory import MemoryLease, MemoryTable
from kvcm.store.store import StoreHealth

GIB = 1 << 30
NOW = 1_000_000.0
BOUNDS = (0.001, 0.01)
CHAT = Instance("", "g", "chat", 16, (), ModelDeployment("m", "bf16"))


def vitals(
    node_id: str = "m1",
    started_at: float = 0.0,
    at: float = 10.0,
    requests: int = 0,
    errors: int = 0,
    match_counts: tuple[int, ...] = (0, 0, 0),
    **fields: Any,
) -> Vitals:
    """Return vitals of a manager whose counters are these, of each method alike."""
    leads = fields.pop("is_leader", "used_bytes" in fields)
    node = (Endpoint(node_id, "h", 1, 2, 3, 4), "1", started_at, at, "serving", leads)
    counters = dict.fromkeys(METHODS, requests), dict.fromkeys(METHODS, errors)
    return Vitals(*node, *counters, BOUNDS, match_counts, fields.pop("groups", {}), **fields)


def configured(ratio: float = 0.8, delay_ms: int = 0, storages: tuple[str, ...] = ("disk",), ttl: int = 0) -> Any:
    strategy = CacheReclaimStrategy(
        trigger_strategy=TriggerStrategy(used_percentage=ratio),
        delay_before_delete_ms=delay_ms,
        policy=EvictionPolicy(ttl_seconds=ttl),
    )
    return InstanceGroup("g", storages, quota=InstanceGroupQuota(10 * GIB), cache_config=CacheConfig(strategy))


def usage(used: float, capacity: int = 10, mark: float = 8, deleting: float = 0) -> usage_values.Usage:
    high = int(mark * GIB) if mark >= 0 else -1
    return usage_values.Usage(int(used * GIB), int(deleting * GIB), capacity * GIB, high, high)


def status(name: str = "disk", reason: str | None = None, **fields: Any) -> usage_values.StorageStatus:
    """Return the status of a storage, which is down if there is a reason."""
    health = HealthState.SH_UP if reason is None else HealthState.SH_DOWN
    found = usage_values.StorageStatus(name, is_enabled=True, health=health, since_ms=int((NOW - 600) * 1000))
    return replace(found, **{"reason": reason or "", **fields})


def used_by(total: usage_values.Usage, **fields: Any) -> usage_values.GroupUsage:
    parts: dict[str, Any] = {"types": (), "storages": (), "instances": (), "pinned_bytes": 0}
    parts |= {"pin_budget_bytes": 0, "refused_writes": 0, **fields}
    return usage_values.GroupUsage("g", total, **parts)


def facts(
    group: usage_values.GroupUsage | None = None, config: InstanceGroup | None = None, **fields: Any
) -> alerts.AlertInputs:
    groups = () if group is None else (group,)
    report = usage_values.UsageReport(groups, fields.pop("storage_usages", ()), fields.pop("quotas", ()))
    given: dict[str, Any] = {"storages": {"disk": status()}, "types": {"disk": StorageType.ST_NFS}, "leader": "m1"}
    return alerts.AlertInputs(NOW, report, {"g": config or configured()}, **{**given, "node_id": "m1", **fields})


def only(found: Any) -> alerts.Alert:
    (alert,) = found
    assert isinstance(alert, alerts.Alert)
    return alert


def of_group(group: usage_values.GroupUsage, config: InstanceGroup | None = None, **fields: Any) -> alerts.Alert:
    return only(alerts.group_alerts(facts(group, config, **fields)))


def test_a_group_below_its_mark_is_fine_and_so_is_one_at_a_high_mark() -> None:
    assert list(alerts.group_alerts(facts(used_by(usage(7.9))))) == []
    assert list(alerts.group_alerts(facts(used_by(usage(9.5, mark=9.6))))) == []


def test_a_full_group_that_refuses_writes_is_a_page_and_either_alone_is_a_ticket() -> None:
    full = of_group(used_by(usage(9.9)), refused={"g": 53})
    assert (full.name, full.severity) == ("KvcmGroupFull", alerts.Severity.ALERT_PAGE)
    assert full.summary == "Group g is full and refused 53 writes in the last 5 minutes."
    assert full.reason.startswith("Its quota is 99 % used (9.9 GiB of 10.0 GiB).")
    short = of_group(used_by(usage(7)), refused={"g": 1})
    assert short.severity is alerts.Severity.ALERT_TICKET
    assert short.summary == "Group g is short of space and refused 1 write in the last 5 minutes."
    assert of_group(used_by(usage(9.9))).severity is alerts.Severity.ALERT_TICKET
    assert of_group(used_by(usage(9.2))).name == "KvcmGroupNearlyFull"


FULL, DELETING, UNMARKED = used_by(usage(9.9)), used_by(usage(9.9, deleting=4)), used_by(usage(9.9, mark=-1))
OF_DISK = {"deleting": {"g": {"disk": 4 * GIB}}}
AWAY = {"disk": status(reason="not mounted"), "spare": status("spare")}
HELD: dict[str, tuple[usage_values.GroupUsage, InstanceGroup, dict[str, Any]]] = {
    "pins": (used_by(usage(9.9), pinned_bytes=6 * GIB), configured(), {}),
    "delay": (DELETING, configured(delay_ms=60_000), OF_DISK),
    "down": (DELETING, configured(storages=("disk", "spare")), {**OF_DISK, "storages": AWAY}),
    "failing": (DELETING, configured(), {**OF_DISK, "backlogs": {"disk": Backlog(waiting=9, failures=3)}}),
    "writes": (FULL, configured(), {"writing": {"g": 3 * GIB}}),
    "off": (UNMARKED, configured(ratio=1.5), {}),
    "unset": (UNMARKED, configured(ratio=0, ttl=7200), {}),
    "leaderless": (FULL, configured(), {"leader": ""}),
    "busy": (FULL, configured(), {}),
}
REASONS_AND_ADVICE = {
    "pins": ("6.0 GiB (60.6 % of it) are pinned", "end pins"),
    "delay": ("4.0 GiB are evicted and wait for their deletion, which comes 60 s later (delay_b", "shorten that"),
    "down": ("wait for their deletion, since storage disk is down (not mounted)", "bring storage disk back"),
    "failing": ("storage disk fails to delete them", "look why storage disk does not delete"),
    "writes": ("3.0 GiB are reserved for writes that are not finished", "open write sessions"),
    "off": ("Nothing is evicted for lack of space: the mark is 1.5, which is off", "to 0.8"),
    "unset": ("the mark is not set, and blocks leave by age alone, after 2 hours", "to 0.8"),
    "leaderless": ("No manager leads, so nothing is evicted", "why no manager leads"),
    "busy": ("begins at 8.0 GiB and does not free space as fast as", "so that eviction begins earlier"),
}


@pytest.mark.parametrize("holder", HELD)
def test_the_reason_why_a_group_stays_full_is_reported(holder: str) -> None:
    group, config, fields = HELD[holder]
    reason, advice = REASONS_AND_ADVICE[holder]
    alert = of_group(group, config, **fields)
    assert reason.lower() in alert.reason.lower()
    assert advice.lower() in alert.advice.lower()
    assert "Or raise the limit: the group's quota (quota.capacity)." in alert.advice


def test_the_largest_holder_comes_first_and_trifles_are_left_out() -> None:
    group = used_by(usage(9.9), pinned_bytes=GIB // 100)
    alert = of_group(group, writing={"g": 2 * GIB}, deleting={"g": {"disk": 5 * GIB}})
    assert alert.reason.index("5.0 GiB") < alert.reason.index("2.0 GiB")
    assert "pinned" not in alert.reason


def test_a_limit_of_blocks_is_reported_in_blocks() -> None:
    group = used_by(usage(1), instances=(usage_values.InstanceUsage("m", 1000, 1000, GIB, "lru"),))
    alert = of_group(group, refused={"g": 2})
    assert "The key limit of instance m is 100 % used (1,000 of 1,000 blocks)." in alert.reason
    assert "Eviction begins at 800 blocks" in alert.reason
    assert "max_key_count" in alert.advice


def test_a_shared_quota_and_a_shared_storage_report_what_others_use() -> None:
    quota = usage_values.GlobalQuotaUsage("team", usage(9.9), ("g", "h"))
    alert = of_group(used_by(usage(2)), refused={"g": 1}, quotas=(quota,))
    assert "The global quota team is 99 % used" in alert.reason
    assert "Other groups use 7.9 GiB of it." in alert.reason
    assert "kvcm quota set team" in alert.advice
    off = of_group(used_by(usage(2)), refused={"g": 1}, quotas=(replace(quota, usage=usage(9.9, mark=-1)),))
    assert "Nothing is evicted because of it: the mark of the global quota team is off." in off.reason
    shared = usage_values.StorageUsage("disk", usage(9.9), 0, 2.0, 0, 0)
    group = used_by(usage(2), storages=(usage_values.GroupStorageUsage("disk", 2 * GIB, 0),))
    alert = of_group(group, refused={"g": 1}, storage_usages=(shared,))
    assert "Storage disk is 99 % used" in alert.reason
    assert "Other groups use 7.9 GiB of it." in alert.reason


def test_the_limit_of_one_storage_is_none_while_another_has_space() -> None:
    full = usage_values.StorageUsage("disk", usage(9.9), 0, 0, 0, 0)
    both = {"disk": status(), "spare": status("spare")}
    roomy = facts(used_by(usage(2)), configured(storages=("disk", "spare")), storages=both, storage_usages=(full,))
    assert list(alerts.group_alerts(roomy)) == []
    half = replace(full, storage_unique_name="spare", usage=usage(5))
    limited = replace(roomy, usage=replace(roomy.usage, storages=(full, half)))
    assert list(alerts.group_alerts(limited)) == []
    fuller = replace(half, usage=usage(9.95))
    reason = only(alerts.group_alerts(replace(roomy, usage=replace(roomy.usage, storages=(full, fuller))))).reason
    assert "Storage disk is 99 % used" in reason
    drained = {**both, "spare": status("spare", is_draining=True)}
    assert only(alerts.group_alerts(replace(roomy, storages=drained))).name == "KvcmGroupFull"


def test_a_type_s_quota_limits_the_storages_of_that_type() -> None:
    group = used_by(usage(2), types=(usage_values.TypeUsage(StorageType.ST_NFS, usage(1, capacity=1)),))
    assert "Its quota for storages of type file is 100 % used" in of_group(group).reason


def test_a_medium_that_others_filled_is_a_limit() -> None:
    filled = {"disk": status(medium_bytes=100 * GIB, medium_free_bytes=GIB)}
    alert = of_group(used_by(usage(2)), refused={"g": 1}, storages=filled)
    assert "The medium of storage disk is 99 % used (99.0 GiB of 100.0 GiB)." in alert.reason
    assert "Other files take the space." in alert.reason
    roomy = {"disk": status(medium_bytes=100 * GIB, medium_free_bytes=7 * GIB)}
    assert list(alerts.group_alerts(facts(used_by(usage(2)), storages=roomy))) == []


def test_a_group_without_a_storage_says_what_each_of_them_lacks() -> None:
    storages = {
        "a": status("a", reason="mount is gone"),
        "b": status("b", is_enabled=False),
        "c": status("c", is_draining=True),
    }
    alert = of_group(used_by(usage(1)), configured(storages=("a", "b", "c", "d")), storages=storages)
    assert (alert.name, alert.severity) == ("KvcmGroupWithoutStorage", alerts.Severity.ALERT_PAGE)
    assert alert.reason == (
        "Storage a is down (mount is gone), storage b is disabled, storage c is being drained and storage d is not "
        "configured."
    )


def test_a_group_that_stays_above_its_mark_is_stuck() -> None:
    alert = of_group(used_by(usage(8.5), pinned_bytes=8 * GIB))
    assert alert.name == "KvcmReclaimStuck"
    assert "stays 512.0 MiB above the mark" in alert.summary
    assert "are pinned" in alert.reason


def of_disk(**fields: Any) -> dict[str, Any]:
    return {"storages": {"disk": status(**fields)}}


def of_usage(**fields: Any) -> dict[str, Any]:
    return {"storage_usages": (replace(usage_values.StorageUsage("disk", usage(1), 0, 0.5, 0, 0), **fields),)}


LATE = {**of_usage(), "backlogs": {"disk": Backlog(4, 0, 7)}}
MOVE = usage_values.BlockMove(
    "i", "registry", "b", usage_values.BlockMoveState.BLOCK_MOVE_WAITING, failures=3, reason="b is away"
)
DRAIN = usage_values.DrainStatus("disk", False, usage_values.DrainState.DRAIN_RUNNING, 0, GIB, "3 locations are pinned")


@pytest.mark.parametrize(
    ("name", "fields", "text"),
    [
        ("KvcmStorageDown", of_disk(reason="no answer"), "down for 10 minutes: its blocks are not read. No answer."),
        ("KvcmStorageDegraded", of_disk(health=HealthState.SH_DEGRADED), "disk"),
        ("KvcmStorageDisabled", of_disk(is_enabled=False), "kvcm storage enable disk"),
        ("KvcmStorageNearlyFull", of_usage(usage=usage(9.6)), "disk is 96 % full."),
        ("KvcmStorageNearlyFull", of_disk(medium_bytes=100 * GIB, medium_free_bytes=GIB), "disk has 1.0 GiB left."),
        ("KvcmStorageOversubscribed", of_usage(oversubscription=2.25), "2.25 times"),
        ("KvcmDeletionsFail", LATE, "4 locations wait, 7 attempts failed, 0 hang."),
        ("KvcmChecksumMismatch", {"mismatches": {("g", "disk"): 2}}, "returned wrong bytes to group g 2 times"),
        ("KvcmStorageUnverified", {"unverified": {"disk"}}, "disk is unverified: its blocks are not read."),
        ("KvcmDrainWaits", {"drains": (DRAIN,)}, "disk waits, 1.0 GiB are left. 3 locations are pinned."),
    ],
)
def test_faults_of_a_storage_are_reported(name: str, fields: dict[str, Any], text: str) -> None:
    alert = only(each for each in alerts.storage_alerts(facts(**fields)) if each.name == name)
    assert text in f"{alert.summary} {alert.reason} {alert.advice}"


def test_nothing_is_wrong_with_a_storage_that_is_well_nor_with_a_drain_that_goes_on() -> None:
    assert list(alerts.storage_alerts(facts())) == []
    done = replace(DRAIN, state=usage_values.DrainState.DRAIN_DONE)
    assert list(alerts.storage_alerts(facts(drains=(done, replace(DRAIN, reason=""))))) == []


def test_managers_and_what_they_share() -> None:
    assert list(alerts.cluster_alerts(facts(certificates={"server": 0.0}))) == []
    for name, severity, fields in (
        ("KvcmNoLeader", alerts.Severity.ALERT_PAGE, {"leader": ""}),
        ("KvcmSeveralLeaders", alerts.Severity.ALERT_PAGE, {"leaders": ("m1", "m2")}),
        ("KvcmStoreAway", alerts.Severity.ALERT_PAGE, {"store_trouble": "connection refused"}),
        ("KvcmStoreUnsound", alerts.Severity.ALERT_PAGE, {"store_health": StoreHealth(evicts="it drops keys")}),
        (
            "KvcmStoreUnsound",
            alerts.Severity.ALERT_PAGE,
            {"store_trouble": "not looked at", "store_health": StoreHealth(closed="it is another deployment's")},
        ),
        ("KvcmBlockStoreUnsound", alerts.Severity.ALERT_PAGE, {"block_stores": {"b": "it is away"}}),
        ("KvcmBlockMoveFails", alerts.Severity.ALERT_TICKET, {"failing_moves": (MOVE,)}),
        (
            "KvcmStoreLostChanges",
            alerts.Severity.ALERT_PAGE,
            {"store_health": StoreHealth(last_loss="it was emptied", lost_at=NOW - 3600)},
        ),
        ("KvcmAccessesDropped", alerts.Severity.ALERT_PAGE, {"dropped_accesses": 5}),
        ("KvcmWriteSessionsOverdue", alerts.Severity.ALERT_TICKET, {"overdue_sessions": 2}),
        ("KvcmLoopLag", alerts.Severity.ALERT_TICKET, {"lag_seconds": 0.25}),
        ("KvcmEngineQuiet", alerts.Severity.ALERT_TICKET, {"quiet_engines": {"chat": ["10.0.0.1:8000"]}}),
        ("KvcmCertificateEnds", alerts.Severity.ALERT_TICKET, {"certificates": {"server": NOW + 10 * 86_400}}),
        ("KvcmCertificateEnds", alerts.Severity.ALERT_PAGE, {"certificates": {"server": NOW - 3600}}),
    ):
        alert = only(alerts.cluster_alerts(facts(**fields)))
        assert (alert.name, alert.severity) == (name, severity)
        assert all(text.endswith(".") for text in (alert.summary, alert.reason, alert.advice))
    long_ago = StoreHealth(last_loss="it was emptied", lost_at=NOW - 2 * 86_400)
    assert list(alerts.cluster_alerts(facts(certificates={"server": 0.0}, store_health=long_ago))) == []
    ends = only(alerts.cluster_alerts(facts(certificates={"server": NOW + 10 * 86_400, "client_ca": NOW + 86_400_000})))
    assert ends.summary == "The certificate (server) of manager m1 ends in 10 days."


def test_quiet_engines_are_named_by_instance_and_the_rest_is_counted() -> None:
    assert list(alerts.cluster_alerts(facts(quiet_engines={"chat": []}))) == []
    many = {f"i{number}": ["a:1", "b:1", "c:1", "d:1", "e:1"] for number in range(4)} | {"chat": ["a:1"]}
    alert = only(alerts.cluster_alerts(facts(quiet_engines=many)))
    assert alert.key == ("KvcmEngineQuiet", "manager", "m1")
    assert alert.summary == "21 engines went quiet: manager m1 gets no reports of their memory."
    assert alert.reason == (
        "Instance chat: a:1; instance i0: a:1, b:1, c:1 and 2 more; instance i1: a:1, b:1, c:1 and 2 more; and 2 more "
        "instances. Scores of prompts do not count their blocks."
    )


def test_counters_count_only_as_long_as_it_is_lately() -> None:
    lately: RecentGrowth[str] = RecentGrowth(300)
    lately.record({}, 0)
    assert lately.growth({"g": 3}) == {"g": 3}
    for at in range(10, 310, 10):
        lately.record({"g": 3}, at)
    assert lately.growth({"g": 3}) == {"g": 3}  # since the note of 0
    lately.record({"g": 3}, 310)
    assert lately.growth({"g": 3}) == {}
    assert lately.growth({"g": 4, "h": 1}) == {"g": 1, "h": 1}


def test_numbers_in_sentences() -> None:
    assert [alerts.percent(part, 1000) for part in (5, 991, 9999, 1000)] == ["0.5 %", "99.1 %", "1000 %", "100 %"]
    assert (alerts.percent(99_999, 100_000), alerts.percent(0, 0)) == ("99.9 %", "100 %")
    times = [alerts.duration_text(seconds) for seconds in (0.25, 119, 130, 3 * 86_400)]
    assert times == ["250 ms", "119 s", "2 minutes", "3 days"]


class World(NamedTuple):
    """The parts of a manager, and its watch for alerts."""

    clock: FakeClock
    storages: StorageDirectory
    leadership: Leadership
    cache: CacheManager
    residency: Residency
    watch: AlertWatch

    async def names(self, group: str = "") -> list[str]:
        return [alert.name for alert in await self.watch.alerts(group)]

    async def pass_time(self, seconds: int) -> None:
        """Let time pass with the looks of the duty."""
        for _ in range(seconds // 10):
            self.clock.time += 10
            await self.leadership.tick()
            await self.watch.check()


@pytest.fixture
async def world() -> AsyncIterator[World]:
    clock, storages = FakeClock(), StorageDirectory("cluster")
    registry = Registry(storages)
    cache = CacheManager(registry, storages, clock)
    drains = StorageDrains(registry, cache.open_caches, Remover(clock, registry.groups.find), clock, is_shared=False)
    leadership = Leadership("me", clock, 60.0, MemoryLease(clock), MemoryTable())
    await leadership.tick()
    await registry.storages.add(StorageConfig("s", DummyStorageSpec()))
    await registry.groups.create(InstanceGroup("g", ("s",), quota=InstanceGroupQuota(1000)))
    deletions = DeletionExecutor(storages, clock)
    view, drain_view = UsageView(cache, registry, deletions), DrainView(drains, storages, deletions, leadership)
    parts = cache, registry, view, storages, deletions, drain_view, leadership
    residency = Residency(clock, {CHAT.instance_id: CHAT}.get)
    sources = AlertSources(*parts, lambda: 0.0, False, residency=residency)
    yield World(clock, storages, leadership, cache, residency, AlertWatch(sources, clock.now))
    storages.close_all()


def neighbour(name: str, refused: int = 0, *, leads: bool = False) -> ManagerView:
    reported = vitals(name, groups={"g": GroupTotals(refused_writes=refused)}, is_leader=leads)
    return ManagerView(
        reported.endpoint, 0.0, is_leader=leads, is_self=False, vitals=reported, rates=None, instances=None
    )


async def test_an_alert_keeps_the_time_of_its_first_check_when_no_client_asks(world: World) -> None:
    world.storages.set_health("s", StorageHealth(HealthState.SH_DOWN, "gone"))
    await world.watch.check()
    begun = world.clock.now()
    await world.pass_time(60)
    found = {alert.name: alert.since_ms for alert in await world.watch.alerts()}
    assert found == dict.fromkeys(("KvcmGroupWithoutStorage", "KvcmStorageDown"), int(begun * 1000))
    world.storages.set_health("s", StorageHealth())
    assert await world.names() == []
    await world.pass_time(10)
    world.storages.set_health("s", StorageHealth(HealthState.SH_DOWN, "gone"))
    assert {alert.since_ms for alert in await world.watch.alerts()} == {int(world.clock.now() * 1000)}


async def test_a_condition_that_has_to_last_is_reported_only_when_every_check_found_it(world: World) -> None:
    await world.leadership.demote()
    world.leadership.campaign_delay_ms = 10_000_000
    assert await world.names() == []
    world.clock.time += 3
    assert await world.names() == []
    world.clock.time += 3
    assert await world.names() == ["KvcmNoLeader"]


async def test_refused_writes_count_for_five_minutes_wherever_they_were_refused(world: World) -> None:
    world.cache.usage.rejections["g"] += 2
    (alert,) = await world.watch.alerts("g")
    assert "refused 2 writes" in alert.summary
    await world.pass_time(320)
    assert await world.names() == []
    world.watch.managers = lambda: [neighbour("other", 1000)]  # its count before this manager found it is unknown
    assert await world.names() == []
    await world.pass_time(10)
    world.watch.managers = lambda: [neighbour("other", 1003)]
    (alert,) = await world.watch.alerts()
    assert "refused 3 writes" in alert.summary
    await world.pass_time(320)
    assert await world.names() == []


async def test_several_that_lead_for_long_are_reported(world: World) -> None:
    world.watch.managers = lambda: [neighbour("a", leads=True), neighbour("b", leads=True), neighbour("c")]
    assert await world.names() == []
    await world.pass_time(30)
    (alert,) = await world.watch.alerts()
    assert (alert.name, alert.reason) == ("KvcmSeveralLeaders", "They are a, b.")


async def test_a_key_limited_to_groups_receives_their_alerts_alone_and_changes_nothing_for_others(world: World) -> None:
    world.storages.set_health("s", StorageHealth(HealthState.SH_DOWN, "gone"))
    begun = {alert.name: alert.since_ms for alert in await world.watch.alerts()}
    world.clock.time += 30
    before = call_context.set(CallContext(Principal("x", frozenset({Verb.VIEW}), frozenset({"g"}))))
    try:
        found = await world.watch.alerts()
    finally:
        call_context.reset(before)
    assert [(alert.name, alert.since_ms) for alert in found] == [
        ("KvcmGroupWithoutStorage", begun["KvcmGroupWithoutStorage"])
    ]
    assert {alert.name: alert.since_ms for alert in await world.watch.alerts()} == begun


async def test_an_engine_is_quiet_until_it_reports_again_or_is_forgotten(world: World) -> None:
    reports = world.residency.open(CHAT)
    for rank, address in enumerate(("a:1", "a:1", "b:1")):
        reports.report(Report(Engine(address, rank), "run", 1))
    timeout = int(world.residency.limits.timeout_seconds)
    await world.pass_time(timeout + 10)
    reports.report(Report(Engine("b:1", 2), "run", 2))
    world.residency.expire()
    (alert,) = await world.watch.alerts()
    assert (alert.name, alert.reason.partition(". ")[0]) == ("KvcmEngineQuiet", "Instance chat: a:1")
    for rank in range(2):
        reports.report(Report(Engine("a:1", rank), "run", 2))
    assert await world.names() == []
    await world.pass_time(timeout + 10)
    world.residency.expire()
    assert await world.names() == ["KvcmEngineQuiet"]
    await world.pass_time(9 * timeout)
    world.residency.expire()
    assert await world.names() == []


ROOT = Path(__file__).parents[2]
NAME = re.compile(r'"(Kvcm[A-Za-z]+)"')


def _reported() -> set[str]:
    folder = Path(alert_watch.__file__).parent
    return {name for path in folder.glob("*.py") for name in NAME.findall(path.read_text())}


def test_every_name_has_a_rule_or_stands_among_those_that_have_none() -> None:
    rules = set(re.findall(r"alert: (\w+)", (ROOT / "deploy/prometheus/rules.yml").read_text()))
    (listed,) = re.findall(r"Names without a rule: (.*?)\.", (ROOT / "docs/rest.md").read_text(), re.DOTALL)
    without = set(re.findall(r"`(\w+)`", listed))
    assert _reported() - rules == without
    assert len(_reported() & rules) >= 10


def test_conditions_that_have_to_last_are_reported_at_all() -> None:
    assert alert_watch._DELAY_SECONDS.keys() <= _reported()


def rates(before: Vitals | None, after: Vitals, since: float = 0.0) -> Rates:
    found = rates_between(before, after, since)
    assert found is not None
    return found


def test_a_rate_is_the_increase_over_the_time_between_the_two_vitals() -> None:
    before = vitals(at=10, requests=100, errors=1, groups={"a": GroupTotals(10, 20, 30, 40)}, match_counts=(1, 2, 3))
    after = vitals(at=20, requests=150, errors=2, groups={"a": GroupTotals(20, 40, 60, 80)}, match_counts=(2, 2, 9))
    found = rates(before, after)
    assert found.requests == dict.fromkeys(("match", "start", "finish", "other"), 5.0)
    assert found.errors["match"] == pytest.approx(0.1)
    assert found.groups["a"] == (1.0, 2.0, 3.0, 4.0)
    assert found.match_counts == (1, 0, 6)


def test_counters_that_shrink_have_gained_nothing() -> None:
    found = rates(vitals(at=10, requests=9, match_counts=(5, 0, 1)), vitals(at=20, requests=3, match_counts=(2, 0, 4)))
    assert found.requests["match"] == 0.0
    assert found.match_counts == (0, 0, 3)


def test_vitals_that_are_still_the_same_report_no_rate() -> None:
    assert rates_between(vitals(at=10), vitals(at=10), 0.0) is None


def test_the_first_moment_of_a_manager_is_not_taken_for_its_rate() -> None:
    assert rates(None, vitals(started_at=9.99, at=10, requests=3), since=5.0).requests["match"] == 3.0


@given(st.lists(st.integers(0, 50), min_size=3, max_size=3), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_value_that_it_stands_for(counts: list[int], share: float) -> None:
    values = [bucket for bucket, count in enumerate(counts) for _ in range(count)]
    found = quantile(share, BOUNDS, counts)
    if not values:
        assert found is None
        return
    bucket = next(at for at in range(3) if sum(counts[: at + 1]) >= share * len(values))
    low, high = (0.0, *BOUNDS)[min(bucket, 2)], (*BOUNDS, BOUNDS[-1])[bucket]
    assert found is not None
    assert low <= found <= high + 1e-12


def _sample(*found: Rates, used: Any = (), quotas: Any = ()) -> dict[Series, float]:
    return dict(vitals_history.sample_of(found, used, dict(quotas), lambda name: "other" if name == "b" else name))


def _of(name: str, *labels: tuple[str, str]) -> Series:
    return Series(name, labels)


def test_a_sample_sums_up_managers_and_groups_of_one_name() -> None:
    groups = {"a": GroupTotals(10, 10), "b": GroupTotals(1), "other": GroupTotals(2)}
    one = rates(None, vitals(at=1, requests=3, errors=1, groups=groups))
    sample = _sample(one, one)
    assert sample[_of(vitals_history.REQUESTS, ("method", "match"))] == 6.0
    assert sample[_of(vitals_history.ERRORS)] == 8.0
    assert sample[_of(vitals_history.HIT_KEYS, ("group", "a"))] == 20.0
    assert sample[_of(vitals_history.HIT_KEYS, ("group", "other"))] == 6.0


def test_percentiles_are_of_the_lookups_of_all_managers_together() -> None:
    fast = rates(None, vitals(at=1, match_counts=(98, 0, 0)))
    slow = rates(None, vitals(at=1, match_counts=(0, 2, 0)))
    sample = _sample(fast, slow)
    assert sample[_of(vitals_history.P50)] == pytest.approx(0.001 * 50 / 98)
    assert sample[_of(vitals_history.P99)] == pytest.approx(0.0055)


def test_buckets_of_another_release_are_left_out() -> None:
    fast = rates(None, vitals(at=1, match_counts=(10, 0, 0)))
    sample = _sample(fast, fast._replace(match_bounds=(7.0,), match_counts=(5, 5)))
    assert sample[_of(vitals_history.P99)] <= 0.001


def test_nothing_is_reported_where_nothing_is_known() -> None:
    assert _sample() == {}
    assert vitals_history.P50 not in {series.name for series in _sample(rates(None, vitals(at=1)))}


def test_usage_comes_from_the_latest_leader() -> None:
    old = vitals(at=10, used_bytes={"a": {"nfs": 1, "hf3fs": 7}})
    new = vitals("m2", at=20, used_bytes={"a": {"nfs": 2}})
    follower = replace(vitals("m3", at=30, used_bytes={"a": {"nfs": 9}}), is_leader=False)
    sample = _sample(used=[old, new, follower], quotas={"a": 100})
    assert sample == {
        _of(vitals_history.USED, ("group", "a"), ("tier", "nfs")): 2,
        _of(vitals_history.QUOTA, ("group", "a")): 100,
    }
