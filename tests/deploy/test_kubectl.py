"""What the documents have people type into kubectl, typed as printed, at a stand-in of a cluster."""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_stand_in import Cluster, stand_in_cluster
from manifests import ROOT, kustomized

from kvcm.model.principals import PresentedKey

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not on the PATH")

Run = Callable[[str], None]

_BY_JSON = """
kubectl() {
  case " $* " in
    *" create "*) command kubectl "$@" --dry-run=client -o json | command kubectl create --validate=false -f - ;;
    *) command kubectl "$@" ;;
  esac
}
"""
"""`kubectl create` sends another format than the stand-in reads: what it makes is sent in a second step."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with stand_in_cluster(tmp_path, "1.34") as made:
        yield made


@pytest.fixture
def run(tmp_path: Path, cluster: Cluster) -> Run:
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig), "HOME": str(tmp_path)}

    def run(script: str) -> None:
        command = ["bash", "-euo", "pipefail", "-c", _BY_JSON + script]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr

    return run


def _blocks(heading: str) -> str:
    """Return the commands below a heading of the documents."""
    text = (ROOT / "docs/kubernetes.md").read_text()
    (section,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#)", text, re.DOTALL | re.MULTILINE)
    return "".join(re.findall(r"```sh\n(.*?)```", section, re.DOTALL))


def test_from_zero_as_printed(cluster: Cluster, run: Run) -> None:
    run(_blocks("1. Namespace"))
    run(_blocks("2. Secrets"))
    secrets = {each["metadata"]["name"]: each["data"] for each in cluster.objects if each["kind"] == "Secret"}
    assert {name: list(data) for name, data in secrets.items()} == {
        "kvcm-admin-key": ["admin.key"],
        "kvcm-store": ["uri"],
        "kvcm-valkey": ["users.acl"],
    }
    key = base64.b64decode(secrets["kvcm-admin-key"]["admin.key"]).decode()
    assert PresentedKey.parse(key.strip()) is not None
    # The stand-in has no document that describes fields, which kubectl would check by; the schemas are looked at here.
    run("kubectl apply --validate=false -k deploy/k8s")
    wanted = {f"{each['kind']} {each['metadata']['name']}" for each in kustomized("base")}
    assert wanted <= {f"{each['kind']} {each['metadata']['name']}" for each in cluster.objects}
