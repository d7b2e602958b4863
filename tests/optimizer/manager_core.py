"""A manager's core under injected time, driven as engines drive it, with a recording of its calls."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "reclaim"))
from manager_rig import ManagerRig

from kvcm.cache.write_sessions import WriteRequest
from kvcm.model import groups
from kvcm.model.errors import CapacityError
from kvcm.model.keys import BlockMask
from kvcm.model.storages import DummyStorageSpec, StorageConfig
from kvcm.optimizer.live.recording import Recording, read_recording

__all__ = ["Core"]


class Core:
    """The manager's core, and the recording of its calls."""

    def __init__(self, group: groups.InstanceGroup, sizes: dict[str, int]) -> None:
        self.rig = ManagerRig([StorageConfig("dummy", DummyStorageSpec())], [group], sizes)
        self.events: list[dict[str, Any]] = []
        self.drain_at = 0.0

    def recording(self) -> Recording:
        recent = {"type": "recent", "from_us": 0, "until_us": int(self.rig.clock.now() * 1e6), "most_keys": 1}
        return read_recording(json.dumps(event).encode() for event in (recent, *self.events))

    async def advance(self, at: float) -> None:
        """Let time pass; once a second reads are recorded, and blocks that are too old go."""
        if not self.events:
            self.drain_at = at + 1.0
        if at >= self.drain_at:
            self.rig.clock.time = self.drain_at
            await self.rig.manager.accesses.drain()
            self.rig.clock.time = at
            await self.rig.settle()
            await self.rig.executor.run_due()
            self.drain_at = at - (at - self.drain_at) % 1.0 + 1.0
        self.rig.clock.time = at

    def record(self, instance: str, kind: str, **fields: Any) -> None:
        at = {"source": instance, "type": kind, "trigger_time_us": int(self.rig.clock.now() * 1e6)}
        self.events.append({**at, **fields})

    async def read(self, instance: str, keys: list[int]) -> int:
        """Look a prefix up and return how many blocks of it were found."""
        hits = await self.rig.read(instance, keys)
        self.record(instance, "GetCacheLocation", keys=keys, query_type="prefix_match", hit_keys=hits)
        return hits

    async def write(self, instance: str, keys: list[int], failing: int) -> None:
        """Write blocks; `failing` of the last ones are not written after all."""
        manager = self.rig.manager
        record = partial(self.record, instance, "StartWriteCache", keys=keys)
        try:
            started = await manager.start_write(manager.cache(instance), WriteRequest(keys))
        except CapacityError:
            record(write_session_id="", block_mask=len(keys), refused_keys=len(keys))
            await self.evict()
            return
        mask, name = started.mask, started.session.id
        shown = mask.offset if mask.offset is not None else list(mask.flags or ())
        record(write_session_id=name, block_mask=shown, refused_keys=started.rejected)
        await self.evict()
        written = max(0, len(started.chunks) - failing)
        await manager.finish_write(manager.cache(instance), name, BlockMask(offset=written))
        self.record(instance, "FinishWriteCache", write_session_id=name, success_block=written)
        await self.evict()

    async def evict(self) -> None:
        await self.rig.settle()
        await self.rig.executor.run_due()
