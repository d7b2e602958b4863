"""Pods behind Services that are replaced as a Deployment does it, and engines that go on meanwhile."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from manifests import Object
from pods import Pod, Secrets
from service_stand_in import Service
from waiting import until

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.credentials import ClientCredentials
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.results import Outcome, RegistrationState
from kvcm.model.instances import LocationSpecInfo, ModelDeployment

__all__ = ["Engine", "Namespace", "Network", "Rollout", "Traffic", "metrics"]

_BLOCKS = 8
_PAUSE_SECONDS = 0.01
_PORTS = (6381, 6382)


class Network:
    """Addresses of loopback that no other test run has."""

    def __init__(self) -> None:
        self._begin = f"127.{os.getpid() % 200 + 20}.7"
        self.services = [f"{self._begin}.100", f"{self._begin}.101"]

    def pod(self, number: int) -> str:
        """Return the address of a pod."""
        return f"{self._begin}.{number}"

    @property
    def addresses(self) -> list[str]:
        """All that a certificate has to name here; in a cluster it has names."""
        return [*self.services, *(self.pod(number) for number in range(1, 10))]


@dataclass(frozen=True, slots=True)
class Engine:
    """How an engine reaches the managers.

    Attributes:
        addresses: both Services.
        credentials: its key, and the certificates that it trusts.
    """

    addresses: str
    credentials: ClientCredentials

    def client(self) -> ManagerClient:
        """Return a client of an engine that has registered its model."""
        client = ManagerClient(self.addresses, "model", ClientSettings(30.0, credentials=self.credentials))
        model = ModelDeployment("model", "bfloat16")
        registration = client.register_instance("default", 16, [LocationSpecInfo("tp0", 4096)], model)
        assert registration.state is RegistrationState.OK, registration
        return client


@dataclass(frozen=True, slots=True)
class Namespace:
    """What there is before the first manager.

    Attributes:
        secrets: of the namespace.
        claims: directory of the storages' directories.
        keys: directory of the keys that operators have.
    """

    secrets: Secrets
    claims: Path
    keys: Path


@dataclass
class Traffic:
    """Clients that write and read all the time.

    Attributes:
        failures: what did not go as it should.
        acknowledged: keys of blocks whose write was confirmed.
        calls: how many calls there were.
    """

    failures: list[str] = field(default_factory=list)
    acknowledged: list[list[int]] = field(default_factory=list)
    calls: int = 0

    @contextlib.contextmanager
    def going_on(self, engine: Engine, clients: int) -> Iterator[None]:
        """Have clients go on during the block."""
        over = threading.Event()
        threads = [
            threading.Thread(target=self._resume_one, args=(engine.client(), number, over)) for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()

    def _resume_one(self, client: ManagerClient, number: int, over: threading.Event) -> None:
        with client:
            turn = 0
            while not over.wait(_PAUSE_SECONDS):
                turn += 1
                self._write_and_read(client, [number * 10**9 + turn * _BLOCKS + each for each in range(_BLOCKS)])

    def _write_and_read(self, client: ManagerClient, keys: list[int]) -> None:
        self.calls += 3
        grant = client.start_write(keys)
        if grant is None or grant.refusal:
            self.failures.append(f"start {client.counters()}")
            return
        if not client.finish_write(grant.session_id, [True] * len(grant.locations)):
            self.failures.append(f"finish {client.counters()}")
            return
        self.acknowledged.append(keys)
        found = client.match(keys)
        if found.outcome is not Outcome.OK or len(found.locations) != len(keys):
            self.failures.append(f"match {found}")


class Rollout:
    """Pods that are there, and Services in front of them. Around a test.

    Args:
        objects: of the deployment.
        namespace: what there is already.
        directory: for files and logs.
        settings: of all pods, in place of those that they are deployed with.
    """

    def __init__(
        self,
        objects: list[Object],
        namespace: Namespace,
        network: Network,
        directory: Path,
        settings: Mapping[str, str],
    ) -> None:
        self._objects, self._namespace, self._network = objects, namespace, network
        self._directory, self._settings = directory, settings
        self._stack = contextlib.ExitStack()
        (deployment,) = (each for each in objects if each["kind"] == "Deployment")
        self.spec: Object = deployment["spec"]["template"]["spec"]
        self.serving: list[Pod] = []
        self.ended: list[tuple[Pod, int, float]] = []
        self.services: list[Service] = []

    def __enter__(self) -> Rollout:
        with contextlib.ExitStack() as self._stack:
            self.serving = [self._started(number) for number in (1, 2, 3)]
            for pod in self.serving:
                pod.wait_until_ready()
            period = self.spec["containers"][0]["readinessProbe"]["periodSeconds"]
            for seed, address in enumerate(self._network.services):
                self.services.append(self._stack.enter_context(Service(address, _PORTS, period, seed)))
            self._follow(self.serving)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def addresses(self) -> str:
        """The addresses of the managers, as engines configure them."""
        return ",".join(f"{address}:{_PORTS[0]}" for address in self._network.services)

    def replace_the_leader(self, viewer: str) -> None:
        """As a Deployment does with the pod that it is hardest to do without: another one first, then its end."""
        old = self.leader(viewer)
        new = self._started(4 + len(self.ended))
        new.wait_until_ready()
        self._follow([*self.serving, new])
        self.ended.append((old, *old.terminate()))
        self.serving = [pod for pod in [*self.serving, new] if pod is not old]
        self._follow(self.serving)

    def leader(self, viewer: str) -> Pod:
        """Return the one pod whose metrics say that it leads, when there is one, and all pods know the key."""

        def leading() -> list[Pod]:
            return [
                pod for pod in self.serving if re.search(r"^kvcm_leader 1(\.0)?$", metrics(pod, viewer), re.MULTILINE)
            ]

        until(lambda: all(metrics(pod, viewer) for pod in self.serving) and len(leading()) == 1)
        (pod,) = leading()
        return pod

    def _started(self, number: int) -> Pod:
        name = f"kvcm-{hashlib.sha256(bytes([number])).hexdigest()[:5]}"
        pod = Pod(
            self._objects, self._namespace.secrets, self._namespace.claims, name, self._network.pod(number),
            self._directory / name, self._settings,
        )  # fmt: skip
        self._stack.callback(pod.kill)
        return pod

    def _follow(self, pods: list[Pod]) -> None:
        for service in self.services:
            service.follow(pods)


def metrics(pod: Pod, key: str) -> str:
    """Return the metrics that Prometheus scrapes, "" while the manager does not know the key."""
    status, text = pod.get(6492, "/metrics", 10, {"authorization": f"Bearer {key}"})
    assert status in {200, 401}, text
    return text if status == 200 else ""
