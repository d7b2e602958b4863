"""How commands find a manager, prove who they are, and say what is wrong when they are not let in."""

from __future__ import annotations

import contextlib
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from command_runner import COMMANDS, Commands
from ports import free_port
from test_transport_process import ManagerProcess
from test_transport_sites import Site
from typer.testing import CliRunner

OK = b'{"header": {"status": {"code": "OK"}}}'


class Front(NamedTuple):
    """What answers every request the same way.

    Attributes:
        url: where.
        shown: the authorization of each request, "" for none.
    """

    url: str
    shown: list[str]


@contextlib.contextmanager
def _front(status: int = 200, body: bytes = OK, said: str = "", tls: ssl.SSLContext | None = None) -> Iterator[Front]:
    shown: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # the server calls it by this name
            self.rfile.read(int(self.headers["content-length"]))
            shown.append(self.headers.get("authorization", ""))
            self.send_response(status)
            if said:
                self.send_header("x-kvcm-error", said)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            """Nobody reads it."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Front(f"{'http' if tls is None else 'https'}://localhost:{server.server_port}", shown)
        finally:
            server.shutdown()
            thread.join()


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
        (403, {"KVCM_KEY": "kvcm_a_b"}, "does not let this key do ListGlobalQuota: it has ended; `kvcm whoami` shows"),
    ],
)
def test_who_is_not_let_in_is_told_what_to_do_with_exit_code_3(
    status: int, environment: dict[str, str], reason: str
) -> None:
    with _front(status, b"{}", "it has ended") as front:
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


def test_the_data_port_is_told_by_the_admin_port(server: ManagerProcess) -> None:
    with server.api() as api:
        instance = Site(api).instance()
    assert Commands(server).json("pin", "list", instance) == {"pins": []}


def test_a_data_port_that_is_given_is_asked(server: ManagerProcess) -> None:
    with server.api() as api:
        instance = Site(api).instance()
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


class Pair(NamedTuple):
    """A certificate that vouches for itself, and its key."""

    cert: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Return a server's side."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, self.key)
        return context


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One for localhost."""
    return _made(tmp_path_factory.mktemp("pair"), "localhost")


def _made(directory: Path, name: str) -> Pair:
    made = Pair(directory / "cert.pem", directory / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-keyout", made.key, "-out", made.cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return made


def test_https_is_trusted_when_the_authority_is_given(pair: Pair) -> None:
    with _front(tls=pair.context()) as front:
        ask = ("quota", "list", "--manager", front.url)
        assert _run(*ask, "--ca-file", str(pair.cert)).exit_code == 0
        assert _run(*ask, KVCM_CA_FILE=str(pair.cert)).exit_code == 0
        done = _run(*ask)
    assert done.exit_code == 2
    assert "certificate verify failed" in done.stderr.lower()


def test_a_client_certificate_is_shown(pair: Pair, tmp_path: Path) -> None:
    own = _made(tmp_path, "client")
    context = pair.context()
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(own.cert)
    with _front(tls=context) as front:
        ask = ("quota", "list", "--manager", front.url, "--ca-file", str(pair.cert))
        assert _run(*ask, "--cert-file", str(own.cert), "--cert-key-file", str(own.key)).exit_code == 0
        assert _run(*ask).exit_code == 2


def test_files_that_are_no_certificates_are_named(pair: Pair, tmp_path: Path) -> None:
    ask = ("quota", "list", "--manager", "https://localhost:1")
    assert "/nowhere is not a file" in _run(*ask, "--ca-file", "/nowhere").stderr
    assert "needs --cert-file too" in _run(*ask, "--cert-key-file", str(pair.key)).stderr
    other = _made(tmp_path, "other")
    done = _run(*ask, "--cert-file", str(pair.cert), "--cert-key-file", str(other.key))
    assert (done.exit_code, f"--cert-file {pair.cert} and its key cannot be used" in done.stderr) == (1, True)
