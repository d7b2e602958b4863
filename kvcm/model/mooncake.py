"""What the manager and the engines both know of Mooncake: how its client is opened and what its answers mean.

The client is C++ and takes its process over, as was seen with version 0.3.13.post1:

* `setup` and `close` hold the interpreter's lock: nothing in the process runs until they return. Against a master that
  is dead, `setup` takes 90 s; against one that is stopped it never returned. The limits below, and a look whether
  anybody listens at the master's address, make that 3 s at the worst.
* A call on a client that was closed ends the process, and so may the end of the process while a call is under way.
* A call against a dead or silent master ends after some 4 s. When the master is back, the same client goes on.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import IntEnum
from importlib import import_module
from importlib.util import find_spec
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Protocol, cast

from kvcm.model.errors import InvalidArgumentError, StorageIOError, UnsupportedError
from kvcm.model.storages import MooncakeStorageSpec

__all__ = [
    "AllowedHosts",
    "HostPort",
    "HostRule",
    "MooncakeClient",
    "MooncakeCode",
    "check_mooncake",
    "explain",
    "load_mooncake",
    "mooncake_hosts",
    "open_client",
]

# Hosts that the manager may connect to.
#
# Configs of storages come through the API and name hosts. Whoever may add a storage must not be able to make the
# manager talk to whatever it can reach, least of all to the address where a cloud hands out the credentials of its
# machines.
#
# Names are compared as they are written and never resolved: the storage's own client resolves them again when it
# connects, so an answer that was checked here would prove nothing. Who lists a name trusts whoever answers for it.
# Addresses are compared as addresses, in whatever way they are written.

_Address = IPv4Address | IPv6Address
_Network = IPv4Network | IPv6Network


def _in_ipv6(network: IPv4Network) -> Iterator[IPv6Network]:
    """Return the networks of IPv6 addresses that translators and tunnels take for those of an IPv4 network."""
    number, bits = int(network.network_address), network.prefixlen
    for prefix in ("::", "::ffff:0:0:0", "64:ff9b::", "64:ff9b:1::"):
        yield IPv6Network((int(IPv6Address(prefix)) | number, 96 + bits))
    yield IPv6Network((int(IPv6Address("2002::")) | number << 80, 16 + bits))


# Link-local, and where clouds have their metadata service elsewhere. Allowed only by a rule that names just them.
_NEVER_BY_DEFAULT_V4 = tuple(IPv4Network(text) for text in ("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32"))
_NEVER_BY_DEFAULT: tuple[_Network, ...] = (
    *_NEVER_BY_DEFAULT_V4,
    *(each for network in _NEVER_BY_DEFAULT_V4 for each in _in_ipv6(network)),
    *(IPv6Network(text) for text in ("fe80::/10", "fd00:ec2::254/128")),
)
_NAMES_NEVER_BY_DEFAULT = frozenset({"metadata.google.internal", "metadata.goog"})
_VISIBLE = re.compile("[!-~]+")  # others are dropped, decoded or mapped to these, by some clients and not by others
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,252}[a-z0-9_])?")
_ZONE = re.compile(r"[a-z0-9_.-]+")
_OLD_ADDRESS = re.compile(r"[0-9][0-9a-fx.]*")
_PORT = re.compile("[0-9]{1,5}")
_FORM = "<host>, <host>:<port>, an address (IPv6 with a port in brackets) or a network as in 10.0.0.0/8"


@dataclass(frozen=True, slots=True)
class HostPort:
    """A host that something is to be connected to.

    Attributes:
        host: name or address, in lower case, without brackets.
        port: None when none is named.
    """

    host: str
    port: int | None

    @classmethod
    def parse(cls, text: str) -> HostPort:
        """Read `<host>` or `<host>:<port>`.

        Raises:
            InvalidArgumentError: it is neither.
        """
        if not _VISIBLE.fullmatch(text):
            raise InvalidArgumentError(f"host {text!r} must be <host> or <host>:<port>, in visible ASCII characters")
        host, port = _split(text.lower())
        host = host.removesuffix(".")
        if _address(host) is None and not _NAME.fullmatch(host):
            raise InvalidArgumentError(f"host {text!r} must be <host> or <host>:<port>")
        return cls(host, port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port is None else f"{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HostRule:
    """One entry of the allowed hosts.

    Attributes:
        text: as it was written.
        host: name or address, None for a network.
        network: of addresses; that of one address has one.
    """

    text: str
    host: HostPort
    network: _Network | None

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> HostRule:
        """Read an entry.

        Raises:
            ValueError: says which forms there are.
        """
        try:
            if "/" in text:
                network = ip_network(text)
                return cls(text, HostPort(str(network), None), network)
            host = HostPort.parse(text)
        except (ValueError, InvalidArgumentError):
            raise ValueError(_FORM) from None
        address = _address(host.host)
        return cls(text, host, None if address is None else ip_network(address))

    def allows(self, wanted: HostPort) -> bool:
        """Whether it names a host, and its port if it has one itself."""
        if self.host.port not in (None, wanted.port):
            return False
        address = _address(wanted.host)
        if address is None or self.network is None:
            return address is None and self.host.host == wanted.host
        return address in self.network

    def allows_by_default(self, wanted: HostPort) -> bool:
        """Whether it allows a host that must be named for itself, and not by a network that happens to hold it."""
        return self.allows(wanted) and (
            self.network is None
            or any(
                self.network.version == never.version and self.network.subnet_of(never)  # type: ignore[arg-type]
                for never in _NEVER_BY_DEFAULT
            )
        )


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The hosts that storages may name; None allows any but link-local addresses and metadata services."""

    rules: Sequence[HostRule] | None = None

    def check(self, field: str, wanted: HostPort) -> None:
        """Refuse a host that is not allowed.

        Args:
            field: of the config, for the message.
            wanted: what it names.

        Raises:
            InvalidArgumentError: it is not allowed; says what is.
        """
        rules = self.rules or ()
        if _is_never_by_default(wanted):
            if not any(rule.allows_by_default(wanted) for rule in rules):
                raise InvalidArgumentError(
                    f"{field} names {str(wanted)!r}, which is link-local or a metadata service: never, unless"
                    " kvcm.storage.allowed_hosts names it for itself"
                )
        elif self.rules is not None and not any(rule.allows(wanted) for rule in rules):
            allowed = ", ".join(rule.text for rule in rules) or "none (set kvcm.storage.allowed_hosts)"
            raise InvalidArgumentError(
                f"{field} names {str(wanted)!r}, which is not one of the allowed hosts: {allowed}"
            )


def _is_never_by_default(wanted: HostPort) -> bool:
    address = _address(wanted.host)
    if address is None:
        return wanted.host in _NAMES_NEVER_BY_DEFAULT
    return any(address in network for network in _NEVER_BY_DEFAULT)


def _split(text: str) -> tuple[str, int | None]:
    """Return host and port; an IPv6 address with a port is in brackets."""
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise InvalidArgumentError(f"host {text!r} must be [<address>] or [<address>]:<port>")
        return host, _port(rest[1:]) if rest else None
    host, colon, port = text.rpartition(":")
    if not colon or ":" in host:
        return text, None
    return host, _port(port)


def _port(text: str) -> int:
    if not _PORT.fullmatch(text) or not 0 < int(text) < 1 << 16:
        raise InvalidArgumentError(f"port {text!r} must be a whole number from 1 to 65535")
    return int(text)


def _address(host: str) -> _Address | None:
    """Return the address that a connection to `host` would go to, None for a name.

    `0xa9fe.43518`, `2852039166` and `::ffff:169.254.169.254` are all 169.254.169.254 to the system. A zone belongs to
    an IPv6 address only: elsewhere some clients decode what follows a `%`, and connect to something else.
    """
    text, percent, zone = host.partition("%")
    if percent and not (":" in text and _ZONE.fullmatch(zone)):
        return None
    try:
        address: _Address = ip_address(text)
    except ValueError:
        return _old_address(host)
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _old_address(host: str) -> IPv4Address | None:
    if not _OLD_ADDRESS.fullmatch(host):  # the call below ignores whatever follows a blank
        return None
    try:
        return IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        return None


# Read by the client when it is loaded; what the operator has set wins.
_LIMITS = {
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_RPC_TIMEOUT_MS": "3000",
}
_NO_METADATA_SERVER = "P2PHANDSHAKE"
_TWO_READINGS = re.compile(r"[?#\\\s]")  # in `a#@b` some see a and some see b: it is refused, being no host
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*", re.IGNORECASE)
_CONNECT_SECONDS = 2.0
_INSTALL = "install it with `pip install 'kvcm[mooncake]'`"


class MooncakeCode(IntEnum):
    """Results of the client's calls."""

    OK = 0
    NO_SPACE = -200
    INVALID = -600
    NOT_READY = -703
    MISSING = -704
    EXISTS = -705
    LEASED = -706
    LEASE_OVER = -707
    TRANSFER_FAILED = -800
    MASTER_UNREACHABLE = -900
    MASTER_SILENT = -901


_EXPLANATIONS = {
    MooncakeCode.NO_SPACE: "no segment has room for it",
    MooncakeCode.INVALID: "the size does not fit",
    MooncakeCode.NOT_READY: "it is being written",
    MooncakeCode.MISSING: "there is no such object",
    MooncakeCode.EXISTS: "there is such an object already",
    MooncakeCode.LEASED: "it is in use by a reader, try again later",
    MooncakeCode.LEASE_OVER: "the read took longer than its lease",
    MooncakeCode.TRANSFER_FAILED: "the transfer failed, is the owner of the segment alive?",
    MooncakeCode.MASTER_UNREACHABLE: "the master cannot be reached",
    MooncakeCode.MASTER_SILENT: "the master does not answer",
}


class MooncakeClient(Protocol):
    """The calls of `MooncakeDistributedStore` that are used here. All but `setup` and `close` let other threads run."""

    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int: ...

    def close(self) -> int: ...

    def register_buffer(self, buffer_ptr: int, size: int) -> int: ...

    def unregister_buffer(self, buffer_ptr: int) -> int: ...

    def put(self, key: str, value: bytes) -> int: ...

    def get(self, key: str) -> bytes: ...

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]: ...

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]: ...

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]: ...

    def batch_put_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]: ...

    def batch_get_into_multi_buffers(
        self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]], all_sizes: Sequence[Sequence[int]]
    ) -> list[int]: ...

    def batch_put_from_multi_buffers(
        self, keys: Sequence[str], all_buffer_ptrs: Sequence[Sequence[int]], all_sizes: Sequence[Sequence[int]]
    ) -> list[int]: ...

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]: ...

    def batch_get_session_end(self, keys: Sequence[str]) -> int: ...

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]: ...


def explain(code: int) -> str:
    """Return in words what a result that is no success means."""
    return f"{_EXPLANATIONS.get(cast(MooncakeCode, code), 'mooncake refused it')} (mooncake {code})"


def mooncake_hosts(spec: MooncakeStorageSpec) -> list[tuple[str, HostPort]]:
    """Return the hosts that a client has to connect to, each with the field that names it.

    Raises:
        InvalidArgumentError: one is no host.
    """
    fields = {
        "master_service_entry": spec.master_service_entry,
        "metadata_connstring": "" if spec.metadata_connstring == _NO_METADATA_SERVER else spec.metadata_connstring,
    }
    return [
        (field, _host_port(field, text))
        for field, value in fields.items()
        if value
        for text in _authorities(field, value)
    ]


def _host_port(field: str, text: str) -> HostPort:
    if text.count(":") > 1 and not text.startswith("["):  # `fd00::1:80` is an address, or one with a port
        raise InvalidArgumentError(
            f"{field}: host {text!r} must be an IPv6 address in brackets, with or without a port"
        )
    try:
        return HostPort.parse(text)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{field}: {error}") from None


def _authorities(field: str, entry: str) -> list[str]:
    """Return `a:1` and `b:2` of `etcd://a:1;b:2`, `http://user@a:1/path` and `a:1,b:2`.

    An empty one, as in `http:///a`, is returned like any other, for it is no host: the client looks for one behind it.
    """
    scheme, separator, place = entry.partition("://")
    if (separator and not _SCHEME.fullmatch(scheme)) or not entry.isprintable():
        raise InvalidArgumentError(f"{field} {entry!r} must be hosts, or <scheme>://hosts, without control characters")
    parts = [part.partition("/")[0] for part in re.split("[;,] *", place if separator else entry)]
    return [part if _TWO_READINGS.search(part) else part.rpartition("@")[2] for part in parts]


def check_mooncake(spec: MooncakeStorageSpec) -> None:
    """Refuse what no client can be opened with. Loads nothing and does not connect.

    Raises:
        UnsupportedError: the package is not installed.
        InvalidArgumentError: protocol, local_hostname or master_service_entry is malformed.
    """
    if spec.protocol not in {"tcp", "rdma"}:
        raise InvalidArgumentError(f"protocol {spec.protocol!r} must be 'tcp' or 'rdma'")
    if not _host(spec.local_hostname):
        raise InvalidArgumentError(f"local_hostname {spec.local_hostname!r} must be <host> or <host>:<port>")
    _master_address(spec)
    found = find_spec("mooncake")
    if found is None or found.origin is None:  # a folder of that name is no package
        raise UnsupportedError(f"mooncake is not installed here: {_INSTALL}")


def load_mooncake() -> type[MooncakeClient]:
    """Load the client's class.

    Raises:
        UnsupportedError: it cannot be loaded; says what to install.
    """
    for name, value in _LIMITS.items():
        os.environ.setdefault(name, value)
    try:
        module = import_module("mooncake.store")
    except ImportError as error:
        raise UnsupportedError(
            f"mooncake cannot be loaded: {error}; {_INSTALL}, and libibverbs1 of the system, also for tcp"
        ) from error
    return cast("type[MooncakeClient]", module.MooncakeDistributedStore)


def open_client(
    spec: MooncakeStorageSpec, *, segment_bytes: int, buffer_bytes: int, local_hostname: str = ""
) -> MooncakeClient:
    """Open a client; blocks, for some milliseconds where the master is well.

    Args:
        spec: of the storage.
        segment_bytes: memory that this process lends to the store; what lies in it is gone with the process.
        buffer_bytes: memory of the client's own, through which `put` and `get` go.
        local_hostname: name of this host; "" for the spec's. Ports are the client's own choice: several clients of one
            host would fight for one that is configured.

    Raises:
        UnsupportedError: the package cannot be loaded.
        InvalidArgumentError: a field of the spec is malformed.
        StorageIOError: the master cannot be reached or refuses.
    """
    client = load_mooncake()()
    _check_reachable(spec)
    host = _host(local_hostname or spec.local_hostname)
    code = client.setup(
        local_hostname=host,
        metadata_server=spec.metadata_connstring,
        global_segment_size=segment_bytes,
        local_buffer_size=buffer_bytes,
        protocol=spec.protocol,
        rdma_devices=spec.rdma_device,
        master_server_addr=spec.master_service_entry,
    )
    if code != MooncakeCode.OK:
        raise StorageIOError(f"no mooncake client can be set up at {spec.master_service_entry}: {explain(code)}")
    return client


def _check_reachable(spec: MooncakeStorageSpec) -> None:
    address = _master_address(spec)
    if address is None:
        return
    try:
        with closing(socket.create_connection(address, _CONNECT_SECONDS)):
            return
    except OSError as error:
        raise StorageIOError(f"mooncake master {spec.master_service_entry} cannot be reached: {error}") from error


def _master_address(spec: MooncakeStorageSpec) -> tuple[str, int] | None:
    """Return host and port of the master, None where others have to be asked who it is (`etcd://...`)."""
    entry = spec.master_service_entry
    if "://" in entry:
        return None
    host, colon, port = entry.rpartition(":")
    if not host or not colon or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise InvalidArgumentError(f"master_service_entry {entry!r} must be <host>:<port> or etcd://...")
    return host.strip("[]"), int(port)


def _host(local_hostname: str) -> str:
    """Return the name without a port; an IPv6 address with one is in brackets, or it is taken as it is."""
    host, colon, port = local_hostname.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.endswith("]")):
        return local_hostname
    return host
