"""Messages between scheduler and workers through vLLM's own channel: one per step in each direction.

Several ranks answer in one step; vLLM merges their answers with `aggregate`. A load has failed where any rank failed;
a block is saved when all ranks have saved their part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvcm.connectors.reuse.loads import LoadReport
from kvcm.model.keys import BlockKey
from kvcm.model.storages import StorageConfig
from kvcm.model.uri import LocationUri

__all__ = [
    "BlockToSave",
    "GroupLoad",
    "KvcmConnectorMetadata",
    "KvcmWorkerMetadata",
    "LoadJob",
    "SaveJob",
    "SaveResult",
    "WeightsReport",
]


@dataclass(frozen=True, slots=True)
class GroupLoad:
    """Blocks of one group of layers to load for a request.

    Attributes:
        group: id of the group.
        keys: of the blocks.
        locations: where they lie, encoded.
        block_ids: of the engine, where they go.
    """

    group: int
    keys: Sequence[BlockKey]
    locations: Sequence[bytes]
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Everything to load for a request.

    Attributes:
        request_id: of the request.
        groups: blocks by group of layers.
        seconds: time for it, from when the workers receive it.
        generation: of the weights that the blocks are of.
    """

    request_id: str
    groups: Sequence[GroupLoad]
    seconds: float
    generation: int


@dataclass(frozen=True, slots=True)
class BlockToSave:
    """A block and where its parts go.

    Attributes:
        uris: by name of the part.
        block_ids: of the engine, by id of the group; groups that have none of it any more are left out.
    """

    uris: Mapping[str, LocationUri]
    block_ids: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Blocks of one write session.

    Attributes:
        id: number of the job.
        blocks: in the order of the session's locations.
        seconds: time for it, from when the workers receive it.
    """

    id: int
    blocks: Sequence[BlockToSave]
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveResult:
    """The result of a save job on some ranks.

    Attributes:
        ranks: how many have answered.
        written: per block, whether all of these ranks have saved their part.
        checksums: per block, of the parts by name.
        reason: why one of them failed, "" when none did.
    """

    ranks: int
    written: tuple[bool, ...]
    checksums: tuple[Mapping[str, int], ...]
    reason: str = ""

    def combine(self, other: SaveResult) -> SaveResult:
        """Return the result of these ranks and the others."""
        return SaveResult(
            self.ranks + other.ranks,
            tuple(mine and theirs for mine, theirs in zip(self.written, other.written, strict=True)),
            tuple({**mine, **theirs} for mine, theirs in zip(self.checksums, other.checksums, strict=True)),
            self.reason or other.reason,
        )


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """The weights of one rank.

    Attributes:
        generation: that this rank is in.
        digest: of its weights, "" when they are unknown.
        initial: digest of the weights that it started with.
        reason: why they are unknown.
    """

    generation: int
    digest: str
    initial: str
    reason: str = ""


@dataclass
class KvcmConnectorMetadata(KVConnectorMetadata):
    """Work of the workers in a step.

    Attributes:
        generation: of the weights; ranks of an earlier one report theirs.
        loads: to begin.
        cancelled: ids of requests that ended before their loads.
        saves: to begin; their blocks do not change until they are answered.
        waits: whether the step must wait for its loads.
        storages: to use from now on, None for those that are in use.
    """

    generation: int = 0
    loads: list[LoadJob] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    saves: list[SaveJob] = field(default_factory=list)
    waits: bool = False
    storages: Sequence[StorageConfig] | None = None


@dataclass
class KvcmWorkerMetadata(KVConnectorWorkerMetadata):
    """Loads and saves that ended on the workers since the last step.

    Attributes:
        saves: by number of the job.
        failed_loads: ids of requests of which not everything was loaded.
        reports: missing and corrupt parts.
        has_unknown_storage: whether a part lies on a storage that a rank does not know.
        weights: reports of ranks, by rank.
    """

    saves: dict[int, SaveResult] = field(default_factory=dict)
    failed_loads: set[str] = field(default_factory=set)
    reports: list[LoadReport] = field(default_factory=list)
    has_unknown_storage: bool = False
    weights: dict[int, WeightsReport] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvcmWorkerMetadata:
        """Return the results of these ranks and another."""
        assert isinstance(other, KvcmWorkerMetadata)
        saves = dict(self.saves)
        for job, result in other.saves.items():
            saves[job] = saves[job].combine(result) if job in saves else result
        return replace(
            self,
            saves=saves,
            failed_loads=self.failed_loads | other.failed_loads,
            reports=self.reports + other.reports,
            has_unknown_storage=self.has_unknown_storage or other.has_unknown_storage,
            weights=self.weights | other.weights,
        )

    def __bool__(self) -> bool:
        return bool(self.saves or self.failed_loads or self.reports or self.has_unknown_storage or self.weights)
