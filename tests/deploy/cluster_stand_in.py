"""Just enough of a Kubernetes API server for Helm to install a chart into, and for kubectl to apply manifests to.

The server lists its kinds, keeps created and merged objects, and rejects objects that violate the schemas of a real
server, and changes of immutable fields. No controller or kubelet is behind it: no pod ever runs.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from schemas import SchemaError, check_object

__all__ = ["Cluster", "stand_in_cluster"]

_KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{name: here, cluster: {server: "http://127.0.0.1:%d"}}]
contexts: [{name: here, context: {cluster: here, user: nobody}}]
users: [{name: nobody, user: {}}]
current-context: here
"""
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]


_KINDS = {
    "v1": "ConfigMap Namespace PersistentVolumeClaim Pod Secret ServiceAccount Service",
    "apps/v1": "Deployment StatefulSet",
    "autoscaling/v2": "HorizontalPodAutoscaler",
    "policy/v1": "PodDisruptionBudget",
    "networking.k8s.io/v1": "NetworkPolicy",
    "cert-manager.io/v1": "Certificate",
    "monitoring.coreos.com/v1": "PrometheusRule ServiceMonitor",
}
_FIXED = {
    "Deployment": ("selector",),
    "StatefulSet": ("selector", "serviceName", "volumeClaimTemplates"),
    "PersistentVolumeClaim": ("accessModes", "storageClassName"),
}
"""The immutable fields in the `spec` of a kind."""


class Cluster:
    """The created objects, by path, and the address of the server.

    Args:
        version: of Kubernetes, as in 1.34.

    Attributes:
        kubeconfig: file that names the server.
    """

    def __init__(self, version: str) -> None:
        self.version = version
        self.kubeconfig = Path()
        self.created: dict[str, dict[str, Any]] = {}

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The created objects, in the order of their creation."""
        return list(self.created.values())

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and body."""
        if method == "POST":
            return self._create(path, json.loads(body))
        if method == "PATCH" and path in self.created:
            return self._change(path, json.loads(body))
        if path in self.created:
            return 200, self.created[path]
        found = self._described(path)
        return (200, found) if found is not None else (404, _status("NotFound", f"{path} is not there", 404))

    def _create(self, path: str, made: dict[str, Any]) -> tuple[int, Any]:
        try:
            check_object(made, self.version)
        except SchemaError as error:
            return 422, _status("Invalid", str(error), 422)
        self.created[f"{path}/{made['metadata']['name']}"] = made
        return 201, made

    def _change(self, path: str, patch: dict[str, Any]) -> tuple[int, Any]:
        old = self.created[path]
        new = _merged(old, patch)
        for field in _FIXED.get(old["kind"], ()):
            if new["spec"].get(field) != old["spec"].get(field):
                return 422, _status("Invalid", f"{path}: {field} is immutable", 422)
        self.created[path] = new
        return 200, new

    def _described(self, path: str) -> Any:
        """What a client asks before it begins."""
        groups = [each for each in _KINDS if "/" in each]
        if path == "/version":
            major, minor = self.version.split(".")
            return {"major": major, "minor": minor, "gitVersion": f"v{self.version}.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(each) for each in groups]}
        version = path.removeprefix("/api/").removeprefix("/apis/")
        return _resources(version) if version in _KINDS else None


def _merged(old: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    new = {**old} if isinstance(old, dict) else {}
    new.update({key: _merged(new.get(key), value) for key, value in patch.items()})
    return {key: value for key, value in new.items() if value is not None}


def _group(version: str) -> dict[str, Any]:
    reported = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [reported], "preferredVersion": reported}


def _described_kind(kind: str) -> dict[str, Any]:
    name = kind.lower()
    plural = f"{name.removesuffix('y')}ies" if name.endswith("y") else f"{name}s"
    is_namespaced = kind != "Namespace"
    return {"name": plural, "singularName": name, "namespaced": is_namespaced, "kind": kind, "verbs": _VERBS}


def _resources(version: str) -> dict[str, Any]:
    kinds = [_described_kind(kind) for kind in _KINDS[version].split()]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": kinds}


def _status(reason: str, message: str, code: int) -> dict[str, Any]:
    reported = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return {**reported, "reason": reason, "message": message, "code": code, "details": {}}


@contextlib.contextmanager
def stand_in_cluster(directory: Path, version: str) -> Iterator[Cluster]:
    """Yield a cluster that listens on loopback."""
    cluster = Cluster(version)

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = cluster.answer(self.command, urlsplit(self.path).path, body)
            encoded = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            self.wfile.write(encoded)

        do_POST = do_PATCH = do_GET  # noqa: N815 - names that the library looks for

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        cluster.kubeconfig = directory / f"kubeconfig-{server.server_port}"
        cluster.kubeconfig.write_text(_KUBECONFIG % server.server_port)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield cluster
        finally:
            server.shutdown()
            thread.join()
