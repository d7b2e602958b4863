"""What holds between the objects of a deployment, and between them and the manager. Each rule yields what breaks it."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from manifests import Object

from kvcm.config import ConfigError, Settings
from kvcm.gateway.settings import GatewaySettings, load_gateway_settings

__all__ = ["RULES", "settings_of"]

_CLOSING_SECONDS = 15
"""What a manager needs behind its drain to write down and close (docs/operations.md)."""

_PAGES = {"/livez", "/readyz", "/startupz", "/metrics"}
_PORTS = {"grpc": "rpc_port", "http": "http_port", "grpc-admin": "admin_rpc_port", "http-admin": "admin_http_port"}
_KNOWN = set(Settings().described())

Rule = Callable[[Sequence[Object]], Iterator[str]]


def _workloads(objects: Sequence[Object]) -> Iterator[tuple[str, Object]]:
    """Yield pods and templates of pods with their names."""
    for each in objects:
        name = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] in {"Deployment", "StatefulSet"}:
            yield name, each["spec"]["template"]
        elif each["kind"] == "Pod":
            yield name, each


def _containers(objects: Sequence[Object]) -> Iterator[tuple[str, Object, Object]]:
    for name, pod in _workloads(objects):
        for container in pod["spec"]["containers"]:
            yield f"{name} {container['name']}", pod, container


def _fits(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def _selected(objects: Sequence[Object], selector: Mapping[str, str]) -> list[Object]:
    return [pod for _, pod in _workloads(objects) if _fits(selector, pod["metadata"]["labels"])]


def _port_names(pods: Sequence[Object]) -> set[str]:
    return {port["name"] for pod in pods for each in pod["spec"]["containers"] for port in each.get("ports", ())}


def _selectors(each: Object) -> Iterator[Mapping[str, str]]:
    """Yield what an object selects pods of its own release by."""
    spec = each.get("spec", {})
    if each["kind"] == "Service":
        yield spec["selector"]
    elif each["kind"] == "NetworkPolicy":
        yield spec["podSelector"]["matchLabels"]
        for rule in spec["ingress"]:
            yield from (peer["podSelector"]["matchLabels"] for peer in rule["from"] if "podSelector" in peer)
    elif each["kind"] in {"PodDisruptionBudget", "Deployment", "StatefulSet"}:
        yield spec["selector"]["matchLabels"]


def selectors_find_pods(objects: Sequence[Object]) -> Iterator[str]:
    """Every selector fits the labels of some pod, and only those of one workload."""
    for each in objects:
        for selector in _selectors(each):
            found = len(_selected(objects, selector))
            if found != 1:
                yield f"{each['kind']} {each['metadata']['name']} selects {found} workloads by {selector}"


def monitors_find_services(objects: Sequence[Object]) -> Iterator[str]:
    """A ServiceMonitor finds exactly one Service, which has its port, and asks for a page that there is."""
    for each in (one for one in objects if one["kind"] == "ServiceMonitor"):
        selector = each["spec"]["selector"]["matchLabels"]
        services = [s for s in objects if s["kind"] == "Service" and _fits(selector, s["metadata"]["labels"])]
        endpoint = each["spec"]["endpoints"][0]
        ports = {port["name"] for service in services for port in service["spec"]["ports"]}
        if len(services) != 1 or endpoint["port"] not in ports or endpoint["path"] not in _PAGES:
            yield f"ServiceMonitor {each['metadata']['name']}: {len(services)} services, {endpoint}"


def ports_have_equal_names(objects: Sequence[Object]) -> Iterator[str]:
    """Ports that services, policies and probes name are ports of the pods that they mean."""
    for each in objects:
        wanted: list[Any] = []
        if each["kind"] == "Service":
            wanted = [port["targetPort"] for port in each["spec"]["ports"]]
        elif each["kind"] == "NetworkPolicy":
            wanted = [port["port"] for rule in each["spec"]["ingress"] for port in rule["ports"]]
        if wanted:
            known = _port_names(_selected(objects, next(iter(_selectors(each)))))
            yield from (
                f"{each['kind']} {each['metadata']['name']}: no port {port}" for port in wanted if port not in known
            )
    for name, _, container in _containers(objects):
        known = {port["name"] for port in container.get("ports", ())}
        for probe, asked in _probes(container):
            port = (asked.get("httpGet") or asked.get("tcpSocket") or {}).get("port")
            if port is not None and port not in known:
                yield f"{name} {probe}: no port {port}"


def ports_are_the_managers(objects: Sequence[Object]) -> Iterator[str]:
    """A manager's ports have the numbers that its settings have, in pods and services."""
    settings = Settings()
    numbers = {name: getattr(settings, field) for name, field in _PORTS.items()}
    for name, _, container in _containers(objects):
        if container["name"] == "kvcm":
            found = {port["name"]: port["containerPort"] for port in container["ports"]}
            if found != numbers:
                yield f"{name} has ports {found}, must have {numbers}"
    for each in (one for one in objects if one["kind"] == "Service"):
        for port in each["spec"]["ports"]:
            if port["name"] in numbers and port["port"] != numbers[port["name"]]:
                yield f"Service {each['metadata']['name']}: {port}"


def _probes(container: Object) -> Iterator[tuple[str, Object]]:
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        if name in container:
            yield name, container[name]


def probes_ask_for_pages(objects: Sequence[Object]) -> Iterator[str]:
    """Everything that runs has three probes; a manager's ask for the right page, by TLS where its ports speak it."""
    pages = {"startupProbe": "startupz", "livenessProbe": "livez", "readinessProbe": "readyz"}
    for name, pod, container in _containers(objects):
        if "restartPolicy" in pod["spec"]:  # runs once
            continue
        found = dict(_probes(container))
        yield from (f"{name} has no {probe}" for probe in pages if probe not in found)
        scheme = "HTTPS" if "kvcm.tls.cert_file" in settings_of(objects) else "HTTP"
        for probe, asked in found.items() if container["name"] == "kvcm" else ():
            http, command = asked.get("httpGet", {}), asked.get("exec", {}).get("command", [])
            by_http = (http.get("path"), http.get("scheme", "HTTP")) == (f"/{pages[probe]}", scheme)
            if not by_http and command != ["python", "-m", "kvcm.probe", pages[probe]]:
                yield f"{name} {probe} asks {asked}"


def settings_of(objects: Sequence[Object]) -> dict[str, str]:
    """Return the settings of the managers: of the file, of -e, of the environment."""
    found: dict[str, str] = {}
    for each in (one for one in objects if one["kind"] == "ConfigMap"):
        lines = each["data"].get("kvcm.conf", "").splitlines()
        pairs = (line.partition("#")[0].strip().partition("=") for line in lines)
        found.update({key: value for key, _, value in pairs if key})
    for _, _, container in _containers(objects):
        arguments = container.get("args", [])
        pairs = (value.partition("=") for option, value in pairwise(arguments) if option == "-e")
        found.update({key: value for key, _, value in pairs})
        found.update({each["name"]: each.get("value", "") for each in container.get("env", ()) if "." in each["name"]})
    return found


def settings_exist(objects: Sequence[Object]) -> Iterator[str]:
    """Every `kvcm.…` is a setting; keys are asked for."""
    found = settings_of(objects)
    yield from (f"{key} is no setting" for key in found if key not in _KNOWN)
    if found.get("kvcm.auth.mode") != "required":
        yield "keys are not required"


def drain_fits_the_grace_period(objects: Sequence[Object]) -> Iterator[str]:
    """The kubelet kills no manager that still drains."""
    settings = settings_of(objects)
    drain = sum(int(settings[f"kvcm.service.drain_{what}_ms"]) for what in ("delay", "timeout")) / 1000
    for name, pod, container in _containers(objects):
        if container["name"] == "kvcm":
            sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            grace = pod["spec"]["terminationGracePeriodSeconds"]
            if grace < sleep + drain + _CLOSING_SECONDS:
                yield f"{name} is killed after {grace} s, needs {sleep + drain:g} and {_CLOSING_SECONDS} s"


def paths_are_mounted(objects: Sequence[Object]) -> Iterator[str]:
    """Files that settings name are mounted, and every secret that is mounted is named."""
    paths = {key: path for key, path in settings_of(objects).items() if path.startswith("/") and "roots" not in key}
    for name, pod, container in _containers(objects):
        if container["name"] != "kvcm":
            continue
        mounted = dict(_mounted_files(pod, container))
        environment = {each.get("value", "") for each in container.get("env", ())}
        named = {*paths.values(), *environment}
        yield from (
            f"{name}: {key} names {path}, which is not mounted" for key, path in paths.items() if path not in mounted
        )
        yield from (
            f"{name}: no setting reads {path} of {secret}"
            for path, secret in mounted.items()
            if secret and path not in named
        )
        yield from _mount_faults(name, pod, container)


def _mount_faults(name: str, pod: Object, container: Object) -> Iterator[str]:
    volumes = {each["name"] for each in pod["spec"].get("volumes", ())}
    mounts = [each["name"] for each in container["volumeMounts"]]
    yield from (f"{name}: no volume {mount}" for mount in mounts if mount not in volumes)
    yield from (f"{name}: no container mounts {volume}" for volume in volumes - set(mounts))
    writable = {each["mountPath"] for each in container["volumeMounts"] if not each.get("readOnly")}
    yield from (f"{name}: {path} can be written" for path in writable if not path.startswith(("/tmp", "/mnt/")))


def _mounted_files(pod: Object, container: Object) -> Iterator[tuple[str, str]]:
    """Yield the files of secrets and settings, with the name of the secret."""
    mounts = {each["name"]: PurePosixPath(each["mountPath"]) for each in container["volumeMounts"]}
    for volume in pod["spec"].get("volumes", ()):
        if "configMap" in volume:
            files = ("kvcm.conf", "startup.json", "gateway.toml")
            yield from ((str(mounts[volume["name"]] / file), "") for file in files)
        for item in volume.get("secret", {}).get("items", ()):
            yield str(mounts[volume["name"]] / item["path"]), volume["secret"]["secretName"]


def storages_are_mounted(objects: Sequence[Object]) -> Iterator[str]:
    """Below an allowed root lies every mounted storage."""
    roots = settings_of(objects)["kvcm.storage.allowed_roots"].split(",")
    for name, _, container in _containers(objects):
        for mount in container.get("volumeMounts", ()) if container["name"] == "kvcm" else ():
            path = PurePosixPath(mount["mountPath"])
            if str(path).startswith("/mnt/") and not any(path.is_relative_to(r) for r in roots):
                yield f"{name}: {path} is below none of {roots}"


def images_stay(objects: Sequence[Object]) -> Iterator[str]:
    """An image is named by a tag that does not move, or a digest."""
    for name, _, container in _containers(objects):
        if not re.fullmatch(r"[\w./:-]+(:v?\d[\w.-]*|@sha256:[0-9a-f]{64})", container["image"]):
            yield f"{name} is of image {container['image']}"


def pods_may_do_nothing(objects: Sequence[Object]) -> Iterator[str]:
    """Pods run as a user of their own, with a root that cannot be written, no capability and no token."""
    for name, pod, container in _containers(objects):
        of_pod, own = pod["spec"]["securityContext"], container["securityContext"]
        holds = {
            "runs as a user": of_pod["runAsNonRoot"] is True and of_pod["runAsUser"] >= 100,
            "has the usual seccomp profile": of_pod["seccompProfile"] == {"type": "RuntimeDefault"},
            "cannot write its root": own["readOnlyRootFilesystem"] is True,
            "gets no privilege": own["allowPrivilegeEscalation"] is False,
            "has no capability": own["capabilities"] == {"drop": ["ALL"]},
            "has no token": pod["spec"]["automountServiceAccountToken"] is False,
            "gets no variables of services": pod["spec"]["enableServiceLinks"] is False,
            "says what it takes": {"cpu", "memory"} <= container["resources"]["requests"].keys(),
            "is limited in memory": "memory" in container["resources"]["limits"],
            "shares nothing of the host": not {"hostNetwork", "hostPID", "hostIPC"} & pod["spec"].keys(),
        }
        yield from (f"{name}: not so that it {what}" for what, is_so in holds.items() if not is_so)


def the_user_is_the_image_s(objects: Sequence[Object]) -> Iterator[str]:
    """Managers run as the user that the Dockerfile makes."""
    dockerfile = Path(__file__).parents[2] / "Dockerfile"
    (user,) = (
        set(re.findall(r"^USER (\d+):\d+$", dockerfile.read_text(), re.MULTILINE)) if dockerfile.exists() else {"10001"}
    )
    for name, pod, container in _containers(objects):
        context = pod["spec"]["securityContext"]
        ids = {context["runAsUser"], context["runAsGroup"], context["fsGroup"]}
        if container["name"] in ("kvcm", "gateway") and ids != {int(user)}:
            yield f"{name} runs as {ids}, the image as {user}"


def a_rollout_keeps_all_replicas(objects: Sequence[Object]) -> Iterator[str]:
    """A new manager is there before an old one goes, and a drained node takes one of several."""
    for each in objects:
        spec = each.get("spec", {})
        if each["kind"] == "Deployment":
            if spec["strategy"]["rollingUpdate"] != {"maxUnavailable": 0, "maxSurge": 1}:
                yield f"Deployment {each['metadata']['name']}: {spec['strategy']}"
            least = 2 if each["metadata"]["labels"]["app.kubernetes.io/component"] == "gateway" else 3
            if spec.get("replicas", least) < least:
                yield f"Deployment {each['metadata']['name']} has {spec['replicas']} replicas"
        if each["kind"] == "PodDisruptionBudget" and spec["maxUnavailable"] not in (1, "25%"):
            yield f"PodDisruptionBudget {each['metadata']['name']}: {spec['maxUnavailable']}"


def gateways_fit_their_settings(objects: Sequence[Object]) -> Iterator[str]:
    """A gateway can read its file, which names mounted secrets, a manager that is there, and engines in its reach."""
    for name, pod, container in _containers(objects):
        if container["name"] != "gateway":
            continue
        (text,) = (each["data"]["gateway.toml"] for each in objects if "gateway.toml" in each.get("data", {}))
        try:
            settings = _gateway_settings(text)
        except ConfigError as error:
            yield f"{name}: {error}"
            return
        named = {path for key in _GATEWAY_FILES if (path := getattr(settings, key))}
        mounted = {path for path, secret in _mounted_files(pod, container) if secret}
        yield from (f"{name}: {path} is named or mounted alone" for path in named ^ mounted)
        yield from _mount_faults(name, pod, container)
        if {port["name"]: port["containerPort"] for port in container["ports"]} != {"gateway": settings.port}:
            yield f"{name} has ports {container['ports']}"
        sleep = int(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0, 0])[1])
        if pod["spec"]["terminationGracePeriodSeconds"] < sleep + settings.drain_timeout_ms / 1000 + 5:
            yield f"{name} is killed while it drains"
        yield from _unreached(name, settings, objects)


_GATEWAY_FILES = ("api_key_file", "engine_key_file", "manager_key_file", "manager_ca_file")


def _gateway_settings(text: str) -> GatewaySettings:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "gateway.toml"
        file.write_text(text)
        return load_gateway_settings(file, {})


def _unreached(name: str, settings: GatewaySettings, objects: Sequence[Object]) -> Iterator[str]:
    services = {f"{each['metadata']['name']}.{each['metadata']['namespace']}.svc:{port['port']}"
                for each in objects if each["kind"] == "Service" for port in each["spec"]["ports"]}  # fmt: skip
    if settings.manager and settings.manager not in services:
        yield f"{name}: no Service {settings.manager}"
    for each in (one for one in objects if one["kind"] == "NetworkPolicy"):
        if each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "gateway":
            ports = {port["port"] for rule in each["spec"]["egress"] for port in rule["ports"]}
            yield from (
                f"{name} may not reach {engine.name}"
                for engine in settings.engines
                if int(engine.name.rpartition(":")[2]) not in ports
            )


RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        selectors_find_pods, monitors_find_services, ports_have_equal_names, ports_are_the_managers,
        probes_ask_for_pages, settings_exist, drain_fits_the_grace_period, paths_are_mounted, storages_are_mounted,
        images_stay, pods_may_do_nothing, the_user_is_the_image_s, a_rollout_keeps_all_replicas,
        gateways_fit_their_settings,
    )
}  # fmt: skip
