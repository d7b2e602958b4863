"""Certificates that are replaced while a manager serves: nobody notices, and nothing broken is taken over."""

from __future__ import annotations

import contextlib
import http.client
import signal
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from authorities import Authority, Pair, dns
from test_transport_drivers import eventually
from test_transport_process import manager
from tls_site import SECONDS, TlsSite, tls_manager

HEALTH = "/grpc.health.v1.Health/Check"


@pytest.fixture
def site(tmp_path: Path) -> Iterator[TlsSite]:
    with tls_manager(tmp_path) as site:
        yield site


def _loaded(site: TlsSite) -> list[str]:
    return [event["subject"] for event in site.process.events("certificate_loaded")]


def _shown(address: str) -> bytes:
    """Return the certificate that a port shows."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=SECONDS).encode()


def _all_show(site: TlsSite, pair: Pair) -> bool:
    return {_shown(address) for address in site.process.address} == {pair.cert.read_bytes()}


class Traffic:
    """Requests of both transports, on connections that are kept and on new ones, until it is told to end."""

    def __init__(self, site: TlsSite) -> None:
        self._site = site
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


def test_a_new_certificate_is_shown_and_no_request_fails(site: TlsSite) -> None:
    with Traffic(site) as traffic:
        for name in ("second", "third"):
            fresh = site.authority.server(name)
            fresh.put_into(site.pair)
            eventually(lambda fresh=fresh: _all_show(site, fresh))  # type: ignore[misc]
        before = dict(traffic.answers)
        eventually(lambda: all(traffic.answers[name] > before[name] + 5 for name in before))
    assert not traffic.failures
    assert _loaded(site) == ["CN=server", "CN=second", "CN=third"]
    told = site.process.events("certificate_loaded")[-1]
    assert told["names"] == ["localhost", "127.0.0.1"]
    assert told["not_after"].endswith("+00:00")


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
def test_what_does_not_fit_is_not_taken_over(site: TlsSite, flaw: str) -> None:
    before = site.pair.cert.read_bytes()
    if flaw == "mismatch":
        site.pair.key.write_bytes(site.authority.server("other").key.read_bytes())
    elif flaw == "gone":
        site.pair.cert.unlink()
    else:
        (site.pair.key if flaw == "key" else site.pair.cert).write_text("broken")
    (event,) = eventually(lambda: site.process.events("certificate_refused"))
    setting = "kvcm.tls.cert_file" if flaw in {"cert", "gone"} else "kvcm.tls.key_file"
    assert event["reason"].startswith(f"{setting} '{site.pair.cert.parent}")
    assert {_shown(address) for address in site.process.address} == {before}
    assert site.who_over_http(key=site.admin_key) == site.who_over_grpc(key=site.admin_key) == "admin"
    repaired = site.authority.server("repaired")
    repaired.put_into(site.pair)
    eventually(lambda: _all_show(site, repaired))
    assert "PRIVATE KEY-----" not in site.process.log_text()


def test_a_signal_reads_them_at_once_and_says_nothing_where_nothing_changed(site: TlsSite) -> None:
    site.process.signal(signal.SIGHUP)
    eventually(lambda: site.process.events("reloaded"))
    assert _loaded(site) == ["CN=server"]
    fresh = site.authority.server("fresh")
    fresh.put_into(site.pair)
    site.process.signal(signal.SIGHUP)
    eventually(lambda: _all_show(site, fresh))


def test_an_authority_that_is_taken_away_lets_nobody_in_any_more(site: TlsSite) -> None:
    site.create_key(name="engine", role="ROLE_VIEWER", certificate_name="engine.example")
    pair = site.clients.issue("engine", [dns("engine.example")])
    assert site.who_over_http(pair) == "engine"
    successor = Authority.make(site.clients.directory / "next", "next")
    site.clients.file.write_bytes(successor.pem)
    eventually(lambda: len(_loaded(site)) == 2)
    with pytest.raises((ssl.SSLError, ConnectionError)):
        site.who_over_http(pair)
    assert site.who_over_http(successor.issue("engine", [dns("engine.example")])) == "engine"


def test_the_same_over_grpc_where_certificates_are_required(tmp_path: Path) -> None:
    with tls_manager(tmp_path, "kvcm.tls.client_auth=required") as site:
        old = site.clients.issue("engine", [dns("engine.example")])
        site.create_key(old, name="engine", role="ROLE_VIEWER", certificate_name="engine.example")
        assert site.who_over_grpc(old) == "engine"
        successor = Authority.make(site.clients.directory / "next", "next")
        site.clients.file.write_bytes(successor.pem)
        eventually(lambda: len(_loaded(site)) == 2)
        with pytest.raises(grpc.RpcError) as caught:
            site.who_over_grpc(old)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert site.who_over_grpc(successor.issue("engine", [dns("engine.example")])) == "engine"


def test_when_certificates_end_is_in_the_metrics(site: TlsSite) -> None:
    headers = dict(site.bearer(site.admin_key))
    with contextlib.closing(site.connection()) as connection:
        connection.request("GET", "/metrics", headers=headers)
        text = connection.getresponse().read().decode()
    name = "kvcm_certificate_expiry_seconds"
    found = {line.split()[0]: float(line.split()[1]) for line in text.splitlines() if line.startswith(name)}
    now = site.authority.certificate.not_valid_after_utc.timestamp() - 100 * 86400
    assert found[f'{name}{{file="server"}}'] == pytest.approx(now + 90 * 86400, abs=600)
    assert found[f'{name}{{file="client_ca"}}'] == pytest.approx(now + 100 * 86400, abs=600)
