"""KV residency: what engines hold, and the scores of a prompt, with and without a browser."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import uuid4

from console_site import HOSTILE, ConsoleSite, ask, post
from watched_pages import faults_of, keyboard_faults, watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHAT = "/console/residency?instance=instance%20of%20chat"
FIRST, SECOND = "10.0.0.1:8000", HOSTILE.replace("#", "")
FORM = {"kind": "keys", "numbers": "0 1 2 3 4 5 70 71"}
"""Of these blocks storages hold the first six; a block has 64 tokens."""


@contextlib.contextmanager
def reported(site: ConsoleSite) -> Iterator[None]:
    """Have two engines report blocks, and stop in the end: the site is shared."""
    held = {FIRST: {"MEDIUM_GPU": range(2), "MEDIUM_HOST": range(2, 7)}, SECOND: {"MEDIUM_GPU": range(71, 73)}}
    stream = uuid4().hex  # one that stopped changes nothing any more
    with site.api() as api:
        for engine, media in held.items():
            changes = [
                {"medium": medium, "added_keys": struct.pack(f"<{len(keys)}q", *keys)} for medium, keys in media.items()
            ]
            fields = {"instance_id": "instance of chat", "engine": engine, "stream": stream}
            snapshot = {"first": True, "last": True}
            api.ok("ResidencyService.ReportResidency", **fields, sequence=1, changes=changes, snapshot=snapshot)
        yield
        for engine in held:
            fields = {"instance_id": "instance of chat", "engine": engine, "stream": stream}
            api.ok("ResidencyService.ReportResidency", **fields, sequence=2, stopped=True)


def test_without_reports_the_page_names_the_program_that_sends_them(site: ConsoleSite) -> None:
    text = ask(site, "GET", CHAT).text
    assert "kvcm-subscriber, beside each engine, reports the blocks that it holds (docs/gateway.md)" in text
    found = post(site, CHAT, FORM).text
    assert "No engine reports, so there is none to choose; 384 of 512 tokens lie in storages." in found
    assert "kvcm-subscriber" not in ask(site, "GET", "/console/residency").text


def test_engines_are_listed_and_scored_and_their_names_stay_text(site: ConsoleSite) -> None:
    with reported(site):
        page = ask(site, "GET", CHAT).text
        found = post(site, CHAT, FORM)
    assert "9 blocks in all" in page
    assert page.count('<span class="badge good">complete</span>') == 2
    assert found.status == 200
    assert f"{FIRST} serves it best" in found.text
    assert (
        f"Tokens of the prompt for {FIRST}: GPU memory 128, host memory 256, disk 0, storages 0, computed 128"
        in found.text
    )
    assert "GPU memory 0, host memory 0, disk 0, storages 384, computed 128" in found.text
    assert HOSTILE not in page + found.text


def test_errors_of_the_page_stand_beside_their_field(site: ConsoleSite) -> None:
    for path, form, said in (
        ("/console/residency", FORM, "Name an instance."),
        ("/console/residency?instance=nowhere", FORM, "nowhere"),
        (CHAT, {**FORM, "numbers": "1.5"}, "1.5 is no whole number, as block keys are."),
    ):
        answer = post(site, path, form)
        assert (answer.status, answer.text.count('aria-invalid="true"')) == (400, 1), path
        assert said in answer.text
    unknown = ask(site, "GET", "/console/residency?instance=nowhere")
    assert (unknown.status, unknown.text.count('aria-invalid="true"')) == (400, 1)


def test_viewers_see_engines_and_are_offered_no_scores(secured: ConsoleSite) -> None:
    for role, is_offered in (("viewer", False), ("limited", False), ("operator", True)):
        cookie = f"kvcm_key={secured.keys[role]}"
        page = ask(secured, "GET", CHAT, cookie=cookie)
        assert (page.status, "Show the scores" in page.text) == (200, is_offered)
        assert post(secured, CHAT, FORM, cookie=cookie).status == (200 if is_offered else 403)
    cookie = f"kvcm_key={secured.keys['limited']}"
    foreign = ask(secured, "GET", "/console/residency?instance=instance%20of%20team%2Fa", cookie=cookie)
    assert "is not registered" in foreign.text  # as of one that does not exist


def test_scores_are_read_by_everybody_and_the_table_goes_on(browser: Browser, site: ConsoleSite) -> None:
    with reported(site), watched(browser, site) as watch:
        watch.go("/console/residency")
        watch.page.get_by_label("Instance").fill("instance of chat")
        watch.press("Show its engines")
        assert watch.page.locator("#reporters tbody tr").count() == 2
        watch.page.get_by_label("block keys").check()
        watch.page.get_by_label("Numbers").fill(FORM["numbers"])
        watch.press("Show the scores")
        assert watch.page.locator(".scores h3").first.inner_text() == FIRST
        assert keyboard_faults(watch) == []
        assert faults_of(watch) == []
        with watch.page.expect_response(lambda answer: "hx-request" in answer.request.headers):
            pass
        assert watch.page.locator("#reporters tbody tr").count() == 2
        assert watch.page.locator(".scores h3").count() == 2
        assert watch.page.title() != "taken"
