"""The first key: without one nobody could make others.

Where keys are required, an administrator's key lies in a file of the manager's host, which only its owner can read. A
key that is there already is taken over, so that secrets of an orchestrator can be mounted; else one is made, unless the
deployment has an administrator. A key that was taken over and has ended since, because it was revoked or rotated, does
not come back: somebody has to take it out of the file. Nothing ever writes over a file. The secret is never logged.
"""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from kvcm.config import ConfigError, Settings
from kvcm.exposure import is_exposed
from kvcm.model.api_keys import ApiKey, PresentedKey, new_key
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.principals import ALL_GROUPS, Role
from kvcm.registry.registry import Registry

__all__ = ["keep_admin_key"]

_NAME = "admin"
_log = structlog.get_logger("kvcm")


async def keep_admin_key(registry: Registry, settings: Settings) -> None:
    """See to it that somebody can administer a deployment that asks for keys.

    Raises:
        ConfigError: the file cannot be used, or nobody could, and there is no place for a key.
        StorageIOError: the store cannot be asked.
    """
    if not settings.is_auth_required:
        return
    path, administrators = _path(settings), _administrators(registry, settings)
    if path is not None and path.exists():
        await _take_over(registry, settings, path)
    elif path is not None and all(key.expires_at for key in administrators):
        await registry.taken_keys.take_over(_NAME, _written(path))
        _log.warning("admin_key_made", file=str(path))
    elif not administrators:
        raise ConfigError(
            "kvcm.auth.mode is required and there is no administrator's key: set kvcm.auth.admin_key_file, or "
            "give --data-dir, or make a key while kvcm.auth.mode is off"
        )


def _path(settings: Settings) -> Path | None:
    if settings.admin_key_file:
        return Path(settings.admin_key_file)
    return Path(settings.data_dir) / "admin.key" if settings.data_dir else None


def _administrators(registry: Registry, settings: Settings) -> list[ApiKey]:
    """Return the keys that are enough to administer: everywhere, without an account that others may remove, and of a
    certificate only where certificates are asked for."""
    return [
        key
        for key in registry.keys.all()
        if key.role is Role.ROLE_ADMIN
        and ALL_GROUPS in key.groups
        and not key.account
        and (key.digest or settings.tls_client_ca_file)
    ]


async def _take_over(registry: Registry, settings: Settings, path: Path) -> None:
    try:
        key = await registry.taken_keys.take_over(_NAME, _read(path))
    except InvalidArgumentError as error:
        raise ConfigError(f"kvcm.auth.admin_key_file {str(path)!r} cannot be used: {error}") from error
    administrators = _administrators(registry, settings)
    if key in administrators:
        return
    reason = "the key in it has ended, or is no administrator's: remove the file, or put a new key into it"
    if not administrators:
        raise ConfigError(
            f"kvcm.auth.admin_key_file {str(path)!r} is of no use, and nobody can administer: {reason}. "
            "Where there is no file, a new key is made and written there"
        )
    _log.warning("admin_key_ended", file=str(path), reason=reason)


def _read(path: Path) -> PresentedKey:
    try:
        text = path.read_text(encoding="ascii").strip()
        exposed = is_exposed(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"kvcm.auth.admin_key_file {str(path)!r} cannot be read: {type(error).__name__}") from None
    key = PresentedKey.parse(text)
    if key is None:
        raise ConfigError(
            f"kvcm.auth.admin_key_file {str(path)!r} holds no key: it must be one line, kvcm_<id>_<secret>"
        )
    if exposed:
        _log.warning("admin_key_readable", file=str(path), reason="others on this host can read it: chmod 600")
    return key


def _written(path: Path) -> PresentedKey:
    key = new_key()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{key.text}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"kvcm.auth.admin_key_file {str(path)!r} cannot be written: {error.strerror}") from error
    return key
