"""Links of the documents lead somewhere, anchors included; those that leave the repository have the right form."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from doc_pages import ROOT, anchors, document, documents

PAGES = documents()
_REAL_HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_what_is_there(page: Path) -> None:
    for link in document(page).links:
        if urlsplit(link).scheme:
            continue
        path, _, anchor = unquote(link).partition("#")
        target = page if not path else (page.parent / path).resolve()
        assert target.exists(), f"{link}: no such file"
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        if anchor:
            assert target.suffix == ".md", f"{link}: only pages have anchors"
            assert anchor in document(target).anchors, f"{link}: the page has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_elsewhere_have_the_right_form(page: Path) -> None:
    for link in document(page).links:
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https", f"{link}: https only"
            assert _REAL_HOST.fullmatch(parts.hostname or ""), f"{link}: no host"
            assert parts.username is None, link
            assert not re.search(r"[\s<>\"]", link), link


def test_anchors_are_made_as_forges_make_them() -> None:
    made = anchors(["Start and stop", "kvcm index: what's new?", "A – B", "Start and stop"])
    assert made == ["start-and-stop", "kvcm-index-whats-new", "a--b", "start-and-stop-1"]


def test_pages_are_found() -> None:
    assert {"README.md", "docs/operations.md"} <= {str(page.relative_to(ROOT)) for page in PAGES}
