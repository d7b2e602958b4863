"""The values that the model of the CacheManager is made of."""

from dataclasses import dataclass, field

from kvcm.model.locations import LocationStatus
from kvcm.model.storages import StorageType

WRITING, SERVING, DELETING = LocationStatus.WRITING, LocationStatus.SERVING, LocationStatus.DELETING


@dataclass
class Place:
    """One location of a block."""

    id: str
    storage: str
    kind: StorageType
    uris: dict[str, str]
    size: int
    written_at: float
    session: str
    deadline: float
    status: LocationStatus = WRITING

    def leave_writing(self, status: LocationStatus) -> None:
        """Session and deadline belong to writing only."""
        self.status, self.session, self.deadline = status, "", 0.0


@dataclass
class Block:
    parent: int | None
    depth: int
    places: list[Place] = field(default_factory=list)


@dataclass
class Shelf:
    """A configured storage."""

    kind: StorageType
    rank: int
    enabled: bool = True


@dataclass
class Session:
    id: str
    instance_id: str
    epoch: int
    deadline: float
    place_id: str
    keys: list[int]


@dataclass
class Lease:
    id: str
    instance_id: str
    deadline: float
    pins: set[tuple[str, int, str]]


@dataclass
class Pending:
    """A location that waits for the deletion of its bytes."""

    due: float
    instance_id: str
    epoch: int
    key: int
    place_id: str


@dataclass
class Wanted:
    """A block that a start has to hand out addresses for."""

    key: int
    parent: int | None
    depth: int
    specs: list[tuple[str, int]]
    storage: str
    kind: StorageType

    @property
    def size(self) -> int:
        return sum(size for _, size in self.specs)


@dataclass
class Plan:
    """What a start must answer."""

    flags: list[bool]
    blocks: list[Wanted] = field(default_factory=list)
    refused: int = 0
    seconds: int = 0
