"""deploy/k8s/examples/vllm.yaml: engines with a subscriber beside each, as the gateway of the chart wants them."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from command_lines import check_subscriber
from composed import ROOT
from manifests import Object, one
from schemas import VERSIONS, check_object

from kvcm.connectors.events.options import SubscriberOptions, parse_arguments
from kvcm.gateway.settings import EngineAddress

EXAMPLE = ROOT / "deploy/k8s/examples/vllm.yaml"
OBJECTS: list[Object] = list(yaml.safe_load_all(EXAMPLE.read_text()))
POD = one(OBJECTS, "StatefulSet", "vllm")["spec"]["template"]["spec"]
_FIRST_WITH_SIDECARS = "1.29"


def sidecar(pod: Object) -> Object:
    (found,) = pod["initContainers"]
    return dict(found)


def words_of(pod: Object, number: int = 0, namespace: str = "engines") -> list[str]:
    """Return the command line of a pod's subscriber, with its variables in their places."""
    values = {"metadata.name": f"vllm-{number}", "metadata.namespace": namespace}
    words = list(sidecar(pod)["args"])
    for each in sidecar(pod)["env"]:
        value = values[each["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in each else each["value"]
        words = [word.replace(f"$({each['name']})", value) for word in words]
    return words


def options_of(pod: Object, number: int = 0) -> SubscriberOptions:
    return parse_arguments(words_of(pod, number))


def faults(pod: Object) -> Iterator[str]:
    """Yield what keeps a pod's subscriber from doing its work, or from being as harmless as it can be."""
    container = sidecar(pod)
    context = container["securityContext"]
    holds = {
        "is a sidecar": container.get("restartPolicy") == "Always",
        "runs as the image's user": context.get("runAsUser") == pod["securityContext"]["fsGroup"] == 10001,
        "is not root": context.get("runAsNonRoot") is True,
        "cannot write its root": context.get("readOnlyRootFilesystem") is True,
        "gets no privilege": context.get("allowPrivilegeEscalation") is False,
        "has no capability": context.get("capabilities") == {"drop": ["ALL"]},
        "is limited": "memory" in container["resources"]["limits"],
        "has no secret in its command line": not [word for word in container["args"] if "kvcm_" in word],
        "has an image that stays": re.fullmatch(r"[\w./-]+:\d[\w.]*", container["image"]) is not None,
    }
    yield from (f"not so that it {what}" for what, is_so in holds.items() if not is_so)
    yield from _probe_faults(pod)
    yield from _secret_faults(pod)


def _probe_faults(pod: Object) -> Iterator[str]:
    container = sidecar(pod)
    host, _, port = options_of(pod).listen.rpartition(":")
    ports = {each["name"]: str(each["containerPort"]) for each in container["ports"]}
    if host not in ("0.0.0.0", "[::]"):
        yield f"the kubelet does not reach {host}"
    for probe in ("startupProbe", "livenessProbe"):
        asked = container.get(probe, {}).get("httpGet", {})
        if (asked.get("path"), ports.get(asked.get("port"))) != ("/livez", port):
            yield f"{probe} asks {asked}"


def _secret_faults(pod: Object) -> Iterator[str]:
    container = sidecar(pod)
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    files = {
        str(PurePosixPath(mounts[volume["name"]]["mountPath"]) / item["path"])
        for volume in pod["volumes"]
        if "secret" in volume and mounts.get(volume["name"], {}).get("readOnly")
        for item in volume["secret"]["items"]
    }
    named = {each["value"] for each in container["env"] if each["name"] == "KVCM_KEY_FILE"}
    if files != named:
        yield f"{named} is named, {files} are mounted"


@pytest.mark.parametrize("version", [each for each in VERSIONS if each > _FIRST_WITH_SIDECARS])
def test_every_object_is_one_of_kubernetes(version: str) -> None:
    for each in OBJECTS:
        check_object(each, version)


def test_the_subscriber_is_as_it_should_be() -> None:
    assert list(faults(POD)) == []


@pytest.mark.parametrize(
    ("path", "defect"),
    [
        ("", {"restartPolicy": None}),
        ("securityContext", {"runAsUser": 0}),
        ("securityContext", {"readOnlyRootFilesystem": False}),
        ("securityContext", {"capabilities": {}}),
        ("startupProbe.httpGet", {"path": "/health"}),
        ("livenessProbe.httpGet", {"port": "other"}),
        ("ports.0", {"containerPort": 9467}),
        ("volumeMounts.0", {"mountPath": "/run/other"}),
        ("env.2", {"value": "/nowhere"}),
        ("", {"image": "kvcm:latest"}),
    ],
)
def test_defects_are_found(path: str, defect: Mapping[str, Any]) -> None:
    pod = copy.deepcopy(POD)
    place: Any = pod["initContainers"][0]
    for name in filter(None, path.split(".")):
        place = place[int(name) if name.isdigit() else name]
    place.update(defect)
    assert list(faults(pod)) != []


def test_the_subscriber_starts_with_its_command_line(tmp_path: Path) -> None:
    words = [word for word in words_of(POD) if "--listen" not in word and "--manager" not in word]
    check_subscriber([*words, "--manager=127.0.0.1:1"], {}, tmp_path / "log")


def test_engine_and_subscriber_agree() -> None:
    (engine,) = POD["containers"]
    words = engine["args"]
    (options,) = options_of(POD).engines
    assert f"--block-size={options.block_tokens}" in words
    assert options.engine_url.endswith(":8000")
    assert "--port=8000" in words
    (events,) = [word.partition("=")[2] for word in words if word.startswith("--kv-events-config=")]
    settings = json.loads(events)
    assert settings["enable_kv_cache_events"] is True
    # vLLM binds to a wildcard and connects to anything else; the subscriber connects.
    assert settings["endpoint"].startswith("tcp://*:")
    assert settings["replay_endpoint"].startswith("tcp://*:")
    assert not options.binds


def test_ports_of_events_are_closed() -> None:
    policy = one(OBJECTS, "NetworkPolicy", "vllm")["spec"]
    containers = [*POD["initContainers"], *POD["containers"]]
    ports = {port["name"] for each in containers for port in each["ports"]}
    allowed = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert allowed == ports == {"openai", "health"}
    assert "Ingress" in policy["policyTypes"]


def test_the_document_gives_engines_the_names_that_subscribers_report() -> None:
    text = (ROOT / "docs/kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n(gateway:.*?)```", text, re.DOTALL)
    engines = [EngineAddress.parse(each) for each in yaml.safe_load(block)["gateway"]["engines"]]
    options = [options_of(POD, number).engines[0] for number in range(len(engines))]
    assert len(engines) == one(OBJECTS, "StatefulSet", "vllm")["spec"]["replicas"]
    assert [each.name for each in engines] == [each.engine_address for each in options]
    assert {each.instance for each in engines} == {each.instance_id for each in options}


def test_the_document_makes_every_secret() -> None:
    text = (ROOT / "docs/kubernetes.md").read_text()
    (section,) = re.findall(r"^## Routing\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
    made = {(name, key) for name, key in re.findall(r"secret generic ([\w-]+) --from-file=([\w.]+)=", section)}
    chart = yaml.safe_load((ROOT / "deploy/helm/kvcm/values.yaml").read_text())["gateway"]
    (mounted,) = [each["secret"] for each in POD["volumes"] if "secret" in each]
    wanted = {(chart[name]["name"], chart[name]["key"]) for name in ("apiKeySecret", "managerKeySecret")}
    assert made == wanted | {(mounted["secretName"], mounted["items"][0]["key"])}
