"""How full each group is and why, in plain words."""

from __future__ import annotations

from typing import Any

import pytest
from history_documents import alert, group_usage, history, usage

from kvcm.console.views.groups import GroupCard, group_card, group_cards, losses_of
from kvcm.console.views.history import History, charts_of_all, charts_of_group
from kvcm.console.views.overview import headline, tiles

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
        (usage(10, 100, 80, 78), QUIET, "has room", "70.0 MiB may be written before eviction begins."),
        (usage(10, 100), QUIET, "has room", "Nothing is evicted before it is full: it has no mark. 90.0 MiB are free."),
        (
            *(usage(79, 100, 80, 78), evicting("g", 1 << 20), "evicting"),
            "Eviction keeps it between 78.0 MiB and 80.0 MiB: 1.0 MiB/s leave on average.",
        ),
        (
            *(usage(85, 100, 80, 78), QUIET, "above its mark"),
            "It is above 80.0 MiB, where eviction begins: that is at work down to 78.0 MiB.",
        ),
        (
            usage(99, 100, 80, 78),
            QUIET,
            "full",
            "It is above 80.0 MiB, where eviction begins: that is at work down to 78.0 MiB.",
        ),
        (
            *(usage(100, 100, 80, 78, deleting=60), QUIET, "full"),
            "60.0 MiB of it are evicted and wait for their deletion: little or nothing fits until then.",
        ),
        (
            *(usage(90, 100, 80, 78, deleting=60), QUIET, "has room"),
            "50.0 MiB may be written before eviction begins, and 60.0 MiB wait for their deletion.",
        ),
        (
            *(usage(70, 100, 80, 78), refusing("g", 0.5), "refuses writes"),
            "50 writes found no room in the last five minutes: 30.0 MiB are free now.",
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


def test_the_headline_names_what_is_full() -> None:
    def line(*totals: dict[str, int], alerts: tuple[Any, ...] = ()) -> tuple[str, str]:
        groups = [group_usage(f"g{number}", total) for number, total in enumerate(totals)]
        return tuple(headline(group_cards(groups, alerts, QUIET), alerts))

    full, room = usage(100, 100), usage(1, 100, 80, 78)
    assert line(room) == ("Nothing is wrong.", "good")
    assert line(full, room) == ("Group g0 is full.", "bad")
    assert line(full, full) == ("Group g0 is full and g1 is full.", "bad")
    assert line(*[full] * 5)[0] == "Group g0 is full, g1 is full, g2 is full and 2 more groups are in trouble."
    assert line(usage(85, 100, 80, 78)) == ("1 group is short of room; nothing is refused.", "warn")
    urgent, low = alert("page", "storage", "disk"), alert("ticket", "manager", "m")
    assert line(room, alerts=(urgent,)) == ("1 other thing needs attention.", "bad")
    assert line(room, alerts=(low, alert("info", "cluster", ""))) == ("1 other thing needs attention.", "warn")
    assert line(full, alerts=(urgent, low)) == ("Group g0 is full; 2 other things need attention.", "bad")


def test_tiles_show_what_is_known_of_late_and_no_more() -> None:
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


def test_what_is_not_known_at_the_beginning_is_left_out_of_charts() -> None:
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


def test_what_is_lost_with_a_group_is_told_before() -> None:
    instances = [{"key_count": 1}, {"key_count": 2}]
    assert len(losses_of(group_usage("g", usage(0, 1)))) == 1
    assert "Its instance stays readable" in losses_of(group_usage("g", usage(3, 4), instances=instances[:1]))[1]
    said = losses_of(group_usage("g", usage(3, 4), instances=instances))
    assert "Its 2 instances stay" in said[1]
    assert "3.0 MiB" in said[2]


def test_who_is_refused_is_in_the_headline_however_urgent_that_is() -> None:
    low = [alert("ticket", "group", "g")]
    cards = group_cards([group_usage("g", usage(70, 100, 80, 78))], low, refusing("g", 1.0))
    assert headline(cards, low).text == "Group g refuses writes."


def test_a_group_without_a_storage_is_not_said_to_have_room() -> None:
    without = {**alert("page", "group", "g"), "name": "KvcmGroupWithoutStorage"}
    cards = group_cards([group_usage("g", usage(1, 100, 80, 78))], [without], QUIET)
    assert (cards[0].state, cards[0].kind) == ("no storage", "bad")
    assert headline(cards, [without]).text == "Group g can use no storage."
