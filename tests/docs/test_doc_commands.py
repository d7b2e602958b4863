"""Every `kvcm` command that a document prints exists, with its options, its arguments and its settings."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from doc_pages import DOCS, ROOT, document, inline_code
from typer.main import get_command

from kvcm.cli import app
from kvcm.config import Settings

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
SETTINGS = Settings().described()
_TREE: Any = get_command(app)
_ENDS = {"|", "||", "&", "&&", ";", ">", "2>", "<"}
_NO_COMMAND = {"…", "NOUN"}  # stands for any
_NAMES_IT = ("kubectl ", "helm ", "user ")  # lines in which kvcm is a namespace, a release or a user of the store


def printed(page: Path) -> Iterator[list[str]]:
    """Yield the words behind each `kvcm` of a page, in shell blocks and in sentences."""
    for language, text in document(page).fences:
        if language in ("sh", "bash", ""):
            for line in re.sub(r"\\\n\s*", " ", text).splitlines():
                yield from _commands(line)
    for text in inline_code(page):
        yield from _commands(text)


def _commands(line: str) -> Iterator[list[str]]:
    if line.startswith(_NAMES_IT):
        return
    for found in re.finditer(r"(?:^|[\s(|;&])kvcm (?=[a-z-])(.*)$", line):
        words = shlex.shlex(
            found[1].replace("'", '"') if found[1].count("'") % 2 else found[1], punctuation_chars="|&;<>()"
        )
        words.whitespace_split, words.commenters = True, "#"
        try:
            yield _until_the_end(list(words))
        except ValueError:
            raise AssertionError(f"no shell reads this: {line}") from None


def _until_the_end(words: list[str]) -> list[str]:
    ends = [place for place, word in enumerate(words) if word in _ENDS or set(word) <= set("|&;<>()")]
    return words[: ends[0]] if ends else words


def complaint(words: list[str]) -> str:
    """Return what is wrong with a command, "" if nothing is."""
    command, rest = _TREE, list(words)
    while hasattr(command, "commands"):
        if not rest or rest[0].startswith("-") or rest[0] in _NO_COMMAND:
            break
        name = rest.pop(0).rstrip(",")
        if name not in command.commands:
            return f"there is no command {name!r}"
        command = command.commands[name]
    options = {option for each in command.params for option in [*each.opts, *each.secondary_opts]}
    options |= {"-h", "--help", "--install-completion"}
    for word in rest:
        option = word.partition("=")[0]
        if re.fullmatch(r"--?[a-z][a-z_-]*", option) and option not in options:
            return f"it has no option {option}"
    for key in re.findall(r"\bkvcm(?:\.\w+)+(?==)", " ".join(rest)):
        if key not in SETTINGS:
            return f"there is no setting {key}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_exist(page: Path) -> None:
    wrong = {" ".join(words): why for words in printed(page) if (why := complaint(words))}
    assert not wrong


def test_commands_are_found() -> None:
    found = [words for page in PAGES for words in printed(page)]
    assert len(found) > 100
    assert complaint(["storage", "list", "--manager", "x"]) == ""
    assert "no command" in complaint(["storage", "lift"])
    assert "no option" in complaint(["storage", "list", "--managr", "x"])
    assert "no setting" in complaint(["serve", "-e", "kvcm.auth.mod=required"])
