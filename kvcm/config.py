"""Settings: one typed tree, read once at start.

Precedence, lowest to highest: default, config file, `-e key=value`, environment variable of the same dotted name
(wire.md 3). Unknown keys in sections of the original's format are reported with the nearest known key; unknown keys in
the sections that are ours alone are errors. `docs/configuration.md` lists all settings.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from kvcm.model.instances import REGISTRY_STORE
from kvcm.model.mooncake import HostRule

__all__ = ["DEBUG_PORT_OFFSET", "BlockStoreUri", "ConfigError", "Settings", "is_exposed", "load_settings"]

_OTHERS = 0o077
_OTHER_USERS = 0o007


def is_exposed(path: Path) -> bool:
    """Return whether other users of this host can read a file, which holds a secret.

    Orchestrators mount secrets for processes that are not root as files of another owner, which the process reads by
    the file's group. There the group's permission is no exposure.

    Raises:
        OSError: the file does not exist, or its directory cannot be read.
    """
    found = path.stat()
    return bool(found.st_mode & (_OTHERS if found.st_uid == os.geteuid() else _OTHER_USERS))


DEBUG_PORT_OFFSET = 3000
"""How far the port of the debug service lies above that of the HTTP service (wire.md 2.1)."""
_OWN_SECTIONS = (
    "kvcm.auth.",
    "kvcm.audit.",
    "kvcm.tls.",
    "kvcm.storage.",
    "kvcm.storage_events.",
    "kvcm.store.",
    "kvcm.limits.",
    "kvcm.reclaim.",
    "kvcm.residency.",
    "kvcm.tracing.",
    "kvcm.optimizer.",
    "kvcm.cluster_id",
    "kvcm.data_dir",
)
_WITHOUT_EFFECT = {
    "io_thread_num",
    "deletion_threads",
    "reporter_type",
    "reporter_config",
    "report_interval_ms",
    "event_publishers_configs",
}
_PASSWORD = re.compile("(?<=password)=[^&]*")
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_ZMQ_ENDPOINT = r"^(tcp://[^\s]+:[0-9]{1,5}|ipc://[^\s]+)$"
_LEVELS = {"error": 2, "warn": 3, "info": 4, "debug": 5}


class ConfigError(Exception):
    """The settings cannot be used; the message names the key, the value and the allowed values."""


def _text(value: str) -> str:
    return value


def _number(least: int, most: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not re.fullmatch("-?[0-9]{1,19}", value) or not least <= int(value) <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return int(value)

    return parse


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in allowed:
            raise ValueError(" or ".join(allowed))
        return value

    return parse


def _flag(value: str) -> bool:
    if value not in {"true", "false"}:
        raise ValueError("true or false")
    return value == "true"


def _log_level(value: str) -> int:
    level = _LEVELS.get(value.lower()) or (int(value) if value in {"0", "2", "3", "4", "5"} else None)
    if level is None:
        raise ValueError("DEBUG, INFO, WARN, ERROR or 0, 2, 3, 4, 5")
    return level


def _paths(value: str) -> tuple[Path, ...]:
    paths = tuple(Path(part.strip()) for part in value.split(",") if part.strip())
    if not all(path.is_absolute() for path in paths):
        raise ValueError("absolute directories separated by commas")
    return paths


def _host(value: str) -> str:
    """Return a host name or an ip address; brackets around one of IPv6 are left out."""
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if bare and not _HOST_NAME.fullmatch(bare):
        try:
            ip_address(bare)
        except ValueError:
            raise ValueError("a host name or an ip address, without a port") from None
    return bare


def _hosts(value: str) -> tuple[HostRule, ...]:
    try:
        return tuple(HostRule.parse(part.strip()) for part in value.split(",") if part.strip())
    except ValueError as error:
        raise ValueError(f"hosts separated by commas, each {error}") from None


def _file(value: str) -> str:
    if value and not Path(value).parent.is_dir():
        raise ValueError("a file in a directory that exists, or empty")
    return value


def _http_address(value: str) -> str:
    if value and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", value):
        raise ValueError("an http or https address like http://127.0.0.1:4318, or empty")
    return value


def _ratio(value: str) -> float:
    if not re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,9})?", value) or not 0 <= float(value) <= 1:
        raise ValueError("a number from 0 to 1")
    return float(value)


class BlockStoreUri(NamedTuple):
    """A further metadata store, for the blocks of some groups.

    Attributes:
        name: that groups name it by.
        uri: as `kvcm.registry_storage.uri`.
    """

    name: str
    uri: str

    def __str__(self) -> str:
        return f"{self.name}={_redacted(self.uri)}"


def _block_stores(value: str) -> tuple[BlockStoreUri, ...]:
    stores = tuple(BlockStoreUri(*part.partition("=")[::2]) for part in value.split())
    names = [each.name for each in stores]
    for name, uri in stores:
        is_named = _STORE_NAME.fullmatch(name) and name != REGISTRY_STORE and names.count(name) == 1
        if not is_named or not uri.startswith(_SHARED):
            raise ValueError(
                "name=uri pairs separated by spaces, each name once and of 1 to 64 letters, digits, '.', '_' or '-' "
                f"(not {REGISTRY_STORE}, which is the store of the registry), each uri with one of {', '.join(_REDIS)}"
            )
    return stores


class EventSocket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where the blocks of one instance that storages have are published as KV events of vLLM.

    Attributes:
        instance: its id.
        endpoint: that a PUB socket binds, such as tcp://127.0.0.1:5557.
        replay_endpoint: that a ROUTER socket binds, which answers requests for a replay; "" for none.
        topic: of every message; kv@POD@MODEL for llm-d.
        signed_hashes: whether hashes are signed numbers, as those of SGLang; vLLM's have no sign.
        kept_batches: that a replay is answered from.
    """

    instance: Annotated[str, msgspec.Meta(min_length=1)]
    endpoint: Annotated[str, msgspec.Meta(pattern=_ZMQ_ENDPOINT)]
    replay_endpoint: Annotated[str, msgspec.Meta(pattern=f"{_ZMQ_ENDPOINT}|^$")] = ""
    topic: str = ""
    signed_hashes: bool = False
    kept_batches: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 10_000

    def __str__(self) -> str:
        return msgspec.json.encode(self).decode()


def _event_sockets(value: str) -> tuple[EventSocket, ...]:
    try:
        sockets = msgspec.json.decode(value or "[]", type=tuple[EventSocket, ...])
    except msgspec.MsgspecError as error:
        raise ValueError(f"a JSON list of sockets, each an instance and an endpoint: {error}") from None
    endpoints = [each for of in sockets for each in (of.endpoint, of.replay_endpoint) if each]
    if len(set(endpoints)) < len(endpoints):
        raise ValueError("a JSON list of sockets whose endpoints are all different")
    return sockets


def _names(value: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(value.split()))


def _setting(key: str, default: Any, parse: Callable[[str], Any] = _text, *, hot: bool = False) -> Any:
    """Return a setting; a reload puts `hot` ones in force in a running manager."""
    return field(default=default, metadata={"key": key, "parse": parse, "hot": hot})


_REDIS = ("redis", "rediss", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")
_SHARED = tuple(f"{scheme}://" for scheme in _REDIS)
_STORE_NAME = re.compile("[A-Za-z0-9._-]{1,64}")
_STORES = ("memory", "local", *_REDIS)
_LOCKS = ("memory", "file", *_REDIS)
_MAX_PORT = 65535
_PORT = _number(0, _MAX_PORT)
_COUNT = _number(0, 1 << 31)


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings. Those of the original keep its keys."""

    registry_storage_uri: str = _setting("kvcm.registry_storage.uri", "")
    registry_storage_uri_file: str = _setting("kvcm.registry_storage.uri_file", "", _file)
    distributed_lock_uri: str = _setting("kvcm.distributed_lock.uri", "")
    block_stores: tuple[BlockStoreUri, ...] = _setting("kvcm.store.block_stores", (), _block_stores)
    block_stores_file: str = _setting("kvcm.store.block_stores_file", "", _file)
    node_id: str = _setting("kvcm.leader_elector.node_id", "")
    lease_ms: int = _setting("kvcm.leader_elector.lease_ms", 10000, _number(1, 1 << 31))
    loop_interval_ms: int = _setting("kvcm.leader_elector.loop_interval_ms", 100, _number(1, 1 << 31))
    rpc_port: int = _setting("kvcm.service.rpc_port", 6381, _PORT)
    http_port: int = _setting("kvcm.service.http_port", 6382, _PORT)
    admin_rpc_port: int = _setting("kvcm.service.admin_rpc_port", 6491, _PORT)
    admin_http_port: int = _setting("kvcm.service.admin_http_port", 6492, _PORT)
    io_thread_num: int = _setting("kvcm.service.io_thread_num", 0, _COUNT)
    enable_debug_service: bool = _setting("kvcm.service.enable_debug_service", False, lambda value: value == "true")
    host: str = _setting("kvcm.service.host", "")
    advertised_host: str = _setting("kvcm.service.advertised_host", "", _host)
    advertised_rpc_port: int = _setting("kvcm.service.advertised_rpc_port", 0, _PORT)
    advertised_http_port: int = _setting("kvcm.service.advertised_http_port", 0, _PORT)
    insecure: bool = _setting("kvcm.service.insecure", False, _flag)
    require_leader: bool = _setting("kvcm.service.require_leader", False, _flag)
    drain_delay_ms: int = _setting("kvcm.service.drain_delay_ms", 0, _number(0, 3_600_000), hot=True)
    drain_timeout_ms: int = _setting("kvcm.service.drain_timeout_ms", 10_000, _number(0, 3_600_000), hot=True)
    reflection: bool = _setting("kvcm.service.reflection", True, _flag)
    log_level: int = _setting("kvcm.logger.log_level", 0, _log_level, hot=True)
    log_format: str = _setting("kvcm.logger.format", "auto", _one_of("auto", "json", "console"), hot=True)
    access_log_sample: float = _setting("kvcm.logger.access_log_sample", 0.0, _ratio, hot=True)
    slow_request_ms: int = _setting("kvcm.logger.slow_request_ms", 1000, _number(0, 3_600_000), hot=True)
    otlp_endpoint: str = _setting("kvcm.tracing.otlp_endpoint", "", _http_address)
    trace_sample: float = _setting("kvcm.tracing.sample", 0.01, _ratio, hot=True)
    startup_config: str = _setting("kvcm.startup_config", "")
    deletion_threads: int = _setting("kvcm.schedule_plan_executor_thread_count", 0, _COUNT)
    reporter_type: str = _setting("kvcm.metrics.reporter_type", "")
    reporter_config: str = _setting("kvcm.metrics.reporter_config", "")
    report_interval_ms: int = _setting("kvcm.metrics.report_interval_ms", 20000, _COUNT)
    event_publishers_configs: str = _setting("kvcm.event.event_publishers_configs", "")
    event_log_file: str = _setting("kvcm.event.log_file", "", _file)
    event_max_bytes: int = _setting("kvcm.event.max_bytes", 64 << 20, _number(1 << 10, 1 << 40))
    recent_keys: int = _setting("kvcm.optimizer.recent_keys", 0, _COUNT)
    sampled_keys: int = _setting("kvcm.optimizer.sampled_keys", 0, _number(0, 1 << 20))
    auth_mode: str = _setting("kvcm.auth.mode", "off", _one_of("off", "required"))
    admin_key_file: str = _setting("kvcm.auth.admin_key_file", "", _file)
    audit_log_file: str = _setting("kvcm.audit.log_file", "", _file)
    tls_cert_file: str = _setting("kvcm.tls.cert_file", "", _file)
    tls_key_file: str = _setting("kvcm.tls.key_file", "", _file)
    tls_client_ca_file: str = _setting("kvcm.tls.client_ca_file", "", _file)
    tls_client_auth: str = _setting("kvcm.tls.client_auth", "optional", _one_of("optional", "required"))
    deletion_workers: int = _setting("kvcm.reclaim.deletion_workers_per_storage", 4, _number(1, 32))
    finish_notes: bool = _setting("kvcm.storage.finish_notes", False, _flag)
    garbage_blocks_per_second: int = _setting("kvcm.reclaim.garbage_blocks_per_second", 2000, _number(0, 1 << 20))
    cluster_id: str = _setting("kvcm.cluster_id", "")
    data_dir: str = _setting("kvcm.data_dir", "")
    fsync: str = _setting("kvcm.store.fsync", "everysec", _one_of("always", "everysec", "never"))
    on_damage: str = _setting("kvcm.store.on_damage", "refuse", _one_of("refuse", "repair"))
    reserve_bytes: int = _setting("kvcm.store.reserve_bytes", 64 << 20, _number(0, 1 << 40))
    search_cache_bytes: int = _setting("kvcm.store.search_cache_bytes", 1 << 30, _number(0, 1 << 50))
    allowed_roots: tuple[Path, ...] | None = _setting("kvcm.storage.allowed_roots", None, _paths)
    allowed_hosts: tuple[HostRule, ...] | None = _setting("kvcm.storage.allowed_hosts", None, _hosts)
    slot_reuse_grace_ms: int = _setting("kvcm.storage.slot_reuse_grace_ms", 600_000, _number(0, 86_400_000))
    probe_interval_ms: int = _setting("kvcm.storage.probe_interval_ms", 5000, _number(0, 3_600_000), hot=True)
    probe_timeout_ms: int = _setting("kvcm.storage.probe_timeout_ms", 5000, _number(1, 600_000), hot=True)
    max_keys_per_request: int = _setting("kvcm.limits.max_keys_per_request", 65536, _number(1, 1 << 24), hot=True)
    max_tokens_per_request: int = _setting("kvcm.limits.max_tokens_per_request", 1 << 20, _number(1, 1 << 28), hot=True)
    max_body_bytes: int = _setting("kvcm.limits.max_body_bytes", 64 << 20, _number(1 << 10, 1 << 30))
    keys_per_second: int = _setting("kvcm.limits.keys_per_second", 1_000_000, _number(0, 1 << 40), hot=True)
    burst_keys: int = _setting("kvcm.limits.burst_keys", 1_000_000, _number(1, 1 << 40), hot=True)
    corrupt_reports_per_minute: int = _setting(
        "kvcm.limits.corrupt_reports_per_minute", 600, _number(0, 1 << 40), hot=True
    )
    residency_timeout_ms: int = _setting("kvcm.residency.timeout_ms", 30_000, _number(100, 3_600_000))
    residency_max_bytes: int = _setting("kvcm.residency.max_bytes", 1 << 30, _number(0, 1 << 50))
    compute_tokens_per_second: int = _setting("kvcm.residency.compute_tokens_per_second", 10_000, _number(1, 1 << 40))
    host_bytes_per_second: int = _setting("kvcm.residency.host_bytes_per_second", 20_000_000_000, _number(1, 1 << 60))
    disk_bytes_per_second: int = _setting("kvcm.residency.disk_bytes_per_second", 3_000_000_000, _number(1, 1 << 60))
    storage_bytes_per_second: int = _setting(
        "kvcm.residency.storage_bytes_per_second", 2_000_000_000, _number(1, 1 << 60)
    )
    event_instances: tuple[str, ...] = _setting("kvcm.storage_events.instances", (), _names)
    event_sockets: tuple[EventSocket, ...] = _setting("kvcm.storage_events.sockets", (), _event_sockets)
    query_dialect: str = _setting(
        "kvcm.residency.query_dialect", "conductor", _one_of("conductor", "spring", "january")
    )
    max_queue_ms: int = _setting("kvcm.limits.max_queue_ms", 2000, _number(0, 3_600_000), hot=True)
    long_request_keys: int = _setting("kvcm.limits.long_request_keys", 4096, _number(1, 1 << 24), hot=True)
    long_requests: int = _setting("kvcm.limits.long_requests", 4, _number(1, 1 << 16), hot=True)
    long_request_ms: int = _setting("kvcm.limits.long_request_ms", 30_000, _number(0, 3_600_000), hot=True)
    queued_long_requests: int = _setting("kvcm.limits.queued_long_requests", 64, _number(0, 1 << 16), hot=True)
    receive_timeout_ms: int = _setting("kvcm.limits.receive_timeout_ms", 30_000, _number(1, 3_600_000), hot=True)
    send_timeout_ms: int = _setting("kvcm.limits.send_timeout_ms", 60_000, _number(1, 3_600_000), hot=True)
    idle_timeout_ms: int = _setting("kvcm.limits.idle_timeout_ms", 75_000, _number(1, 3_600_000), hot=True)
    max_connections: int = _setting("kvcm.limits.max_connections", 4096, _number(1, 1 << 20))
    max_streams: int = _setting("kvcm.limits.max_streams_per_connection", 128, _number(1, 1 << 20))

    @property
    def log_level_name(self) -> str:
        """DEBUG, INFO, WARN or ERROR."""
        return {2: "ERROR", 3: "WARN", 5: "DEBUG"}.get(self.log_level, "INFO")

    @property
    def bind_address(self) -> str:
        """Address to bind: the configured one, else all addresses if that is allowed, else loopback."""
        return self.host or ("0.0.0.0" if self.insecure or self.is_auth_required else "127.0.0.1")  # noqa: S104

    @property
    def is_auth_required(self) -> bool:
        """Whether every request needs authentication."""
        return self.auth_mode == "required"

    @property
    def is_loopback(self) -> bool:
        """Whether the server can be reached from this host only."""
        return self.bind_address == "localhost" or ip_address(self.bind_address).is_loopback

    def without_effect(self) -> list[str]:
        """Return the keys of the original that are set and have no effect here."""
        fields = (f for f in dataclasses.fields(self) if f.name in _WITHOUT_EFFECT)
        return [f.metadata["key"] for f in fields if getattr(self, f.name) != f.default]

    def described(self) -> dict[str, str]:
        """Return every setting by its key, without passwords in uris."""
        values = ((f.metadata["key"], getattr(self, f.name)) for f in dataclasses.fields(self))
        return {key: _format(value) if isinstance(value, tuple) else _redacted(str(value)) for key, value in values}

    def changed_fields(self, new: Settings) -> list[dataclasses.Field[Any]]:
        """Return the fields whose values differ in `new`; their metadata has `key` and `hot`."""
        return [f for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(new, f.name)]


_FIELDS = {f.metadata["key"]: f for f in dataclasses.fields(Settings)}
_ALIASES = {"KVCM_LOG_LEVEL": "kvcm.logger.log_level"}


def load_settings(
    config_file: Path | None,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    warn: Callable[[str], None],
) -> Settings:
    """Read the settings.

    Args:
        config_file: `key=value` lines, None for none.
        overrides: `key=value` texts of the command line; the first of a key wins.
        environment: environment variables; non-empty ones named like a key win over everything.
        warn: called with a message for each ignored key.

    Raises:
        ConfigError: a key or a value is wrong, or values contradict each other.
    """
    values: dict[str, str] = {}
    if config_file is not None:
        values.update(_known(_file_pairs(config_file), warn))
    values.update(_known(reversed([_pair(text, "-e") for text in overrides]), warn))
    for key in (*_FIELDS, *_ALIASES):
        if environment.get(key):
            values[_ALIASES.get(key, key)] = environment[key]
    settings = Settings(**{_FIELDS[key].name: _parsed(key, value) for key, value in values.items()})
    return _checked(_with_block_stores_of_file(_with_uri_of_file(settings)))


def _file_pairs(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    stripped = ((number, line.partition("#")[0].strip()) for number, line in enumerate(lines, start=1))
    return [_pair(line, f"{path}:{number}") for number, line in stripped if line]


def _pair(text: str, where: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ConfigError(f"{where}: {text!r} is not key=value")
    return key.strip(), value.strip()


def _known(pairs: Iterable[tuple[str, str]], warn: Callable[[str], None]) -> dict[str, str]:
    values: dict[str, str] = {}
    for key, value in pairs:
        if key in _FIELDS:
            values[key] = value
            continue
        message = f"unknown setting {key!r}{_nearest(key)}"
        if key.startswith(_OWN_SECTIONS):
            raise ConfigError(message)
        warn(f"{message}; ignored")
    return values


def _nearest(key: str) -> str:
    nearest = difflib.get_close_matches(key, _FIELDS, n=1)
    return f", did you mean {nearest[0]!r}?" if nearest else ""


def _parsed(key: str, value: str) -> Any:
    try:
        return _FIELDS[key].metadata["parse"](value)
    except ValueError as error:
        shown = " ".join(map(_redacted, value.split(" ")))
        raise ConfigError(f"{key} is {shown!r}, must be {error}") from None


def _with_uri_of_file(settings: Settings) -> Settings:
    """Return the settings with the uri of `uri_file`: orchestrators mount uris with passwords as files."""
    path = settings.registry_storage_uri_file
    if not path:
        return settings
    if settings.registry_storage_uri:
        raise ConfigError("kvcm.registry_storage.uri and kvcm.registry_storage.uri_file are both set: give one of them")
    uri = _content("kvcm.registry_storage.uri_file", path)
    if not uri or len(uri.splitlines()) > 1:
        raise ConfigError(f"kvcm.registry_storage.uri_file {path!r} must hold one line, the uri")
    return dataclasses.replace(settings, registry_storage_uri=uri)


def _with_block_stores_of_file(settings: Settings) -> Settings:
    path = settings.block_stores_file
    if not path:
        return settings
    if settings.block_stores:
        raise ConfigError("kvcm.store.block_stores and kvcm.store.block_stores_file are both set: give one of them")
    try:
        stores = _block_stores(_content("kvcm.store.block_stores_file", path))
    except ValueError as error:
        raise ConfigError(f"kvcm.store.block_stores_file {path!r} must hold {error}") from None
    return dataclasses.replace(settings, block_stores=stores)


def _content(key: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} {path!r} cannot be read: {type(error).__name__}") from None


def _checked(settings: Settings) -> Settings:
    """Return the settings if they fit together; ports that others reach need authentication or --insecure."""
    try:
        loopback = settings.is_loopback
    except ValueError:
        raise ConfigError(f"kvcm.service.host is {settings.host!r}, must be an ip address or localhost") from None
    may_serve_others = settings.insecure or settings.is_auth_required
    if settings.enable_debug_service and not loopback and not may_serve_others:
        raise ConfigError(
            "kvcm.service.enable_debug_service lets every client that reaches this server make its calls fail: "
            f"give --insecure to allow that on {settings.host!r}, or leave the host at 127.0.0.1"
        )
    if not loopback and not may_serve_others:
        raise ConfigError(
            f"kvcm.service.host is {settings.host!r} and authentication is disabled: set kvcm.auth.mode=required, "
            "or give --insecure to serve other hosts all the same, or leave the host at 127.0.0.1"
        )
    _check_tls(settings)
    if settings.enable_debug_service and settings.http_port > _MAX_PORT - DEBUG_PORT_OFFSET:
        raise ConfigError(
            f"kvcm.service.http_port is {settings.http_port}, must be at most {_MAX_PORT - DEBUG_PORT_OFFSET} with "
            f"kvcm.service.enable_debug_service, which takes the port {DEBUG_PORT_OFFSET} above"
        )
    _check_uri("kvcm.registry_storage.uri", settings.registry_storage_uri, _STORES)
    _check_uri("kvcm.distributed_lock.uri", settings.distributed_lock_uri, _LOCKS)
    if settings.registry_storage_uri.startswith("redis") and settings.distributed_lock_uri.startswith("memory:"):
        raise ConfigError(
            "kvcm.distributed_lock.uri is memory:// while managers share a store: each would lead; leave it unset"
        )
    if settings.block_stores and not settings.registry_storage_uri.startswith("redis"):
        raise ConfigError(
            "kvcm.store.block_stores is set and kvcm.registry_storage.uri names no redis: a store of this manager "
            "alone keeps all blocks itself"
        )
    return settings


def _check_tls(settings: Settings) -> None:
    if bool(settings.tls_cert_file) != bool(settings.tls_key_file):
        missing = "key_file" if settings.tls_cert_file else "cert_file"
        raise ConfigError(f"kvcm.tls.{missing} is missing: a certificate and its key belong together")
    if settings.tls_client_ca_file and not settings.tls_cert_file:
        raise ConfigError("kvcm.tls.client_ca_file is set without kvcm.tls.cert_file and kvcm.tls.key_file")
    if settings.tls_client_auth == "required" and not settings.tls_client_ca_file:
        raise ConfigError("kvcm.tls.client_auth is required: set kvcm.tls.client_ca_file, or no client could connect")


def _check_uri(key: str, uri: str, schemes: Sequence[str]) -> None:
    if uri and not uri.startswith(tuple(f"{scheme}://" for scheme in schemes)):
        raise ConfigError(f"{key} is {_redacted(uri)!r}, must begin with one of {', '.join(schemes)}, or be empty")


def _format(values: tuple[object, ...]) -> str:
    if values and isinstance(values[0], EventSocket):
        return f"[{','.join(map(str, values))}]"
    separator = " " if values and isinstance(values[0], BlockStoreUri) else ","
    return separator.join(map(str, values))


def _redacted(value: str) -> str:
    if "://" not in value:
        return value
    scheme, _, rest = value.partition("://")
    login, at, hosts = rest.rpartition("@")
    user = login.partition(":")[0]
    shown = f"{user}:***@" if at and ":" in login else login + at
    return f"{scheme}://{shown}{_PASSWORD.sub('=***', hosts)}"
