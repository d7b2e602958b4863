"""Groups, storages, instances, keys, curves, sessions and reports of tasks as they are shown."""

from __future__ import annotations

import re
from typing import Any

import pytest
from history_documents import alert, group_usage, history, usage

from kvcm.console.deployment import History, charts_of_all, charts_of_group
from kvcm.console.pages.curve import curve_of
from kvcm.console.pages.groups import GroupCard, group_card, group_cards, losses_of
from kvcm.console.pages.instances import instance_views
from kvcm.console.pages.keys import key_views
from kvcm.console.pages.overview import headline, tiles
from kvcm.console.pages.storages import storage_views
from kvcm.console.pages.tasks import outcome_of

GIB = 1 << 30


def curve(
    kept: int = 4 * GIB, points: tuple[tuple[int, float], ...] = ((GIB, 0.2), (4 * GIB, 0.5), (8 * GIB, 0.8))
) -> Any:
    ratio = max((found for size, found in points if size <= kept), default=0.0)
    attainable = points[-1][1] if points else 0.0
    return {
        "since_ms": 1, "lookups": 100, "sampled_keys": 10, "attainable_ratio": attainable,
        "points": [{"bytes": size, "hit_ratio": found} for size, found in points],
        "targets": [{"part": part, "hit_ratio": part, "bytes": int(8 * GIB * part)} for part in (0.4, 0.9)],
        "present": {"quota_bytes": 5 * GIB, "kept_bytes": kept, "used_bytes": GIB, "predicted_ratio": ratio},
    }  # fmt: skip


def test_gains_of_more_and_less_capacity() -> None:
    view = curve_of(curve())
    assert [(change.bytes // GIB, change.ratio, round(change.gain, 3)) for change in view.changes] == [
        *[(1, 0.2, -0.3), (2, 0.2, -0.3), (4, 0.5, 0), (8, 0.8, 0.3), (16, 0.8, 0.3)]
    ]
    assert [change.is_present for change in view.changes] == [False, False, True, False, False]
    assert [missing for _, missing in view.targets] == [0, int(8 * GIB * 0.9) - 4 * GIB]
    assert view.headline == (
        "With 4.0 GiB the group finds 50.0 % of the blocks asked for; a cache of any size would find 80.0 %."
    )
    assert curve_of(curve(8 * GIB)).headline.startswith("The group has what it needs: 80.0 %")


def test_the_drawing_has_the_curve_and_where_the_group_stands() -> None:
    drawing = str(curve_of(curve()).drawing)
    assert "now: 4.0 GiB" in drawing
    assert "<title>Hit rate by capacity. With 4.0 GiB" in drawing
    places = [float(number) for number in re.findall(r"[HVM ](-?\d+(?:\.\d+)?)", drawing)]
    assert min(places) >= 0
    assert max(places) <= 640
    (steps,) = re.findall(r'class="line c0" d="([^"]*)"', drawing)
    heights = [float(number) for number in re.findall(r"V([\d.]+)", steps)]
    assert heights == sorted(heights, reverse=True)


@pytest.mark.parametrize("kept", [0, 1, 1 << 62])
def test_any_capacity_can_be_drawn(kept: int) -> None:
    assert "now: " in str(curve_of(curve(kept)).drawing)


def test_without_anything_that_was_asked_for_twice_there_is_nothing_to_draw() -> None:
    view = curve_of({**curve(points=()), "targets": []})
    assert (str(view.drawing), "asked for twice" in view.headline) == ("", True)


def garbage(**report: int) -> Any:
    found = {"blocks": 900, "without_bytes": 0, "without_prefix": 0, "expired_sessions": 0, "freed_bytes": 0}
    return {"kind": "collect_garbage", "report": {**found, **report}}


def scrub(**report: int) -> Any:
    found = dict.fromkeys(("objects", "bytes", "orphans", "orphan_bytes", "too_young", "deleted", "failed"), 0)
    return {"kind": "scrub", "report": {**found, **report}}


def test_a_dry_run_that_found_garbage_can_be_followed_by_a_deletion() -> None:
    outcome = outcome_of(garbage(without_prefix=3, freed_bytes=3 << 20), is_dry=True)
    assert (outcome.headline, outcome.has_work) == ("3 of them, 3.0 MiB, would be freed; nothing was changed.", True)
    done = outcome_of(garbage(without_prefix=3, freed_bytes=3 << 20), is_dry=False)
    assert (done.headline, done.has_work) == ("3 of them, 3.0 MiB, were freed.", False)
    assert ("Blocks whose prefix is gone", "3") in done.rows
    assert outcome_of(garbage(), is_dry=True).headline == "There is nothing to free."
    orphans = outcome_of(scrub(objects=9, orphans=4, too_young=1, orphan_bytes=1024), is_dry=True)
    assert (orphans.headline, orphans.has_work) == ("3 of them, 1.0 KiB, would be freed; nothing was changed.", True)
    assert not outcome_of(scrub(orphans=1, too_young=1), is_dry=True).has_work
    assert outcome_of(scrub(orphans=4, deleted=4, orphan_bytes=1024), is_dry=False).headline.endswith("were freed.")


def storage(name: str, health: str = "SH_UP", *, is_available: bool = True, reason: str = "") -> dict[str, Any]:
    status = {"health": health, "reason": reason}
    spec = {"nfs": {"root_path": "/kv/", "key_count_per_file": 0}, "mooncake": None}
    return {"global_unique_name": name, "is_available": is_available, "status": status, **spec}


def drain(name: str, state: str) -> dict[str, Any]:
    return {"kind": "drain", "storage": name, "state": state, "left_bytes": 1, "reason": "", "started_ms": 1}


def test_storages_that_need_attention_come_first() -> None:
    well = [storage("b"), storage("a"), storage("draining"), storage("new", "SH_UNSPECIFIED")]
    ill = [storage("off", is_available=False), storage("slow", "SH_DEGRADED"), storage("down", "SH_DOWN")]
    tasks = [drain("draining", "running"), {**drain("a", "running"), "kind": "removal"}]
    found = storage_views([*well, *ill], {"storages": []}, tasks)
    assert [view.name for view in found] == ["down", "off", "slow", "draining", "a", "b", "new"]
    assert {view.name: [text for text, _ in view.badges] for view in found} == {
        "down": ["down"], "off": ["disabled", "up"], "slow": ["degraded"], "draining": ["draining", "up"],
        "a": ["up"], "b": ["up"], "new": ["not probed yet"],
    }  # fmt: skip


def test_a_storage_shows_its_known_figures() -> None:
    usage = {"usage": {"used_bytes": 7}, "deletion_backlog": 2, "deletion_failures": 3, "oversubscription": 1.5}
    (view,) = storage_views(
        [storage("old", reason="slow")], {"storages": [{"storage_unique_name": "old", **usage}]}, [drain("old", "done")]
    )
    assert (view.kind, view.reason, view.settings) == ("Shared directory", "slow", [("root_path", "/kv/")])
    assert (view.usage["used_bytes"], view.deletions, view.failures, view.oversubscription) == (7, 2, 3, 1.5)
    assert [text for text, _ in view.badges] == ["drained", "up"]


def test_instances_show_the_bytes_of_their_blocks_and_their_usage() -> None:
    model = {"model_name": "m", "dtype": "bf16", "use_mla": True, "tp_size": 2, "pp_size": 0, "dp_size": 1}
    model |= {"lora_name": "", "extra": "", "user_data": "note"}
    parts = [{"name": f"tp{rank}", "size": 3, "kind": "LSK_FULL_ATTENTION"} for rank in range(2)]
    instances = [
        {
            "instance_id": name, "instance_group_name": group, "location_spec_infos": parts, "model_deployment": model,
        }
        for name, group in (("z", "a"), ("a", "b"), ("b", "a"))
    ]  # fmt: skip
    used = {"instance_id": "b", "key_count": 4, "max_key_count": -1, "used_bytes": 24, "policy": "lru"}
    found = instance_views(instances, [{"instances": [used]}])
    assert [(view.group, view.name) for view in found] == [("a", "b"), ("a", "z"), ("b", "a")]
    assert (found[0].block_bytes, found[0].usage["key_count"], found[1].usage["key_count"]) == (6, 4, 0)
    assert found[0].deployment == [
        ("Parallelism", "2 ways by tensor, 1 ways by data"), ("Attention", "multi-head latent"), ("Note", "note"),
    ]  # fmt: skip
    assert found[0].parts[0] == ("tp0", 3, "full attention")


@pytest.mark.parametrize(
    ("changes", "scope", "verbs", "ends_soon"),
    [
        ({}, "all groups", "", False),
        ({"instance_groups": ["*"], "verbs": ["MATCH", "PIN"]}, "all groups", "match, pin", False),
        ({"instance_groups": ["a", "b"], "expires_at_ms": 1_000_000}, "a, b", "", True),
        ({"expires_at_ms": 1_000_000, "account": "grace"}, "all groups", "", False),
        ({"expires_at_ms": 20 * 86_400_000}, "all groups", "", False),
    ],
)
def test_keys_report_where_they_count_and_whether_they_end_soon(
    changes: dict[str, Any], scope: str, verbs: str, ends_soon: bool
) -> None:
    key = {"key_id": "k", "name": "n", "role": "ROLE_ENGINE", "instance_groups": [], "verbs": [], "account": ""}
    (view,) = key_views([{**key, "expires_at_ms": 0, **changes}], 0)
    assert (view.role, view.scope, view.verbs, view.ends_soon) == ("engine", scope, verbs, ends_soon)


QUIET = History(history({}))


def evicting(name: str, bytes_per_second: float) -> History:
    return History(history({("evicted_bytes_per_second", name): [bytes_per_second] * 60}))


def refusing(name: str, per_second: float) -> History:
    return History(history({("refused_writes_per_second", name): [None] * 50 + [per_second] * 10}))


def card(total: dict[str, int], going_on: History = QUIET, *alerts: Any, **more: Any) -> GroupCard:
    return group_card(group_usage("g", total, **more), alerts, going_on)


@pytest.mark.parametrize(
    ("total", "going_on", "state", "why"),
    [
        (usage(10, 100, 80, 78), QUIET, "has space", "70.0 MiB may be written before eviction begins."),
        (
            usage(10, 100),
            QUIET,
            "has space",
            "Nothing is evicted before it is full: it has no mark. 90.0 MiB are free.",
        ),
        (
            *(usage(79, 100, 80, 78), evicting("g", 1 << 20), "evicting"),
            "Eviction keeps it between 78.0 MiB and 80.0 MiB: 1.0 MiB/s leave on average.",
        ),
        (
            *(usage(85, 100, 80, 78), QUIET, "above its mark"),
            "It is above 80.0 MiB, where eviction begins: that is at work down to 78.0 MiB.",
        ),
        (
            *(usage(100, 100, 80, 78, deleting=60), QUIET, "full"),
            "60.0 MiB of it are evicted and wait for their deletion: little or nothing fits until then.",
        ),
        (
            *(usage(90, 100, 80, 78, deleting=60), QUIET, "has space"),
            "50.0 MiB may be written before eviction begins, and 60.0 MiB wait for their deletion.",
        ),
        (
            *(usage(70, 100, 80, 78), refusing("g", 0.5), "refuses writes"),
            "50 writes found no space in the last five minutes: 30.0 MiB are free now.",
        ),
        (usage(0, 0), QUIET, "no quota", "Its quota is 0: nothing may be written."),
    ],
)
def test_a_group_says_why_it_is_as_it_is(total: dict[str, int], going_on: History, state: str, why: str) -> None:
    found = card(total, going_on)
    assert (found.state, found.why, found.summary) == (state, why, "")


def test_pins_are_named_where_writes_are_refused() -> None:
    found = card(usage(70, 100, 80, 78), refusing("g", 0.5), pinned_bytes=60 << 20)
    assert found.why.endswith("30.0 MiB are free now, and 60.0 MiB are pinned.")


def test_the_worst_alert_of_the_group_says_it_better() -> None:
    others = [alert("page", "group", "other"), alert("page", "storage", "g"), alert("info", "group", "g")]
    found = card(usage(10, 100), QUIET, *others, alert("ticket", "group", "g"))
    assert (found.kind, found.why, found.advice) == ("warn", "Because of ticket.", "Do something.")


def test_groups_in_trouble_come_first_and_then_the_fullest() -> None:
    groups = [
        group_usage("a", usage(1, 100, 80, 78)), group_usage("b", usage(70, 100, 80, 78)),
        group_usage("c", usage(99, 100, 80, 78)), group_usage("d", usage(20, 100, 80, 78)),
        group_usage("e", usage(0, 0)),
    ]  # fmt: skip
    cards = group_cards(groups, [alert("page", "group", "d")], QUIET)
    assert [each.name for each in cards] == ["c", "d", "e", "b", "a"]


def test_the_headline_names_full_groups() -> None:
    def line(*totals: dict[str, int], alerts: tuple[Any, ...] = ()) -> tuple[str, str]:
        groups = [group_usage(f"g{number}", total) for number, total in enumerate(totals)]
        return tuple(headline(group_cards(groups, alerts, QUIET), alerts))

    full, space = usage(100, 100), usage(1, 100, 80, 78)
    assert line(space) == ("Nothing is wrong.", "good")
    assert line(full, space) == ("Group g0 is full.", "bad")
    assert line(full, full) == ("Group g0 is full and g1 is full.", "bad")
    assert line(*[full] * 5)[0] == "Group g0 is full, g1 is full, g2 is full and 2 more groups are in trouble."
    assert line(usage(85, 100, 80, 78)) == ("1 group is short of space; nothing is refused.", "warn")
    urgent, low = alert("page", "storage", "disk"), alert("ticket", "manager", "m")
    assert line(space, alerts=(urgent,)) == ("1 other thing needs attention.", "bad")
    assert line(space, alerts=(low, alert("info", "cluster", ""))) == ("1 other thing needs attention.", "warn")
    assert line(full, alerts=(urgent, low)) == ("Group g0 is full; 2 other things need attention.", "bad")


def test_tiles_show_known_recent_figures_only() -> None:
    methods = {("requests_per_second", name): [1.0, 2.0] for name in ("match", "start", "finish", "other")}
    known = History(history({**methods, ("hit_ratio",): [0.5, 0.75], ("errors_per_second",): [1.0, None]}))
    values = {tile.name: tile.value for tile in tiles(known)}
    assert values["Requests"] == "8/s"
    assert values["Hit rate"] == "75.0 %"
    assert values["Errors"] == "1/s"
    assert values["Look-up, half within"] == "–"
    assert {tile.value for tile in tiles(QUIET)} == {"–"}


def test_values_that_are_old_are_not_shown_as_present() -> None:
    assert History(history({("hit_ratio",): [0.5, None, None, None]})).latest("hit_ratio") is None


def test_unknown_samples_at_the_beginning_are_left_out_of_charts() -> None:
    known = History(history({("hit_ratio",): [None] * 290 + [0.5] * 70, ("errors_per_second",): [None] * 360}))
    assert (len(known.values("hit_ratio")), len(known.values("errors_per_second"))) == (70, 70)
    assert len(History(history({("hit_ratio",): [None] * 359 + [0.5]})).values("hit_ratio")) == 60


def test_charts_show_the_groups_that_are_asked_for_most() -> None:
    series: dict[tuple[str, ...], list[float | None]] = {("hit_ratio",): [0.5]}
    for number in range(8):
        series["hit_ratio", f"g{number}"] = [0.1 * number]
        series["lookup_keys_per_second", f"g{number}", "hit"] = [float(number)]
    ratios = charts_of_all(History(history(series)))[1]
    assert [name for name, _ in ratios.lines] == ["all groups", "g7", "g6", "g5", "g4", "g3"]


def test_charts_of_a_group_have_every_kind_of_storage() -> None:
    series: dict[tuple[str, ...], list[float | None]] = {
        ("used_bytes", "g", "hf3fs"): [1.0], ("used_bytes", "g", "file"): [2.0], ("used_bytes", "x", "dummy"): [3.0],
        ("quota_bytes", "g"): [4.0],
    }  # fmt: skip
    used = charts_of_group(History(history(series)), "g")[0]
    assert [*used.lines] == [("used on file", [2.0]), ("used on hf3fs", [1.0]), ("quota", [4.0])]


def test_losses_with_a_group_are_reported_before_its_removal() -> None:
    instances = [{"key_count": 1}, {"key_count": 2}]
    assert len(losses_of(group_usage("g", usage(0, 1)))) == 1
    assert "Its instance stays readable" in losses_of(group_usage("g", usage(3, 4), instances=instances[:1]))[1]
    said = losses_of(group_usage("g", usage(3, 4), instances=instances))
    assert "Its 2 instances stay" in said[1]
    assert "3.0 MiB" in said[2]


def test_refused_clients_are_in_the_headline_however_urgent_that_is() -> None:
    low = [alert("ticket", "group", "g")]
    cards = group_cards([group_usage("g", usage(70, 100, 80, 78))], low, refusing("g", 1.0))
    assert headline(cards, low).text == "Group g refuses writes."


def test_a_group_without_a_storage_is_not_said_to_have_space() -> None:
    without = {**alert("page", "group", "g"), "name": "KvcmGroupWithoutStorage"}
    cards = group_cards([group_usage("g", usage(1, 100, 80, 78))], [without], QUIET)
    assert (cards[0].state, cards[0].kind) == ("no storage", "bad")
    assert headline(cards, [without]).text == "Group g can use no storage."
