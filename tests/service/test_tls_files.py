"""Files of certificates and keys as settings name them: every mistake is named with the setting and the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from authorities import Authority, Pair, uri
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from structlog.testing import capture_logs

from kvcm.config import ConfigError, Settings, load_settings
from kvcm.service.certificates import names_of_peer
from kvcm.tls_files import TlsFiles, open_tls


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path)


def _settings(pair: Pair, ca: str = "", client_auth: str = "optional") -> Settings:
    return Settings(
        tls_cert_file=str(pair.cert), tls_key_file=str(pair.key), tls_client_ca_file=ca, tls_client_auth=client_auth
    )


def test_no_setting_is_no_tls() -> None:
    assert open_tls(Settings()) is None


def test_what_is_loaded_is_told(authority: Authority) -> None:
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


def test_a_key_that_others_can_read_is_told(authority: Authority) -> None:
    pair = authority.server()
    pair.key.chmod(0o640)
    with capture_logs() as logs:
        TlsFiles(_settings(pair))
    assert [event["event"] for event in logs] == ["certificate_loaded", "tls_key_readable"]


async def test_a_look_that_finds_nothing_new_reads_nothing(authority: Authority) -> None:
    pair = authority.server()
    files = TlsFiles(_settings(pair))
    before = files.tls.material, files.tls.context
    await files.look()
    pair.cert.touch()
    await files.look()
    assert (files.tls.material, files.tls.context) == before


async def test_what_cannot_be_used_is_told_once(authority: Authority) -> None:
    pair = authority.server()
    files = TlsFiles(_settings(pair))
    pair.key.unlink()
    with capture_logs() as logs:
        await files.look()
        await files.look()
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


def test_names_of_a_peer_are_those_that_grpc_tells() -> None:
    peer = {
        "subject": ((("commonName", "nobody"),),),
        "subjectAltName": (
            ("DNS", "a.example"),
            ("URI", "spiffe://a"),
            ("email", "a@b"),
            ("IP Address", "0:0:0:0:0:0:0:1\n"),
            ("DirName", "x"),
        ),
    }
    assert names_of_peer(peer) == ("a.example", "spiffe://a", "a@b", "::1")
    assert names_of_peer({}) == names_of_peer(None) == ()
