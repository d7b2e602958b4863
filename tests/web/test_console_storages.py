"""Storages in the console: added, switched off and on, emptied, limited and removed, with the keyboard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from console_site import ConsoleSite
from watched_pages import watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser


def storage(site: ConsoleSite, name: str) -> Any:
    with site.rest() as rest:
        return next(each for each in rest.items("/v1/storages?with_status=true") if each["global_unique_name"] == name)


def add(site: ConsoleSite, name: str, directory: Path) -> None:
    (directory / name).mkdir()
    with site.rest() as rest:
        rest.put(f"/v1/storages/{name}", {"nfs": {"root_path": f"{directory / name}/"}, "capacity_bytes": 1 << 30})


def test_a_storage_is_added_and_errors_stand_at_the_field(browser: Browser, site: ConsoleSite, tmp_path: Path) -> None:
    with watched(browser, site) as watch:
        watch.go("/console/storages")
        watch.press("Add a storage", role="link")
        watch.press("Shared directory", role="link")
        watch.page.get_by_label("Name").fill("added here")
        watch.page.get_by_label("Root path").fill("relative")
        watch.page.get_by_label("Capacity for all groups").fill("5 apples")
        watch.press("Add")
        assert "5 apples" in watch.fault("Capacity")
        watch.page.get_by_label("Capacity for all groups").fill("5 GiB")
        watch.press("Add")
        assert "characters that are not allowed" in watch.fault("Name")
        watch.page.get_by_label("Name").fill("disk")
        watch.press("Add")
        assert "a storage of this name already" in watch.fault("Name")
        watch.page.get_by_label("Name").fill("added-here")
        watch.press("Add")
        assert "relative" in watch.fault("Root path")
        assert watch.page.get_by_label("Root path").input_value() == "relative"
        watch.page.get_by_label("Root path").fill(f"{tmp_path}/")
        watch.press("Add")
        assert watch.page.url.split("?")[0] == f"{site.base}/console/storages/added-here"
        assert "was added" in watch.said
    assert storage(site, "added-here")["capacity_bytes"] == 5 << 30


def test_it_is_disabled_and_enabled(browser: Browser, site: ConsoleSite, tmp_path: Path) -> None:
    add(site, "to-switch", tmp_path)
    with watched(browser, site) as watch:
        watch.go("/console/storages/to-switch")
        watch.press("Disable", role="link")
        assert "Nothing is deleted" in watch.page.locator("main").inner_text()
        watch.press("Disable it")
        assert watch.page.locator(".badge", has_text="disabled").is_visible()
        assert not storage(site, "to-switch")["is_available"]
        watch.press("Enable")
        assert "read and written again" in watch.said
    assert storage(site, "to-switch")["is_available"]


def test_it_is_drained_and_the_drain_is_cancelled(browser: Browser, site: ConsoleSite, tmp_path: Path) -> None:
    add(site, "to-drain", tmp_path)
    with watched(browser, site) as watch:
        watch.go("/console/storages/to-drain/drain")
        watch.page.get_by_label("Type to-drain to go on").fill("to-drain")
        watch.press("Drain it")
        assert storage(site, "to-drain")["status"]["is_draining"]
        watch.page.get_by_text("It is empty, and stays closed to writes").wait_for()  # the page keeps up by itself
        watch.press("Cancel the drain")
        assert "takes new blocks again" in watch.said
    assert not storage(site, "to-drain")["status"]["is_draining"]


def test_a_drain_that_waits_says_why(browser: Browser, site: ConsoleSite) -> None:
    with watched(browser, site) as watch:
        watch.go("/console/storages/old")
        watch.page.get_by_text("1.0 MiB left. 16 locations are pinned").wait_for()


def test_a_storage_that_is_down_comes_first_with_the_reason(browser: Browser, site: ConsoleSite) -> None:
    with watched(browser, site) as watch:
        watch.go("/console/storages")
        card = watch.page.locator(".card").first
        card.get_by_text("down", exact=True).wait_for()
        assert "no host agent has reported the pool on node 'node-1' yet" in card.inner_text()


def test_its_capacity_is_changed_unless_someone_was_faster(browser: Browser, site: ConsoleSite, tmp_path: Path) -> None:
    add(site, "to-limit", tmp_path)
    with watched(browser, site) as watch:
        watch.go("/console/storages/to-limit")
        watch.press("Change its capacity", role="link")
        assert watch.page.get_by_label("Capacity").input_value() == "1 GiB"
        watch.page.get_by_label("Capacity").fill("2 GiB")
        watch.page.get_by_label("Evict above").fill("80 %")
        with site.rest() as rest:
            rest.patch("/v1/storages/to-limit", {"capacity_bytes": 7})
        watch.press("Change")
        assert "Another client has changed it meanwhile" in watch.said
        assert storage(site, "to-limit")["capacity_bytes"] == 7
        watch.go("/console/storages/to-limit/limits")
        watch.page.get_by_label("Capacity").fill("2 GiB")
        watch.page.get_by_label("Evict above").fill("80 %")
        watch.press("Change")
        assert "has a capacity of 2.0 GiB" in watch.said
        watch.go("/console/storages/to-limit/limits")
        assert watch.page.get_by_label("Evict above").input_value() == "80"
        watch.page.get_by_label("Evict above").fill("-3")
        watch.press("Change")
        assert "no percentage" in watch.fault("Evict above")
        watch.page.get_by_label("Evict above").fill("")
        watch.page.get_by_label("Capacity").fill("")
        watch.press("Change")
        assert "is not limited" in watch.said
    found = storage(site, "to-limit")
    assert (found["capacity_bytes"], found["used_percentage"]) == (0, 0.0)


def test_it_is_removed_by_its_name_only(browser: Browser, site: ConsoleSite, tmp_path: Path) -> None:
    add(site, "to-remove", tmp_path)
    with watched(browser, site) as watch:
        watch.go("/console/storages/to-remove/remove")
        for typed in ("", "to remove", "TO-REMOVE"):
            watch.page.evaluate("document.querySelector('#f-name').required = false")  # that is for browsers only
            watch.page.get_by_label("Type to-remove to go on").fill(typed)
            watch.press("Remove it")
            assert "The name that was typed is not to-remove" in watch.said
            assert storage(site, "to-remove")
        watch.page.get_by_label("Type to-remove to go on").fill("to-remove")
        watch.press("Remove it")
        assert "was removed" in watch.said
        assert watch.go("/console/storages/to-remove").status == 404
        assert "it may have been removed" in watch.said
