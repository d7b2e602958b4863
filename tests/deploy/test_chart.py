"""The chart, installed by Helm into a stand-in of a cluster: no Kubernetes is at hand."""

from __future__ import annotations

import copy
import itertools
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from authorities import Authority
from command_lines import check_gateway
from invariants import RULES, settings_of
from manifests import (
    CHART,
    VALUES,
    Installation,
    Object,
    has_helm,
    helm,
    installed,
    kustomized,
    one,
    upgraded,
    values_of,
)
from schemas import VERSIONS, check_object

from kvcm.registry.startup_document import parse_startup_document

pytestmark = pytest.mark.skipif(not has_helm(), reason="Helm is missing: make helm")

_CREATED_BY_OTHERS = {"kustomization", "Namespace"}
_OF_HELM = ("helm.sh/", "meta.helm.sh/", "app.kubernetes.io/managed-by", "app.kubernetes.io/version")


@pytest.fixture(scope="module")
def releases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Every file of values, installed. The cluster rejects objects that are not valid in its version."""
    names = {"everything": "prod"}
    wanted = [Installation(values_of(name), VERSIONS[1], names.get(name, "kvcm")) for name in VALUES]
    made = dict(zip(VALUES, installed(tmp_path_factory.mktemp("releases"), wanted), strict=True))
    assert {name: release.get("error") for name, release in made.items()} == dict.fromkeys(VALUES)
    return made


@pytest.fixture(params=list(VALUES))
def release(request: pytest.FixtureRequest, releases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return copy.deepcopy(releases[request.param])


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_of_kubernetes(release: dict[str, Any], version: str) -> None:
    for each in release["objects"]:
        check_object(each, version)


@pytest.mark.parametrize("rule", RULES)
def test_what_belongs_together_fits(release: dict[str, Any], rule: str) -> None:
    assert list(RULES[rule](release["objects"])) == []


def test_the_first_storage_and_group_can_be_read(release: dict[str, Any]) -> None:
    (settings,) = (each for each in release["objects"] if "startup.json" in each.get("data", {}))
    document = parse_startup_document(settings["data"]["startup.json"])
    assert document.storage.global_unique_name in document.group.storage_candidates


def test_with_its_defaults_it_is_what_the_plain_manifests_are(releases: dict[str, dict[str, Any]]) -> None:
    hooks = {"Pod kvcm-test"}
    ours = _comparable(releases["defaults"]["objects"])
    theirs = _comparable(kustomized("base"))
    assert ours.keys() - hooks == theirs.keys()
    for name, wanted in theirs.items():
        assert (name, ours[name]) == (name, wanted)


def _comparable(objects: list[Object]) -> dict[str, Any]:
    """The objects by kind and name, without what only one of the two ways has."""
    found = {}
    for each in copy.deepcopy(objects):
        if each["kind"] in _CREATED_BY_OTHERS:
            continue
        name = each["metadata"]["name"]
        if name.startswith("kvcm-settings-"):  # kustomize's hash
            name = name.rpartition("-")[0]
        found[f"{each['kind']} {name}"] = _plain(each)
    return found


def _plain(each: Object) -> Any:
    if each["kind"] == "ConfigMap":
        return settings_of([each]), json.loads(each["data"]["startup.json"])
    metadata = {key: value for key, value in each["metadata"]["labels"].items() if not key.startswith(_OF_HELM)}
    spec = each.get("spec", {})
    if each["kind"] == "NetworkPolicy":  # the chart also lets its own test in
        for rule in spec["ingress"]:
            rule["from"] = [peer for peer in rule["from"] if "podSelector" not in peer]
    if each["kind"] == "Service":
        spec.pop("type", None)  # ClusterIP, which is what it is anyway
    if each["kind"] == "Deployment":
        spec["template"]["metadata"].pop("annotations", None)
        for volume in spec["template"]["spec"]["volumes"]:
            if "configMap" in volume:
                volume["configMap"]["name"] = "kvcm-settings"
    return metadata, spec, each.get("automountServiceAccountToken")


def test_rules_are_those_of_prometheus(releases: dict[str, dict[str, Any]]) -> None:
    rule = one(releases["everything"]["objects"], "PrometheusRule", "prod-kv")
    assert rule["spec"] == one(kustomized("complete"), "PrometheusRule")["spec"]


def test_the_bundled_store_is_that_of_the_plain_manifests(releases: dict[str, dict[str, Any]]) -> None:
    ours = one(releases["everything"]["objects"], "ConfigMap", "prod-kv-valkey")["data"]["valkey.conf"]
    (theirs,) = (
        each["data"]["valkey.conf"] for each in kustomized("complete") if "valkey.conf" in each.get("data", {})
    )
    assert ours.split() == [*theirs.split(), "io-threads", "2", "maxmemory", "1gb"]


def test_notes_name_every_secret(release: dict[str, Any]) -> None:
    mounted = {
        volume["secret"]["secretName"]
        for each in release["objects"]
        if each["kind"] in {"Deployment", "StatefulSet"}
        for volume in each["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume and "ca" not in volume["name"] and volume["name"] != "store-tls"
    }
    assert mounted
    assert [name for name in mounted if name not in release["notes"]] == []


_ENGINE = {"url": "http://e:8000", "instance": "i"}
REFUSED: dict[str, dict[str, Any]] = {
    "replicaCont": {"replicaCont": 3},
    "replicaCount": {"replicaCount": 0},
    "/image/tag": {"image": {"tag": "latest"}},
    "service.host": {"settings": {"service.host": "0.0.0.0"}},
    "kvcm.service.drain_delay_ms": {"settings": {"kvcm.service.drain_delay_ms": 60000}},
    "kvcm.service.http_port": {"settings": {"kvcm.service.http_port": 8080}},
    "/storages/0": {"storages": [{"name": "a", "mountPath": "/mnt/a"}]},
    "/storages/1": {"storages": [{"name": n, "mountPath": f"/{n}", "size": "1Ti", "existingClaim": n} for n in "ab"]},
    "tls.existingSecret is needed": {"tls": {"enabled": True}},
    "/tls/clients/caSecret/name": {"tls": {"clients": {"auth": "required"}}},
    "serviceAccount.name is needed": {"serviceAccount": {"create": False}},
    "/drain/closingSeconds": {"drain": {"closingSeconds": 5}},
    "/podSecurityContext/runAsNonRoot": {"podSecurityContext": {"runAsNonRoot": False}},
    "/gateway/engines": {"gateway": {"enabled": True}},
    "/gateway/engines/0": {"gateway": {"enabled": True, "engines": [{"url": "http://e:8000"}]}},
    "/gateway/policy": {"gateway": {"policy": "fastest"}},
    "manager_ca_file": {"gateway": {"settings": {"manager_ca_file": "/x"}}},
    "a gateway shows managers a key and no certificate": {
        "gateway": {"enabled": True, "engines": [_ENGINE]},
        "tls": {"enabled": True, "existingSecret": "mine", "clients": {"auth": "required", "caSecret": {"name": "c"}}},
    },
}


def test_values_that_make_no_sense_are_refused_and_named(tmp_path: Path) -> None:
    releases = installed(tmp_path, [Installation(values) for values in REFUSED.values()])
    errors = {said: release["error"].replace("'", "") for said, release in zip(REFUSED, releases, strict=True)}
    assert {said: error for said, error in errors.items() if said not in error} == {}


ODD: list[dict[str, Any]] = [
    {"strategy": {"type": "Recreate", "rollingUpdate": None}},
    {"podSecurityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": None}},
    {"storages": [], "startup": {"storage_config": {"type": "dummy"}, "instance_group": {"name": "default"}}},
    {"networkPolicy": {"enabled": False}, "valkey": {"enabled": True}, "podDisruptionBudget": {"enabled": False}},
    {"tls": {"enabled": True, "existingSecret": "mine", "certManager": {"enabled": True}}},
    {
        "resources": {"limits": {"cpu": "2", "memory": "4Gi"}},
        "settings": {"kvcm.limits.keys_per_second": 1099511627776},
    },
    {"fullnameOverride": "x" * 63, "valkey": {"enabled": True}},
    {
        "storages": [
            {"name": "kv", "mountPath": "/kv/", "size": "1Ti"},
            {"name": "b", "mountPath": "/b/c", "size": "1Ti"},
        ]
    },
    {
        "gateway": {
            "enabled": True,
            "policy": "least_loaded",
            "engines": [{"url": "http://e:8000"}],
            "apiKeySecret": {"name": "", "key": "key"},
            "settings": {"max_buffered_bytes": 1099511627776, "log_format": "console"},
            "podDisruptionBudget": {"enabled": False},
            "drain": {"delaySeconds": 0},
        }
    },
]


def test_what_some_clusters_need_can_be_said(tmp_path: Path) -> None:
    releases = installed(tmp_path, [Installation(values) for values in ODD])
    assert [release.get("error") for release in releases] == [None] * len(ODD)
    names = [each["metadata"]["name"] for release in releases for each in release["objects"]]
    assert max(map(len, names)) <= 63
    settings = settings_of(releases[5]["objects"])
    assert settings["kvcm.limits.keys_per_second"] == "1099511627776"  # not 1.099511627776e+12
    assert one(releases[4]["objects"], "Certificate")["spec"]["secretName"] == "mine"
    assert settings_of(releases[7]["objects"])["kvcm.storage.allowed_roots"] == "/kv,/b"  # not "/"
    assert list(RULES["gateways_fit_their_settings"](releases[8]["objects"])) == []
    text = one(releases[8]["objects"], "ConfigMap", "kvcm-gateway")["data"]["gateway.toml"]
    assert "max_buffered_bytes = 1099511627776\n" in text
    assert "insecure = true" in text
    assert 'log_format = "console"\n' in text
    assert "asks clients for no key" in releases[8]["notes"]


def _gateway(objects: list[Object]) -> Object:
    pod: Object = one(objects, "Deployment", "kvcm-gateway")["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize(
    ("place", "defect"),
    [
        (lambda o: one(o, "ConfigMap", "kvcm-gateway")["data"], {"gateway.toml": "engines = ['http://e:9']"}),
        (lambda o: _gateway(o)["volumes"][1]["secret"]["items"][0], {"path": "other"}),
        (lambda o: _gateway(o)["containers"][0]["volumeMounts"][0], {"readOnly": False}),
        (lambda o: _gateway(o)["containers"][0]["ports"][0], {"containerPort": 8000}),
        (_gateway, {"terminationGracePeriodSeconds": 60}),
        (lambda o: one(o, "Service")["metadata"], {"name": "other"}),
        (lambda o: one(o, "NetworkPolicy", "kvcm-gateway")["spec"], {"egress": []}),
    ],
)
def test_defects_of_a_gateway_are_found(
    releases: dict[str, dict[str, Any]], place: Callable[[list[Object]], Object], defect: Object
) -> None:
    objects = copy.deepcopy(releases["gateway"]["objects"])
    place(objects).update(defect)
    assert list(RULES["gateways_fit_their_settings"](objects)) != []


def test_a_gateway_starts_with_its_file(releases: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    objects = releases["gateway"]["objects"]
    (container,) = _gateway(objects)["containers"]
    files = tmp_path / "files"
    for name in ("clients", "engines", "manager"):
        (files / name).mkdir(parents=True)
        (files / name / "key").write_text("kvcm_a_b\n")
        (files / name / "key").chmod(0o600)
    (files / "ca").mkdir()
    (files / "ca/ca.crt").write_bytes(Authority.make(tmp_path / "authority").pem)
    text = one(objects, "ConfigMap", "kvcm-gateway")["data"]["gateway.toml"]
    (files / "gateway.toml").write_text(text.replace("/run/secrets/kvcm/", f"{files}/"))
    check_gateway(container["args"], {"/etc/kvcm": files}, tmp_path / "log")


def test_a_gateway_is_off_unless_it_is_wanted(releases: dict[str, dict[str, Any]]) -> None:
    assert not [each for each in releases["everything"]["objects"] if "gateway" in each["metadata"]["name"]]
    kinds = [each["kind"] for each in releases["gateway"]["objects"] if each["metadata"]["name"] == "kvcm-gateway"]
    assert sorted(kinds) == [
        "ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "ServiceMonitor",
    ]  # fmt: skip


CHANGED: dict[str, Any] = {
    "image": {"tag": "0.2.1"}, "replicaCount": 5, "commonLabels": {"team": "b"}, "podLabels": {"tier": "cache"},
    "settings": {"kvcm.store.search_cache_bytes": 1 << 30}, "drain": {"delaySeconds": 20},
    "tls": {"enabled": True, "existingSecret": "mine"}, "resources": {"limits": {"memory": "4Gi"}},
    "valkey": {"enabled": True, "image": {"tag": "8.1.4"}, "settings": {"maxmemory": "1gb"}},
}  # fmt: skip


def test_a_release_is_upgraded_to_other_values(tmp_path: Path) -> None:
    release = upgraded(tmp_path, {"valkey": {"enabled": True}}, CHANGED)
    assert "error" not in release
    deployment = one(release["objects"], "Deployment")
    assert deployment["spec"]["replicas"] == 5
    assert deployment["metadata"]["labels"]["team"] == "b"
    assert one(release["objects"], "StatefulSet", "kvcm-valkey")["metadata"]["labels"]["team"] == "b"


def test_an_autoscaler_begins_with_as_many_as_there_are(tmp_path: Path) -> None:
    release = upgraded(tmp_path, {"replicaCount": 4}, {"autoscaling": {"enabled": True}})
    assert one(release["objects"], "Deployment")["spec"]["replicas"] == 4


@pytest.mark.parametrize("then", [{"valkey": {"enabled": True, "size": "40Gi"}}, {"nameOverride": "kv"}])
def test_what_cannot_be_changed_is_said_by_the_cluster(tmp_path: Path, then: dict[str, Any]) -> None:
    named: dict[str, Any] = {"fullnameOverride": "kvcm", "valkey": {"enabled": True}}
    assert "is immutable" in upgraded(tmp_path, named, {**named, **then})["error"]


def test_an_older_cluster_is_refused(tmp_path: Path) -> None:
    (release,) = installed(tmp_path, [Installation({}, "1.26")])
    assert "1.27" in release["error"]


def test_two_releases_in_one_namespace_share_nothing(tmp_path: Path, releases: dict[str, dict[str, Any]]) -> None:
    (other,) = installed(tmp_path, [Installation({}, release="other")])
    names = [
        {f"{each['kind']} {each['metadata']['name']}" for each in one["objects"]}
        for one in (other, releases["defaults"])
    ]
    assert not names[0] & names[1]


def test_every_value_says_what_it_is() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    sections = [number for number, line in enumerate(lines) if line and line[0].isalpha()]
    bare = [lines[number] for number in sections if not _explained(lines, number)]
    assert bare == []


def _explained(lines: list[str], number: int) -> bool:
    """A comment above it, above its neighbours, or within it."""
    above = number
    while above and lines[above - 1] and not lines[above - 1].startswith(("#", " ")):
        above -= 1
    block = itertools.takewhile(lambda line: line.startswith(" "), lines[number + 1 :])
    return lines[above - 1].startswith("#") or any(line.strip().startswith("#") for line in block)


def test_helm_finds_no_fault_and_packs_it(tmp_path: Path) -> None:
    nowhere = str(tmp_path / "none")
    reported, packed = helm(
        {"do": "lint", "chart": str(CHART), "kubeconfig": nowhere},
        {"do": "package", "chart": str(CHART), "directory": str(tmp_path), "kubeconfig": nowhere},
    )
    assert (reported["Errors"], [each for each in reported["Messages"] if each["Severity"] > 1]) == (None, [])
    with tarfile.open(packed["file"]) as archive:
        names = {Path(name).relative_to("kvcm") for name in archive.getnames()}
    assert names == {
        path.relative_to(CHART) for path in CHART.rglob("*") if path.is_file() and path.name != ".DS_Store"
    }
