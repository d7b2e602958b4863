"""The Dockerfile carried out, and its images run: alone as Docker runs them, and as docker-compose.yml says.

No user is root and no root can be written. With KVCM_TESTS=thorough also the demo's engine, and Prometheus, which is
asked everything that the dashboards ask.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from composed import MANAGERS, ROOT
from composition import Composition
from container_stand_in import Container, Network, Recipe
from image_build import Image, Workshop, can_build
from materials import SERVER_EXTRAS
from pods import may_isolate
from scraped import missing_series, scraped_managers
from waiting import until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not may_isolate(), reason="namespaces and mounts need root"),
    pytest.mark.skipif(not can_build(), reason="buildah or mmdebstrap is missing: make buildah"),
]

VERSION = "0.2.0.dev7"
DOCUMENT = ROOT / "docs/docker.md"
IS_THOROUGH = os.environ.get("KVCM_TESTS") == "thorough"
_ASK = """
import sys, urllib.request as u
key = open('/secrets/admin.key').read().strip() if len(sys.argv) > 2 else ''
request = u.Request(sys.argv[1], b'{}', {'authorization': 'Bearer ' + key} if key else {})
print(u.urlopen(request).read().decode())
"""


@pytest.fixture(scope="module", name="images")
def _images() -> Iterator[dict[str, Image]]:
    workshop = Workshop(ROOT / "build/images")
    try:
        images = {"server": workshop.built("server", SERVER_EXTRAS, VERSION)}
        if IS_THOROUGH:
            images["engine"] = workshop.built("engine", (*SERVER_EXTRAS, "engine"), VERSION)
        rows = [row for name, image in images.items() for row in _rows(name, image)]
        (ROOT / "build/images.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        yield images
    finally:
        workshop.close()


def _rows(name: str, image: Image) -> list[dict[str, Any]]:
    """Return the sizes as benchmarks write their figures."""
    sizes = {"unpacked": image.size_bytes, "of the package and what it needs": image.package_bytes}
    blank = {"unit": "B", "baseline": None, "ratio": None, "target": "", "ok": None}
    return [{"case": name, "metric": metric, "value": size, **blank} for metric, size in sizes.items()]


@pytest.fixture(name="image")
def _image(images: dict[str, Image]) -> Image:
    return images["server"]


@pytest.fixture(name="container")
def _container(image: Image, tmp_path: Path) -> Iterator[Container]:
    network, data = Network(), tmp_path / "data"
    data.mkdir()
    owner = (image.root / "data").stat()  # a new volume gets them from the image
    os.chown(data, owner.st_uid, owner.st_gid)
    data.chmod(stat.S_IMODE(owner.st_mode))
    recipe = Recipe(
        image.root,
        [*image.config["Entrypoint"], *image.config["Cmd"]],
        image.config["User"],
        dict(pair.split("=", 1) for pair in image.config["Env"]),
        volumes={"/data": (data, True)},
        directory=image.config["WorkingDir"],
    )
    container = Container(recipe, network, tmp_path / "container")
    try:
        yield container
    finally:
        container.kill()
        network.close()


def test_what_the_image_says_of_itself(image: Image) -> None:
    config = image.config
    assert config["User"] == "10001:10001"
    assert config["StopSignal"] == "SIGTERM"
    assert config["ExposedPorts"].keys() == {f"{port}/tcp" for port in (6381, 6382, 6491, 6492)}
    assert config["Volumes"].keys() == {"/data"}
    assert config["Labels"]["org.opencontainers.image.version"] == VERSION


def test_the_package_is_root_s_and_has_no_engine(image: Image) -> None:
    assert not [path for path in (image.root / "opt/kvcm").rglob("*") if path.lstat().st_uid]
    names = {path.name.lower() for path in (image.root / "opt/kvcm/lib/python3.11/site-packages").iterdir()}
    assert {"kvcm", "connectors", "opentelemetry", "aiohttp", "zmq"} <= names
    assert not names & {"torch", "transformers", "numba", "pip"}


def test_it_serves_is_healthy_writes_nowhere_else_and_drains(image: Image, container: Container) -> None:
    check = image.config["Healthcheck"]["Test"]
    until(lambda: container.is_healthy(check), "healthy")
    asked = container.execute(["env", "KVCM_KEY_FILE=/data/admin.key", "kvcm", "whoami", "--json"])
    assert json.loads(asked.stdout)["is_required"], asked
    assert VERSION in container.execute(["kvcm", "--version"]).stdout
    health = container.execute(["python", "-c", _ASK, "http://127.0.0.1:6492/api/checkHealth"])
    assert json.loads(health.stdout)["is_health"], health
    for user in ("10001:10001", "0:0"):
        for path in ("/opt/kvcm/x", "/etc/x", "/x"):
            written = container.execute(["touch", path], user)
            assert written.returncode != 0, path
            assert "Read-only file system" in written.stderr or user != "0:0", written.stderr
    assert container.execute(["touch", "/data/x", "/tmp/x"]).returncode == 0
    status = container.execute(["grep", "-E", "^(Uid|CapEff|CapBnd|NoNewPrivs)", "/proc/1/status"]).stdout
    assert re.findall(r"\w+", status) == [
        "Uid", *["10001"] * 4, "CapEff", "0" * 16, "CapBnd", "0" * 16, "NoNewPrivs", "1",
    ]  # fmt: skip
    assert container.stop() == 0, container.log.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kvcm", "gateway", "--policy", "round_robin", "--engine", "http://127.0.0.1:8000"], "serving"),
        (
            ["kvcm-subscriber", "--manager=127.0.0.1:6381", "--engine=vllm", "--engine-address=127.0.0.1:8000",
             "--instance-id=model", "--engine-url=http://127.0.0.1:8000", "--block-tokens=16"],
            "health and metrics are served",
        ),
    ],
)  # fmt: skip
def test_the_gateway_and_the_subscriber_start_and_end(
    image: Image, container: Container, words: list[str], said: str
) -> None:
    until(lambda: container.is_healthy(image.config["Healthcheck"]["Test"]), "healthy")
    ran = container.execute(["timeout", "--preserve-status", "5", *words])
    assert ran.returncode == 0, ran
    assert said in ran.stdout + ran.stderr


@pytest.fixture(scope="module", name="composition")
def _composition(images: dict[str, Image], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composition]:
    composition = Composition(images, tmp_path_factory.mktemp("composition"))
    try:
        for name in ("setup", "valkey", *MANAGERS, "keys"):
            composition.start(name)
        yield composition
    finally:
        composition.close()


def test_three_managers_serve_as_composed(composition: Composition) -> None:
    for name in MANAGERS:
        done = composition.running[name].execute(["kvcm", "group", "list", "--json"])
        assert '"default"' in done.stdout, done
    of_files = {
        path.name: (stat.S_IMODE(path.stat().st_mode), path.stat().st_gid)
        for volume in ("secrets", "keys")
        for path in composition.volume(volume).iterdir()
    }
    assert of_files == {
        "admin.key": (0o400, 10001), "store.uri": (0o400, 10001), "valkey.conf": (0o440, 10010),
        "valkey.password": (0o440, 10010), "grafana.password": (0o440, 10012), "prometheus.key": (0o440, 10011),
        "engine.key": (0o600, 10001), "gateway.key": (0o600, 10001), "subscriber.key": (0o600, 10001),
        "clients.key": (0o600, 10001),
    }  # fmt: skip
    refused = composition.running["valkey"].execute(["cat", "/secrets/admin.key"])
    assert "Permission denied" in refused.stderr
    stranger = composition.running["manager-1"].execute(["env", "-u", "KVCM_KEY_FILE", "kvcm", "usage"])
    assert stranger.returncode == 3, stranger

    made = {path.name: path.read_bytes() for path in composition.volume("secrets").iterdir()}
    for job in ("setup", "keys"):
        composition.start(job)
    assert {path.name: path.read_bytes() for path in composition.volume("secrets").iterdir()} == made


def test_a_manager_leaves_and_comes_back_and_the_store_forgets_nothing(composition: Composition) -> None:
    leader = _leader(composition, "manager-1")
    others = [name for name in MANAGERS if name != leader]
    assert composition.running.pop(leader).stop() == 0
    until(lambda: _leader(composition, others[0]) in others, "another one leads")
    composition.start(leader)
    before = composition.running[leader].execute(["kvcm", "key", "list", "--json"]).stdout
    composition.running.pop("valkey").kill()
    composition.start("valkey")
    until(lambda: composition.running[leader].execute(["python", "-m", "kvcm.probe"]).returncode == 0, "ready again")
    after = composition.running[leader].execute(["kvcm", "key", "list", "--json"]).stdout
    assert _ids(before) == _ids(after) != set()


def test_what_the_document_runs_in_a_manager_works_as_printed(composition: Composition) -> None:
    of_managers = re.compile(r"^\(?(?:umask 077; )?docker compose exec (?:-T )?(manager-\d) ([^#>\n]+)", re.MULTILINE)
    printed = of_managers.findall(DOCUMENT.read_text())
    ran = [(name, shlex.split(words)) for name, words in printed if "account add" not in words]  # that asks a person
    assert len(ran) >= 7
    for name, words in ran:
        done = composition.running[name].execute(words)
        assert done.returncode == 0, (words, done)


@pytest.mark.skipif(not IS_THOROUGH, reason="the engine has torch: KVCM_TESTS=thorough")
def test_an_engine_talks_and_prometheus_sees_it(composition: Composition) -> None:
    engine = composition.start("engine")
    until(lambda: "round 2, turn 1" in engine.log.read_text(), "a second round", 300)
    composition.running.pop("engine").stop()
    again = composition.start("engine")
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is missing: make promtool; the engine was run")
    composition.start("prometheus")
    until(lambda: scraped_managers(composition) == dict.fromkeys(MANAGERS, "1"), "all managers are scraped")
    until(lambda: not missing_series(composition), "series of every query of the dashboards", 180)
    found = re.findall(r"round 1, turn \d: loaded ([\d,]+) of", again.log.read_text())
    assert min(int(each.replace(",", "")) for each in found) > 1500, again.log.read_text()
    assert composition.running.pop("engine").stop() == 0, again.log.read_text()


def _leader(composition: Composition, name: str) -> str:
    asked = composition.running[name].execute(
        ["python", "-c", _ASK, f"http://{name}:6492/api/getManagerClusterInfo", "with key"]
    )
    assert asked.returncode == 0, asked
    return str(json.loads(asked.stdout).get("leader_node_id"))


def _ids(listed: str) -> set[str]:
    return {key["key_id"] for key in json.loads(listed)["keys"]}
