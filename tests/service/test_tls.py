"""TLS on every port of a real manager: versions, who is believed, and who a certificate stands for."""

from __future__ import annotations

import contextlib
import datetime as dt
import http.client
import select
import socket
import ssl
import time
import warnings
from collections.abc import Callable, Iterator

import grpc
import pytest
from authorities import Authority, Pair, dns, ip, mail, uri
from ports import free_port
from test_transport_drivers import eventually
from test_transport_process import run_kvcm
from tls_site import SECONDS, TlsSite, tls_manager

from kvcm.config import DEBUG_PORT_OFFSET

SPIFFE = "spiffe://cluster/engine"
HEALTH = "/grpc.health.v1.Health/Check"
NAMES = {"dns": dns("engine.example"), "uri": uri(SPIFFE), "mail": mail("engine@example.org"), "ip": ip("::1")}
PORTS = ("rpc", "admin_rpc", "http", "admin_http")


@pytest.fixture(scope="module")
def optional(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSite]:
    """Certificates of clients are looked at where HTTP is given one."""
    with tls_manager(tmp_path_factory.mktemp("optional"), "kvcm.limits.receive_timeout_ms=1000") as site:
        yield site


@pytest.fixture(scope="module")
def required(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsSite]:
    """Nobody gets in without a certificate."""
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
def test_what_is_no_tls_is_closed_without_a_word_of_http(optional: TlsSite, port: str, said: bytes) -> None:
    with socket.create_connection(_host_port(optional, port), SECONDS) as connection:
        connection.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while heard := connection.recv(1 << 16):
                assert b"HTTP" not in heard
    with optional.channel() as channel:
        assert channel.unary_unary(HEALTH)(b"", timeout=SECONDS)
    assert "Traceback" not in optional.process.log_text()
    assert "Handshake failed" not in optional.process.log_text()
    assert not optional.process.events("handshake_failed"), "that is for debugging"


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01\x02\x00\x01\x00"])
def test_a_handshake_that_does_not_end_is_cut_off(optional: TlsSite, port: str, said: bytes) -> None:
    begin = time.monotonic()
    with socket.create_connection(_host_port(optional, port), SECONDS) as connection:
        connection.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(1 << 16):
                pass
    assert 0.5 < time.monotonic() - begin < 15


# ── who is believed ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_manager_of_another_authority_is_not_believed(optional: TlsSite) -> None:
    stranger = TlsSite(optional.process, optional.clients, optional.clients, optional.pair)
    with pytest.raises(ssl.SSLCertVerificationError):
        stranger.who_over_http()
    with stranger.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(HEALTH)(b"", timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_keys_need_no_certificate_where_it_is_optional(optional: TlsSite) -> None:
    assert optional.who_over_grpc(key=optional.admin_key) == "admin"
    assert optional.who_over_http(key=optional.admin_key) == "admin"
    assert (optional.who_over_grpc(), optional.who_over_http()) == ("", "")


def test_probes_need_nothing_where_it_is_optional(optional: TlsSite) -> None:
    for address in (optional.process.address.http, optional.process.address.admin_http):
        with contextlib.closing(optional.connection(address=address)) as connection:
            connection.request("GET", "/livez")
            assert connection.getresponse().status == 200


def test_grpc_does_not_ask_for_certificates_where_they_are_optional(optional: TlsSite) -> None:
    optional.create_key(name="lonely", role="ROLE_VIEWER", certificate_name="lonely.example")
    pair = optional.clients.issue("lonely", [dns("lonely.example")])
    assert optional.who_over_http(pair, times=3) == "lonely"
    assert optional.who_over_grpc(pair) == ""


@pytest.mark.parametrize("kind", NAMES)
def test_every_kind_of_name_stands_for_its_principal(required: TlsSite, kind: str) -> None:
    pair = required.clients.issue(kind, [dns("unknown.example"), NAMES[kind]])
    assert required.who_over_grpc(pair) == f"by-{kind}"
    assert required.who_over_http(pair, times=3) == f"by-{kind}"


def test_a_common_name_stands_for_nobody(required: TlsSite) -> None:
    for names in ([], [dns("unknown.example")]):
        pair = required.clients.issue("engine.example", names)
        assert (required.who_over_grpc(pair), required.who_over_http(pair)) == ("", "")


def test_a_key_goes_before_a_certificate(required: TlsSite) -> None:
    pair = required.clients.issue("both", [NAMES["uri"]])
    assert required.who_over_grpc(pair, required.admin_key) == "admin"
    assert required.who_over_http(pair, required.admin_key) == "admin"


def _refused(use: Callable[[], str]) -> bool:
    try:
        use()
    except (ssl.SSLError, ConnectionError, http.client.HTTPException):
        return True
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


@pytest.mark.parametrize("flaw", ["none", "foreign", "expired"])
def test_who_has_no_certificate_that_counts_does_not_get_in(required: TlsSite, flaw: str) -> None:
    names = [NAMES["uri"]]
    if flaw == "none":
        pair = None
    elif flaw == "foreign":
        pair = Authority.make(required.clients.directory / "foreign").issue("foreign", names)
    else:
        pair = required.clients.issue("expired", names, dt.timedelta(minutes=-1))
    assert _refused(lambda: required.who_over_http(pair, required.admin_key))
    assert _refused(lambda: required.who_over_grpc(pair, required.admin_key))


@pytest.mark.parametrize("flaw", ["foreign", "expired"])
def test_a_certificate_that_does_not_count_is_refused_where_it_is_optional(optional: TlsSite, flaw: str) -> None:
    if flaw == "foreign":
        pair = Authority.make(optional.clients.directory / "foreign").issue("foreign", [NAMES["uri"]])
    else:
        pair = optional.clients.issue("expired", [NAMES["uri"]], dt.timedelta(minutes=-1))
    assert _refused(lambda: optional.who_over_http(pair))


def _gets_in(site: TlsSite, port: str) -> bool:
    try:
        _handshake(site, port, ssl.TLSVersion.TLSv1_3).close()
    except OSError:
        return False
    return True


# ── connections ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_manager_ends_in_time_whoever_is_connected(tmp_path_factory: pytest.TempPathFactory) -> None:
    with tls_manager(tmp_path_factory.mktemp("end"), "kvcm.service.drain_timeout_ms=20000") as site:
        with contextlib.closing(site.connection()) as idle, socket.create_connection(_host_port(site, "http")):
            idle.request("GET", "/livez")
            idle.getresponse().read()
            begin = time.monotonic()
            site.process.process.terminate()
            assert site.process.wait() == 0
            assert time.monotonic() - begin < 15
    assert "Traceback" not in site.process.log_text()


def test_handshakes_count_as_connections(tmp_path_factory: pytest.TempPathFactory) -> None:
    limits = ("kvcm.limits.max_connections=5", "kvcm.limits.receive_timeout_ms=3000")
    with tls_manager(tmp_path_factory.mktemp("few"), *limits) as site:
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(socket.create_connection(_host_port(site, "http"), SECONDS))
            with pytest.raises(OSError):
                _handshake(site, "http", ssl.TLSVersion.TLSv1_3)
        eventually(lambda: _gets_in(site, "http"))


def test_the_debug_port_speaks_tls_too(tmp_path_factory: pytest.TempPathFactory) -> None:
    port = free_port(DEBUG_PORT_OFFSET)
    settings = ("kvcm.service.enable_debug_service=true", f"kvcm.service.http_port={port}")
    with tls_manager(tmp_path_factory.mktemp("debug"), *settings) as site:
        host, _, _ = site.process.address.http.rpartition(":")
        with contextlib.closing(site.connection(address=f"{host}:{port + DEBUG_PORT_OFFSET}")) as connection:
            connection.request("POST", "/api/clearFaults", b"{}")
            assert connection.getresponse().status == 401


def test_who_does_not_read_is_disconnected(tmp_path_factory: pytest.TempPathFactory) -> None:
    with tls_manager(tmp_path_factory.mktemp("slow"), "kvcm.limits.send_timeout_ms=500") as site:
        request = b"GET /metrics HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %s\r\n\r\n" % site.admin_key.encode()
        with _handshake(site, "admin_http", ssl.TLSVersion.TLSv1_3) as connection:
            connection.settimeout(0.2)
            with contextlib.suppress(TimeoutError):
                for _ in range(100_000):
                    connection.sendall(request)
            poll = select.poll()
            poll.register(connection, 0)
            assert eventually(lambda: poll.poll(10)), "it waits for its client"
        assert site.who_over_http(key=site.admin_key) == "admin"
        assert "Traceback" not in site.process.log_text()


def test_a_broken_start_names_the_setting(tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tmp_path_factory.mktemp("broken")
    pair = Authority.make(directory / "ca").server()
    pair.key.write_text("no key")
    options = ("-e", f"kvcm.tls.cert_file={pair.cert}", "-e", f"kvcm.tls.key_file={pair.key}")
    ended = run_kvcm(directory, "serve", "--data-dir", str(directory / "data"), *options)
    assert ended.returncode == 1, ended.stderr
    assert f"kvcm.tls.key_file '{pair.key}' holds no private key" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr
