"""docker-compose.yml: valid by the specification's schema, and safe in what the schema does not know."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_lines import check_gateway, check_subscriber
from composed import COMPOSE_FILE, JOBS, MANAGERS, ROOT, bind_mounts, composed, settings_of, words_of

from kvcm.config import Settings
from kvcm.connectors.events.options import parse_arguments
from kvcm.gateway.settings import EngineAddress
from kvcm.model.storages import NfsStorageSpec
from kvcm.registry.startup_document import parse_startup_document

Service = dict[str, Any]
Rule = Callable[[str, Service], Iterator[str]]

_FOREIGN_ENVIRONMENT = re.compile(r"GF_[A-Z_]+|KVCM_(MANAGER|KEY_FILE)|OMP_NUM_THREADS")


def test_the_specification_allows_it() -> None:
    checked = subprocess.run(
        [Path(sys.executable).parent / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", COMPOSE_FILE],
        capture_output=True, text=True,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout


def may_do_nothing(name: str, service: Service) -> Iterator[str]:
    holds = {
        "is not root": not str(service.get("user", "0")).startswith(("0", "root")),
        "cannot write its root": service.get("read_only") is True,
        "has no capability": service.get("cap_drop") == ["ALL"] and "cap_add" not in service,
        "gets no privilege": "no-new-privileges:true" in service.get("security_opt", ()),
        "is not privileged": not {"privileged", "pid", "ipc", "devices"} & service.keys(),
        "keeps scratch in memory": any(each.startswith("/tmp") for each in service.get("tmpfs", ())),
    }
    yield from (f"{name}: not so that it {what}" for what, is_so in holds.items() if not is_so)


def is_bounded(name: str, service: Service) -> Iterator[str]:
    limits = service.get("deploy", {}).get("resources", {}).get("limits", {})
    if {"cpus", "memory", "pids"} - limits.keys():
        yield f"{name} is not limited in everything: {limits}"
    if service["logging"]["options"].keys() != {"max-size", "max-file"}:
        yield f"{name} may fill the disk with its log"


def comes_back(name: str, service: Service) -> Iterator[str]:
    wanted = "no" if name in JOBS else "unless-stopped"
    if service.get("restart") != wanted:
        yield f"{name} restarts {service.get('restart')}, not {wanted}"
    has_check = "test" in service.get("healthcheck", {})
    if has_check == (name in JOBS):
        yield f"{name}: {service.get('healthcheck')}"


def listens_on_loopback(name: str, service: Service) -> Iterator[str]:
    for port in service.get("ports", ()):
        if not re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port):
            yield f"{name} publishes {port}"


def stays_as_it_is(name: str, service: Service) -> Iterator[str]:
    _, _, tag = service["image"].rpartition(":")
    if not re.search(r"\d+\.\d+", tag):
        yield f"{name} runs image {service['image']}"


def reports_no_secret(name: str, service: Service) -> Iterator[str]:
    for key, value in service.get("environment", {}).items():
        if re.search(r"PASSWORD|SECRET|TOKEN|KEY", key) and not str(value).startswith(("/secrets/", "/keys/")):
            yield f"{name} has {key} in its environment"
    for word in words_of(service):
        if re.search(r"://[^/]*:[^/]*@|requirepass|password=", word):
            yield f"{name} has a password in its command line"


def has_known_environment(name: str, service: Service) -> Iterator[str]:
    known = Settings().described()
    for key in service.get("environment", {}):
        if key not in known and not _FOREIGN_ENVIRONMENT.fullmatch(key):
            yield f"{name}: {key}"


def finds_its_files(name: str, service: Service) -> Iterator[str]:
    for source in bind_mounts(service).values():
        if not source.exists():
            yield f"{name}: {source} is not there"
    for each in service.get("volumes", ()):
        if each["type"] == "bind" and not each.get("read_only"):
            yield f"{name} may write {each['source']}"


RULES: tuple[Rule, ...] = (
    may_do_nothing, is_bounded, comes_back, listens_on_loopback, stays_as_it_is, reports_no_secret,
    has_known_environment, finds_its_files,
)  # fmt: skip


def broken(services: dict[str, Service], rule: Rule) -> list[str]:
    return [fault for name, service in services.items() for fault in rule(name, service)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_service(rule: Rule) -> None:
    assert not broken(composed()["services"], rule)


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        (may_do_nothing, {"user": "0:0"}),
        (may_do_nothing, {"read_only": False}),
        (may_do_nothing, {"cap_add": ["NET_ADMIN"]}),
        (may_do_nothing, {"security_opt": []}),
        (is_bounded, {"deploy": {"resources": {"limits": {"cpus": "1"}}}}),
        (comes_back, {"restart": "always"}),
        (comes_back, {"healthcheck": {"disable": True}}),
        (listens_on_loopback, {"ports": ["6382:6382"]}),
        (stays_as_it_is, {"image": "kvcm-server:latest"}),
        (reports_no_secret, {"environment": {"KVCM_KEY": "kvcm_a_b"}}),
        (reports_no_secret, {"command": ["serve", "--env=kvcm.registry_storage.uri=redis://:pw@valkey:6379"]}),
        (has_known_environment, {"environment": {"kvcm.service.rpc_prot": "1"}}),
        (finds_its_files, {"volumes": [{"type": "bind", "source": "./deploy/absent", "target": "/x"}]}),
    ],
)
def test_a_rule_notices_what_breaks_it(rule: Rule, change: Service) -> None:
    assert broken({"manager-1": composed()["services"]["manager-1"] | change}, rule)


@pytest.mark.parametrize("name", MANAGERS)
def test_settings_of_managers_are_known_and_used(name: str) -> None:
    service = composed()["services"][name]
    settings, known = settings_of(service), Settings().described()
    assert not settings.keys() - known.keys()
    assert settings["kvcm.auth.mode"] == "required"
    assert settings["kvcm.leader_elector.node_id"] == service["hostname"] == name
    seconds = (int(settings["kvcm.service.drain_delay_ms"]) + int(settings["kvcm.service.drain_timeout_ms"])) / 1000
    assert int(service["stop_grace_period"].removesuffix("s")) > seconds + 15


def test_managers_differ_in_name_and_published_ports_only() -> None:
    services = composed()["services"]
    same = [{**services[name], "ports": None, "environment": None, "hostname": None} for name in MANAGERS]
    assert same[0] == same[1] == same[2]
    published = [port.split(":")[1] for each in services.values() for port in each.get("ports", ())]
    assert len(published) == len(set(published))


def test_the_startup_document_is_one_for_the_shared_volume() -> None:
    services = composed()["services"]
    document = parse_startup_document(bind_mounts(services["manager-1"])["/etc/kvcm/startup.json"].read_text())
    assert document.storage.spec == NfsStorageSpec(root_path="/kv/", key_count_per_file=8)
    for name in (*MANAGERS, "engine"):
        assert {"type": "volume", "source": "kv", "target": "/kv"} in services[name]["volumes"], name
        assert services[name]["user"] == "10001:10001", name


def test_the_store_keeps_acknowledged_writes() -> None:
    command = composed()["services"]["valkey"]["command"]
    assert "--appendonly yes --appendfsync always" in command
    assert "--maxmemory-policy noeviction" in command
    networks = composed()["networks"]
    assert networks["store"]["internal"]
    reached = {name for name, each in composed()["services"].items() if "store" in each.get("networks", ())}
    assert reached == {"valkey", *MANAGERS}


def test_services_wait_for_what_they_need() -> None:
    services = composed()["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            wanted = "service_completed_successfully" if other in JOBS else "service_healthy"
            assert how == {"condition": wanted}, f"{name} → {other}"


def test_an_image_of_ours_is_built_by_one_service_that_the_others_wait_for() -> None:
    services = composed()["services"]
    builders = {each["image"]: name for name, each in services.items() if "build" in each}
    assert len(builders) == sum("build" in each for each in services.values()) == 2
    for name, service in services.items():
        if service["image"] in builders and "build" not in service:
            assert service["pull_policy"] == "never", name
            assert builders[service["image"]] in _awaited(services, name), name


def _awaited(services: dict[str, Service], name: str) -> set[str]:
    others = set(services[name].get("depends_on", {}))
    return others.union(*(_awaited(services, other) for other in others))


def _made_keys(directory: Path) -> dict[str, Path]:
    """Return the volume of keys with a file of each name that the job makes."""
    names = re.findall(r"\$2/([a-z]+\.key)", (ROOT / "deploy/compose/make_keys.sh").read_text())
    for name in names:
        (directory / name).write_text("kvcm_a_b\n")
        (directory / name).chmod(0o600)
    return {"/keys": directory}


def test_the_gateway_starts_with_its_command_line(tmp_path: Path) -> None:
    service = composed()["services"]["gateway"]
    assert {"type": "volume", "source": "keys", "target": "/keys", "read_only": True} in service["volumes"]
    check_gateway(words_of(service), _made_keys(tmp_path), tmp_path / "log")


def test_the_subscriber_starts_with_its_command_line(tmp_path: Path) -> None:
    service = composed()["services"]["subscriber"]
    assert service["entrypoint"] == ["kvcm-subscriber"]
    words = [word for word in words_of(service) if not word.startswith("--manager=")]
    log = tmp_path / "log"
    check_subscriber([*words, "--manager=127.0.0.1:1"], _made_keys(tmp_path), log)


def test_the_subscriber_reports_engines_under_the_names_that_the_gateway_asks_for() -> None:
    services = composed()["services"]
    (engine,) = [word.removeprefix("--engine=") for word in words_of(services["gateway"]) if "--engine=" in word]
    asked = EngineAddress.parse(engine)
    options = parse_arguments([word for word in words_of(services["subscriber"]) if "--key-file" not in word])
    (reported,) = options.engines
    assert (reported.engine_address, reported.instance_id) == (asked.name, asked.instance)
    assert options.managers == tuple(f"{name}:6381" for name in MANAGERS)
    for name in ("gateway", "subscriber"):
        assert services[name]["profiles"] == ["routing"]


def test_keys_of_the_gateway_and_the_subscriber_may_do_what_they_do_and_nothing_else() -> None:
    script = (ROOT / "deploy/compose/make_keys.sh").read_text()
    verbs = dict(re.findall(r'key "\$2/([a-z]+)\.key" .* --verb ([a-z]+)$', script, re.MULTILINE))
    assert (verbs["gateway"], verbs["subscriber"]) == ("score", "report")


def test_prometheus_scrapes_every_manager_with_its_key() -> None:
    document = yaml.safe_load((ROOT / "deploy/compose/prometheus.yml").read_text())
    (job,) = (each for each in document["scrape_configs"] if each["job_name"] == "kvcm")
    assert job["static_configs"] == [{"targets": [f"{name}:6492" for name in MANAGERS]}]
    assert job["authorization"]["credentials_file"] == "/secrets/prometheus.key"
    mounted = bind_mounts(composed()["services"]["prometheus"])
    assert all(path in mounted for path in document["rule_files"])


def test_grafana_is_reported_of_its_data_source_and_its_dashboards() -> None:
    folder = ROOT / "deploy/compose/grafana"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards/kvcm.yml").read_text())["providers"]
    grafana = composed()["services"]["grafana"]
    assert source["url"] == "http://prometheus:9090"
    dashboards = bind_mounts(grafana)[provider["options"]["path"]]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (dashboards / home.name).is_file()
