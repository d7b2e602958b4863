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
from collections.abc import Sequence
from contextlib import closing
from enum import IntEnum
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol, cast

from kvcm.model.errors import InvalidArgumentError, StorageIOError, UnsupportedError
from kvcm.model.hosts import HostPort
from kvcm.model.storages import MooncakeStorageSpec

__all__ = [
    "MooncakeClient",
    "MooncakeCode",
    "check_mooncake",
    "explain",
    "load_mooncake",
    "mooncake_hosts",
    "open_client",
]

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


_WORDS = {
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
    return f"{_WORDS.get(cast(MooncakeCode, code), 'mooncake refused it')} (mooncake {code})"


def mooncake_hosts(spec: MooncakeStorageSpec) -> list[tuple[str, HostPort]]:
    """Return the hosts that a client is told to connect to, each with the field that names it.

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
    """Refuse what no client can be opened with. Loads nothing and connects to nobody.

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
        host,
        spec.metadata_connstring,
        segment_bytes,
        buffer_bytes,
        spec.protocol,
        spec.rdma_device,
        spec.master_service_entry,
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
