"""Rules that no linter checks: names of modules, the top level, documents that list what the code has."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from kvcm.config import Settings
from kvcm.model.errors import ErrorCode

ROOT = Path(__file__).parents[1]
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}
# vLLM hashes what `pickle.dumps` writes, which makes no code of anything: loading would.
FORBIDDEN_CALLS = re.compile(
    r"\bpickle\.(?!dumps\()|\b(marshal|shelve)\b\.|(?<!\.)\b(?:eval|exec)\(|\bos\.system\(|shell=True"
)
TOP_LEVEL = {".ci", ".dockerignore", ".gitignore", "CHANGELOG.md", "Dockerfile", "LICENSE", "Makefile", "README.md"} | {
    "benchmarks", "connectors", "deploy", "docker-compose.yml", "docs", "gpu_tier", "kvcm", "proto", "pyproject.toml",
    "tests",
}  # fmt: skip


@pytest.fixture(scope="module")
def files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).exists()]


@pytest.fixture(scope="module")
def modules(files: list[Path]) -> list[Path]:
    found = [path for path in files if path.suffix == ".py" and "protocol" not in path.relative_to(ROOT).parts[:-1]]
    assert len(found) > 50
    return found


def test_modules_have_names_that_say_something(modules: list[Path]) -> None:
    parts = {part for path in modules for part in (*path.relative_to(ROOT).parts[:-1], path.stem)}
    assert not parts & FORBIDDEN_NAMES


def test_modules_of_tests_can_be_imported_by_their_names_alone(modules: list[Path]) -> None:
    # A conftest is imported by that name in every folder: which of them is meant would depend on which tests run.
    names = Counter(path.name for path in modules if path.is_relative_to(ROOT / "tests"))
    assert [name for name, count in names.items() if count > 1] == ["conftest.py"]
    pattern = re.compile(r"^\s*(from|import) conftest\b", re.MULTILINE)
    assert not [path for path in modules if pattern.search(path.read_text())]


def test_no_code_is_made_from_data(modules: list[Path]) -> None:
    product = [path for path in modules if path.relative_to(ROOT).parts[0] in {"kvcm", "connectors", "gpu_tier"}]
    assert not [path for path in product if FORBIDDEN_CALLS.search(path.read_text())]


def test_the_top_level_is_as_laid_out(files: list[Path]) -> None:
    assert {path.relative_to(ROOT).parts[0] for path in files} <= TOP_LEVEL


def test_every_setting_and_every_outcome_code_is_documented() -> None:
    configuration, protocol = ((ROOT / "docs" / name).read_text() for name in ("configuration.md", "protocol.md"))
    assert not [key for key in Settings().described() if key not in configuration and "kvcm.metrics." not in key]
    codes = [code.name for code in ErrorCode if code is not ErrorCode.UNSPECIFIED]
    assert not [name for name in codes if f"| {name} |" not in protocol]


def test_links_of_the_documents_lead_somewhere(files: list[Path]) -> None:
    links = re.compile(r"\]\((?!https?:|#)([^)#]+)")
    documents = [path for path in files if path.suffix == ".md"]
    found = [(path, target) for path in documents for target in links.findall(path.read_text())]
    assert not [(path, target) for path, target in found if not (path.parent / target).exists()]


def test_every_dependency_says_why_it_is_needed() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    assert not [line for line in lines if re.match(r'\s+"[a-z][\w\[\]-]*[<>=]=', line) and "#" not in line]
