"""Rules of the house that no linter knows: file lengths, names of modules, documents that list what the code has."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from kvcm.config import Settings
from kvcm.model.errors import ErrorCode

ROOT = Path(__file__).parents[1]
MOST_LINES = 400
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
FORBIDDEN_CALLS = re.compile(r"\b(pickle|marshal|shelve)\b\.|(?<!\.)\b(?:eval|exec)\(|\bos\.system\(|shell=True")
TOP_LEVEL = {
    ".ci", ".dockerignore", ".gitignore", "CHANGELOG.md", "Dockerfile", "LICENSE", "Makefile", "README.md",
    "benchmarks", "connectors", "deploy", "docker-compose.yml", "docs", "gpu_tier", "kvcm", "proto",
    "pyproject.toml", "tests",
}  # fmt: skip


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).exists()]


FILES = tracked_files()
OUR_PYTHON = [path for path in FILES if path.suffix == ".py" and "protocol" not in path.parent.relative_to(ROOT).parts]


def test_the_tree_holds_what_was_searched() -> None:
    assert len(OUR_PYTHON) > 50


@pytest.mark.parametrize("path", OUR_PYTHON, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_longer_than_400_lines_without_a_reason(path: Path) -> None:
    text = path.read_text()
    lines = text.count("\n")
    assert lines <= MOST_LINES or "Longer than 400 lines because" in text, f"{lines} lines"


def test_no_module_has_a_name_that_says_nothing() -> None:
    parts = {part for path in OUR_PYTHON for part in (*path.relative_to(ROOT).parts[:-1], path.stem)}
    assert not parts & FORBIDDEN_NAMES


def test_nothing_is_imported_from_a_conftest() -> None:
    # Every room has one: which of them is meant depends on which tests run.
    for path in OUR_PYTHON:
        assert not re.search(r"^\s*(from|import) conftest\b", path.read_text(), re.MULTILINE), path


def test_no_two_modules_of_tests_have_one_name() -> None:
    # They are imported by their names alone: which of them is meant depends on which came first.
    names = Counter(path.name for path in OUR_PYTHON if path.is_relative_to(ROOT / "tests"))
    assert [name for name, count in names.items() if count > 1] == ["conftest.py"]


@pytest.mark.parametrize("room", ["kvcm", "connectors", "gpu_tier"])
def test_no_code_is_made_from_data(room: str) -> None:
    for path in OUR_PYTHON:
        if path.is_relative_to(ROOT / room):
            assert not FORBIDDEN_CALLS.search(path.read_text()), path


def test_the_top_level_is_as_laid_out() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} <= TOP_LEVEL


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    missing = [key for key in Settings().described() if key not in text and not key.startswith("kvcm.metrics.")]
    assert not missing


def test_every_outcome_code_is_documented() -> None:
    text = (ROOT / "docs/protocol.md").read_text()
    missing = [code.name for code in ErrorCode if f"| {code.name} |" not in text and code is not ErrorCode.UNSPECIFIED]
    assert not missing


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in (path for path in FILES if path.suffix == ".md"):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.relative_to(ROOT)}: {target}"


def test_every_dependency_says_why_it_is_needed() -> None:
    for line in (ROOT / "pyproject.toml").read_text().splitlines():
        if re.match(r'\s+"[a-z][\w\[\]-]*[<>=]=', line):
            assert "#" in line, line
