"""The engines that are installed have the interfaces that the connectors were written for."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from engine_kinds import CONNECTED, FOLDER, ROOT, SGLANG, TRANSFORMERS, VLLM, EngineKind
from interfaces import ATTRIBUTES, OVERRIDES

_KINDS = {kind.name: kind for kind in (VLLM, SGLANG, TRANSFORMERS)}
_SECONDS = 120
_FEATURE = "has the interface that the connector was written for"


def by_engine(named: list[tuple[str, Any]]) -> list[Any]:
    """Return the cases of a test, each as a sign that its engine has its interface."""
    return [pytest.param(engine, name, marks=pytest.mark.feature(engine, _FEATURE)) for engine, name in named]


def asked(kind: EngineKind, request: dict[str, Any], directory: Path) -> dict[str, Any]:
    if kind.missing:
        pytest.skip(kind.missing)
    question, answer = directory / "request.json", directory / "answer.json"
    question.write_text(json.dumps(request))
    paths = os.pathsep.join(map(str, [*kind.paths, ROOT]))
    command = [kind.python, FOLDER / "interface_report.py", question, answer]
    done = subprocess.run(
        command, env=os.environ | kind.environment | {"PYTHONPATH": paths}, capture_output=True, text=True,
        timeout=_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(answer.read_text()))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that reports the interface of an engine; it asks each engine once."""

    @cache
    def ask(engine: str) -> dict[str, Any]:
        request = {"classes": list(ATTRIBUTES[engine]), "overrides": OVERRIDES[engine]}
        return asked(_KINDS[engine], request, tmp_path_factory.mktemp(engine))

    return ask


@pytest.mark.parametrize(
    ("engine", "name"), by_engine([(engine, name) for engine in ATTRIBUTES for name in ATTRIBUTES[engine]])
)
def test_classes_have_the_expected_attributes(engine: str, name: str, installed: Any) -> None:
    found = installed(engine)["classes"][name]
    assert found is not None, f"{engine}: there is no {name} any more"
    gone = set(ATTRIBUTES[engine][name].split()) - set(found)
    assert not gone, f"{engine}: {name} has no {sorted(gone)} any more"


@pytest.mark.parametrize(
    ("engine", "pair"),
    by_engine([(engine, pair) for engine, pairs in OVERRIDES.items() for pair in pairs if _KINDS[engine] in CONNECTED]),
)
def test_our_methods_take_the_parameters_of_the_engine(engine: str, pair: tuple[str, str], installed: Any) -> None:
    methods = installed(engine)["overrides"][" ".join(pair)]
    assert methods, f"{engine}: {pair[0]} or {pair[1]} cannot be imported, or they have no method in common"
    different = {name: both for name, both in methods.items() if both[0] != both[1]}
    assert not different, f"{engine}: {pair[0]} takes other parameters than {pair[1]}: {different}"
