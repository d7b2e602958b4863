"""ConfigService: settings of a running manager. Thin translation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcm.protocol.kvcm.v1 import config_service_pb2 as pb
from kvcm.service.calls import Call, Plane, Reply

__all__ = ["ConfigApi", "SettingChange"]


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that was read with another value than the one in force.

    Attributes:
        key: of the setting.
        old: value so far, secrets left out.
        new: value that was read, secrets left out.
        needs_restart: the old value stays in force until the manager is started again.
    """

    key: str
    old: str
    new: str
    needs_restart: bool

    def described(self) -> str:
        """Return it as text for the log."""
        return f"{self.key}: {self.old!r} -> {self.new!r}{', restart needed' if self.needs_restart else ''}"


class ConfigApi:
    """Handlers of the calls about settings.

    Args:
        reload: reads the settings anew and returns what changed.
    """

    def __init__(self, reload: Callable[[], Awaitable[Sequence[SettingChange]]]) -> None:
        self._reload = reload

    def calls(self) -> list[Call]:
        """Return every call, all of the admin plane; each manager has settings of its own."""
        types = (pb.ReloadConfigRequest, pb.ReloadConfigResponse)
        return [
            Call("kvcm.v1.ConfigService", "ReloadConfig", Plane.ADMIN, *types, self.reload_config, leader_only=False)
        ]

    async def reload_config(self, _request: Any) -> Reply:
        """Read the settings anew."""
        message = pb.ReloadConfigResponse()
        for change in await self._reload():
            message.changes.add(
                key=change.key, old_value=change.old, new_value=change.new, needs_restart=change.needs_restart
            )
        return Reply(message)
