"""The built site: it says what the documents say, needs no network, and every link in it leads somewhere."""

from __future__ import annotations

import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from doc_pages import DOCS, document, documents

pytestmark = pytest.mark.timeout(600)  # the first test builds the site
_KINDS = {"ul", "ol", "li", "table", "pre", "h1", "h2", "h3", "h4", "h5", "h6"}
_ASSETS = {"src", "href", "srcset", "data", "poster", "action"}
PAGES = [page for page in documents() if page.is_relative_to(DOCS)]


class Html(HTMLParser):
    """What a page of the site has.

    Attributes:
        blocks: how many of each kind its article has.
        ids: every id.
        links: where it leads.
        fetched: what a browser asks for by itself.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.blocks: Counter[str] = Counter()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self._in_article = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Count."""
        values = {name: value or "" for name, value in attrs}
        self._in_article |= tag == "article"
        if self._in_article and tag in _KINDS:
            self.blocks[tag] += 1
        self.ids.update(value for name, value in values.items() if name == "id")
        places = [value for name, value in values.items() if name in _ASSETS]
        (self.links if tag == "a" else self.fetched).extend(places)

    def handle_endtag(self, tag: str) -> None:
        """Leave the article."""
        self._in_article &= tag != "article"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Html]:
    """Every page of the site."""
    return {path: Html(path.read_text()) for path in site.rglob("*.html")}


def test_every_page_of_the_documents_is_in_it(site: Path) -> None:
    for page in PAGES:
        if "examples" not in page.relative_to(DOCS).parts:
            assert (site / page.relative_to(DOCS)).with_suffix(".html").is_file(), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_reads_the_same_on_a_forge_and_in_the_site(page: Path, site: Path, pages: dict[Path, Html]) -> None:
    shown = pages.get((site / page.relative_to(DOCS)).with_suffix(".html"))
    if shown is not None:  # not pages of examples
        assert shown.blocks == document(page).blocks


def test_links_and_anchors_of_the_site_lead_somewhere(site: Path, pages: dict[Path, Html]) -> None:
    for path, page in pages.items():
        for link in [*page.links, *page.fetched]:
            parts = urlsplit(link)
            if parts.scheme or path.name == "404.html":
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.is_file(), f"{path.relative_to(site)}: {link}"
            if parts.fragment and target in pages:
                wanted = unquote(parts.fragment)
                assert wanted in pages[target].ids or wanted.startswith("__"), f"{path.relative_to(site)}: {link}"


def test_nothing_is_fetched_from_elsewhere(site: Path, pages: dict[Path, Html]) -> None:
    for path, page in pages.items():
        assert not [place for place in page.fetched if urlsplit(place).netloc], path
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", sheet.read_text()), sheet


def test_the_search_knows_every_page_and_no_source(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    assert '"location":"operations.html"' in index
    assert '"location":"source/' not in index
