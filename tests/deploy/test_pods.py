"""Managers as the Deployment starts them, replaced as a rollout replaces them, while engines go on.

One manager is replaced in every run, with a drain of three seconds; with KVCM_TESTS=thorough all three are, with the
times of the Deployment, and once more with TLS; and one of the chart with certificates that every client has to show.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from authorities import Authority, dns, ip
from manifests import KUSTOMIZED, ROOT, Installation, Object, has_helm, installed, kustomized, one, values_of
from pods import Pod, may_isolate, unpacked
from ports import free_port
from redis_servers import REDIS_PROGRAM
from rollout import Engine, Namespace, Network, Rollout, Traffic
from waiting import until

from kvcm.connectors.credentials import ClientCredentials

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not may_isolate(), reason="mounts of its own for a process need root"),
]

IS_THOROUGH = os.environ.get("KVCM_TESTS") == "thorough"
_SHORT = {} if IS_THOROUGH else {"kvcm.service.drain_delay_ms": "3000", "kvcm.service.drain_timeout_ms": "3000"}
_SETTINGS = {**_SHORT, "kvcm.logger.format": "json"}
_USER = 10001
_OF_A_BUSY_MACHINE = {"redis_invalidations_interrupted", "storage_health", "duty_interrupted", "usage_not_reported"}
DOCUMENT = ROOT / "docs/kubernetes.md"


@pytest.fixture(params=["base", "complete", "chart"] if IS_THOROUGH else ["base"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> list[Object]:
    if request.param in KUSTOMIZED:
        return kustomized(request.param)
    if not has_helm():
        pytest.skip("Helm is missing: make helm")
    values = {**values_of("everything"), "extraArgs": []}  # there is no collector of traces here
    (release,) = installed(tmp_path, [Installation(values)])
    found: list[Object] = release["objects"]
    return found


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def namespace(tmp_path: Path, objects: list[Object], network: Network) -> Iterator[Namespace]:
    """What the documents say makes the Secrets, run; a claim; a certificate; and the bundled store."""
    text = DOCUMENT.read_text()
    (block,) = re.findall(r"<!-- secrets:begin -->\n```sh\n(.*?)```", text, re.DOTALL)
    kubectl = 'kubectl() { mkdir -p "../given/$6"; cp "${7#--from-file=}" "../given/$6/"; }\n'
    subprocess.run(["bash", "-euc", kubectl + block], cwd=tmp_path, check=True)
    given = tmp_path / "given"
    secrets = {path.name: {file.name: file.read_text() for file in path.iterdir()} for path in given.iterdir()}
    assert {name: list(files) for name, files in secrets.items()} == {
        "kvcm-admin-key": ["admin.key"],
        "kvcm-store": ["uri"],
        "kvcm-valkey": ["users.acl"],
    }
    authority, port = Authority.make(tmp_path / "kvcm-secrets"), free_port()
    secrets["kvcm-tls"] = secrets["kvcm-client-ca"] = _certificate(authority, network)
    secrets["kvcm-store"]["uri"] = secrets["kvcm-store"]["uri"].replace("kvcm-valkey:6379", f"127.0.0.1:{port}")
    secrets["kvcm-store"]["uri"] += "&timeout_ms=20000"  # a busy machine is no reason for a failed call
    store = _bundled_store(tmp_path / "valkey", secrets["kvcm-valkey"]["users.acl"], port)
    try:
        until(lambda: _redis_cli(port, "ping") == "PONG")
        assert "NOPERM" in _redis_cli(port, "get", "kvcm:x")  # a stranger may ping, and nothing else
        yield Namespace(secrets, tmp_path / "storages", tmp_path / "kvcm-secrets")
    finally:
        store.terminate()
        store.wait(20)


def _certificate(authority: Authority, network: Network) -> dict[str, str]:
    """What cert-manager would make; engines of a cluster call managers by names, those here by addresses."""
    names = one(kustomized("complete"), "Certificate")["spec"]["dnsNames"]
    pair = authority.issue("tls", [*map(dns, names), *map(ip, network.addresses)])
    return {"tls.crt": pair.cert.read_text(), "tls.key": pair.key.read_text(), "ca.crt": authority.pem.decode()}


def _bundled_store(directory: Path, users: str, port: int) -> subprocess.Popen[bytes]:
    """Start another program with the settings of the bundled one."""
    complete = kustomized("complete")
    volumes = one(complete, "StatefulSet", "kvcm-valkey")["spec"]["template"]["spec"]["volumes"]
    (settings,) = (unpacked(complete, volume, {}) for volume in volumes if "configMap" in volume)
    directory.mkdir()
    (directory / "users.acl").write_text(users)
    text = settings["valkey.conf"].replace("dir /data", f"dir {directory}\nport {port}\nbind 127.0.0.1")
    (directory / "valkey.conf").write_text(text.replace("/run/secrets/valkey/", f"{directory}/"))
    with (directory / "log").open("wb") as log:
        return subprocess.Popen([f"{REDIS_PROGRAM}-server", str(directory / "valkey.conf")], stdout=log, stderr=log)


def _redis_cli(port: int, *words: str) -> str:
    return subprocess.run(
        [f"{REDIS_PROGRAM}-cli", "-p", str(port), *words], capture_output=True, text=True
    ).stdout.strip()


def kvcm(pod: Pod, namespace: Namespace, *words: str) -> str:
    """Run the command line as an operator does, and return what it prints."""
    manager = {"KVCM_MANAGER": f"{'https' if pod.has_tls else 'http'}://{pod.address}:6492"}
    files = {"KVCM_CA_FILE": "authority.pem", "KVCM_CERT_FILE": "tls.crt", "KVCM_CERT_KEY_FILE": "tls.key"}
    trust = files if pod.has_tls else {}
    ran = subprocess.run(
        [sys.executable, "-m", "kvcm", *words],
        cwd=namespace.keys, env={**os.environ, "KVCM_KEY_FILE": "admin.key", **manager, **trust},
        capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_a_rollout_under_load_fails_no_call_and_loses_nothing(
    tmp_path: Path, objects: list[Object], namespace: Namespace, network: Network
) -> None:
    with Rollout(objects, namespace, network, tmp_path, _SETTINGS) as rollout:
        _check_isolation(rollout.serving)
        manager, traffic = rollout.serving[0], Traffic()
        (storage,) = json.loads(kvcm(manager, namespace, "storage", "list", "--json"))["storages"]
        assert (storage["name"], storage["health"]) == ("nfs_01", "SH_UP")
        engine, viewer = _engine(rollout, namespace), _viewer(manager, namespace)
        rollout.leader(viewer)
        with traffic.going_on(engine, clients=3):
            for _ in range(3 if IS_THOROUGH else 1):
                rollout.replace_the_leader(viewer)
        _check_traffic(traffic, engine)
        assert rollout.leader(viewer) in rollout.serving
        for command in re.findall(
            r"exec deployment/kvcm -- (kvcm index .*?)(?: >|$)", DOCUMENT.read_text(), re.MULTILINE
        ):
            assert rollout.serving[0].run(*command.split())
        for pod, code, seconds in rollout.ended:
            assert (pod.name, code) == (pod.name, 0)
            assert seconds < rollout.spec["terminationGracePeriodSeconds"]
        for pod in [*rollout.serving, *(pod for pod, *_ in rollout.ended)]:
            _check_log(pod)


def _engine(rollout: Rollout, namespace: Namespace) -> Engine:
    engine = ("--name", "engines", "--role", "engine", "--group", "default", "--out", "engine.key")
    kvcm(rollout.serving[0], namespace, "key", "create", *engine)
    keys = namespace.keys
    plain = ClientCredentials(key_file=keys / "engine.key")
    encrypted = replace(
        plain, ca_file=keys / "authority.pem", cert_file=keys / "tls.crt", cert_key_file=keys / "tls.key"
    )
    return Engine(rollout.addresses, encrypted if rollout.serving[0].has_tls else plain)


def _viewer(manager: Pod, namespace: Namespace) -> str:
    kvcm(manager, namespace, "key", "create", "--name", "prometheus", "--role", "viewer", "--out", "metrics.key")
    return (namespace.keys / "metrics.key").read_text().strip()


def _check_isolation(pods: list[Pod]) -> None:
    for pod in pods:
        status = pod.status
        assert (status["Uid"].split()[0], status["Gid"].split()[0]) == (str(_USER), str(_USER))
        assert (status["CapEff"], status["CapBnd"], status["NoNewPrivs"]) == ("0" * 16, "0" * 16, "1")


def _check_traffic(traffic: Traffic, engine: Engine) -> None:
    assert traffic.failures == []
    assert len(traffic.acknowledged) > 10
    with engine.client() as client:
        lost = [keys for keys in traffic.acknowledged if len(client.match(keys).locations) != len(keys)]
    assert lost == []
    print(f"{traffic.calls} calls, {len(traffic.acknowledged)} writes, none failed or lost")


def _check_log(pod: Pod) -> None:
    """Nothing needs an operator: other users cannot read secrets, and stopped pods stopped in time."""
    reported = [event for event in pod.events if event["level"] not in {"info", "debug"}]
    assert [event for event in reported if event["event"] not in _OF_A_BUSY_MACHINE] == []
