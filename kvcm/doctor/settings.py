"""Settings that can be read, and still do not do what was meant."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path

from kvcm.config import ConfigError, Settings, load_settings
from kvcm.doctor.findings import Finding, fail, ok, warn
from kvcm.store.redis.uri import RedisSettings, parse_redis_uri

__all__ = ["combinations", "read_settings", "redis_settings"]

_CHECK = "settings"
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - places to warn of


def read_settings(
    config_file: Path | None, overrides: Sequence[str], environment: Mapping[str, str]
) -> tuple[Settings | None, list[Finding]]:
    """Return the settings as `kvcm serve` reads them, None when it would refuse them, and what is odd about them."""
    ignored: list[str] = []
    where = str(config_file) if config_file is not None else "the defaults, -e and the environment"
    try:
        settings = load_settings(config_file, overrides, environment, ignored.append)
    except ConfigError as error:
        return None, [fail(_CHECK, str(error), "correct it: `kvcm serve` refuses it too")]
    odd = [warn(_CHECK, text, "correct the name, or leave it out: docs/configuration.md lists all") for text in ignored]
    odd += [
        warn(_CHECK, f"{key} is set and has no effect in this release", "leave it out")
        for key in settings.without_effect()
    ]
    return settings, [ok(_CHECK, f"{where} can be read"), *odd]


def combinations(settings: Settings) -> Iterator[Finding]:
    """Yield what is dangerous about settings that are allowed."""
    if not settings.is_loopback:
        yield from _reachable(settings)
    yield from _kept(settings)
    if settings.enable_debug_service:
        yield warn(
            _CHECK,
            "kvcm.service.enable_debug_service lets callers make requests fail",
            "leave it out outside of tests",
        )
    redis = redis_settings(settings)
    if redis is not None:
        yield from _store(redis)


def _reachable(settings: Settings) -> Iterator[Finding]:
    if settings.auth_mode == "off":
        yield fail(
            _CHECK,
            f"everybody who reaches {settings.bind_address} may do everything: kvcm.auth.mode is off",
            "set kvcm.auth.mode=required, or let only a trusted network reach the ports",
        )
    elif not settings.described().get("kvcm.tls.cert_file"):
        yield warn(
            _CHECK,
            f"keys cross the network to {settings.bind_address} in the clear",
            "set kvcm.tls.cert_file and kvcm.tls.key_file, or let a proxy encrypt",
        )
    if settings.allowed_roots is None:
        yield ok(_CHECK, "kvcm.storage.allowed_roots is unset: file storages can be added below no directory")


def _kept(settings: Settings) -> Iterator[Finding]:
    uri = settings.registry_storage_uri
    if (not uri and not settings.data_dir) or uri.startswith("memory://"):
        yield warn(
            _CHECK,
            "metadata is kept in memory only: a restart forgets every block, group and instance",
            "set kvcm.data_dir (or --data-dir), or kvcm.registry_storage.uri",
        )
    if settings.data_dir and settings.data_dir.startswith(_TEMPORARY):
        yield warn(_CHECK, f"kvcm.data_dir {settings.data_dir} does not outlive a reboot", "choose a place that does")
    if settings.fsync == "never":
        yield warn(
            _CHECK,
            "kvcm.store.fsync is never: a power failure may lose metadata that was acknowledged",
            "set everysec or always",
        )


def _store(redis: RedisSettings) -> Iterator[Finding]:
    remote = [address for address in redis.addresses if not _is_local(address.host)]
    if remote and not redis.password:
        yield warn(
            _CHECK,
            f"kvcm.registry_storage.uri has no password for {remote[0]}: whoever reaches it can change all metadata",
            "give Redis a user or password, and put it in the uri",
        )
    if remote and redis.tls is None:
        yield warn(_CHECK, f"metadata crosses the network to {remote[0]} in the clear", "use rediss:// in the uri")


def redis_settings(settings: Settings) -> RedisSettings | None:
    """Return where the shared store is, None when there is none or the uri is no good."""
    if not settings.registry_storage_uri.startswith("redis"):
        return None
    try:
        return parse_redis_uri(settings.registry_storage_uri)
    except ValueError:
        return None


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
