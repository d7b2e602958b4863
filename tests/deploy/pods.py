"""Pods without a cluster: what a Deployment says of its pods, done to processes.

A pod gets a root that cannot be written, with the interpreter and our code in the place of an image; the files of its
ConfigMap and Secrets with owners and modes as the kubelet gives them; its claims as directories; user, group and
capabilities of its security context; its arguments and its environment. Its address is one of loopback, given by a
setting that a real pod does not need.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from invariants import settings_of
from manifests import ROOT, Object

__all__ = ["Pod", "Secrets", "may_isolate", "unpacked"]

_SYSTEM = ("bin", "sbin", "lib", "lib64", "usr", "dev", "proc", "sys")
_ETC = ("passwd", "group", "hosts", "nsswitch.conf", "ld.so.cache", "resolv.conf")
_START_SECONDS = 120.0

Secrets = Mapping[str, Mapping[str, str]]
"""What Secrets hold, by their names and keys."""


def may_isolate() -> bool:
    """Whether mounts of its own can be given to a process."""
    tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True)
    return tried.returncode == 0


def unpacked(objects: list[Object], volume: Object, secrets: Secrets) -> dict[str, str]:
    """Return the files of a volume of settings or secrets."""
    if "configMap" in volume:
        (found,) = (
            each["data"]
            for each in objects
            if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", volume["configMap"]["name"])
        )
        return dict(found)
    secret = volume["secret"]
    return {item["path"]: secrets[secret["secretName"]][item["key"]] for item in secret["items"]}


class Pod:
    """One pod of a Deployment.

    Args:
        objects: of the deployment.
        secrets: what it has in its namespace.
        claims: directory that has a directory for each claim and each export.
        name: its own.
        address: of loopback.
        directory: for its files and its log.
        settings: to be given in the environment, for this run only.
    """

    def __init__(
        self,
        objects: list[Object],
        secrets: Secrets,
        claims: Path,
        name: str,
        address: str,
        directory: Path,
        settings: Mapping[str, str],
    ) -> None:
        (deployment,) = (each for each in objects if each["kind"] == "Deployment")
        self._spec: Object = deployment["spec"]["template"]["spec"]
        self._container: Object = self._spec["containers"][0]
        self._objects, self._secrets, self._claims = objects, secrets, claims
        self.name, self.address, self._settings = name, address, settings
        self._directory = directory
        directory.mkdir(parents=True)
        self._log = directory / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "bash", "-euc", "\n".join(self._script())],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip

    def _script(self) -> Iterator[str]:
        group = self._spec["securityContext"]["fsGroup"]
        root = self._directory / "root"
        root.mkdir()
        yield f"cd {shlex.quote(str(root))}; mount -t tmpfs -o mode=755 tmpfs .; cd {shlex.quote(str(root))}"
        for name in _SYSTEM:
            yield (
                f"if [ -L /{name} ]; then cp -P /{name} .; elif [ -e /{name} ]; then mkdir {name}; "
                f"mount --rbind /{name} {name}; fi"
            )
        yield "mkdir etc tmp data"
        yield from (f"cp /etc/{name} etc/ || true" for name in _ETC)
        for mount in self._container["volumeMounts"]:
            yield self._mounted(mount, group)
        for path in (sys.base_prefix, sys.prefix, str(ROOT / "kvcm")):  # behind /tmp, where a checkout may lie
            if not path.startswith("/usr"):
                yield _bind(Path(path), path)
        yield "mount -o remount,ro ."
        yield f"exec chroot . {shlex.join(self._as_user(['kvcm', *self._container['args']]))}"

    def _as_user(self, words: Sequence[str]) -> list[str]:
        """Return a command of the image, with the pod's user, capabilities and environment around it."""
        context = self._spec["securityContext"]
        return [
            "/usr/bin/setpriv", f"--reuid={context['runAsUser']}", f"--regid={context['runAsGroup']}",
            f"--groups={context['fsGroup']}", "--bounding-set=-all", "--inh-caps=-all", "--ambient-caps=-all",
            "--no-new-privs", "/usr/bin/env", "-i", *self._environment(), sys.executable, "-m", *words,
        ]  # fmt: skip

    def _mounted(self, mount: Object, group: int) -> str:
        (volume,) = (each for each in self._spec["volumes"] if each["name"] == mount["name"])
        path = mount["mountPath"]
        if "emptyDir" in volume:
            return f"mkdir -p .{path}; mount -t tmpfs -o mode=1777,size=64m tmpfs .{path}"
        if "persistentVolumeClaim" in volume or "nfs" in volume:
            claim = self._claims / mount["name"]
            if not claim.exists():
                claim.mkdir(parents=True)
                os.chown(claim, group, group)
            return _bind(claim, path, is_writable=not mount.get("readOnly"))
        directory = self._directory / mount["name"]
        directory.mkdir()
        mode = volume.get("secret", volume.get("configMap")).get("defaultMode", 0o644)
        for name, text in unpacked(self._objects, volume, self._secrets).items():
            (directory / name).write_text(text)
            os.chown(directory / name, 0, group)
            (directory / name).chmod(mode)
        return _bind(directory, path)

    def _environment(self) -> Iterator[str]:
        yield "PATH=/usr/bin:/bin"
        yield f"PYTHONPATH={ROOT}"
        yield "PYTHONDONTWRITEBYTECODE=1"
        for each in self._container["env"]:
            field = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            own = {"metadata.name": self.name, "status.podIP": self.address}
            yield f"{each['name']}={own[field] if field else each['value']}"
        yield f"KVCM_MANAGER={'https' if self.has_tls else 'http'}://{self.address}:6492"  # instead of localhost
        yield from (f"{key}={value}" for key, value in {"kvcm.service.host": self.address, **self._settings}.items())

    @property
    def has_tls(self) -> bool:
        """Whether its ports speak TLS."""
        return "kvcm.tls.cert_file" in settings_of(self._objects)

    @property
    def log(self) -> str:
        """What it logged."""
        return self._log.read_text(errors="replace")

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it logged, line by line."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    @property
    def status(self) -> Mapping[str, str]:
        """What the kernel says of its process."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def answers(self, probe: str) -> bool:
        """Whether a probe of the Deployment would be content."""
        if "exec" in self._container[probe]:
            python, module, *words = self._container[probe]["exec"]["command"]
            assert (python, module) == ("python", "-m")
            return self._ran(*words).returncode == 0
        asked = self._container[probe]["httpGet"]
        (port,) = (each["containerPort"] for each in self._container["ports"] if each["name"] == asked["port"])
        assert (asked.get("scheme") == "HTTPS") is self.has_tls, asked
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, _ = self.get(port, asked["path"], self._container[probe].get("timeoutSeconds", 1))
            return status == http.client.OK
        return False

    def get(self, port: int, path: str, seconds: float, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Ask for a page, as kubelet and Prometheus do; certificates are not looked at, as the kubelet does not.

        Raises:
            OSError, HTTPException: there is no answer.
        """
        address = (self.address, port)
        connection = (
            http.client.HTTPSConnection(*address, timeout=seconds, context=self._key_of_header())
            if self.has_tls
            else http.client.HTTPConnection(*address, timeout=seconds)
        )
        with contextlib.closing(connection):
            connection.request("GET", path, headers=dict(headers or {}))
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def _key_of_header(self) -> ssl.SSLContext:
        """The managers' own certificate, for those that demand one."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(self._directory / "tls/tls.crt", self._directory / "tls/tls.key")
        return context

    def wait_until_ready(self) -> None:
        """Return when both probes are content that have to be before traffic comes."""
        deadline = time.monotonic() + _START_SECONDS
        while not (self.answers("startupProbe") and self.answers("readinessProbe")):
            assert self._process.poll() is None, f"{self.name} ended:\n{self.log[-3000:]}"
            assert time.monotonic() < deadline, f"{self.name} does not become ready:\n{self.log[-3000:]}"
            time.sleep(0.05)

    def run(self, *words: str) -> bytes:
        """Run a command of the image inside, as `kubectl exec` does, and return what it prints."""
        ran = self._ran(*words)
        assert ran.returncode == 0, (ran.returncode, ran.stdout, ran.stderr)
        return ran.stdout

    def _ran(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        inside = ["nsenter", f"--target={self._process.pid}", "--mount", "--root", "--wd"]
        return subprocess.run([*inside, *self._as_user(words)], capture_output=True)

    def terminate(self) -> tuple[int, float]:
        """Take it down as the kubelet does; returns the exit code and how many seconds it took.

        Raises:
            subprocess.TimeoutExpired: it did not end within the grace period, and was killed.
        """
        assert "lifecycle" not in self._container, "a preStop hook would have to run first"
        begin = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(self._spec["terminationGracePeriodSeconds"])
        finally:
            self.kill()
        return code, time.monotonic() - begin

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()


def _bind(source: Path, path: str, *, is_writable: bool = False) -> str:
    made = f"mkdir -p .{path}; mount --bind {shlex.quote(str(source))} .{path}"
    return made if is_writable else f"{made}; mount -o remount,bind,ro .{path}"
