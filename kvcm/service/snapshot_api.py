"""GenConfigSnapshot and LoadConfigSnapshot. Thin translation; a load is decided in the registry."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvcm.model.errors import InvalidArgumentError
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.registry.configuration import ConfigChange
from kvcm.registry.snapshots import ConfigSnapshots
from kvcm.service.calls import Reply
from kvcm.service.snapshot_text import print_snapshot, print_value, read_snapshot

__all__ = ["SnapshotCalls"]


class SnapshotCalls:
    """Handlers of the calls about the configuration as a whole.

    Args:
        snapshots: takes and loads it.
        cluster_id: of the deployment.
        end_logins: ends the keys of whoever logged in to an account.
        now: wall clock in unix seconds.
    """

    def __init__(
        self,
        snapshots: ConfigSnapshots,
        cluster_id: str,
        end_logins: Callable[[str], Awaitable[None]],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._snapshots = snapshots
        self._cluster_id = cluster_id
        self._end_logins = end_logins
        self._now = now

    async def generate(self, _request: Any) -> Reply:
        """Return all that is configured, without secrets."""
        taken = await self._snapshots.take()
        # Thousands of instances take a while: not on the loop.
        text = await asyncio.to_thread(print_snapshot, taken, self._cluster_id, int(self._now() * 1000))
        return Reply(pb.ConfigSnapShotResponse(config_snapshot=text))

    async def load(self, request: Any) -> Reply:
        """Load a configuration, or tell what that would change."""
        if not request.config_snapshot:
            raise InvalidArgumentError("config_snapshot is empty, must be a text of GenConfigSnapshot")
        wanted = await asyncio.to_thread(read_snapshot, request.config_snapshot)
        changes = await self._snapshots.load(wanted, prune=request.prune, dry_run=request.dry_run)
        if not request.dry_run:
            for change in changes:
                if change.kind == "account" and change.action in {"change", "remove"}:  # of its role: logins have it
                    await self._end_logins(change.name)
        return Reply(await asyncio.to_thread(_answer, changes))


def _answer(changes: Sequence[ConfigChange]) -> Any:
    message = pb.LoadConfigSnapshotResponse()
    for change in changes:
        message.changes.add(**_printed(change))
    return message


def _printed(change: ConfigChange) -> dict[str, str]:
    return {
        "kind": change.kind,
        "name": change.name,
        "action": change.action,
        "old_value": print_value(change.old) if change.old is not None else "",
        "new_value": print_value(change.new) if change.new is not None else "",
    }
