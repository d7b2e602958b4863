"""The values that the model of the CacheManager is made of."""

from dataclasses import dataclass, field

from kvcm.cache.write_values import FinishedWrite
from kvcm.model.locations import LocationStatus
from kvcm.model.storages import StorageType

WRITING, SERVING, DELETING = LocationStatus.WRITING, LocationStatus.SERVING, LocationStatus.DELETING


@dataclass
class Place:
    """One location of a block.

    Attributes:
        session: that writes it; kept for good by what never served, since its writer may come back.
        deadline: of the session while writing, of the bytes while deleting, else 0.
    """

    id: str
    storage: str
    kind: StorageType
    uris: dict[str, str]
    size: int
    written_at: float
    session: str
    deadline: float
    status: LocationStatus = WRITING

    def serve(self) -> None:
        """Nobody writes here any more."""
        self.status, self.session, self.deadline = SERVING, "", 0.0

    def fail(self, now: float) -> None:
        """Nobody was ever given it to read."""
        if self.status is not DELETING or self.deadline > now:
            self.status, self.deadline = DELETING, now


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
class Finished:
    session: Session
    flags: list[bool]
    told: FinishedWrite
    until: float


@dataclass
class Lease:
    id: str
    instance_id: str
    epoch: int
    deadline: float
    pins: set[tuple[str, int, str]]


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
