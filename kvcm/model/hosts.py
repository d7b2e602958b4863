"""Which hosts the manager may be told to connect to.

Configs of storages come through the API and name hosts. Whoever may add a storage must not be able to make the manager
talk to whatever it can reach, least of all to the address where a cloud hands out the credentials of its machines.

Names are compared as they are written and never resolved: the storage's own client resolves them again when it
connects, so an answer that was checked here would prove nothing. Who lists a name trusts whoever answers for it.
Addresses are compared as addresses, in whatever way they are written.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from kvcm.model.errors import InvalidArgumentError

__all__ = ["AllowedHosts", "HostPort", "HostRule"]

_Address = IPv4Address | IPv6Address
_Network = IPv4Network | IPv6Network


def _in_ipv6(network: IPv4Network) -> Iterator[IPv6Network]:
    """Return the networks of IPv6 addresses that translators and tunnels take for those of an IPv4 network."""
    number, bits = int(network.network_address), network.prefixlen
    for prefix in ("::", "::ffff:0:0:0", "64:ff9b::", "64:ff9b:1::"):
        yield IPv6Network((int(IPv6Address(prefix)) | number, 96 + bits))
    yield IPv6Network((int(IPv6Address("2002::")) | number << 80, 16 + bits))


# Link-local, and where clouds have their metadata service elsewhere. Allowed only by a rule that names just them.
_NEVER_UNASKED_V4 = tuple(IPv4Network(text) for text in ("169.254.0.0/16", "100.100.100.200/32", "168.63.129.16/32"))
_NEVER_UNASKED: tuple[_Network, ...] = (
    *_NEVER_UNASKED_V4,
    *(each for network in _NEVER_UNASKED_V4 for each in _in_ipv6(network)),
    *(IPv6Network(text) for text in ("fe80::/10", "fd00:ec2::254/128")),
)
_NAMES_NEVER_UNASKED = frozenset({"metadata.google.internal", "metadata.goog"})
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

    def allows_unasked(self, wanted: HostPort) -> bool:
        """Whether it allows a host that must be named for itself, and not by a network that happens to hold it."""
        return self.allows(wanted) and (
            self.network is None
            or any(
                self.network.version == never.version and self.network.subnet_of(never)  # type: ignore[arg-type]
                for never in _NEVER_UNASKED
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
        if _is_never_unasked(wanted):
            if not any(rule.allows_unasked(wanted) for rule in rules):
                raise InvalidArgumentError(
                    f"{field} names {str(wanted)!r}, which is link-local or a metadata service: never, unless"
                    " kvcm.storage.allowed_hosts names it for itself"
                )
        elif self.rules is not None and not any(rule.allows(wanted) for rule in rules):
            allowed = ", ".join(rule.text for rule in rules) or "none (set kvcm.storage.allowed_hosts)"
            raise InvalidArgumentError(
                f"{field} names {str(wanted)!r}, which is not one of the allowed hosts: {allowed}"
            )


def _is_never_unasked(wanted: HostPort) -> bool:
    address = _address(wanted.host)
    if address is None:
        return wanted.host in _NAMES_NEVER_UNASKED
    return any(address in network for network in _NEVER_UNASKED)


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
