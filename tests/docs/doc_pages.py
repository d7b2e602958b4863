"""The documents as a forge reads them (CommonMark with tables): headings with their anchors, links, blocks."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

__all__ = ["DOCS", "ROOT", "Document", "anchors", "document", "documents", "inline_code", "shell_blocks"]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_READER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True, slots=True)
class Document:
    """A page.

    Attributes:
        anchors: of its headings.
        links: what it links and shows, as written.
        blocks: how many of each kind it has: `ul`, `ol`, `li`, `table`, `pre`, `h1` to `h6`.
        fences: (language and options, text) of its fenced blocks, in order.
    """

    anchors: frozenset[str]
    links: tuple[str, ...]
    blocks: Counter[str]
    fences: tuple[tuple[str, str], ...]


def documents() -> list[Path]:
    """Return every tracked page, and new ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).exists()]


@cache
def document(path: Path) -> Document:
    """Read a page."""
    tokens = _READER.parse(path.read_text())
    inline = [child for token in tokens for child in token.children or ()]
    links = [
        child.attrs.get("href") or child.attrs.get("src") for child in inline if child.type in ("link_open", "image")
    ]
    return Document(
        anchors=frozenset(anchors(_headings(tokens))),
        links=tuple(str(link) for link in links if link),
        blocks=Counter("pre" if t.type in ("fence", "code_block") else t.tag for t in tokens if _is_block(t)),
        fences=tuple((token.info.strip(), token.content) for token in tokens if token.type == "fence"),
    )


def anchors(headings: list[str]) -> list[str]:
    """Return the anchors of headings in order, as forges make them: repeated ones are numbered."""
    seen: Counter[str] = Counter()
    made = []
    for heading in headings:
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        made.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return made


def shell_blocks(path: Path, under: str = "") -> list[str]:
    """Return the `sh` blocks of a page, in order; `under`: only those behind this text."""
    text = path.read_text().partition(under)[2] if under else path.read_text()
    return [token.content for token in _READER.parse(text) if token.type == "fence" and token.info.strip() == "sh"]


def inline_code(path: Path) -> list[str]:
    """Return what stands between backticks in the text of a page."""
    inline = [child for token in _READER.parse(path.read_text()) for child in token.children or ()]
    return [token.content for token in inline if token.type == "code_inline"]


def _is_block(token: Token) -> bool:
    return token.type in ("fence", "code_block") or (token.nesting == 1 and token.tag in _KINDS)


_KINDS = {"ul", "ol", "li", "table", "h1", "h2", "h3", "h4", "h5", "h6"}


def _headings(tokens: list[Token]) -> list[str]:
    texts = [tokens[place + 1] for place, token in enumerate(tokens) if token.type == "heading_open"]
    return ["".join(c.content for c in text.children or () if c.type in ("text", "code_inline")) for text in texts]
