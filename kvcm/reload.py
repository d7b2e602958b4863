"""Settings of a running manager read anew: checked as a whole first, then the hot ones are in force together.

Hot is what the table in docs/configuration.md says; what else changed is told, and needs a restart. What was changed at
runtime by other means (UpdateLogger) stays until its setting changes.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Container, Sequence

import structlog

from kvcm.config import ConfigError, Settings
from kvcm.model.errors import InvalidArgumentError
from kvcm.service.config_api import SettingChange

__all__ = ["BackgroundReload", "Reloader"]

_log = structlog.get_logger("kvcm")

Apply = Callable[[Settings, Container[str]], None]
"""Takes the settings that are in force from now on, and the names of those that changed. Neither waits nor fails."""

Refresh = Callable[[], Awaitable[None]]
"""Takes over what files hold that settings name. Does not fail."""


class Reloader:
    """Keeps the settings in force.

    Args:
        settings: those of the start.
        reread: reads them anew; raises ConfigError.
    """

    def __init__(self, settings: Settings, reread: Callable[[], Settings]) -> None:
        self.settings = settings
        self._reread = reread
        self._appliers: list[Apply] = []
        self._refreshers: list[Refresh] = []
        self._reading = asyncio.Lock()

    def follow(self, apply: Apply) -> None:
        """Have something called with every new state of the settings."""
        self._appliers.append(apply)

    def refresh(self, refresh: Refresh) -> None:
        """Have something called whenever somebody asks for a reload: files that settings name may have changed."""
        self._refreshers.append(refresh)

    async def reload(self) -> Sequence[SettingChange]:
        """Read the settings anew, put those in force that can be, and return what changed, ordered by key.

        Raises:
            InvalidArgumentError: they cannot be used; nothing is changed.
        """
        async with self._reading:
            try:
                new = await asyncio.to_thread(self._reread)
            except ConfigError as error:
                _log.warning("reload_refused", reason=str(error))
                raise InvalidArgumentError(f"nothing is changed: {error}") from error
            changes = self._take(new)
            for refresh in self._refreshers:
                await refresh()
        _log.info("reloaded", changes=[change.described() for change in changes])
        return changes

    def _take(self, new: Settings) -> list[SettingChange]:
        old = self.settings
        changed = old.changed_fields(new)
        hot = {f.name: getattr(new, f.name) for f in changed if _is_hot(f, old, new)}
        if hot:
            self.settings = dataclasses.replace(old, **hot)
            for apply in self._appliers:
                apply(self.settings, hot)
        before, after = old.described(), new.described()
        keys = sorted((f.metadata["key"], f.name in hot) for f in changed)
        return [SettingChange(key, before[key], after[key], needs_restart=not applied) for key, applied in keys]


class BackgroundReload:
    """Reloads for a signal, which waits for nothing.

    Args:
        reloader: does it.
        may: whether the manager is where it can reload.
    """

    def __init__(self, reloader: Reloader, may: Callable[[], bool]) -> None:
        self._reloader = reloader
        self._may = may
        self._running: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Reload soon; the log has the outcome."""
        if not self._may():
            _log.warning("reload_refused", reason="the manager is starting or stopping")
            return
        task = asyncio.get_running_loop().create_task(self._reload())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _reload(self) -> None:
        try:
            await self._reloader.reload()
        except InvalidArgumentError:
            pass  # it is logged
        except Exception:
            _log.exception("reload_failed")


def _is_hot(field: dataclasses.Field[object], old: Settings, new: Settings) -> bool:
    if field.name == "probe_interval_ms" and not (old.probe_interval_ms and new.probe_interval_ms):
        return False  # whether storages are probed at all is decided at start
    return bool(field.metadata["hot"])
