"""Both clients against a manager that speaks TLS and asks for keys; and what credentials are refused before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from authorities import Authority, Pair, dns
from blocking_client import BlockingClient
from manager_process import ManagerProcess, start_manager

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.credentials import ClientCredentials
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.pool_agent import parse_arguments
from kvcm.connectors.results import MatchMode, Outcome
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import LocationSpecInfo, ModelDeployment
from kvcm.protocol.kvcm.v1 import access_service_pb2 as access
from kvcm.protocol.kvcm.v1 import access_service_pb2_grpc as access_grpc

MODEL = ModelDeployment(model_name="model", dtype="float32", tp_size=1, pp_size=1, dp_size=1)
SPECS = [LocationSpecInfo("tp0", 64)]
WRONG = "kvcm_aaaaaaaaaaaaaaaa_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
SECONDS = 20.0


class Secure(NamedTuple):
    """A manager that demands certificates of clients and asks for keys."""

    process: ManagerProcess
    authority: Authority
    stub: Any

    @property
    def as_admin(self) -> tuple[tuple[str, str]]:
        admin = (self.process.data_dir / "admin.key").read_text().strip()
        return (("authorization", f"Bearer {admin}"),)

    def engine_key(self, name: str, **fields: Any) -> access.CreateKeyResponse:
        """Let an engine in."""
        request = access.CreateKeyRequest(name=name, role="ROLE_ENGINE", instance_groups=["default"], **fields)
        made = self.stub.CreateKey(request, timeout=SECONDS, metadata=self.as_admin)
        assert made.header.status.code == 1, made
        return made

    def rotated(self, key_id: str) -> str:
        """Replace a key at once; return the text of the new one."""
        request = access.RotateKeyRequest(key_id=key_id)
        return str(self.stub.RotateKey(request, timeout=SECONDS, metadata=self.as_admin).secret)


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    directory = tmp_path_factory.mktemp("secure")
    authority = Authority.make(directory / "ca")
    pair, own = authority.server(), authority.issue("operator", [dns("operator")])
    settings = [
        *(f"kvcm.tls.cert_file={pair.cert}", f"kvcm.tls.key_file={pair.key}"),
        *(f"kvcm.tls.client_ca_file={authority.file}", "kvcm.tls.client_auth=required"),
        *("kvcm.auth.mode=required", "kvcm.service.host=127.0.0.1"),
    ]
    credentials = grpc.ssl_channel_credentials(authority.pem, own.key.read_bytes(), own.cert.read_bytes())
    process = start_manager(directory / "manager", None, settings, credentials)
    with grpc.secure_channel(f"127.0.0.1:{process.ports['admin_rpc_port']}", credentials) as channel:
        yield Secure(process, authority, access_grpc.AccessServiceStub(channel))
    process.stop()


@pytest.fixture
def pair(secure: Secure, instance_id: str) -> Pair:
    """A valid certificate that is mapped to no principal."""
    return secure.authority.issue(instance_id, [dns(f"{instance_id}.example")])


@pytest.fixture(params=[ManagerClient, BlockingClient])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def _client(kind: Any, secure: Secure, instance_id: str, pair: Pair, **given: Any) -> Any:
    values = {"ca_file": secure.authority.file, "cert_file": pair.cert, "cert_key_file": pair.key} | given
    settings = ClientSettings(timeout_seconds=SECONDS, credentials=ClientCredentials(**values))
    return kind(secure.process.address, instance_id, settings)


def _registers(client: Any) -> bool:
    return bool(client.register_instance("default", 16, SPECS, MODEL).ok)


def test_a_key_of_a_file_lets_in(secure: Secure, kind: Any, pair: Pair, instance_id: str, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(secure.engine_key(instance_id).secret + "\n")
    with closing(_client(kind, secure, instance_id, pair, key_file=file)) as client:
        assert _registers(client)
        grant = client.start_write([1, 2])
        assert client.finish_write(grant.session_id, [True, True])
        assert client.match([1, 2, 3], MatchMode.PREFIX).outcome is Outcome.OK


def test_a_certificate_lets_in(secure: Secure, kind: Any, pair: Pair, instance_id: str) -> None:
    secure.engine_key(instance_id, certificate_name=f"{instance_id}.example")
    with closing(_client(kind, secure, instance_id, pair)) as client:
        assert _registers(client)


def test_a_key_that_was_replaced_is_read_again(
    secure: Secure, kind: Any, pair: Pair, instance_id: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    file, made = tmp_path / "key", secure.engine_key(instance_id)
    file.write_text(made.secret)
    with closing(_client(kind, secure, instance_id, pair, key_file=file)) as client:
        assert _registers(client)
        fresh = secure.rotated(made.key.key_id)
        assert client.match([1]).outcome is Outcome.MISS_ON_ERROR, "the file is as it was"
        file.write_text(fresh)
        assert client.match([1]).outcome is Outcome.OK, "the caller does not notice that it was replaced"
        file.unlink()
        assert client.match([1]).outcome is Outcome.OK
    for key in (made.secret, fresh):
        assert key.split("_", 2)[2] not in caplog.text


def test_a_certificate_that_was_replaced_is_read_again(secure: Secure, kind: Any, pair: Pair, instance_id: str) -> None:
    stranger = Authority.make(secure.authority.directory / instance_id).issue("stranger", [dns("stranger")])
    fresh = Pair(*(path.read_bytes() for path in pair))  # type: ignore[arg-type]
    for path, other in zip(pair, stranger, strict=True):
        path.write_bytes(other.read_bytes())
    key = secure.engine_key(instance_id).secret
    with closing(_client(kind, secure, instance_id, pair, key=key)) as client:
        assert client.match([1], timeout_seconds=1).outcome is not Outcome.OK
        for path, data in zip(pair, fresh, strict=True):
            path.write_bytes(data)  # type: ignore[arg-type]
        assert _registers(client)


@pytest.mark.parametrize("flaw", ["no key", "wrong key", "no certificate", "other authority", "plain text"])
def test_a_client_that_is_not_admitted_misses(
    secure: Secure, kind: Any, pair: Pair, instance_id: str, flaw: str
) -> None:
    given: dict[str, Any] = {
        "no key": {},
        "wrong key": {"key": WRONG},
        "no certificate": {"cert_file": None, "cert_key_file": None},
        "other authority": {"ca_file": Authority.make(secure.authority.directory / "other", "other").file},
        "plain text": {"ca_file": None, "cert_file": None, "cert_key_file": None, "key": WRONG},
    }[flaw]
    with closing(_client(kind, secure, instance_id, pair, **given)) as client:
        result = client.match([1], timeout_seconds=SECONDS if flaw.endswith("key") else 1)
    assert result.outcome is not Outcome.OK
    assert ("UNAUTHENTICATED" in result.reason) is flaw.endswith("key")
    assert WRONG.split("_", 2)[2] not in result.reason


def test_the_name_of_the_certificate_can_be_reported(secure: Secure, kind: Any, pair: Pair, instance_id: str) -> None:
    key = secure.engine_key(instance_id).secret
    for name, is_believed in (("localhost", True), ("elsewhere", False)):
        with closing(_client(kind, secure, instance_id, pair, key=key, server_name=name)) as client:
            found = client.match([1], timeout_seconds=SECONDS if is_believed else 1)
            assert (found.code == 8) is is_believed, "unknown instance, if it is asked"


def test_credentials_do_not_show_their_key() -> None:
    settings = ClientSettings(credentials=ClientCredentials(key=WRONG))
    assert WRONG not in repr(settings)
    with closing(ManagerClient("127.0.0.1:1", "i", settings)) as client:
        assert WRONG not in repr(vars(client))
        assert WRONG not in repr(client._login.presented)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"key": WRONG, "key_file": Path("/k")}, "key and key_file '/k' are both given"),
        ({"key": "two words"}, "key holds no key"),
        ({"key_file": Path("/nowhere")}, "key_file '/nowhere' cannot be read: No such file or directory"),
        ({"key_file": Path("/dev/null")}, "key_file '/dev/null' holds no key"),
        ({"ca_file": Path("/nowhere")}, "ca_file '/nowhere' cannot be read"),
        ({"ca_file": Path("/dev/null")}, "ca_file '/dev/null' is not PEM"),
        ({"cert_file": Path("/c")}, "cert_file and cert_key_file belong together"),
        ({"server_name": "m"}, "server_name is 'm' without TLS"),
    ],
)
def test_credentials_that_cannot_be_used_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ManagerClient("127.0.0.1:1", "i", ClientSettings(credentials=ClientCredentials(**given)))
    assert str(caught.value).startswith(said)


def test_variables_name_files() -> None:
    found = ClientCredentials.from_environment(
        {"KVCM_KEY_FILE": "/k", "KVCM_CA_FILE": "/ca", "KVCM_CERT_FILE": "/c", "KVCM_CERT_KEY_FILE": "/ck"}
    )
    assert found == ClientCredentials("", Path("/k"), Path("/ca"), Path("/c"), Path("/ck"))
    assert ClientCredentials.from_environment({}) == ClientCredentials()
    named = ClientCredentials.from_environment({"KVCM_TLS": "1", "KVCM_SERVER_NAME": "m"})
    assert (named.is_encrypted, named.server_name) == (True, "m")
    with pytest.raises(InvalidArgumentError, match="KVCM_TLS is 'yes', must be 1 or 0"):
        ClientCredentials.from_environment({"KVCM_TLS": "yes"})


def test_the_pool_agent_takes_credentials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "key").write_text(WRONG)
    monkeypatch.setenv("KVCM_TLS", "1")
    arguments = ["--storage", "s", "--capacity", "1M", "--manager", "h:1", "--node-id", "n", "--key-file"]
    settings = parse_arguments([*arguments, str(tmp_path / "key")])
    assert settings.credentials == ClientCredentials(key_file=tmp_path / "key", has_tls=True)
    with pytest.raises(SystemExit):
        parse_arguments([*arguments, "/nowhere"])
    assert "key_file '/nowhere' cannot be read" in capsys.readouterr().err
