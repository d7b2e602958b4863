"""deploy/k8s is what Kubernetes and the manager expect, and hangs together."""

from __future__ import annotations

import copy
import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from invariants import RULES, settings_of
from manifests import KUSTOMIZED, ROOT, Object, built, kustomized, one, run_kustomize, source_hash
from schemas import VERSIONS, SchemaError, check_object

from kvcm.registry.startup_document import parse_startup_document


@functools.cache
def _objects(name: str) -> tuple[Object, ...]:
    return tuple(kustomized(name))


@pytest.fixture(params=list(KUSTOMIZED))
def objects(request: pytest.FixtureRequest) -> list[Object]:
    return copy.deepcopy(list(_objects(request.param)))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_one_of_kubernetes(objects: list[Object], version: str) -> None:
    for each in objects:
        check_object(each, version)


@pytest.mark.parametrize("rule", RULES)
def test_what_belongs_together_fits(objects: list[Object], rule: str) -> None:
    assert list(RULES[rule](objects)) == []


def test_the_first_storage_and_group_can_be_read(objects: list[Object]) -> None:
    (settings,) = (each for each in objects if "startup.json" in each.get("data", {}))
    document = parse_startup_document(settings["data"]["startup.json"])
    assert document.storage.global_unique_name in document.group.storage_candidates
    mounts = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    root = json.loads(settings["data"]["startup.json"])["storage_config"]["storage_spec"]["root_path"]
    assert root.rstrip("/") in {mount["mountPath"] for mount in mounts}


def test_changed_settings_are_rolled_out(objects: list[Object]) -> None:
    volumes = one(objects, "Deployment")["spec"]["template"]["spec"]["volumes"]
    (name,) = (volume["configMap"]["name"] for volume in volumes if "configMap" in volume)
    assert re.fullmatch("kvcm-settings-[a-z0-9]{10}", name)
    assert one(objects, "ConfigMap", name)


def test_only_managers_reach_the_bundled_store() -> None:
    policy = one(_objects("complete"), "NetworkPolicy", "kvcm-valkey")["spec"]
    assert policy["egress"] == []
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "manager"


def test_with_tls_prometheus_asks_by_tls() -> None:
    (endpoint,) = one(_objects("complete"), "ServiceMonitor")["spec"]["endpoints"]
    names = one(_objects("complete"), "Certificate")["spec"]["dnsNames"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] in names


def test_the_rules_are_those_of_prometheus() -> None:
    checked = subprocess.run(
        [sys.executable, str(ROOT / "deploy/prometheus/copies.py"), "--check"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("name", KUSTOMIZED)
def test_the_committed_output_of_kustomize_is_of_these_files(name: str) -> None:
    said = f"{built(name)} is old: run python tests/deploy/manifests.py where kubectl is"
    assert source_hash() in built(name).read_text(), said


@pytest.mark.parametrize("name", KUSTOMIZED)
def test_the_committed_output_is_that_of_kustomize(name: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on the PATH: the tests check the committed files instead")
    assert built(name).read_text().partition("\n")[2].partition("\n")[2] == run_kustomize(KUSTOMIZED[name])


def test_the_version_is_the_one_that_comes() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    chart = (ROOT / "deploy/helm/kvcm/Chart.yaml").read_text()
    (coming,) = re.findall(r'^fallback_version = "([\d.]+)\.dev', project, re.MULTILINE)
    tags = {re.findall(r'newTag: "(.*)"', (path / "kustomization.yaml").read_text())[0] for path in KUSTOMIZED.values()}
    assert tags == {coming}
    assert re.findall(r'^(?:version|appVersion): "?([\d.]+)"?$', chart, re.MULTILINE) == [coming, coming]


def test_a_kustomization_of_one_s_own_is_made_as_printed(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on the PATH")
    text = (ROOT / "docs/kubernetes.md").read_text()
    (block,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", text, re.DOTALL)
    (tmp_path / "kustomization.yaml").write_text(block)
    shutil.copytree(ROOT / "deploy/k8s", tmp_path / "kvcm/deploy/k8s")
    objects = run_kustomize(tmp_path)
    assert "image: registry.example/kvcm:0.2.0" in objects
    assert "storage: 10Ti" in objects
    assert "name: kvcm-valkey" in objects


def _pod(objects: list[Object]) -> Object:
    template: Object = one(objects, "Deployment")["spec"]["template"]
    return template


def _container(objects: list[Object]) -> Object:
    container: Object = _pod(objects)["spec"]["containers"][0]
    return container


def _secret_item(objects: list[Object]) -> Object:
    (volume,) = (each for each in _pod(objects)["spec"]["volumes"] if each["name"] == "store")
    item: Object = volume["secret"]["items"][0]
    return item


@pytest.mark.parametrize(
    ("rule", "place", "defect"),
    [
        ("selectors_find_pods", lambda o: _pod(o)["metadata"]["labels"], {"app.kubernetes.io/name": "x"}),
        ("ports_have_equal_names", lambda o: one(o, "Service")["spec"]["ports"][0], {"targetPort": "rpc"}),
        ("ports_are_the_managers", lambda o: _container(o)["ports"][0], {"containerPort": 6380}),
        ("probes_ask_for_pages", lambda o: _container(o)["livenessProbe"]["httpGet"], {"path": "/readyz"}),
        ("settings_exist", lambda o: _container(o)["env"][0], {"name": "kvcm.servce.host"}),
        ("drain_fits_the_grace_period", lambda o: _pod(o)["spec"], {"terminationGracePeriodSeconds": 30}),
        ("drain_fits_the_grace_period", _container, {"lifecycle": {"preStop": {"sleep": {"seconds": 10}}}}),
        ("paths_are_mounted", _secret_item, {"path": "url"}),
        ("paths_are_mounted", lambda o: _container(o)["volumeMounts"][0], {"readOnly": False}),
        ("storages_are_mounted", lambda o: _container(o)["volumeMounts"][-1], {"mountPath": "/mnt/other"}),
        ("images_stay", _container, {"image": "kvcm:latest"}),
        ("images_stay", _container, {"image": "registry.example:5000/kvcm"}),
        ("the_user_is_the_image_s", lambda o: _pod(o)["spec"]["securityContext"], {"runAsUser": 0}),
        ("pods_may_do_nothing", lambda o: _container(o)["securityContext"], {"readOnlyRootFilesystem": False}),
        (
            "a_rollout_keeps_all_replicas",
            lambda o: one(o, "Deployment")["spec"]["strategy"]["rollingUpdate"],
            {"maxUnavailable": 1},
        ),
    ],
)
def test_defects_are_found(rule: str, place: Callable[[list[Object]], Object], defect: Object) -> None:
    objects = copy.deepcopy(list(_objects("base")))
    place(objects).update(defect)
    assert list(RULES[rule](objects)) != []


@pytest.mark.parametrize(
    ("kind", "field"),
    [("Deployment", "replica"), ("PodDisruptionBudget", "maxUnavailabel"), ("ServiceMonitor", "jobLable")],
)
def test_a_field_that_does_not_exist_is_found(kind: str, field: str) -> None:
    found = copy.deepcopy(one(_objects("complete"), kind))
    found["spec"][field] = 1
    with pytest.raises(SchemaError, match=field):
        check_object(found, VERSIONS[-1])


def test_the_docs_have_the_settings_of_the_drain() -> None:
    settings = settings_of(_objects("base"))
    spent = [int(settings[f"kvcm.service.drain_{what}_ms"]) // 1000 for what in ("delay", "timeout")]
    grace = one(_objects("base"), "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    text = (ROOT / "docs/kubernetes.md").read_text()
    assert f"{spent[0]} s + {spent[1]} s + {grace - sum(spent)} s = {grace} s" in text
