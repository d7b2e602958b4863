"""TLS on every port: versions, authentication by certificate, files, reloading."""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import signal
import socket
import ssl
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from authorities import Authority, Pair, dns, ip, mail, uri
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from probe_clients import rest
from structlog.testing import capture_logs
from test_transport_drivers import eventually
from test_transport_process import manager, run_kvcm
from tls_site import SECONDS, TlsSite, tls_manager

from kvcm.config import ConfigError, Settings, load_settings
from kvcm.service.tls import names_of_peer
from kvcm.serving import TlsFiles, open_tls

pytestmark = pytest.mark.ci  # processes that wait

SPIFFE = "spiffe://cluster/engine"
HEALTH = "/grpc.health.v1.Health/Check"
NAMES = {"dns": dns("engine.example"), "uri": uri(SPIFFE), "mail": mail("engine@example.org"), "ip": ip("::1")}
PORTS = ("rpc", "admin_rpc", "http", "admin_http")


@pytest.fixture(scope="module")
def optional(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSite]:
    """Certificates of clients are looked at where HTTP is given one."""
    with tls_manager(tmp_path_factory.mktemp("optional")) as site:
        yield site


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSite]:
    """A manager that waits for handshakes for hardly longer than half a second."""
    with tls_manager(tmp_path_factory.mktemp("hasty"), "kvcm.limits.receive_timeout_ms=600") as site:
        yield site


@pytest.fixture(scope="module")
def required(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSite]:
    """A manager that requires a certificate of every client."""
    with tls_manager(tmp_path_factory.mktemp("required"), "kvcm.tls.client_auth=required") as site:
        admin = site.clients.issue("bootstrap", [dns("bootstrap")])
        for kind, name in NAMES.items():
            site.create_key(admin, name=f"by-{kind}", role="ROLE_VIEWER", certificate_name=str(name.value))
        yield site


def _host_port(site: TlsSite, port: str) -> tuple[str, int]:
    host, _, number = getattr(site.process.address, port).rpartition(":")
    return host, int(number)


def _handshake(site: TlsSite, port: str, version: ssl.TLSVersion, client: Pair | None = None) -> ssl.SSLSocket:
    context = site.context(client)
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.set_ciphers("ALL:@SECLEVEL=0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    return context.wrap_socket(socket.create_connection(_host_port(site, port), SECONDS), server_hostname="localhost")


# ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("port", PORTS)
def test_versions_from_1_2_on_with_forward_secrecy(optional: TlsSite, port: str) -> None:
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        with _handshake(optional, port, version) as connection:
            assert connection.selected_alpn_protocol() == ("http/1.1" if "http" in port else "h2")
            cipher, _, bits = connection.cipher() or ("", "", 0)
            assert bits >= 128
            assert version is ssl.TLSVersion.TLSv1_3 or cipher.startswith(("ECDHE-", "DHE-")), cipher
    with pytest.raises(OSError):
        _handshake(optional, port, ssl.TLSVersion.TLSv1_1)


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("said", [b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n", b"\x16\x03\x01\x00\x05hello", b"\0" * 999])
def test_a_connection_without_tls_is_closed_without_a_word_of_http(optional: TlsSite, port: str, said: bytes) -> None:
    with socket.create_connection(_host_port(optional, port), SECONDS) as connection:
        connection.sendall(said)
        assert b"HTTP" not in rest(connection)
    with optional.channel() as channel:
        assert channel.unary_unary(HEALTH)(b"", timeout=SECONDS)
    assert "Traceback" not in optional.process.log_text()
    assert "Handshake failed" not in optional.process.log_text()
    assert not optional.process.events("handshake_failed"), "that is for debugging"


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01\x00"])
def test_a_handshake_that_does_not_end_is_cut_off(hasty: TlsSite, port: str, said: bytes) -> None:
    begin = time.monotonic()
    with socket.create_connection(_host_port(hasty, port), SECONDS) as connection:
        connection.sendall(said)
        rest(connection)
    assert 0.5 < time.monotonic() - begin < 15


# ── authentication ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_manager_of_another_authority_is_not_believed(optional: TlsSite) -> None:
    stranger = TlsSite(optional.process, optional.clients, optional.clients, optional.pair)
    with pytest.raises(ssl.SSLCertVerificationError):
        stranger.principal_over_http()
    with stranger.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(HEALTH)(b"", timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_keys_need_no_certificate_where_it_is_optional(optional: TlsSite) -> None:
    assert optional.principal_over_grpc(key=optional.admin_key) == "admin"
    assert optional.principal_over_http(key=optional.admin_key) == "admin"
    assert (optional.principal_over_grpc(), optional.principal_over_http()) == ("", "")


def test_probes_need_nothing_where_it_is_optional(optional: TlsSite) -> None:
    for address in (optional.process.address.http, optional.process.address.admin_http):
        with contextlib.closing(optional.connection(address=address)) as connection:
            connection.request("GET", "/livez")
            assert connection.getresponse().status == 200


def test_grpc_does_not_ask_for_certificates_where_they_are_optional(optional: TlsSite) -> None:
    optional.create_key(name="lonely", role="ROLE_VIEWER", certificate_name="lonely.example")
    pair = optional.clients.issue("lonely", [dns("lonely.example")])
    assert optional.principal_over_http(pair, times=3) == "lonely"
    assert optional.principal_over_grpc(pair) == ""


@pytest.mark.parametrize("kind", NAMES)
def test_every_kind_of_name_stands_for_its_principal(required: TlsSite, kind: str) -> None:
    pair = required.clients.issue(kind, [dns("unknown.example"), NAMES[kind]])
    assert required.principal_over_grpc(pair) == f"by-{kind}"
    assert required.principal_over_http(pair, times=3) == f"by-{kind}"


def test_a_common_name_stands_for_no_principal(required: TlsSite) -> None:
    for names in ([], [dns("unknown.example")]):
        pair = required.clients.issue("engine.example", names)
        assert (required.principal_over_grpc(pair), required.principal_over_http(pair)) == ("", "")


def test_a_key_goes_before_a_certificate(required: TlsSite) -> None:
    pair = required.clients.issue("both", [NAMES["uri"]])
    assert required.principal_over_grpc(pair, required.admin_key) == "admin"
    assert required.principal_over_http(pair, required.admin_key) == "admin"


def _refused(use: Callable[[], str]) -> bool:
    try:
        use()
    except (ssl.SSLError, ConnectionError, http.client.HTTPException):
        return True
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


def _flawed(site: TlsSite, flaw: str) -> Pair:
    names = [NAMES["uri"]]
    if flaw == "foreign":
        return Authority.make(site.clients.directory / "foreign").issue("foreign", names)
    return site.clients.issue("expired", names, dt.timedelta(minutes=-1))


@pytest.mark.parametrize("flaw", ["none", "foreign", "expired"])
def test_without_a_valid_certificate_a_client_does_not_get_in(required: TlsSite, flaw: str) -> None:
    pair = None if flaw == "none" else _flawed(required, flaw)
    assert _refused(lambda: required.principal_over_http(pair, required.admin_key))
    assert _refused(lambda: required.principal_over_grpc(pair, required.admin_key))


@pytest.mark.parametrize("flaw", ["foreign", "expired"])
def test_an_invalid_certificate_is_refused_where_it_is_optional(optional: TlsSite, flaw: str) -> None:
    pair = _flawed(optional, flaw)
    assert _refused(lambda: optional.principal_over_http(pair))


def _gets_in(site: TlsSite, port: str) -> bool:
    try:
        _handshake(site, port, ssl.TLSVersion.TLSv1_3).close()
    except OSError:
        return False
    return True


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_manager_ends_in_time_despite_open_connections(tmp_path_factory: pytest.TempPathFactory) -> None:
    with tls_manager(tmp_path_factory.mktemp("end"), "kvcm.service.drain_timeout_ms=60000") as site:
        with contextlib.closing(site.connection()) as idle, socket.create_connection(_host_port(site, "http")):
            idle.request("GET", "/livez")
            idle.getresponse().read()
            begin = time.monotonic()
            site.process.process.terminate()
            assert site.process.wait() == 0
            assert time.monotonic() - begin < 40
    assert "Traceback" not in site.process.log_text()


def test_handshakes_count_as_connections(tmp_path_factory: pytest.TempPathFactory) -> None:
    limits = ("kvcm.limits.max_connections=5", "kvcm.limits.receive_timeout_ms=60000")
    with tls_manager(tmp_path_factory.mktemp("few"), *limits) as site:
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(socket.create_connection(_host_port(site, "http"), SECONDS))
            with pytest.raises(OSError):
                _handshake(site, "http", ssl.TLSVersion.TLSv1_3)
        eventually(lambda: _gets_in(site, "http"))


def test_a_broken_start_names_the_setting(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("broken")
    pair = Authority.make(directory / "ca").server()
    pair.key.write_text("no key")
    options = ("-e", f"kvcm.tls.cert_file={pair.cert}", "-e", f"kvcm.tls.key_file={pair.key}")
    ended = run_kvcm(directory, "serve", "--data-dir", str(directory / "data"), *options)
    assert ended.returncode == 1, ended.stderr
    assert f"kvcm.tls.key_file '{pair.key}' holds no private key" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path)


def _settings(pair: Pair, ca: str = "", client_auth: str = "optional") -> Settings:
    return Settings(
        tls_cert_file=str(pair.cert), tls_key_file=str(pair.key), tls_client_ca_file=ca, tls_client_auth=client_auth
    )


def test_no_setting_is_no_tls() -> None:
    assert open_tls(Settings()) is None


def test_loaded_certificates_are_reported(authority: Authority) -> None:
    pair = authority.issue("server", [uri("spiffe://a/b")])
    with capture_logs() as logs:
        files = TlsFiles(_settings(pair, str(authority.file)))
    (event,) = logs
    assert (event["event"], event["subject"]) == ("certificate_loaded", "CN=server")
    assert (event["names"], event["client_ca"]) == (["spiffe://a/b"], ["CN=authority"])
    assert "PRIVATE" not in repr(files.tls.material)


def test_a_chain_with_text_between_its_certificates_is_fine(authority: Authority) -> None:
    pair = authority.server()
    pair.cert.write_bytes(b"# \xc3\xa4\n" + pair.cert.read_bytes() + b"# next\n" + authority.pem)
    material = TlsFiles(_settings(pair, str(pair.cert))).tls.material
    assert material.chain_pem.count(b"BEGIN CERTIFICATE") == 2
    assert [ca.subject for ca in material.client_cas] == ["CN=server", "CN=authority"]


def _encrypted(pair: Pair) -> bytes:
    key = load_pem_private_key(pair.key.read_bytes(), None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ("cert gone", "kvcm.tls.cert_file {cert!r} cannot be read: No such file or directory"),
        ("cert directory", "kvcm.tls.cert_file {cert!r} cannot be read: Is a directory"),
        ("cert empty", "kvcm.tls.cert_file {cert!r} holds no certificate: it must be PEM, BEGIN CERTIFICATE"),
        ("cert der", "kvcm.tls.cert_file {cert!r} holds no certificate: it must be PEM, BEGIN CERTIFICATE"),
        ("key gone", "kvcm.tls.key_file {key!r} cannot be read: No such file or directory"),
        ("key broken", "kvcm.tls.key_file {key!r} holds no private key: it must be PEM, BEGIN PRIVATE KEY"),
        ("key encrypted", "kvcm.tls.key_file {key!r} holds a key with a password: it must be without one"),
        ("key other", "kvcm.tls.key_file {key!r} is not the key of the certificate in kvcm.tls.cert_file {cert!r}"),
        ("ca gone", "kvcm.tls.client_ca_file '/nowhere' cannot be read: No such file or directory"),
    ],
)
def test_every_mistake_is_named(authority: Authority, flaw: str, said: str) -> None:
    pair, other = authority.server(), authority.server("other")
    damage = {
        "cert gone": lambda: pair.cert.unlink(),
        "cert directory": lambda: (pair.cert.unlink(), pair.cert.mkdir()),
        "cert empty": lambda: pair.cert.write_bytes(b""),
        "cert der": lambda: pair.cert.write_bytes(authority.certificate.public_bytes(Encoding.DER)),
        "key gone": lambda: pair.key.unlink(),
        "key broken": lambda: pair.key.write_bytes(pair.key.read_bytes()[:60]),
        "key encrypted": lambda: pair.key.write_bytes(_encrypted(pair)),
        "key other": lambda: pair.key.write_bytes(other.key.read_bytes()),
        "ca gone": lambda: None,
    }
    damage[flaw]()
    with pytest.raises(ConfigError) as caught:
        TlsFiles(_settings(pair, "/nowhere" if flaw == "ca gone" else ""))
    assert str(caught.value) == said.format(cert=str(pair.cert), key=str(pair.key))


def test_a_key_that_is_too_short_is_refused(authority: Authority) -> None:
    weak = authority.issue("weak", key=rsa.generate_private_key(65537, 1024))
    with pytest.raises(ConfigError, match=r"kvcm\.tls\.cert_file .* cannot be used with its key .*: EE_KEY"):
        TlsFiles(_settings(weak))


def test_a_key_that_others_can_read_is_reported(authority: Authority) -> None:
    pair = authority.server()
    pair.key.chmod(0o640)
    with capture_logs() as logs:
        TlsFiles(_settings(pair))
    assert [event["event"] for event in logs] == ["certificate_loaded", "tls_key_readable"]


async def test_a_poll_that_finds_nothing_new_reads_nothing(authority: Authority) -> None:
    pair = authority.server()
    files = TlsFiles(_settings(pair))
    before = files.tls.material, files.tls.context
    await files.poll()
    pair.cert.touch()
    await files.poll()
    assert (files.tls.material, files.tls.context) == before


async def test_an_unusable_certificate_is_reported_once(authority: Authority) -> None:
    pair = authority.server()
    files = TlsFiles(_settings(pair))
    pair.key.unlink()
    with capture_logs() as logs:
        await files.poll()
        await files.poll()
    assert [event["event"] for event in logs] == ["certificate_refused"]


def _loaded(*texts: str) -> Settings:
    return load_settings(None, texts, {}, lambda _text: None)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["kvcm.tls.cert_file=/a"], "kvcm.tls.key_file is missing"),
        (["kvcm.tls.client_ca_file=/a"], "kvcm.tls.client_ca_file is set without"),
        (["kvcm.tls.client_auth=maybe"], "kvcm.tls.client_auth is 'maybe', must be optional or required"),
        (
            ["kvcm.tls.cert_file=/a", "kvcm.tls.key_file=/a", "kvcm.tls.client_auth=required"],
            "kvcm.tls.client_auth is required: set kvcm.tls.client_ca_file",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(texts: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _loaded(*texts)
    assert str(caught.value).startswith(said)


def test_names_of_a_peer_are_those_that_grpc_reports() -> None:
    names = (("DNS", "a.example"), ("URI", "spiffe://a"), ("email", "a@b"))
    others = (("IP Address", "0:0:0:0:0:0:0:1\n"), ("DirName", "x"))
    peer = {"subject": ((("commonName", "nobody"),),), "subjectAltName": names + others}
    assert names_of_peer(peer) == ("a.example", "spiffe://a", "a@b", "::1")
    assert names_of_peer({}) == names_of_peer(None) == ()


@pytest.fixture
def reloading(tmp_path: Path) -> Iterator[TlsSite]:
    with tls_manager(tmp_path) as reloading:
        yield reloading


def _loaded_subjects(reloading: TlsSite) -> list[str]:
    return [event["subject"] for event in reloading.process.events("certificate_loaded")]


def _shown(address: str) -> bytes:
    """Return the certificate that a port shows."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=SECONDS).encode()


def _all_show(reloading: TlsSite, pair: Pair) -> bool:
    return {_shown(address) for address in reloading.process.address} == {pair.cert.read_bytes()}


class Traffic:
    """Requests of both transports, on connections that are kept and on new ones, until the test ends it."""

    def __init__(self, reloading: TlsSite) -> None:
        self._site = reloading
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._http, self._grpc)]
        self.failures: list[str] = []
        self.answers = {"http": 0, "grpc": 0}

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _http(self) -> None:
        with contextlib.closing(self._site.connection()) as kept:
            while not self._is_over.is_set():
                with contextlib.closing(self._site.connection()) as fresh:
                    for connection in (kept, fresh):
                        self._count("http", lambda connection=connection: _get(connection))  # type: ignore[misc]

    def _grpc(self) -> None:
        with self._site.channel() as kept:
            while not self._is_over.is_set():
                with self._site.channel() as fresh:
                    for channel in (kept, fresh):
                        self._count("grpc", lambda channel=channel: channel.unary_unary(HEALTH)(b"", timeout=SECONDS))  # type: ignore[misc]

    def _count(self, transport: str, request: Any) -> None:
        try:
            assert request()
            self.answers[transport] += 1
        except Exception as error:
            self.failures.append(f"{transport}: {error!r}")


def _get(connection: http.client.HTTPSConnection) -> bool:
    connection.request("GET", "/livez")
    response = connection.getresponse()
    return response.read() == b"ok" and response.status == 200


def test_a_new_certificate_is_shown_and_no_request_fails(reloading: TlsSite) -> None:
    with Traffic(reloading) as traffic:
        for name in ("second", "third"):
            fresh = reloading.authority.server(name)
            fresh.put_into(reloading.pair)
            eventually(lambda fresh=fresh: _all_show(reloading, fresh))  # type: ignore[misc]
        before = dict(traffic.answers)
        eventually(lambda: all(traffic.answers[name] > before[name] + 5 for name in before))
    assert not traffic.failures
    assert _loaded_subjects(reloading) == ["CN=server", "CN=second", "CN=third"]
    reported = reloading.process.events("certificate_loaded")[-1]
    assert reported["names"] == ["localhost", "127.0.0.1"]
    assert reported["not_after"].endswith("+00:00")


def test_a_link_above_the_files_can_be_turned(tmp_path: Path) -> None:
    authority, directory = Authority.make(tmp_path / "ca"), tmp_path / "mounted"
    for name in ("old", "new"):
        made = authority.server(name)
        (tmp_path / name).mkdir()
        for file, target in zip(made, ("tls.crt", "tls.key"), strict=True):
            file.rename(tmp_path / name / target)
    directory.mkdir()
    (directory / "..data").symlink_to(tmp_path / "old")
    for target in ("tls.crt", "tls.key"):
        (directory / target).symlink_to(Path("..data") / target)
    files = (f"kvcm.tls.cert_file={directory}/tls.crt", f"kvcm.tls.key_file={directory}/tls.key")
    with manager(tmp_path / "own", *files) as process:
        (directory / "..new").symlink_to(tmp_path / "new")
        (directory / "..new").rename(directory / "..data")
        subjects = eventually(lambda: [e["subject"] for e in process.events("certificate_loaded")][1:])
        assert subjects == ["CN=new"]


@pytest.mark.parametrize("flaw", ["key", "cert", "gone", "mismatch"])
def test_an_invalid_certificate_or_key_is_not_taken_over(reloading: TlsSite, flaw: str) -> None:
    before = reloading.pair.cert.read_bytes()
    if flaw == "mismatch":
        reloading.pair.key.write_bytes(reloading.authority.server("other").key.read_bytes())
    elif flaw == "gone":
        reloading.pair.cert.unlink()
    else:
        (reloading.pair.key if flaw == "key" else reloading.pair.cert).write_text("broken")
    event, *_ = eventually(lambda: reloading.process.events("certificate_refused"))
    setting = "kvcm.tls.cert_file" if flaw in {"cert", "gone"} else "kvcm.tls.key_file"
    assert event["reason"].startswith(f"{setting} '{reloading.pair.cert.parent}")
    assert {_shown(address) for address in reloading.process.address} == {before}
    assert (
        reloading.principal_over_http(key=reloading.admin_key)
        == reloading.principal_over_grpc(key=reloading.admin_key)
        == "admin"
    )
    repaired = reloading.authority.server("repaired")
    repaired.put_into(reloading.pair)
    eventually(lambda: _all_show(reloading, repaired))
    assert "PRIVATE KEY-----" not in reloading.process.log_text()


def test_a_signal_reads_them_at_once_and_says_nothing_where_nothing_changed(reloading: TlsSite) -> None:
    reloading.process.signal(signal.SIGHUP)
    eventually(lambda: reloading.process.events("reloaded"))
    assert _loaded_subjects(reloading) == ["CN=server"]
    fresh = reloading.authority.server("fresh")
    fresh.put_into(reloading.pair)
    reloading.process.signal(signal.SIGHUP)
    eventually(lambda: _all_show(reloading, fresh))


def _replace_client_authority(site: TlsSite) -> Authority:
    successor = Authority.make(site.clients.directory / "next", "next")
    site.clients.file.write_bytes(successor.pem)
    eventually(lambda: len(_loaded_subjects(site)) == 2)
    return successor


def test_certificates_of_a_removed_authority_are_refused(reloading: TlsSite) -> None:
    reloading.create_key(name="engine", role="ROLE_VIEWER", certificate_name="engine.example")
    pair = reloading.clients.issue("engine", [dns("engine.example")])
    assert reloading.principal_over_http(pair) == "engine"
    successor = _replace_client_authority(reloading)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        reloading.principal_over_http(pair)
    assert reloading.principal_over_http(successor.issue("engine", [dns("engine.example")])) == "engine"


def test_the_same_over_grpc_where_certificates_are_required(tmp_path: Path) -> None:
    with tls_manager(tmp_path, "kvcm.tls.client_auth=required") as reloading:
        old = reloading.clients.issue("engine", [dns("engine.example")])
        reloading.create_key(old, name="engine", role="ROLE_VIEWER", certificate_name="engine.example")
        assert reloading.principal_over_grpc(old) == "engine"
        successor = _replace_client_authority(reloading)
        with pytest.raises(grpc.RpcError) as caught:
            reloading.principal_over_grpc(old)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reloading.principal_over_grpc(successor.issue("engine", [dns("engine.example")])) == "engine"


def test_when_certificates_end_is_in_the_metrics(reloading: TlsSite) -> None:
    headers = dict(reloading.bearer(reloading.admin_key))
    with contextlib.closing(reloading.connection()) as connection:
        connection.request("GET", "/metrics", headers=headers)
        text = connection.getresponse().read().decode()
    name = "kvcm_certificate_expiry_seconds"
    found = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith(name)}
    now = reloading.authority.certificate.not_valid_after_utc.timestamp() - 100 * 86400
    assert found[f'{name}{{file="server"}}'] == pytest.approx(now + 90 * 86400, abs=600)
    assert found[f'{name}{{file="client_ca"}}'] == pytest.approx(now + 100 * 86400, abs=600)
