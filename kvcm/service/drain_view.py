"""How far the drains are, and why one does not go on: what several rooms know, put together for operators.

Field names are those of the wire messages, as in `usage_values`.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvcm.cache.drains import TAKE_BACK_SECONDS, DrainProgress, StorageDrains
from kvcm.reclaim.executor import DeletionExecutor
from kvcm.reclaim.workers import LATE_SECONDS
from kvcm.registry.leadership import Leadership
from kvcm.service.usage_values import DrainState, DrainStatus
from kvcm.storage.directory import StorageDirectory

__all__ = ["DrainView"]


class DrainView:
    """Looks at the drains.

    Args:
        drains: what was asked for, and how far it is.
        storages: the open storages, whose health may be the reason.
        deletions: what waits for its deletion.
        leadership: whether this manager carries them out.
    """

    def __init__(
        self, drains: StorageDrains, storages: StorageDirectory, deletions: DeletionExecutor, leadership: Leadership
    ) -> None:
        self._drains = drains
        self._storages = storages
        self._deletions = deletions
        self._leadership = leadership

    async def look(self) -> list[DrainStatus]:
        """Return every drain, ordered by name.

        Raises:
            StorageIOError: the store cannot be asked.
        """
        is_leader = self._leadership.is_leader
        return [self._status(each, is_leader=is_leader) for each in await self._drains.look(is_leader=is_leader)]

    def _status(self, progress: DrainProgress, *, is_leader: bool) -> DrainStatus:
        drain = progress.drain
        reasons = self._reasons(progress) if is_leader else self._reasons_elsewhere()
        return DrainStatus(
            drain.name,
            drain.is_removal,
            DrainState.DRAIN_DONE if progress.is_done else DrainState.DRAIN_RUNNING,
            int(drain.started_at * 1000),
            progress.left_bytes,
            "" if progress.is_done else "; ".join(reasons),
        )

    def _reasons_elsewhere(self) -> Iterator[str]:
        leader = self._leadership.leader_node_id
        if leader:
            yield f"manager {leader} leads and carries it out: ask that one what it waits for"
        else:
            yield "no manager leads at the moment"

    def _reasons(self, progress: DrainProgress) -> Iterator[str]:
        if not progress.is_begun:
            yield f"it begins {TAKE_BACK_SECONDS:g} s after the removal, so that it can be added again as it was"
        troubles = [] if progress.drain.is_removal else list(self._troubles(progress.drain.name))
        yield from troubles
        if unreadable := progress.unreadable:
            yield (
                f"{len(unreadable)} stored instances cannot be read, {unreadable[0]!r} for one, so that nobody knows "
                "what they have there: run `kvcm index verify`"
            )
        if progress.pinned:
            yield f"{progress.pinned} locations are pinned (kvcm pin list)"
        if progress.writing:
            yield f"{progress.writing} locations are being written"
        if progress.is_marked and progress.left_bytes and not troubles:
            yield "what is left goes when delay_before_delete_ms, read leases and write sessions allow it"

    def _troubles(self, name: str) -> Iterator[str]:
        health = self._storages.health(name)
        if health is None:
            yield "the storage is not open on this manager, which leads: nothing can be deleted"
        elif not health.is_usable:
            yield f"the storage is down: {health.reason}"
        backlog = self._deletions.backlog(name)
        if backlog.waiting and backlog.failures:
            yield f"{backlog.waiting} locations wait for their deletion, which failed {backlog.failures} times"
        if backlog.late:
            yield f"{backlog.late} locations are being deleted for more than {LATE_SECONDS:g} s: the storage hangs"
