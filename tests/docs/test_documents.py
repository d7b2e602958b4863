"""Documents: links, commands, alerts and the reference are what the code has."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from doc_pages import DOCS, ROOT, anchors, document, documents, inline_code
from typer.main import get_command

from kvcm.cli import app
from kvcm.config import Settings

PAGE = DOCS / "alerts.md"
RULES = ROOT / "deploy/prometheus/rules.yml"


def _alerts() -> dict[str, dict[str, dict[str, str]]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


def _sections() -> dict[str, str]:
    return dict(re.findall(r"^### (\w+)\n\n(.*?)(?=^#|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_every_alert_has_a_section_and_every_section_an_alert() -> None:
    assert list(_sections()) == list(_alerts())


def test_the_runbook_of_an_alert_is_its_section() -> None:
    for name, rule in _alerts().items():
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert ROOT / page == PAGE
        assert anchor == name.lower()
        assert anchor in document(PAGE).anchors


def test_a_section_begins_with_the_severity_of_its_alert() -> None:
    for name, text in _sections().items():
        assert text.startswith(f"**{_alerts()[name]['labels']['severity'].capitalize()}.** "), name


PAGES = documents()
_REAL_HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_existing_targets(page: Path) -> None:
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


_ROW = re.compile(r"^\| `(kvcm\.[\w.]+)` \| (.*?) \| (.*) \|$", re.MULTILINE)
# What the table says in words, since it depends on other settings or on the machine.
_IN_WORDS = {
    "kvcm.service.host", "kvcm.cluster_id", "kvcm.startup_config", "kvcm.storage.allowed_roots",
    "kvcm.storage.allowed_hosts", "kvcm.auth.admin_key_file", "kvcm.leader_elector.node_id",
}  # fmt: skip


def test_the_generated_pages_are_up_to_date() -> None:
    checked = subprocess.run(
        [sys.executable, "docs/site/reference.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_table_of_settings_is_the_tree_of_settings() -> None:
    rows = {key: (default, about) for key, default, about in _ROW.findall((DOCS / "configuration.md").read_text())}
    settings = Settings()
    without_effect = {"kvcm.service.io_thread_num", "kvcm.schedule_plan_executor_thread_count"}
    kept = {f.metadata["key"]: f for f in fields(Settings) if "key" in f.metadata}
    documented = {key for key in kept if not key.startswith(("kvcm.metrics.", "kvcm.event.event_publishers"))}
    uris = {key for key in rows if "://" in key}
    assert set(rows) - uris == documented - without_effect
    for key, (default, about) in rows.items():
        assert about.startswith("**hot**") == kept[key].metadata["hot"], key
        if key not in _IN_WORDS:
            assert default == _said(getattr(settings, kept[key].name)), key


def _said(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if value in ("", ()):
        return "empty"
    return f"{value:g}" if isinstance(value, float) else str(value)


COMMAND_PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
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
    """Return the error in a command, "" if there is none."""
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


@pytest.mark.parametrize("page", COMMAND_PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_exist(page: Path) -> None:
    wrong = {" ".join(words): why for words in printed(page) if (why := complaint(words))}
    assert not wrong


def test_commands_are_found() -> None:
    found = [words for page in COMMAND_PAGES for words in printed(page)]
    assert len(found) > 100
    assert complaint(["storage", "list", "--manager", "x"]) == ""
    assert "no command" in complaint(["storage", "lift"])
    assert "no option" in complaint(["storage", "list", "--managr", "x"])
    assert "no setting" in complaint(["serve", "-e", "kvcm.auth.mod=required"])
