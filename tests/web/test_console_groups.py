"""Groups in the console: which one is full and why, limits that are changed after a look, new groups."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from console_site import ConsoleSite
from rest_client import component
from test_transport_sites import instance_fields, unique
from watched_pages import Watch, watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

MIB = 1 << 20


@pytest.fixture
def group(site: ConsoleSite) -> str:
    """A group of 8 MiB whose blocks use 2 of them."""
    name = unique("team/of a test")
    with site.rest() as rest:
        limits = {"quota": {"capacity": 8 * MIB}, "max_instance_count": 3}
        rest.put(
            f"/v1/groups/{component(name)}",
            {"storage_candidates": ["disk"], "global_quota_group_name": "nobody's", **limits},
        )
    with site.api() as api:
        api.ok(
            "RegisterInstance",
            **instance_fields(name, name, block_size=16, location_spec_infos=[{"name": "kv", "size": MIB // 16}]),
        )
    site.write(name, range(32))
    return name


def stored(site: ConsoleSite, name: str) -> Any:
    with site.rest() as rest:
        return rest.get(f"/v1/groups/{component(name)}").body


def begin(watch: Watch, name: str) -> None:
    """Go to the form of a group's limits."""
    watch.go(f"/console/groups/{component(name)}")
    watch.press("Change limits", role="link")


def test_the_effect_of_a_change_is_shown_before_it_is_saved(browser: Browser, site: ConsoleSite, group: str) -> None:
    with watched(browser, site) as watch:
        begin(watch, group)
        assert watch.page.get_by_label("Quota", exact=True).input_value() == "8 MiB"
        watch.page.get_by_label("Quota", exact=True).fill("1 MiB")
        watch.page.get_by_label("Evict at an age").fill("12h")
        watch.press("See what it does")
        reported = watch.page.locator("main").inner_text()
        assert "eviction begins above 819.2 KiB: about 1.2 MiB will be evicted" in reported
        assert "writes are refused until that much is deleted" in reported
        assert stored(site, group)["quota"]["capacity"] == 8 * MIB
        watch.press("Save")
        assert "The limits were changed. Quota: 1 MiB; Evict at an age: 12h." in watch.said
        watch.page.get_by_text("of 1.0 MiB").locator("visible=true").first.wait_for()  # a bar has such a title, hidden
    found = stored(site, group)
    assert found["quota"]["capacity"] == MIB
    assert found["cache_config"]["reclaim_strategy"]["policy"]["ttl_seconds"] == 43200
    assert found["max_instance_count"] == 3


def test_errors_stand_beside_their_field(browser: Browser, site: ConsoleSite, group: str) -> None:
    with watched(browser, site) as watch:
        begin(watch, group)
        watch.page.get_by_label("Quota", exact=True).fill("lots")
        watch.press("Save")
        assert "lots" in watch.fault("Quota")
        watch.page.get_by_label("Quota", exact=True).fill("7 MiB")
        watch.page.get_by_label("What is evicted first").select_option("ttl")
        watch.press("Save")
        assert "must be > 0 with policy 'ttl'" in watch.fault("Evict at an age")
        assert watch.page.get_by_label("Quota", exact=True).input_value() == "7 MiB"
    assert stored(site, group)["version"] == 1


def test_a_change_of_someone_else_is_not_overwritten_unread(browser: Browser, site: ConsoleSite, group: str) -> None:
    with watched(browser, site) as watch:
        begin(watch, group)
        with site.rest() as rest:
            rest.patch(f"/v1/groups/{component(group)}", {"quota": {"capacity": 5 * MIB}})
        watch.page.get_by_label("Pins may hold").fill("2 MiB")
        watch.press("Save")
        assert "Another client changed this group meanwhile, and nothing was saved" in watch.said
        assert watch.page.locator("tr", has_text="Quota").inner_text().split("\t")[1:] == ["5 MiB", "8 MiB"]
        assert stored(site, group)["pin_budget_bytes"] == 0
        watch.page.get_by_label("Quota", exact=True).fill("5 MiB")
        watch.press("Save")
        assert "Pins may hold: 2 MiB" in watch.said
    assert stored(site, group)["pin_budget_bytes"] == 2 * MIB
    assert stored(site, group)["quota"]["capacity"] == 5 * MIB


def test_saving_an_unchanged_form_changes_nothing(browser: Browser, site: ConsoleSite, group: str) -> None:
    with watched(browser, site) as watch:
        begin(watch, group)
        watch.press("Save")
        assert "Nothing was changed." in watch.said
    assert stored(site, group)["version"] == 1


def test_a_group_is_created_and_removed(browser: Browser, site: ConsoleSite) -> None:
    name = unique("a group / of people")
    with watched(browser, site) as watch:
        watch.go("/console/groups")
        watch.press("Create a group", role="link")
        watch.page.get_by_label("Name", exact=True).fill("chat")
        watch.page.get_by_label("disk").check()
        watch.page.get_by_label("Quota", exact=True).fill("3 GiB")
        watch.page.get_by_label("Evict above, in % of each limit").fill("")
        watch.press("Create")
        assert "there is a group of this name" in watch.fault("Name")
        watch.page.get_by_label("Name", exact=True).fill(name)
        watch.page.get_by_label("disk").uncheck()
        watch.press("Create")
        assert watch.fault("Storages")
        watch.page.get_by_label("disk").check()
        watch.press("Create")
        assert f"Group {name} was created." in watch.said
        trigger = stored(site, name)["cache_config"]["reclaim_strategy"]["trigger_strategy"]
        assert trigger["used_percentage"] == 0.0  # an empty field sets no watermark, despite the common default
        assert stored(site, name)["quota"]["capacity"] == 3 << 30
        watch.press("Remove", role="link")
        watch.page.get_by_label(f"Type {name} to go on").fill("chat")
        watch.press("Remove")
        assert "The name that was typed is not" in watch.said
        watch.page.get_by_label(f"Type {name} to go on").fill(name)
        watch.press("Remove")
        assert f"Group {name} was removed." in watch.said
        assert watch.page.get_by_role("link", name=name).count() == 0


def test_the_first_page_says_what_is_full_and_why_and_keeps_up(browser: Browser, site: ConsoleSite, group: str) -> None:
    with watched(browser, site) as watch:
        watch.go("/console/")
        card = watch.page.locator(".card", has=watch.page.get_by_role("link", name=group, exact=True))
        assert "has space" in card.inner_text()
        with site.rest() as rest:
            unmarked = {"reclaim_strategy": {"trigger_strategy": {"used_percentage": 2}}}
            rest.patch(f"/v1/groups/{component(group)}", {"quota": {"capacity": 2 * MIB}, "cache_config": unmarked})
        watch.page.locator(".card.bad, .card.warn", has_text=group).get_by_text("100 % used").wait_for()
        assert watch.page.locator(".headline").get_attribute("class") != "said headline good"


def test_a_visitor_of_one_group_sees_that_one(browser: Browser, secured: ConsoleSite) -> None:
    with watched(browser, secured, "limited") as watch:
        for path in ("/console/", "/console/groups"):
            assert watch.go(path).status == 200
            shown = watch.page.locator("main").inner_text()
            assert "chat" in shown
            assert "legacy" not in shown
        assert watch.go("/console/groups/chat").status == 200
        assert watch.page.get_by_role("link", name="Change limits").count() == 0
        for path in ("/console/groups/legacy", "/console/managers", "/console/groups/chat/limits"):
            assert watch.go(path).status == 403
            assert "may not" in watch.said


def test_a_group_that_is_gone_does_not_keep_its_visitor_from_the_others(browser: Browser, secured: ConsoleSite) -> None:
    with secured.rest() as rest:
        order = {"name": unique("late"), "role": "ROLE_VIEWER", "instance_groups": ["chat", "gone for good"]}
        secured.keys["late"] = rest.post("/v1/keys", order).body["secret"]
    with watched(browser, secured, "late") as watch:
        assert watch.go("/console/groups").status == 200
        assert watch.page.get_by_role("link", name="chat").count() > 0
        assert watch.go("/console/groups/gone%20for%20good").status in {400, 404}


def test_an_engine_learns_nothing_of_managers(browser: Browser, secured: ConsoleSite) -> None:
    with watched(browser, secured) as watch:
        watch.go("/console/login")
        watch.page.get_by_label("API key").fill(secured.keys["engine"])
        watch.press("Sign in")
        for path in ("/console/", "/console/managers", "/console/groups/chat"):
            assert watch.go(path).status == 403
