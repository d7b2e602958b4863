"""Settings of a gateway: a TOML file, and options of the command line, which win.

Unknown keys and values out of range are errors that name the key, the value and the allowed values.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvcm.config import ConfigError
from kvcm.gateway.policies import DEFAULT_LOAD_FACTOR, DEFAULT_PREFIX_CHARACTERS

__all__ = ["POLICIES", "EngineAddress", "GatewaySecrets", "GatewaySettings", "load_gateway_settings"]

POLICIES = ("kvcm", "consistent_hash", "least_loaded", "round_robin")
"""Names of policies."""
_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?/?")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_INSTANCE = re.compile(r"[!-~]{1,256}")
_MAX_PORT = 65535
_HOUR_MS = 3_600_000
_ENGINE_FORM = "URL or URL=INSTANCE_ID, the URL as http://host:port without a path"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """An engine.

    Attributes:
        url: `http://host:port`.
        instance: id of its instance in the manager, "" for none.
    """

    url: str
    instance: str = ""

    @property
    def name(self) -> str:
        """`host:port`: what the manager's residency, metrics and answers call it."""
        parts = urlsplit(self.url)
        return f"{parts.netloc}" if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"

    @classmethod
    def parse(cls, value: object) -> EngineAddress:
        """Return the engine of `URL=INSTANCE_ID`, or of a table with `url` and `instance`.

        Raises:
            ValueError: it is malformed; the text names the allowed forms.
        """
        if isinstance(value, dict):
            if not {"url"} <= set(value) <= {"url", "instance"} or not all(
                isinstance(each, str) for each in value.values()
            ):
                raise ValueError("tables with url and, if any, instance")
            url, instance = value["url"], value.get("instance", "")
        elif isinstance(value, str):
            url, _, instance = value.partition("=")
        else:
            raise ValueError(_ENGINE_FORM)  # noqa: TRY004 - one kind of error for all bad values
        if (
            not _URL.fullmatch(url)
            or not 0 < _port_of(url) <= _MAX_PORT
            or (instance and not _INSTANCE.fullmatch(instance))
        ):
            raise ValueError(_ENGINE_FORM)
        return cls(url.rstrip("/"), instance)


def _port_of(url: str) -> int:
    try:
        port = urlsplit(url).port
    except ValueError:
        return 0
    return 80 if port is None else port


def _engines(value: object) -> tuple[EngineAddress, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError(f"at least one engine: {_ENGINE_FORM}")
    engines = tuple(map(EngineAddress.parse, value))
    if len({each.name for each in engines}) < len(engines):
        raise ValueError("each engine once")
    return engines


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")  # noqa: TRY004
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")  # noqa: TRY004
    return value


def _number(least: int, most: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most}")
        return value

    return check


def _quantity(least: float, most: float, *, or_zero: bool = False) -> Callable[[object], float]:
    def check(value: object) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not (least <= value <= most or (or_zero and value == 0)):  # type: ignore[operator]
            raise ValueError(f"a number from {least:g} to {most:g}{', or 0' if or_zero else ''}")
        return float(value)  # type: ignore[arg-type]

    return check


def _one_of(*allowed: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        if value not in allowed:
            raise ValueError(", ".join(allowed))
        return str(value)

    return check


def _host(value: object) -> str:
    if value not in ("", "localhost"):
        try:
            ip_address(_text(value))
        except ValueError:
            raise ValueError("an ip address, localhost, or empty") from None
    return str(value)


def _address(value: object) -> str:
    found = _ADDRESS.fullmatch(_text(value))
    if value and (found is None or not 0 < int(found[2]) <= _MAX_PORT):
        raise ValueError("host:port of the manager's gRPC calls")
    return str(value)


def _setting(default: Any, check: Callable[[object], Any]) -> Any:
    return field(default=default, metadata={"check": check})


_MS = _number(1, _HOUR_MS)
_COUNT = _number(1, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """All settings; `docs/gateway.md` lists them."""

    engines: tuple[EngineAddress, ...] = _setting((), _engines)
    policy: str = _setting("kvcm", _one_of(*POLICIES))
    host: str = _setting("", _host)
    port: int = _setting(8080, _number(0, _MAX_PORT))
    insecure: bool = _setting(False, _flag)
    api_key_file: str = _setting("", _text)
    engine_key_file: str = _setting("", _text)
    manager: str = _setting("", _address)
    manager_key_file: str = _setting("", _text)
    manager_ca_file: str = _setting("", _text)
    score_timeout_ms: int = _setting(100, _MS)
    tokenize_timeout_ms: int = _setting(200, _MS)
    compute_tokens_per_second: float = _setting(10_000.0, _quantity(1, 1e9))
    hash_prefix_characters: int = _setting(DEFAULT_PREFIX_CHARACTERS, _number(1, 1 << 20))
    hash_load_factor: float = _setting(DEFAULT_LOAD_FACTOR, _quantity(1, 1000, or_zero=True))
    max_in_flight: int = _setting(1024, _COUNT)
    max_in_flight_per_engine: int = _setting(256, _COUNT)
    max_queued: int = _setting(1024, _number(0, 1 << 20))
    queue_timeout_ms: int = _setting(10_000, _MS)
    max_attempts: int = _setting(3, _number(1, 100))
    max_body_bytes: int = _setting(32 << 20, _number(1 << 10, 1 << 30))
    max_buffered_bytes: int = _setting(1 << 30, _number(1 << 10, 1 << 40))
    connect_timeout_ms: int = _setting(2000, _MS)
    first_byte_timeout_ms: int = _setting(600_000, _MS)
    idle_timeout_ms: int = _setting(120_000, _MS)
    probe_interval_ms: int = _setting(5000, _MS)
    probe_timeout_ms: int = _setting(5000, _MS)
    eject_after: int = _setting(3, _number(1, 1000))
    eject_ms: int = _setting(5000, _MS)
    max_eject_ms: int = _setting(60_000, _MS)
    drain_timeout_ms: int = _setting(30_000, _number(0, _HOUR_MS))
    max_connections: int = _setting(4096, _COUNT)
    log_level: str = _setting("INFO", _one_of("DEBUG", "INFO", "WARN", "ERROR"))
    log_format: str = _setting("auto", _one_of("auto", "json", "console"))

    @property
    def bind_address(self) -> str:
        """Address to bind: the configured one, else all addresses if that is allowed, else loopback."""
        return self.host or ("0.0.0.0" if self.insecure or self.api_key_file else "127.0.0.1")  # noqa: S104


@dataclass(frozen=True, slots=True)
class GatewaySecrets:
    """Keys, read from the files that the settings name; "" for none.

    Attributes:
        api_key: that clients must show to the gateway.
        engine_key: that the gateway shows to engines, in the place of the clients' own.
        manager_key: that it shows to the manager.
        manager_ca: certificates (PEM) that it trusts for the manager; empty for plain text.
    """

    api_key: str = field(default="", repr=False)
    engine_key: str = field(default="", repr=False)
    manager_key: str = field(default="", repr=False)
    manager_ca: bytes = field(default=b"", repr=False)


_CHECKS: Mapping[str, Callable[[object], Any]] = {
    each.name: each.metadata["check"] for each in dataclasses.fields(GatewaySettings)
}


def load_gateway_settings(path: Path | None, options: Mapping[str, object]) -> GatewaySettings:
    """Return the settings of a file and of options.

    Args:
        path: the TOML file, None for none.
        options: values by setting, which win; None for those that were not given.

    Raises:
        ConfigError: a file cannot be read, a key is unknown, or a value is not allowed.
    """
    given = {**_read(path), **{name: value for name, value in options.items() if value not in (None, [], ())}}
    where = f"{path}: " if path is not None else ""
    values = {name: _checked(name, value, where) for name, value in given.items()}
    settings = GatewaySettings(**values)
    if problem := _contradiction(settings):
        raise ConfigError(f"{where}{problem}")
    return settings


def _read(path: Path | None) -> Mapping[str, object]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a TOML file: {error}") from None


def _checked(name: str, value: object, where: str) -> Any:
    check = _CHECKS.get(name)
    if check is None:
        nearest = difflib.get_close_matches(name, _CHECKS, 1)
        raise ConfigError(f"{where}{name} is no setting{f'; the nearest one is {nearest[0]}' if nearest else ''}")
    try:
        return check(value)
    except ValueError as error:
        raise ConfigError(f"{where}{name} is {_shown(value)}, must be {error}") from None


def _shown(value: object) -> str:
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _contradiction(settings: GatewaySettings) -> str:
    """Return the contradiction between settings that are allowed one by one, "" for none."""
    if not settings.engines:
        return f"engines is empty, must be at least one engine: {_ENGINE_FORM} (--engine)"
    if settings.max_eject_ms < settings.eject_ms:
        return f"max_eject_ms is {settings.max_eject_ms}, must be at least eject_ms, {settings.eject_ms}"
    if settings.policy == "kvcm" and not settings.manager:
        others: Sequence[str] = [name for name in POLICIES if name != "kvcm"]
        return f"manager is empty, must be host:port for policy 'kvcm' (--manager); other policies: {', '.join(others)}"
    without = [each.url for each in settings.engines if not each.instance]
    if settings.policy == "kvcm" and without:
        return f"engines has {without[0]!r}, must be URL=INSTANCE_ID for policy 'kvcm'"
    if not settings.insecure and not settings.api_key_file and not _is_loopback(settings.bind_address):
        return (
            f"host is {settings.host!r}, which other hosts reach, must be a loopback address unless there is an "
            "api_key_file (--api-key-file) or the gateway is insecure (--insecure)"
        )
    return ""


def _is_loopback(host: str) -> bool:
    return host == "localhost" or ip_address(host).is_loopback
