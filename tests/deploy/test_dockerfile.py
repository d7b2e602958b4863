"""The Dockerfile by its text, and the probe that is its health check. It is carried out in test_images.py."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from composed import ROOT
from materials import SERVER_EXTRAS

from kvcm.probe import probe

TEXT = (ROOT / "Dockerfile").read_text()


def test_hadolint_has_nothing_to_say() -> None:
    checked = subprocess.run(
        [Path(sys.executable).parent / "hadolint", ROOT / "Dockerfile"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


def test_the_default_target_is_the_server() -> None:
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", TEXT, re.MULTILINE)
    assert stages[-1] == ("runtime", "server")
    assert set(re.findall(r"^USER (.*)$", TEXT, re.MULTILINE)) == {"10001:10001"}


def _packages(*extras: str) -> set[str]:
    """Return the names of the packages that the image with these extras installs."""
    listed = subprocess.run(
        [sys.executable, ROOT / "deploy/images/requirements.py", *extras],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {re.split(r"[<>=\[]", line)[0] for line in listed.stdout.splitlines()}


def test_the_server_has_no_torch() -> None:
    names = _packages(*SERVER_EXTRAS)
    assert {"grpcio", "uvicorn", "opentelemetry-sdk"} <= names
    assert not names & {"torch", "transformers", "numba", "matplotlib"}


@pytest.mark.parametrize("extra", ["gateway", "subscriber"])
def test_the_gateway_and_the_subscriber_start_from_the_server(extra: str) -> None:
    assert _packages(extra) <= _packages(*SERVER_EXTRAS)
    assert {"gateway": "aiohttp", "subscriber": "pyzmq"}[extra] in _packages(*SERVER_EXTRAS)


def test_packages_of_the_gateway_and_the_subscriber_are_pinned() -> None:
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    pinned, wanted = ({re.sub("[-_.]+", "-", name.partition("==")[0].lower()) for name in names}
                      for names in (lines, _packages("gateway", "subscriber")))  # fmt: skip
    assert wanted - pinned == set()


@pytest.mark.parametrize(
    "path", ["deploy/images/requirements.py", ".ci/constraints.txt", "docs/examples/demo/talker.py"]
)
def test_copied_files_are_sent_to_the_builder(path: str) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert any(Path(path).is_relative_to(each) for each in allowed)
    assert (ROOT / path).is_file()


def test_the_document_reports_the_measured_sizes() -> None:
    reported = re.findall(r"\| size, unpacked \| (.*) \|", (ROOT / "docs/docker.md").read_text())[0]
    rows = json.loads((ROOT / "benchmarks/results/images.json").read_text())["rows"]
    sizes = [f"{row['value'] / 1e6:,.0f} MB" for row in rows]
    assert [row["case"] for row in rows] == ["server", "server", "engine", "engine"]
    for row, whole, package in zip(rows[::2], sizes[::2], sizes[1::2], strict=True):
        assert f"`{row['case']}` {whole}, of which {package}" in reported


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/livez" else 503)
        self.end_headers()
        self.wfile.write(b"ok" if self.path == "/livez" else b"not ready")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(name="address")
def _address() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_probe_is_content_with_200_alone(address: str) -> None:
    assert probe(address, "livez", {}) == ""
    assert probe(address, "readyz", {}) == f"{address}/readyz: 503 not ready"


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "https://127.0.0.1:1", "127.0.0.1:6492", "http://[::1"])
def test_a_probe_names_the_address_that_does_not_answer(address: str) -> None:
    assert probe(address, "readyz", {}).startswith(f"no manager answers at {address}: ")


def test_the_command_ends_as_docker_wants_it(address: str) -> None:
    def code(*words: str) -> int:
        environment = {"KVCM_MANAGER": address, "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            [sys.executable, "-m", "kvcm.probe", *words], env=environment, capture_output=True
        ).returncode

    assert (code("livez"), code(), code("/readyz"), code("livez", "more")) == (0, 1, 2, 2)


def test_the_script_of_keys_is_one() -> None:
    subprocess.run(["sh", "-n", ROOT / "deploy/compose/make_keys.sh"], check=True)
