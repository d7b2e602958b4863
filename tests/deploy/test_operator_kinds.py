"""Objects of the Prometheus operator and of cert-manager against types made of those operators' own definitions.

They are packages of npm, so this needs node, npm and their registry: part of the acceptance run. Every run compares the
same objects with a list of fields (schemas.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from manifests import VALUES, Installation, Object, has_helm, installed, kustomized, values_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.environ.get("KVCM_TESTS") != "thorough", reason="part of the acceptance run"),
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not on the PATH"),
]

_PACKAGES = (
    "@kubernetes-models/prometheus-operator@6.0.0",
    "@kubernetes-models/cert-manager@4.4.4",
    "typescript@7.0.2",
)
_KINDS = {
    "ServiceMonitor": "prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "prometheus-operator/monitoring.coreos.com/v1",
    "Certificate": "cert-manager/cert-manager.io/v1",
}
_VALIDATE = """
import {readFileSync} from "fs";
for (const object of JSON.parse(readFileSync("objects.json"))) {
  const kinds = await import(object.models);
  new kinds[object.kind](object.object).validate();
}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    (directory / "package.json").write_text('{"private": true, "type": "module"}')
    subprocess.run(["npm", "install", "--silent", "--no-audit", *_PACKAGES], cwd=directory, check=True)
    (directory / "validate.js").write_text(_VALIDATE)
    return directory


def _complaints(models: Path, objects: Sequence[Object]) -> str:
    """Return what the types say of the objects' fields, and the validators of their values."""
    lines = [
        f'import type {{I{kind}}} from "@kubernetes-models/{path}/{kind}";' for kind, path in _KINDS.items()
    ]  # fmt: skip
    lines += [f"export const o{i}: I{each['kind']} = {json.dumps(each)};" for i, each in enumerate(objects)]
    (models / "objects.ts").write_text("\n".join(lines))
    reported = [
        {"kind": each["kind"], "models": f"@kubernetes-models/{_KINDS[each['kind']]}", "object": each}
        for each in objects
    ]
    (models / "objects.json").write_text(json.dumps(reported))
    options = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution", "nodenext"]
    commands = (["npx", "tsc", *options, "objects.ts"], ["node", "validate.js"])
    ran = [subprocess.run(command, cwd=models, capture_output=True, text=True) for command in commands]
    return "".join(each.stdout + each.stderr for each in ran if each.returncode)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> list[Object]:
    found = list(kustomized("complete"))
    if has_helm():
        wanted = [Installation(values_of(name)) for name in VALUES]
        found += [each for release in installed(tmp_path_factory.mktemp("c"), wanted) for each in release["objects"]]
    return [each for each in found if each["kind"] in _KINDS]


def test_operators_know_every_field(models: Path, objects: list[Object]) -> None:
    assert {each["kind"] for each in objects} == set(_KINDS)
    assert _complaints(models, objects) == ""


@pytest.mark.parametrize("wrong", [{"jobLable": "x"}, {"endpoints": [{"port": "a", "interval": "often"}]}])
def test_a_field_or_value_that_they_do_not_know_is_found(models: Path, objects: list[Object], wrong: Object) -> None:
    monitor = next(each for each in objects if each["kind"] == "ServiceMonitor")
    assert next(iter(wrong)) in _complaints(models, [{**monitor, "spec": {**monitor["spec"], **wrong}}])
