"""docs/docker.md typed as printed, on a host with Docker and Compose: every block, in an order that makes sense.

What registries have is a stand-in of the same name, of Debian's packages. With KVCM_TESTS=thorough only: four minutes,
and two gigabytes of packages the first time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from composed import MANAGERS, ROOT
from docker_engine import DockerEngine
from image_stand_ins import import_stand_ins
from pexpect.replwrap import REPLWrapper
from pods import may_isolate
from waiting import until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(os.environ.get("KVCM_TESTS") != "thorough", reason="minutes and gigabytes: KVCM_TESTS=thorough"),
    pytest.mark.skipif(not may_isolate(), reason="namespaces and mounts need root"),
    pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="mmdebstrap is missing: make buildah"),
]

_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PASSWORD = "correct horse battery"
_LONG_SECONDS = 1200


class Reader:
    """A reader with the document, a clone and a shell."""

    def __init__(self, engine: DockerEngine, clone: Path) -> None:
        self.engine = engine
        self.unread = _BLOCK.findall((clone / "docs/docker.md").read_text())
        self._shell: REPLWrapper = engine.shell(clone)

    def types(self, beginning: str) -> str:
        """Type the block that begins so; every command of it succeeds. Returns what all of them printed."""
        (block,) = (each for each in self.unread if each.startswith(beginning))
        self.unread.remove(block)
        return "".join(self._typed(line) for line in block.replace("\\\n", " ").splitlines())

    def requires_credentials(self, line: str) -> str:
        """Type a command that the document does not have; it succeeds."""
        return self._typed(line)

    def types_password(self, beginning: str) -> None:
        """Type the one command of a block, and a password as often as it is asked for."""
        (block,) = (each for each in self.unread if each.startswith(beginning))
        self.unread.remove(block)
        child = self._shell.child
        child.sendline(block.strip())
        while child.expect_exact([self._shell.prompt, ": "], timeout=60) == 1:
            child.sendline(_PASSWORD)
        assert self._code() == 0, child.before

    def _typed(self, line: str) -> str:
        if "Ctrl-C" in line:
            return self._followed(line)
        printed = _COLOURS.sub("", self._shell.run_command(line, timeout=_LONG_SECONDS))
        assert self._code() == 0, f"{line}\n{printed[-4000:]}"
        return printed

    def _followed(self, line: str) -> str:
        """Look at something that does not end until it shows turns, and then end it."""
        child = self._shell.child
        child.sendline(line)
        child.expect(r"round \d+, turn \d+", timeout=300)
        child.sendintr()
        child.expect_exact(self._shell.prompt, timeout=60)
        return str(child.before)

    def _code(self) -> int:
        return int(self._shell.run_command("echo $?"))


@pytest.fixture(scope="module", name="reader")
def _reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    clone = tmp_path_factory.mktemp("docker") / "kvcm"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    directory = ROOT / "build/docker"
    engine = DockerEngine(directory, [clone])
    try:
        import_stand_ins(engine, directory)
        reader = Reader(engine, clone)
        yield reader
        reader.requires_credentials("docker compose --profile demo down --volumes --remove-orphans")
    finally:
        engine.close()


def test_from_zero_to_three_managers(reader: Reader) -> None:
    reader.types("docker compose up --build --detach\ndocker compose ps\n")
    until(lambda: set(_health(reader)) == {"healthy"}, "every service is healthy", 180)
    assert len(_health(reader)) == 6
    printed = reader.types("docker compose exec manager-1 kvcm whoami")
    assert "admin" in printed
    assert _answer(reader, "http://127.0.0.1:26492/readyz")


def test_the_hardening_is_docker_s_too(reader: Reader) -> None:
    hardened = [r"Uid:\s+[1-9]", r"CapEff:\s+0{16}\b", r"CapBnd:\s+0{16}\b", r"NoNewPrivs:\s+1"]
    for name in (*MANAGERS, "valkey", "prometheus", "grafana"):
        status = reader.requires_credentials(f"docker compose exec {name} cat /proc/1/status")
        assert all(re.search(pattern, status) for pattern in hardened), status
        refused = reader.engine.run("docker", "exec", "--user", "0", f"kvcm-{name}-1", "touch", "/x")
        assert "Read-only file system" in refused.stderr, refused


def test_an_engine_that_is_restarted_loads_what_it_stored(reader: Reader) -> None:
    printed = reader.types("docker compose --profile demo up --build --detach")
    assert "demo" in printed
    until(lambda: _loaded(reader) > 1500, "the new process has loaded", 300)


def test_a_gateway_and_a_subscriber_start_without_an_engine(reader: Reader) -> None:
    reader.types("docker compose exec manager-1 kvcm instance register")
    until(lambda: "does not answer" in _log(reader, "subscriber"), "the subscriber misses the engine", 60)
    until(lambda: "serving" in _log(reader, "gateway"), "the gateway serves", 60)
    reader.types("docker compose --profile routing rm")


def test_someone_signs_in_to_the_console(reader: Reader) -> None:
    reader.types_password("docker compose exec manager-1 kvcm account add grace")
    accounts = reader.requires_credentials("docker compose exec manager-1 kvcm account list")
    assert re.search(r"grace.*operator", accounts), accounts
    assert "sign in" in _answer(reader, "http://127.0.0.1:6492/").lower()
    assert len(reader.types("docker compose exec grafana cat /secrets/grafana.password").strip()) > 16


def test_prometheus_scrapes_every_manager(reader: Reader) -> None:
    def up() -> list[str]:
        answer = json.loads(_answer(reader, "http://127.0.0.1:9090/api/v1/query?query=up%7Bjob%3D%22kvcm%22%7D"))
        return [each["value"][1] for each in answer["data"]["result"]]

    until(lambda: up() == ["1"] * 3, "three managers are up", 120)
    rules = json.loads(_answer(reader, "http://127.0.0.1:9090/api/v1/rules"))["data"]["groups"]
    assert not [rule for group in rules for rule in group["rules"] if rule["health"] == "err"]


def test_a_manager_goes_and_the_engine_goes_on(reader: Reader) -> None:
    started = reader.requires_credentials("docker inspect --format '{{.State.StartedAt}}' kvcm-engine-1")
    reader.types("docker compose stop manager-1")
    turns = _turns(reader)
    until(lambda: _turns(reader) > turns + 1, "the engine talks", 120)
    assert reader.requires_credentials("docker inspect --format '{{.State.StartedAt}}' kvcm-engine-1") == started
    until(lambda: set(_health(reader)) == {"healthy"}, "every service is healthy again", 180)


def test_a_key_leaves_for_the_host_and_serves_there(reader: Reader) -> None:
    created = reader.types("docker compose exec manager-1 kvcm key create --name chat-engine")
    assert json.loads(created), created
    assert "default" in reader.types("(umask 077; docker compose exec -T manager-1 cat /secrets/admin.key")


def test_a_backup_is_written_and_the_index_is_clean(reader: Reader) -> None:
    reader.types("docker compose exec -T manager-1 kvcm index export")
    assert int(reader.requires_credentials("stat --format %s backup.kvcm")) > 1000


def test_an_upgrade_replaces_one_manager_at_a_time(reader: Reader) -> None:
    reader.types("git pull")
    for name in MANAGERS:
        assert "0.2.1" in reader.requires_credentials(f"docker compose exec {name} kvcm --version")
    until(lambda: set(_health(reader)) == {"healthy"}, "every service is healthy", 180)
    before = _turns(reader)
    until(lambda: _turns(reader) > before, "the engine goes on", 120)


def test_the_end_and_the_end_of_all_data(reader: Reader) -> None:
    reader.types("docker compose --profile demo down\n")
    assert not reader.requires_credentials(
        "docker volume ls --quiet --filter label=com.docker.compose.project=kvcm"
    ).strip()


def test_a_manager_alone_keeps_its_metadata_in_the_volume(reader: Reader) -> None:
    reader.types("docker build --build-arg KVCM_VERSION=0.2.0 --tag kvcm-server:0.2.0 .")
    block = next(each for each in reader.unread if each.startswith("docker run --detach"))
    start, ask = (each.strip() for each in block.replace("\\\n", " ").splitlines())
    reader.unread.remove(block)
    reader.requires_credentials(start)
    until(
        lambda: "healthy" in reader.requires_credentials("docker inspect --format '{{.State.Health.Status}}' manager"),
        "",
        120,
    )
    assert "admin" in reader.requires_credentials(ask)
    reader.requires_credentials("docker stop manager")
    assert reader.requires_credentials("docker inspect --format '{{.State.ExitCode}}' manager").strip() == "0"
    reader.requires_credentials("docker rm --volumes manager && docker volume rm kvcm-data")


def test_every_block_of_the_document_was_typed(reader: Reader) -> None:
    assert reader.unread == []


def _health(reader: Reader) -> list[str]:
    listed = reader.engine.run(
        "docker", "ps", "--filter", "label=com.docker.compose.project=kvcm", "--format", "{{.Status}}"
    )
    return [
        found[1] if (found := re.search(r"\((?:health: )?(\w+)\)", line)) else line
        for line in listed.stdout.splitlines()
    ]


def _answer(reader: Reader, url: str) -> Any:
    return reader.requires_credentials(
        f"python3 -c 'import urllib.request as u; print(u.urlopen(\"{url}\").read().decode())'"
    )


def _log(reader: Reader, service: str) -> str:
    logged = reader.engine.run("docker", "logs", f"kvcm-{service}-1")
    return logged.stdout + logged.stderr


def _loaded(reader: Reader) -> int:
    return max(
        (int(each.replace(",", "")) for each in re.findall(r"loaded ([\d,]+) of", _log(reader, "engine"))), default=0
    )


def _turns(reader: Reader) -> int:
    return len(re.findall(r"turn \d+:", _log(reader, "engine")))
