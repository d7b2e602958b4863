"""Checks of one host: settings, directories, ports and certificates of the manager that `kvcm serve` would start."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import http.client
import os
import shutil
import socket
import ssl
import struct
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc

from kvcm.components import local_directory
from kvcm.config import DEBUG_PORT_OFFSET, ConfigError, Settings, load_settings
from kvcm.doctor.findings import Finding, fail, ok, warn
from kvcm.model.errors import StorageIOError
from kvcm.model.units import format_duration, format_size
from kvcm.store.redis.uri import RedisSettings, parse_redis_uri
from kvcm.store.rocks import database_options, unopened
from kvcm.store.rocks_check import check_database
from kvcm.store.rocks_repair import RepairNote, read_repairs

__all__ = [
    "block_store_settings",
    "certificate_of",
    "check_authorities",
    "check_certificate",
    "check_directory",
    "check_expiry",
    "check_metadata_directory",
    "check_ports",
    "combinations",
    "free_space",
    "lock_holder",
    "read_settings",
    "redis_settings",
]

# Settings: readable, but dangerous or without effect.

_SETTINGS = "settings"
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - places to warn of


def read_settings(
    config_file: Path | None, overrides: Sequence[str], environment: Mapping[str, str]
) -> tuple[Settings | None, list[Finding]]:
    """Return the settings as `kvcm serve` reads them, None if it would refuse them, and findings of their keys."""
    ignored: list[str] = []
    where = str(config_file) if config_file is not None else "the defaults, -e and the environment"
    try:
        settings = load_settings(config_file, overrides, environment, ignored.append)
    except ConfigError as error:
        return None, [fail(_SETTINGS, str(error), "correct it: `kvcm serve` refuses it too")]
    odd = [
        warn(_SETTINGS, text, "correct the name, or leave it out: docs/configuration.md lists all") for text in ignored
    ]
    odd += [
        warn(_SETTINGS, f"{key} is set and has no effect in this release", "leave it out")
        for key in settings.without_effect()
    ]
    return settings, [ok(_SETTINGS, f"{where} can be read"), *odd]


def combinations(settings: Settings) -> Iterator[Finding]:
    """Yield findings of settings that are allowed and dangerous."""
    if not settings.is_loopback:
        yield from _reachable(settings)
    yield from _kept(settings)
    if settings.enable_debug_service:
        yield warn(
            _SETTINGS,
            "kvcm.service.enable_debug_service lets callers make requests fail",
            "leave it out outside of tests",
        )
    redis = redis_settings(settings)
    if redis is not None:
        yield from _store("kvcm.registry_storage.uri", redis)
    for each in block_store_settings(settings).values():
        yield from _store("kvcm.store.block_stores", each)


def _reachable(settings: Settings) -> Iterator[Finding]:
    if settings.auth_mode == "off":
        yield fail(
            _SETTINGS,
            f"every client that reaches {settings.bind_address} may do everything: kvcm.auth.mode is off",
            "set kvcm.auth.mode=required, or let only a trusted network reach the ports",
        )
    elif not settings.described().get("kvcm.tls.cert_file"):
        yield warn(
            _SETTINGS,
            f"keys cross the network to {settings.bind_address} in the clear",
            "set kvcm.tls.cert_file and kvcm.tls.key_file, or let a proxy encrypt",
        )
    if settings.allowed_roots is None:
        yield ok(_SETTINGS, "kvcm.storage.allowed_roots is unset: file storages can be added below no directory")


def _kept(settings: Settings) -> Iterator[Finding]:
    uri = settings.registry_storage_uri
    if (not uri and not settings.data_dir) or uri.startswith("memory://"):
        yield warn(
            _SETTINGS,
            "metadata is kept in memory only: a restart forgets every block, group and instance",
            "set kvcm.data_dir (or --data-dir), or kvcm.registry_storage.uri",
        )
    if settings.data_dir and settings.data_dir.startswith(_TEMPORARY):
        yield warn(
            _SETTINGS, f"kvcm.data_dir {settings.data_dir} does not outlive a reboot", "choose a place that does"
        )
    if settings.fsync == "never":
        yield warn(
            _SETTINGS,
            "kvcm.store.fsync is never: a power failure may lose metadata that was acknowledged",
            "set everysec or always",
        )


def _store(key: str, redis: RedisSettings) -> Iterator[Finding]:
    remote = [address for address in redis.addresses if not _is_local(address.host)]
    if remote and not redis.password:
        yield warn(
            _SETTINGS,
            f"{key} has no password for {remote[0]}: every client can change all metadata",
            "give Redis a user or password, and put it in the uri",
        )
    if remote and redis.tls is None:
        yield warn(_SETTINGS, f"metadata crosses the network to {remote[0]} in the clear", "use rediss:// in the uri")


def redis_settings(settings: Settings) -> RedisSettings | None:
    """Return the addresses of the shared store, None without one or if the uri is malformed."""
    if not settings.registry_storage_uri.startswith("redis"):
        return None
    try:
        return parse_redis_uri(settings.registry_storage_uri)
    except ValueError:
        return None


def block_store_settings(settings: Settings) -> dict[str, RedisSettings]:
    """Return the addresses of the further stores for blocks, by name; without those whose uri is malformed."""
    found = {}
    for name, uri in settings.block_stores:
        with contextlib.suppress(ValueError):
            found[name] = parse_redis_uri(uri)
    return found


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


# Directories: do they exist, are they writable, have they free space; which process has the metadata open.

_DIRECTORY = "data directory"
_LEAST_FREE_BYTES = 1 << 30
_LEAST_FREE_SHARE = 0.05
_FLOCK = "hhqqi4x"  # struct flock of Linux on 64 bits: type, whence, start, length, process


def check_metadata_directory(settings: Settings) -> Iterator[Finding]:
    """Yield findings of the directory with the metadata; none if the metadata is kept elsewhere."""
    directory = local_directory(settings)
    if directory is None:
        return
    yield from check_directory(_DIRECTORY, directory, is_made=True)
    holder = lock_holder(directory / "LOCK")
    if holder:
        yield ok(_DIRECTORY, f"{directory} is in use by process {holder}: a manager or a `kvcm index` runs on it")
    elif directory.is_dir():
        yield from _damage(directory)
    yield from map(_repair, read_repairs(directory))


def _damage(directory: Path) -> Iterator[Finding]:
    """Yield a finding if the manifest or the logs show damage; `kvcm index verify` reads all tables."""
    try:
        check_database(directory, database_options)
    except StorageIOError as error:
        yield fail(_DIRECTORY, str(error), "run `kvcm index repair`")
    except Exception as error:  # RocksDB's errors have no type of their own
        yield fail(_DIRECTORY, str(unopened(directory, error)), "run `kvcm index verify`")


def _repair(note: RepairNote) -> Finding:
    lost = {"blocks": note.lost_blocks, "documents": note.lost_documents, "changes": note.lost_changes}
    shown = ", ".join(f"{'an unknown number of' if count is None else count} {what}" for what, count in lost.items())
    at = datetime.fromtimestamp(note.at, UTC).isoformat(timespec="seconds")
    found = f"a repair at {at} found damage; gone are: {shown}"
    if note.doubtful_blocks:  # where a removal is lost its block is back, and hides a loss from the count
        found += f"; {note.doubtful_blocks} blocks are doubtful: they may be outdated, or be removed ones"
    is_counted = note.lost_blocks is not None and note.lost_documents is not None
    if is_counted and not any(lost.values()) and not note.doubtful_blocks:
        return ok(_DIRECTORY, found)
    return warn(_DIRECTORY, found, f"engines compute blocks again; {note.moved_to} and kvcm.repairs may be deleted")


def check_directory(check: str, directory: Path, *, is_made: bool) -> Iterator[Finding]:
    """Yield findings of a directory.

    Args:
        check: name of the check.
        directory: its path.
        is_made: whether the manager creates a missing one.
    """
    if not directory.exists():
        yield _absent(check, directory, is_made=is_made)
    elif not directory.is_dir():
        yield fail(check, f"{directory} is no directory", "choose another place, or move away what is there")
    elif not os.access(directory, os.R_OK | os.W_OK | os.X_OK):
        user = os.geteuid()
        yield fail(check, f"{directory} cannot be written by user {user}", f"run `chown -R {user} {directory}`")
    else:
        disk = shutil.disk_usage(directory)
        yield free_space(check, str(directory), disk.free, disk.total)


def _absent(check: str, directory: Path, *, is_made: bool) -> Finding:
    if not is_made:
        advice = "mount it at this path on every host that has managers or engines, or correct the path"
        return fail(check, f"{directory} does not exist on this host", advice)
    parent = next(each for each in directory.parents if each.exists())
    if os.access(parent, os.W_OK | os.X_OK):
        return ok(check, f"{directory} does not exist yet; the manager makes it")
    return fail(
        check, f"{directory} does not exist, and {parent} cannot be written", f"make it: `mkdir -p {directory}`"
    )


def free_space(check: str, name: str, free_bytes: int, whole_bytes: int) -> Finding:
    """Return whether a medium has free space."""
    found = f"{name} has {format_size(free_bytes)} of {format_size(whole_bytes)} free"
    if free_bytes < min(_LEAST_FREE_BYTES, whole_bytes // 10):
        return fail(check, found, "free space: writes will fail soon")
    if free_bytes < _LEAST_FREE_SHARE * whole_bytes:
        return warn(check, found, "free space, or lower the quotas of the groups that write there")
    return ok(check, found)


def lock_holder(path: Path) -> int:
    """Return the process that holds RocksDB's lock, 0 for none. Does not acquire it."""
    try:
        with path.open("rb+") as file:
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, process = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    except OSError:
        return 0
    return 0 if kind == fcntl.F_UNLCK else int(process)


# Ports: free, or held by a manager.

_PORTS = "ports"
_SECONDS = 2.0
_OURS = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
_CLUSTER_INFO = (
    "/kv_cache_manager.proto.meta.MetaService/GetClusterInfo",
    "/kv_cache_manager.proto.admin.AdminService/GetManagerClusterInfo",
)
"""Neither needs a request; one port may serve only one of them."""


def check_ports(settings: Settings) -> Iterator[Finding]:
    """Yield for each port of the settings whether a manager can bind it, or has bound it."""
    host = settings.bind_address
    ports = {
        "kvcm.service.http_port": settings.http_port,
        "kvcm.service.admin_http_port": settings.admin_http_port,
        "kvcm.service.rpc_port": settings.rpc_port,
        "kvcm.service.admin_rpc_port": settings.admin_rpc_port,
    }
    if settings.enable_debug_service and settings.http_port:
        ports["debug service"] = settings.http_port + DEBUG_PORT_OFFSET
    seen: dict[int, str] = {}
    for key, port in ports.items():
        if not port:
            continue
        if port in seen:
            if {key, seen[port]} != {"kvcm.service.rpc_port", "kvcm.service.admin_rpc_port"}:
                yield fail(_PORTS, f"{key} and {seen[port]} are both {port}", "give each a port of its own")
            continue
        seen[port] = key
        yield _check_port(key, host, port, is_rpc="rpc" in key, is_closed=settings.tls_client_auth == "required")


def _check_port(key: str, host: str, port: int, *, is_rpc: bool, is_closed: bool) -> Finding:
    trouble = _bind_error(host, port)
    if not trouble:
        return ok(_PORTS, f"{key} {port} is free on {host}")
    if trouble != errno.EADDRINUSE:
        reason = f"{key} {port} cannot be taken on {host}: {errno.errorcode.get(trouble, trouble)}"
        return fail(_PORTS, reason, "choose an address of this host and a port that this user may take")
    near = "127.0.0.1" if host in {"0.0.0.0", "::"} else host  # noqa: S104 - an address to bind, not to connect to
    if _is_grpc_of_ours(near, port) if is_rpc else _is_http_of_ours(near, port, is_closed=is_closed):
        return ok(_PORTS, f"{key} {port} is held by a manager")
    return fail(
        _PORTS,
        f"{key} {port} is held by something that does not answer as a manager",
        f"stop it (`ss -ltnp 'sport = :{port}'` names it), or set {key} to another port",
    )


def _bind_error(host: str, port: int) -> int:
    """Return the number of the error of binding an address, 0 for none."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        return error.errno or -1
    return 0


def _is_http_of_ours(host: str, port: int, *, is_closed: bool) -> bool:
    """Return whether /livez is answered, in the clear or encrypted (another check verifies the certificate). Of a port
    that requires client certificates, TLS is enough."""
    trusting = ssl._create_unverified_context()  # noqa: S323 - nothing is sent, and the answer is not used
    plain = http.client.HTTPConnection(host, port, timeout=_SECONDS)
    encrypted = http.client.HTTPSConnection(host, port, timeout=_SECONDS, context=trusting)
    is_alive = any(_is_alive(connection) for connection in (plain, encrypted))
    return is_alive or (is_closed and _speaks_tls(host, port, "http/1.1"))


def _is_alive(connection: http.client.HTTPConnection) -> bool:
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/livez")
            return connection.getresponse().read(64).strip() == b"ok"
        except (OSError, http.client.HTTPException):
            return False


def _is_grpc_of_ours(host: str, port: int) -> bool:
    shown = f"[{host}]" if ":" in host else host
    with grpc.insecure_channel(f"{shown}:{port}", (("grpc.enable_http_proxy", 0),)) as channel:
        return any(_is_answered(channel, method) for method in _CLUSTER_INFO) or _speaks_tls(host, port, "h2")


def _is_answered(channel: grpc.Channel, method: str) -> bool:
    call: Any = channel.unary_unary(method)  # bytes as they are: an empty request, and any answer will do
    try:
        return bool(call(b"", timeout=_SECONDS))
    except grpc.RpcError as error:
        return error.code() in _OURS


def _speaks_tls(host: str, port: int, protocol: str) -> bool:
    """Return whether a port speaks a protocol over TLS, which is as much as a client without a key can find out."""
    trusting = ssl._create_unverified_context()  # noqa: S323 - nothing is sent
    trusting.set_alpn_protocols([protocol])
    try:
        with socket.create_connection((host, port), _SECONDS) as raw, trusting.wrap_socket(raw) as encrypted:
            return encrypted.selected_alpn_protocol() == protocol
    except OSError:
        return False


# Certificates: are they readable, do they fit their keys, when do they expire.
#
# The standard library parses a certificate only after a handshake that trusted it. So there is a handshake in memory,
# between a server with the certificate and a client that trusts exactly that one.

_CERTIFICATES = "certificates"
_SOON_SECONDS = 14 * 86_400
_MAX_ROUNDS = 10
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED


def check_certificate(cert_file: str, key_file: str, now: float) -> Iterator[Finding]:
    """Yield findings of the certificate of a server.

    Args:
        cert_file: path of the certificate chain.
        key_file: path of its key; "" if it is in the same file.
        now: unix seconds.
    """
    for path in (cert_file, key_file):
        if path and not Path(path).is_file():
            yield fail(_CERTIFICATES, f"{path} is not a file", "correct kvcm.tls.cert_file and kvcm.tls.key_file")
            return
    try:
        found = certificate_of(cert_file, key_file)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            yield fail(_CERTIFICATES, f"{cert_file} has expired", "renew it")
        else:
            yield fail(
                _CERTIFICATES,
                f"{cert_file} is of no use to a server: {error.verify_message}",
                "have a new one issued",
            )
        return
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or error
        yield fail(
            _CERTIFICATES,
            f"{cert_file} and {key_file or cert_file} cannot be used together: {reason}",
            "give a certificate and the key it was made for, both PEM, the key without a password",
        )
        return
    names = ", ".join(value for _, value in found.get("subjectAltName", ()))
    yield check_expiry(f"{cert_file} for {names or 'no name at all'}", _end(found), now)
    if not names:
        yield warn(_CERTIFICATES, f"{cert_file} names no host", "have one issued with the names that clients use (SAN)")


def check_authorities(ca_file: str, now: float) -> Iterator[Finding]:
    """Yield findings of the authorities of client certificates."""
    if not Path(ca_file).is_file():
        yield fail(_CERTIFICATES, f"{ca_file} is not a file", "correct kvcm.tls.client_ca_file")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(ca_file)
    except (ssl.SSLError, OSError) as error:
        yield fail(_CERTIFICATES, f"{ca_file} cannot be read: {error}", "give certificates of authorities as PEM")
        return
    authorities = context.get_ca_certs()
    if not authorities:
        yield fail(
            _CERTIFICATES,
            f"{ca_file} has no certificate of an authority",
            "give those that issue client certificates",
        )
    for authority in authorities:
        yield check_expiry(f"authority {_name(authority)} in {ca_file}", _end(authority), now)


def check_expiry(what: str, end: float, now: float) -> Finding:
    """Return whether a certificate expires soon."""
    left = end - now
    if left <= 0:
        return fail(
            _CERTIFICATES,
            f"{what} has expired {format_duration(-left)} ago",
            "renew it: a manager reloads the file by itself",
        )
    found = f"{what} ends in {format_duration(left)}"
    return warn(_CERTIFICATES, found, "renew it now") if left < _SOON_SECONDS else ok(_CERTIFICATES, found)


def certificate_of(cert_file: str, key_file: str) -> dict[str, Any]:
    """Return the fields of a certificate, as `ssl` names them.

    Raises:
        ssl.SSLCertVerificationError: it has expired, or is not for servers.
        ssl.SSLError, OSError: it cannot be read, or does not fit the key.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert_file, key_file or None, password=lambda: "")
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cert_file)
    return _handshake(client, server)


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> dict[str, Any]:
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_MAX_ROUNDS):
        done = [_step(side) for side in (asking, answering)]
        if all(done):
            return dict(asking.getpeercert() or {})
    raise ssl.SSLError("the handshake does not end")


def _step(side: ssl.SSLObject) -> bool:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True


def _end(certificate: dict[str, Any]) -> float:
    return float(ssl.cert_time_to_seconds(certificate["notAfter"]))


def _name(certificate: dict[str, Any]) -> str:
    parts = dict(pair for group in certificate.get("subject", ()) for pair in group)
    return parts.get("commonName") or parts.get("organizationName") or "without a name"
