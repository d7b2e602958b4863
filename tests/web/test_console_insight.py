"""The prefix explorer, write sessions, tasks and curves in a real browser."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from console_site import ConsoleSite, open_site
from watched_pages import Watch, faults_of, keyboard_faults, watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHAT = "instance of chat"


@pytest.fixture
def watch(browser: Browser, site: ConsoleSite) -> Iterator[Watch]:
    with watched(browser, site) as found:
        yield found


def explore(watch: Watch, instance: str, numbers: str, kind: str = "block keys") -> None:
    watch.go("/console/explorer")
    watch.page.get_by_label("Instance").fill(instance)
    watch.page.get_by_label(kind).check()
    watch.page.get_by_label("Numbers").fill(numbers)
    watch.press("Explore")
    watch.page.wait_for_load_state()


def headings(watch: Watch) -> list[str]:
    return watch.page.locator(".runs h3").all_inner_texts()


def test_a_chain_is_shown_in_runs_with_where_the_match_ends(watch: Watch) -> None:
    keys = [*range(60), *range(1000, 1004), *range(5000, 5936)]
    explore(watch, CHAT, str(keys))
    assert keyboard_faults(watch) == []
    assert "The first 60 of 1,000 blocks are found: 3,840 of 64,000 tokens." in watch.said
    assert headings(watch) == [
        *["Blocks 0 to 31 found pinned", "Blocks 32 to 59 found"],
        *["Blocks 60 to 63 being written", "Blocks 64 to 999 not there"],
    ]
    items = watch.page.locator(".runs > li").all_inner_texts()
    assert items[2] == "The match ends here"
    assert "The match ends at block 60: it is being written" in watch.page.locator("main").inner_text()
    assert "disk (file)" in items[0]
    watch.page.locator(".runs summary").first.press("Enter")
    rows = watch.page.locator(".runs details").first.locator("tbody tr")
    assert rows.count() == 32
    assert rows.nth(31).locator("td").nth(0).inner_text() == "1,984 – 2,047"


def test_everybody_can_read_a_chain(watch: Watch) -> None:
    explore(watch, CHAT, "0 1 40 1000 5000")
    assert faults_of(watch) == []


def test_tokens_and_keys_that_are_pasted_stay_for_the_next_lookup(watch: Watch) -> None:
    explore(watch, CHAT, "tokens: 1; 2; 3 " * 64, "tokens of the prompt")
    assert "None of the 3 blocks is found" in watch.said
    assert watch.page.get_by_label("Numbers").input_value() == "tokens: 1; 2; 3 " * 64
    assert watch.page.get_by_label("tokens of the prompt").is_checked()


@pytest.mark.parametrize(
    ("instance", "numbers", "said"),
    [
        (CHAT, "1.5", "1.5 is no whole number, as block keys are."),
        (CHAT, "nothing", "There is no number in it"),
        (CHAT, "9223372036854775808", "does not fit into 64 bits"),
        ("nobody", "1", "'nobody'"),
    ],
)
def test_explorer_errors_are_reported_beside_their_field(watch: Watch, instance: str, numbers: str, said: str) -> None:
    explore(watch, instance, numbers)
    assert said in watch.said
    assert watch.page.locator("[aria-invalid=true]").count() == 1
    assert watch.page.get_by_label("Numbers").input_value() == numbers
    assert faults_of(watch) == []


def test_sessions_are_listed_by_group_without_their_whole_ids(watch: Watch) -> None:
    watch.go("/console/sessions")
    watch.page.get_by_label("Group").fill("chat")
    watch.press("Show these")
    watch.page.wait_for_url("**/console/sessions?group=chat&instance=")
    (row,) = watch.page.locator("tbody tr").all_inner_texts()
    assert f"{CHAT}\tchat\t4\t256.0 KiB" in row
    assert len(watch.page.locator("tbody code").inner_text()) == len("01234567…")
    watch.press("Show all", role="link")
    watch.page.wait_for_url("**/console/sessions")


def test_garbage_is_shown_before_anything_is_freed(watch: Watch, site: ConsoleSite) -> None:
    watch.go("/console/tasks")
    watch.page.get_by_label("Instance").fill("nobody")
    watch.press("Look for garbage")
    watch.page.wait_for_load_state()
    assert "nobody" in watch.said
    watch.page.get_by_label("Instance").fill(CHAT)
    watch.press("Look for garbage")
    watch.page.wait_for_load_state()
    assert watch.said == "There is nothing to free."
    assert watch.page.locator("form[action^='/console/tasks']").count() == 0
    with site.api() as api:  # a scrub lists locations of written blocks: tests write none
        entries = api.ok(
            "GetCacheLocation", instance_id="instance of legacy", block_keys=[0], query_type="QT_BATCH_GET"
        )
        assert entries.locations
    watch.go("/console/tasks")
    watch.page.get_by_label("Instance").fill("instance of legacy")
    watch.page.get_by_label("Also ask the storages").check()
    watch.press("Look for garbage")
    watch.page.wait_for_load_state()
    assert "would be freed; nothing was changed" in watch.said
    assert faults_of(watch) == []
    watch.go("/console/explorer")
    explore(watch, "instance of legacy", "0")
    assert "The block is found" in watch.said


def test_a_scrub_deletes_only_shown_orphans_and_after_the_name_was_typed(browser: Browser, tmp_path: Path) -> None:
    with open_site(tmp_path) as site, watched(browser, site) as watch:
        orphan = _orphan(tmp_path / "disk", site)
        watch.go("/console/tasks")
        watch.page.get_by_label("Leave alone what changed within").fill("0s")
        watch.press("Look for orphans")
        watch.page.wait_for_load_state()
        assert "It must be 1 s at least" in watch.said
        watch.page.get_by_label("Storage", exact=True).select_option("disk")
        watch.page.get_by_label("Leave alone what changed within").fill("1h")
        watch.press("Look for orphans")
        watch.page.wait_for_load_state()
        assert "would be freed; nothing was changed" in watch.said
        assert faults_of(watch) == []
        watch.page.get_by_label("Name of the storage").fill("dis")
        watch.press("Delete the orphans")
        watch.page.wait_for_load_state()
        assert "That is not the name of the storage" in watch.said
        assert orphan.exists()
        watch.page.get_by_label("Name of the storage").fill("disk")
        watch.press("Delete the orphans")
        watch.page.wait_for_load_state()
        assert "were freed" in watch.said
        assert not orphan.exists()


def _orphan(directory: Path, site: ConsoleSite) -> Path:
    """Leave orphans: those of a block whose metadata alone was dropped."""
    with site.api() as api:
        api.ok("RegisterInstance", **{**_fields(), "instance_id": "gone"})
        started = api.ok("StartWriteCache", instance_id="gone", block_keys=[1])
        path = Path(started.locations[0].location_specs[0].uri.partition("://disk")[2].partition("?")[0])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0" * 4096)
        long_ago = time.time() - 86_400
        os.utime(path, (long_ago, long_ago))
        success = {"offset": 1}
        api.ok(
            "FinishWriteCache", instance_id="gone", write_session_id=started.write_session_id, success_blocks=success
        )
        api.ok("TrimCache", instance_id="gone", strategy="TS_REMOVE_ALL_META")
    assert path.is_relative_to(directory)
    return path


def _fields() -> dict[str, object]:
    return {
        "instance_group": "team/a", "block_size": 4, "location_spec_infos": [{"name": "kv", "size": 4096}],
        "model_deployment": {"model_name": "m", "dtype": "bf16"},
    }  # fmt: skip


def test_a_drain_is_cancelled_after_it_was_asked_again(watch: Watch, site: ConsoleSite) -> None:
    with site.rest() as rest:
        rest.post("/v1/storages/nothing/drain")
    watch.go("/console/tasks")
    watch.page.get_by_role("link", name="of nothing").press("Enter")
    watch.page.wait_for_url("**/cancel")
    assert "The storage takes writes again" in watch.page.locator("main").inner_text()
    watch.page.get_by_role("button", name="the drain").press("Enter")
    watch.page.wait_for_url("**/console/tasks")
    assert "The drain is over" in watch.said
    with site.rest() as rest:
        assert "drain:nothing" not in [task["id"] for task in rest.items("/v1/tasks")]


def test_viewers_are_offered_no_actions(browser: Browser, secured: ConsoleSite) -> None:
    with watched(browser, secured, "viewer") as watch:
        watch.go("/console/tasks")
        assert watch.page.locator("main form, main .button").count() == 0
        assert watch.go("/console/tasks/drain:old/cancel").status in {200, 403}
        answer = watch.page.request.post(
            f"{watch.base}/console/tasks/drain:old/cancel", headers={"origin": watch.base}, max_redirects=0
        )
        assert answer.status == 403
        explore(watch, CHAT, "0")
        assert "The block is found" in watch.said


def test_an_account_limited_to_a_group_sees_its_sessions_and_chains(browser: Browser, secured: ConsoleSite) -> None:
    with watched(browser, secured, "limited") as watch:
        watch.go("/console/sessions")
        assert watch.page.locator("tbody tr").count() == 1
        explore(watch, CHAT, "0")
        assert "The block is found" in watch.said
        assert watch.page.locator("datalist option").count() == 1
        explore(watch, "instance of team/a", "0")
        assert "is not registered" in watch.said  # as of one that does not exist


def test_a_curve_shows_the_gain_of_more_capacity(browser: Browser, tmp_path: Path) -> None:
    with open_site(tmp_path, "kvcm.optimizer.sampled_keys=2048") as site, watched(browser, site) as watch:
        with site.api() as api:
            for _ in range(3):
                for begin in range(0, 4000, 100):
                    keys = list(range(begin, begin + 100))
                    api.ok("GetCacheLocation", instance_id=CHAT, block_keys=keys, query_type="QT_PREFIX_MATCH")
        watch.go("/console/groups/chat/curve")
        assert "a cache of any size would find" in watch.said
        assert watch.page.locator("svg.curve .line").count() == 1
        tables = watch.page.locator("main table").all_inner_texts()
        assert "Four times\t16.0 MiB" in tables[0]
        assert len(tables[1].splitlines()) == 6
        assert f"kvcm optimize --from {site.base}" in watch.page.locator("main").inner_text()
        assert faults_of(watch) == []
        watch.go("/console/groups/legacy/curve")
        assert "nothing was asked of this manager for it" in watch.said


def test_without_samples_the_page_names_the_setting(watch: Watch) -> None:
    watch.go("/console/groups/chat/curve")
    assert "kvcm.optimizer.sampled_keys" in watch.said
    assert watch.go("/console/groups/nowhere/curve").status == 404
