"""What deploy/k8s and the chart come to: lists of Kubernetes' objects."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from cluster_stand_in import stand_in_cluster

__all__ = [
    "CHART", "KUSTOMIZED", "ROOT", "VALUES", "Installation", "Object", "built", "has_helm", "helm", "installed",
    "kustomized", "one", "run_kustomize", "source_hash", "upgraded", "values_of",
]  # fmt: skip

Object = dict[str, Any]
ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/kvcm"
HELM = ROOT / "build/helm"
HERE = Path(__file__).parent
KUSTOMIZED = {"base": ROOT / "deploy/k8s", "complete": ROOT / "deploy/k8s/overlays/complete"}
"""What `kubectl kustomize` is run on, by the name of the file in built/ that holds what comes out."""

VALUES = {"defaults": None, **{path.stem: path for path in sorted((HERE / "values").glob("*.yaml"))}}
"""Files of values that the chart is installed with."""


def values_of(name: str) -> dict[str, Any]:
    """Return the values of a file; none for the chart's own."""
    path = VALUES[name]
    return {} if path is None else dict(yaml.safe_load(path.read_text()))


def source_hash() -> str:
    """Return a hash of everything that kustomize reads."""
    sources = sorted((ROOT / "deploy/k8s").rglob("*"))
    named = [(str(path.relative_to(ROOT)), path.read_bytes()) for path in sources if path.is_file()]
    return hashlib.sha256(repr(named).encode()).hexdigest()


def built(name: str) -> Path:
    """Return the file that holds what kustomize makes of a folder: it cannot be had everywhere."""
    return HERE / "built" / f"{name}.yaml"


def kustomized(name: str) -> list[Object]:
    """Return the objects of a folder, by kubectl where there is one, else those that were written down."""
    text = run_kustomize(KUSTOMIZED[name]) if shutil.which("kubectl") else built(name).read_text()
    return _documents(text)


def run_kustomize(folder: Path) -> str:
    """Return what `kubectl kustomize` prints."""
    ran = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def has_helm() -> bool:
    """Whether the package that has Helm as a library is there (make helm); it is made for one kind of processor."""
    return platform.machine() == "x86_64" and (HELM / "helm_sdkpy").is_dir()


def helm(*asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Have Helm do things, all at once; see helm_process.py."""
    environment = {**os.environ, "PYTHONPATH": str(HELM), "HELM_DRIVER": "memory"}
    ran = subprocess.run(
        [sys.executable, str(HERE / "helm_process.py")],
        input=json.dumps(asked), env=environment, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    answers: list[dict[str, Any]] = json.loads(ran.stdout)
    return answers


class Installation(NamedTuple):
    """A release of the chart to install.

    Attributes:
        values: of the chart.
        version: of Kubernetes.
        release: its name.
    """

    values: Mapping[str, Any]
    version: str = "1.34"
    release: str = "kvcm"


def installed(directory: Path, wanted: Sequence[Installation]) -> list[dict[str, Any]]:
    """Install the chart, each time into a stand-in of a cluster of its own.

    Returns:
        `objects` that were created, and those of hooks; `notes` for people; or `error`.
    """
    with contextlib.ExitStack() as stack:
        clusters = [stack.enter_context(stand_in_cluster(directory, each.version)) for each in wanted]
        answers = helm(
            *(
                {
                    "do": "install", "release": each.release, "chart": str(CHART), "values": each.values,
                    "namespace": "kvcm", "kubeconfig": str(cluster.kubeconfig),
                }
                for each, cluster in zip(wanted, clusters, strict=True)
            )
        )  # fmt: skip
    return [
        {**answer, "objects": [*cluster.objects, *_hooks(answer)]}
        for answer, cluster in zip(answers, clusters, strict=True)
    ]


def upgraded(directory: Path, values: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    """Install the chart into a stand-in of a cluster, and upgrade it there to other values.

    Returns:
        `objects` that are there in the end, and `error` where there was one.
    """
    with stand_in_cluster(directory, "1.34") as cluster:
        (answer,) = helm(
            {
                "do": "upgrade", "release": "kvcm", "chart": str(CHART), "values": values, "then": then,
                "namespace": "kvcm", "kubeconfig": str(cluster.kubeconfig),
            }
        )  # fmt: skip
    return {**answer, "objects": cluster.objects}


def _hooks(answer: dict[str, Any]) -> list[Object]:
    return [each for text in answer.get("hooks", ()) for each in _documents(text)]


def one(objects: Sequence[Object], kind: str, name: str = "kvcm") -> Object:
    """Return the only object of a kind and name."""
    (found,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def _documents(text: str) -> list[Object]:
    return [each for each in yaml.safe_load_all(text) if each]


def write_built() -> None:
    """Write down what kustomize makes of every folder."""
    for name in KUSTOMIZED:
        head = f"# Made by `python tests/deploy/manifests.py`, with kubectl, of deploy/k8s of hash\n# {source_hash()}\n"
        built(name).write_text(head + run_kustomize(KUSTOMIZED[name]))


if __name__ == "__main__":
    write_built()
