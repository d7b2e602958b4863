"""What test doubles of shared stores that keep a record per block have in common."""

from collections.abc import Mapping, Sequence

from kvcm.index.backends.backend import UniformRun
from kvcm.model.locations import BlockRecord


class RecordByRecord:
    """What a backend of a shared store has besides, where it keeps a record per block."""

    ends_at_miss = False
    most_touched = 1024

    async def get_fresh(self, keys: Sequence[int], *, is_head_known: bool) -> list[BlockRecord | None]:
        records: list[BlockRecord | None] = await self.get_many(keys)  # type: ignore[attr-defined]
        return records

    async def get_runs(
        self, keys: Sequence[int], *, stop_at_miss: bool = False
    ) -> tuple[Sequence[UniformRun], Mapping[int, BlockRecord]]:
        records = await self.get_many(keys)  # type: ignore[attr-defined]
        return (), {key: record for key, record in zip(keys, records, strict=True) if record is not None}
