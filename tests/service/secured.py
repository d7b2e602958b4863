"""A manager that asks for keys, with two tenants and a key of every kind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from authorities import Authority, uri
from test_transport_drivers import Api, ClientTls, eventually
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site


@dataclass(frozen=True)
class Secured:
    """A running manager.

    Attributes:
        process: it.
        admin_key: of its administrator.
        tls: how its clients speak TLS, where it does.
        clients: gives them certificates, where it asks for some.
    """

    process: ManagerProcess
    admin_key: str
    tls: ClientTls | None = None
    clients: Authority | None = None

    @contextlib.contextmanager
    def api(self, transport: str = "grpc", key: str | None = None, tls: ClientTls | None = None) -> Iterator[Api]:
        """Call with a key, as the administrator unless one is given."""
        with self.process.api(transport, self.admin_key if key is None else key, tls or self.tls) as api:
            yield api

    def page(self, path: str, key: str = "", *, is_stream: bool = False) -> tuple[int, str]:
        """Return status and text of a page of the admin port; of a stream the status alone."""
        with self.process.api("http", "", self.tls) as api:
            connection: Any = api.driver.admin  # type: ignore[attr-defined]
            connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
            response = connection.getresponse()
            return response.status, "" if is_stream else response.read().decode()

    def certified(self, name: str) -> ClientTls:
        """Return the TLS settings of a client with a certificate of that name."""
        assert self.tls is not None
        assert self.clients is not None
        return ClientTls(self.tls.ca_file, *self.clients.issue(name, [uri(spiffe(name))]))

    def key(self, name: str, role: str, **fields: Any) -> str:
        """Make a key and return its text."""
        with self.api() as api:
            return str(api.ok("AccessService.CreateKey", name=name, role=role, **fields).secret)

    def engine(self, name: str, *groups: str, **fields: Any) -> str:
        """Make a key of an engine."""
        return self.key(name, "ROLE_ENGINE", instance_groups=groups, **fields)


@dataclass(frozen=True)
class Tenants:
    """Two tenants: group and instance of each, and an API key of every kind by name.

    Attributes:
        server: they share it.
        groups: by tenant, a and b.
        instances: by tenant.
        keys: `viewer`, `operator`, `admin`; of engines of a with one verb each `match`, `write`, `remove`, `pin`,
            `score`; of engines with all verbs `engine` in a, `foreign` in b and `everywhere`; `expired` was an admin's.
        admin_of_a: key of an administrator of a's group alone.
    """

    server: Secured
    groups: dict[str, str] = field(default_factory=dict)
    instances: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    admin_of_a: str = ""

    @classmethod
    def on(cls, server: Secured) -> Tenants:
        """Make them."""
        made = cls(server)
        with server.api() as api:
            site = Site(api)
            for name in ("a", "b"):
                made.groups[name] = site.group(pin_budget_bytes=1 << 20)
                made.instances[name] = site.instance(made.groups[name])
        made._make_keys()
        key = server.key("admin-of-a", "ROLE_ADMIN", instance_groups=[made.groups["a"]])
        return replace(made, admin_of_a=key)

    def _make_keys(self) -> None:
        """Make keys, and where clients have certificates the same for these."""
        server, of_a, of_b = self.server, [self.groups["a"]], [self.groups["b"]]
        kinds: dict[str, dict[str, Any]] = {"expired": {"role": "ROLE_ADMIN", "ttl_seconds": 1}}
        roles = ("viewer", "operator", "admin")
        kinds |= {role: {"role": f"ROLE_{role.upper()}"} for role in roles}
        groups = {**dict.fromkeys(("match", "write", "remove", "pin", "score", "engine"), of_a), "foreign": of_b}
        for name, own in {**groups, "everywhere": ["*"]}.items():
            kinds[name] = {"role": "ROLE_ENGINE", "instance_groups": own}
        for verb in ("match", "write", "remove", "pin", "score"):
            kinds[verb]["verbs"] = [verb.upper()]
        for name, fields in kinds.items():
            if server.clients is not None:
                server.key(f"certified-{name}", certificate_name=spiffe(name), **fields)
            self.keys[name] = server.key(f"some-{name}" if name in roles else name, **fields)
        with server.api(key=self.keys["expired"]) as api:
            eventually(lambda: api.attempt("AccessService.WhoAmI").status == 401)

    def authorization(self, name: str) -> str:
        """Return the value of the authorization header with that key."""
        return f"Bearer {self.keys[name]}"


def spiffe(name: str) -> str:
    """Return the name that certificates have."""
    return f"spiffe://tests/{name}"


@contextlib.contextmanager
def secured_over(mode: str, directory: Path, *settings: str) -> Iterator[Secured]:
    """Run a manager that asks for keys: `plain`, over `tls`, or over `mtls`, where every client has a certificate."""
    if mode == "plain":
        with secured(directory, *settings) as server:
            yield server
        return
    authority, clients = Authority.make(directory / "ca"), Authority.make(directory / "clients", "clients")
    pair, own = authority.server(), clients.issue("somebody", [uri(spiffe("somebody"))])
    tls = [f"kvcm.tls.cert_file={pair.cert}", f"kvcm.tls.key_file={pair.key}"]
    if mode == "mtls":
        tls += [f"kvcm.tls.client_ca_file={clients.file}", "kvcm.tls.client_auth=required"]
    with secured(directory, *tls, *settings) as server:
        shown = ClientTls(authority.file, *(own if mode == "mtls" else ()))
        yield replace(server, tls=shown, clients=clients if mode == "mtls" else None)


@contextlib.contextmanager
def secured(directory: Path, *settings: str, **environment: str) -> Iterator[Secured]:
    """Run a manager that asks for keys."""
    required = ("kvcm.auth.mode=required", "kvcm.service.host=127.0.0.1", "kvcm.service.enable_debug_service=false")
    with manager(directory, *required, *settings, **environment) as process:
        yield Secured(process, (process.data_dir / "admin.key").read_text().strip())
