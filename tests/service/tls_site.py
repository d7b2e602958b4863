"""A manager that speaks TLS and asks for keys, and clients of every kind for it."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from authorities import Authority, Pair
from test_transport_process import ManagerProcess, manager

from kvcm.protocol.kvcm.v1 import access_service_pb2 as access
from kvcm.protocol.kvcm.v1 import access_service_pb2_grpc as access_grpc

SECONDS = 30.0


@dataclass(frozen=True)
class TlsSite:
    """A running manager, the authority of its certificate, and the one of its clients."""

    process: ManagerProcess
    authority: Authority
    clients: Authority
    pair: Pair

    @property
    def admin_key(self) -> str:
        """The key of its administrator."""
        return (self.process.data_dir / "admin.key").read_text().strip()

    def context(self, client: Pair | None = None) -> ssl.SSLContext:
        """Return a context of a client that believes its authority."""
        context = ssl.create_default_context(cafile=str(self.authority.file))
        if client is not None:
            context.load_cert_chain(*client)
        return context

    def connection(self, client: Pair | None = None, address: str = "") -> http.client.HTTPSConnection:
        """Connect to a port of HTTP, by default the admin plane's."""
        target = address or self.process.address.admin_http
        return http.client.HTTPSConnection(target, context=self.context(client), timeout=SECONDS)

    def channel(self, client: Pair | None = None, address: str = "") -> grpc.Channel:
        """Connect to a port of gRPC, by default the admin plane's."""
        own = (client.key.read_bytes(), client.cert.read_bytes()) if client is not None else (None, None)
        credentials = grpc.ssl_channel_credentials(self.authority.pem, *own)
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0))
        return grpc.secure_channel(address or self.process.address.admin_rpc, credentials, options)

    def create_key(self, client: Pair | None = None, **fields: Any) -> access.CreateKeyResponse:
        """Make a key, or let a certificate in."""
        with self.channel(client) as channel:
            stub = access_grpc.AccessServiceStub(channel)
            request = access.CreateKeyRequest(**fields)
            made = stub.CreateKey(request, timeout=SECONDS, metadata=self.bearer(self.admin_key))
        assert made.header.status.code == 1, made
        return made

    def bearer(self, key: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a key."""
        return (("authorization", f"Bearer {key}"),)

    def principal_over_grpc(self, client: Pair | None = None, key: str = "") -> str:
        """Return the name of the principal of a client, "" when it is not authenticated."""
        metadata = self.bearer(key) if key else ()
        with self.channel(client) as channel:
            try:
                answer = access_grpc.AccessServiceStub(channel).WhoAmI(
                    access.WhoAmIRequest(), timeout=SECONDS, metadata=metadata
                )
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    raise
                return ""
        return str(answer.key.name)

    def principal_over_http(self, client: Pair | None = None, key: str = "", times: int = 1) -> str:
        """Return the same over HTTP, on one connection."""
        headers = dict(self.bearer(key) if key else ())
        with contextlib.closing(self.connection(client)) as connection:
            names = set()
            for _ in range(times):
                connection.request("POST", "/api/whoAmI", b"{}", headers)
                response = connection.getresponse()
                body = response.read()
                assert response.status in {200, 401}, response.status
                names.add(json.loads(body).get("key", {}).get("name", ""))
        (name,) = names
        return str(name)


@contextlib.contextmanager
def tls_manager(directory: Path, *settings: str) -> Iterator[TlsSite]:
    """Run a manager with TLS, certificates of clients and keys inside the block."""
    authority, clients = Authority.make(directory / "ca"), Authority.make(directory / "clients", "clients")
    pair = authority.server()
    tls = (f"kvcm.tls.cert_file={pair.cert}", f"kvcm.tls.key_file={pair.key}")
    ca = f"kvcm.tls.client_ca_file={clients.file}"
    auth = ("kvcm.auth.mode=required", "kvcm.service.host=127.0.0.1")
    with manager(directory / "manager", *tls, ca, *auth, *settings) as process:
        yield TlsSite(process, authority, clients, pair)
