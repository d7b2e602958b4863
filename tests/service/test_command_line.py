"""How commands reach a manager, complete names, explain themselves, and what they say when they fail."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from authorities import Authority
from command_runner import COMMANDS, Commands
from ports import free_port
from test_transport_drivers import eventually
from test_transport_process import ManagerProcess, run_kvcm
from test_transport_sites import Site, unique
from typer.main import get_command
from typer.testing import CliRunner

from kvcm.cli import app
from kvcm.model.errors import CapacityError, InvalidArgumentError, KvcmError, NotReadyError
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as pb
from kvcm.terminal.admin_client import AdminClient
from kvcm.terminal.exit_codes import EXIT_CODES

OK_BODY = b'{"header": {"status": {"code": "OK"}}}'


class Front(NamedTuple):
    """A server that answers every request the same way.

    Attributes:
        url: its address.
        shown: the authorization of each request, "" for none.
        asked: path and decoded body of each request.
    """

    url: str
    shown: list[str]
    asked: list[tuple[str, Any]]


@contextlib.contextmanager
def _front(
    status: int = 200, body: bytes = OK_BODY, tls: ssl.SSLContext | None = None, **headers: str
) -> Iterator[Front]:
    shown: list[str] = []
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the server calls it by this name
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
            shown.append(self.headers.get("authorization", ""))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            """Not wanted."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Front(f"{'http' if tls is None else 'https'}://localhost:{server.server_port}", shown, asked)
        finally:
            server.shutdown()
            thread.join()


def _ask(url: str, seconds: float = 60.0) -> pb.CollectGarbageResponse:
    request = pb.CollectGarbageRequest(instance_id="i", check_bytes=True)
    return AdminClient(url).call("CollectGarbage", request, pb.CollectGarbageResponse, seconds)


def test_a_call_is_the_json_of_the_contract_and_int64_may_be_text() -> None:
    body = json.dumps({**json.loads(OK_BODY), "freed_bytes": "9007199254740993", "blocks": 3, "later_field": [1]})
    with _front(body=body.encode()) as front:
        answer = _ask(front.url)
    assert front.asked == [("/api/collectGarbage", {"instance_id": "i", "check_bytes": True})]
    assert (answer.freed_bytes, answer.blocks) == (2**53 + 1, 3)


@pytest.mark.parametrize(
    ("code", "error"),
    [("REACH_MAX_ENTITY_CAPACITY", CapacityError), ("INTERNAL_ERROR", KvcmError), ("OF_A_LATER_RELEASE", KvcmError)],
)
def test_a_refusal_is_the_error_of_its_code_with_the_managers_words(code: str, error: type[KvcmError]) -> None:
    body = json.dumps({"header": {"status": {"code": code, "message": "full"}}}).encode()
    with _front(body=body) as front, pytest.raises(KvcmError, match=r"^full$") as raised:
        _ask(front.url)
    assert type(raised.value) is error


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, b"404 Not Found", "HTTP 404: Not Found"),
        (200, b"<html>", "does not answer CollectGarbage as a manager does"),
        (200, b"[]", "does not answer CollectGarbage as a manager does"),
        (200, OK_BODY[:-1] + b', "blocks": []}', "is not understood"),
        (302, b"", "HTTP 302"),
    ],
)
def test_an_answer_of_another_server_is_reported_in_one_line(status: int, body: bytes, reason: str) -> None:
    with _front(status, body, location="http://127.0.0.1:1/") as front:
        with pytest.raises(NotReadyError, match=reason) as raised:
            _ask(front.url)
    assert "\n" not in str(raised.value)


def test_the_reason_that_a_manager_gives_for_a_bad_body_is_passed_on() -> None:
    with _front(400, b"{}", x_kvcm_error="name: must be a string") as front:
        with pytest.raises(NotReadyError, match="HTTP 400: name: must be a string"):
            _ask(front.url)


def test_no_manager_and_one_that_does_not_answer_are_reported_apart() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NotReadyError, match=f"no manager answers at {url}: Connection refused"):
            _ask(url)
        silent.listen()
        with pytest.raises(NotReadyError, match=f"no manager answers at {url}: nothing came within 0.1 s"):
            _ask(url, 0.1)


@pytest.mark.parametrize(
    "url",
    ["", "127.0.0.1:6492", "http://127.0.0.1", "http://:1", "ftp://h:1", "http://h:99999", "http://h:x",
     "http://h:1/api", "http://h:1?x=1", "http://[::1", "http://user:secret@h:1"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be an url of host and port"):
        AdminClient(url)


def _run(*arguments: str, **environment: str) -> Any:
    kept = {"KVCM_KEY": None, "KVCM_KEY_FILE": None, "KVCM_MANAGER": None, "COLUMNS": "200"}
    return CliRunner().invoke(COMMANDS, arguments, env={**kept, **environment})


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """A file with a key, readable by its owner."""
    path = tmp_path / "key"
    path.write_text("kvcm_file_secret\n")
    path.chmod(0o600)
    return path


def test_a_key_comes_from_a_file_or_the_environment_and_the_file_wins(key_file: Path) -> None:
    with _front() as front:
        ask = ("quota", "list", "--manager", front.url)
        for arguments, environment in (
            (ask, {}),
            (ask, {"KVCM_KEY": "kvcm_env_secret"}),
            ((*ask, "--key-file", str(key_file)), {"KVCM_KEY": "kvcm_env_secret"}),
            (ask, {"KVCM_KEY_FILE": str(key_file)}),
        ):
            assert _run(*arguments, **environment).exit_code == 0
    assert front.shown == ["", "Bearer kvcm_env_secret", "Bearer kvcm_file_secret", "Bearer kvcm_file_secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_key_that_others_can_read_is_not_used(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with _front() as front:
        done = _run("quota", "list", "--manager", front.url, "--key-file", str(key_file))
    assert (done.exit_code, front.shown) == (1, [])
    assert done.stderr == (
        f"kvcm: key file {key_file} has mode {mode:03o}: others can read the secret in it; run `chmod 600 {key_file}`\n"
    )


def test_a_key_that_cannot_be_sent_is_not_shown() -> None:
    done = _run("quota", "list", KVCM_KEY="kvcm_a\u00e9_b")
    assert (done.exit_code, "kvcm_a" in done.stderr) == (1, False)
    assert "characters that no key has" in done.stderr


@pytest.mark.parametrize(
    ("status", "environment", "reason"),
    [
        (401, {}, "asks for a key: give --key-file, or set KVCM_KEY_FILE or KVCM_KEY"),
        (401, {"KVCM_KEY": "kvcm_a_b"}, "does not know the key: it has ended; it may have ended"),
        (403, {"KVCM_KEY": "kvcm_a_b"}, "does not allow this key ListGlobalQuota: it has ended; `kvcm whoami` shows"),
    ],
)
def test_a_refused_client_gets_advice_and_exit_code_3(status: int, environment: dict[str, str], reason: str) -> None:
    with _front(status, b"{}", x_kvcm_error="it has ended") as front:
        done = _run("quota", "list", "--manager", front.url, **environment)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (3, "", 1)
    assert reason in done.stderr
    assert "kvcm_a_b" not in done.stderr


def test_the_manager_can_be_named_by_the_environment_and_an_option_wins() -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    done = _run("quota", "list", KVCM_MANAGER=nowhere)
    assert (done.exit_code, done.stderr) == (2, f"kvcm: no manager answers at {nowhere}: Connection refused\n")
    with _front() as front:
        assert _run("quota", "list", "--manager", front.url, KVCM_MANAGER=nowhere).exit_code == 0


# ── the data port ──


def test_the_data_port_is_found_through_the_admin_port_unless_it_is_given(server: ManagerProcess) -> None:
    with server.api() as api:
        instance = Site(api).instance()
    assert Commands(server).json("pin", "list", instance) == {"pins": []}
    nowhere = f"http://127.0.0.1:{free_port()}"
    commands = Commands(server, KVCM_DATA_MANAGER=nowhere)
    assert nowhere in commands.refused("pin", "list", instance, exit_code=2)
    data = f"http://{server.address.http}"
    assert commands.json("pin", "list", instance, "--data-manager", data) == {"pins": []}


def test_without_a_leader_the_data_port_has_to_be_given() -> None:
    with _front() as front:
        done = _run("pin", "list", "x", "--manager", front.url)
    assert (done.exit_code, "no manager leads at the moment: give --data-manager" in done.stderr) == (2, True)


# ── encryption ──


def test_https_is_trusted_when_the_authority_is_given_and_a_client_certificate_is_shown(tmp_path: Path) -> None:
    authority = Authority.make(tmp_path)
    own, other = authority.server(), authority.server("other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*own)
    shown = ("--cert-file", str(own.cert), "--cert-key-file")
    with _front(tls=context) as front:
        ask = ("quota", "list", "--manager", front.url)
        trusting = (*ask, "--ca-file", str(authority.file))
        assert _run(*trusting).exit_code == 0
        assert _run(*ask, KVCM_CA_FILE=str(authority.file)).exit_code == 0
        done = _run(*ask)
        assert (done.exit_code, "certificate verify failed" in done.stderr.lower()) == (2, True)
        context.load_verify_locations(authority.file)
        context.verify_mode = ssl.CERT_REQUIRED
        assert _run(*trusting, *shown, str(own.key)).exit_code == 0
        assert _run(*trusting).exit_code == 2
    assert "/nowhere is not a file" in _run(*ask, "--ca-file", "/nowhere").stderr
    assert "needs --cert-file too" in _run(*ask, "--cert-key-file", str(own.key)).stderr
    done = _run(*ask, *shown, str(other.key))
    assert (done.exit_code, f"--cert-file {own.cert} and its key cannot be used" in done.stderr) == (1, True)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions wait as long as a busy machine needs, not as long as a finger on a key."""
    monkeypatch.setattr("kvcm.commands.connection._SECONDS", 60.0)


def _completed(words: str, url: str) -> list[str]:
    """Return the completions that bash gets for a line that ends in the middle of a word."""
    line = {"COMP_WORDS": f"kvcm {words}", "COMP_CWORD": str(len(words.split()))}
    environment = {"_KVCM_COMPLETE": "complete_bash", **line, "KVCM_MANAGER": url}
    done = CliRunner().invoke(COMMANDS, prog_name="kvcm", env=environment)
    assert done.stderr == ""
    return done.stdout.split()


def test_names_come_from_the_manager(server: ManagerProcess, site: Site) -> None:
    url = f"http://{server.address.admin_http}"
    storage, quota = site.storage(), unique("completed")
    group = site.group(storage)
    instance = site.instance(group)
    site.api.ok("CapacityService.SetGlobalQuota", global_quota={"name": quota, "capacity_bytes": 1})
    assert _completed(f"group show {group[:-1]}", url).count(group) == 1
    assert storage in _completed(f"storage drain {storage[:4]}", url)
    assert storage in _completed(f"group update x --storage {storage[:4]}", url)
    assert instance in _completed(f"instance show {instance[:4]}", url)
    assert instance in _completed(f"get {instance[:4]}", url)
    assert _completed("quota remove compl", url) == [quota]
    assert _completed("group show no-such", url) == []


def test_the_manager_of_the_line_is_asked(server: ManagerProcess, site: Site) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    group = site.group()
    line = f"group show --manager http://{server.address.admin_http} {group}"
    assert group in _completed(line, nowhere)


def test_without_a_manager_commands_and_options_are_completed_and_names_are_not() -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    assert _completed("group show a", nowhere) == []
    assert _completed("group cr", nowhere) == ["create"]
    assert "--quota-type" in _completed("group create x --quo", nowhere)


def test_bash_completes_after_the_installation(server: ManagerProcess, site: Site, tmp_path: Path) -> None:
    storage = site.storage()
    command = str(Path(sys.executable).with_name("kvcm"))
    environment = {
        **{key: value for key, value in os.environ.items() if not key.lower().startswith("kvcm")},
        "HOME": str(tmp_path),
        "PATH": f"{Path(command).parent}:{os.environ['PATH']}",
        "KVCM_MANAGER": f"http://{server.address.admin_http}",
    }
    # Which shell runs is found out from the parents of the process.
    install = f"{command} --install-completion; true"
    subprocess.run(["bash", "-c", install], env=environment, check=True, capture_output=True, cwd=tmp_path)
    line = (
        "source .bash_completions/kvcm.sh; COMP_WORDS=(kvcm storage show " + storage[:5] + "); COMP_CWORD=3; "
        '_kvcm_completion kvcm; echo "${COMPREPLY[@]}"'
    )
    run = partial(subprocess.run, ["bash", "-c", line], env=environment, capture_output=True, text=True, cwd=tmp_path)
    eventually(lambda: storage in run().stdout.split(), 60)  # a busy manager answers too late for it, now and then


def _tree(command: Any, path: str = "kvcm") -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, each in getattr(command, "commands", {}).items():
        yield from _tree(each, f"{path} {name}")


TREE = dict(_tree(get_command(app)))
LEAVES = {path: command for path, command in TREE.items() if not hasattr(command, "commands")}


def test_every_command_argument_and_option_says_what_it_does() -> None:
    for path, command in TREE.items():
        text = (command.help or "").strip()
        assert text.endswith((".", "`")), path
        assert text[0].isupper(), path
    parameters = [(path, each) for path, leaf in LEAVES.items() for each in leaf.params]
    silent = [(path, each.name) for path, each in parameters if not (each.help or "").strip().endswith((".", ";"))]
    assert silent == []


def test_no_option_takes_a_secret_and_every_command_reaches_its_manager_in_the_same_way() -> None:
    connection = {"--manager", "--data-manager", "--key-file", "--ca-file", "--cert-file", "--cert-key-file"}
    for path, leaf in LEAVES.items():
        taken = {option for each in leaf.params for option in each.opts}
        assert not taken & {"--key", "--password", "--secret", "--token"}, path
        assert taken >= connection or path.split()[1] in {"serve", "index", "trace", "gateway", "scorer"}, path


def test_the_exit_codes_are_in_the_help(tmp_path: Any) -> None:
    done = run_kvcm(tmp_path, "--help")
    shown = " ".join(done.stdout.split())
    assert [f"{code}: {meaning}" in shown for code, meaning in EXIT_CODES.items()] == [True] * len(EXIT_CODES)
    assert sorted(EXIT_CODES) == [0, 1, 2, 3]
    assert isinstance(app, typer.Typer)


@pytest.mark.parametrize(("given", "in_force"), [(None, "-event_engine_listener"), ("tcp_rcv_lowat", "tcp_rcv_lowat")])
def test_grpc_reads_in_the_thread_that_waits_unless_the_environment_says_otherwise(
    given: str | None, in_force: str
) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    code = "import os, kvcm.cli; print(os.environ['GRPC_EXPERIMENTS'])"
    environment = kept if given is None else {**kept, "GRPC_EXPERIMENTS": given}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [in_force]
