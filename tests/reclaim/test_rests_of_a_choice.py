"""A choice of victims lets requests run after a bounded number of blocks that were looked at, also where each candidate
is passed over because more blocks follow it than are looked through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from levels_rig import group, instance

from kvcm.index.backends.memory import MemoryBackend
from kvcm.index.meta_index import MetaIndex
from kvcm.model.locations import BlockRecord, Location, LocationStatus
from kvcm.model.storages import StorageType
from kvcm.reclaim.chains import Chains
from kvcm.reclaim.guard import MOST_FOLLOWERS
from kvcm.reclaim.lanes import Candidate
from kvcm.reclaim.needs import Holding, Need, Reason
from kvcm.reclaim.shares import Shares
from kvcm.reclaim.victims import Goal, Source, Victim, Walk, choose

FOLLOWED = 20
FOLLOWERS = MOST_FOLLOWERS + 1


class CountingBackend(MemoryBackend):
    """Counts the records that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    async def get_many(self, keys: Sequence[int]) -> list[BlockRecord | None]:
        self.read += len(keys)
        return await super().get_many(keys)


class AllAvailable:
    """Every storage can be read."""

    generation = 0

    def rank(self, _storage: str) -> int:
        return 0


def record(parent: int | None, depth: int) -> BlockRecord:
    """A block that serves."""
    place = ("l", "nfs", StorageType.ST_NFS, LocationStatus.SERVING, ("kv",))
    return BlockRecord(parent, depth, (Location(*place, b"\x12\x00", 10, 0.0),))


class HeadsFirst:
    """An order that names the head of a chain before what follows it, as one by the time of writing does."""

    def __len__(self) -> int:
        return FOLLOWED

    async def prepare(self, count: int, window: int = 0) -> Mapping[int, BlockRecord]:
        return {}

    def class_bytes(self, name: str) -> int:
        return 0

    def candidates(self, is_over_budget: object) -> Iterator[Candidate]:
        return (Candidate(key, False, 0, 0.0, "fifo") for key in range(FOLLOWED))

    def expired(self, now: float) -> Iterator[Candidate]:
        return iter(())

    def took(self, key: int) -> None:
        raise AssertionError("nothing of these blocks goes")

    async def settle(self) -> None:
        pass


class Rests:
    """Notes how many records were read between two rests.

    Attributes:
        reads: one number per stretch.
    """

    def __init__(self, backend: CountingBackend) -> None:
        self._backend = backend
        self.reads: list[int] = []

    def take(self, victim: Victim) -> None:
        raise AssertionError("nothing of these blocks goes")

    async def rest(self) -> None:
        self.reads.append(self._backend.read)
        self._backend.read = 0


async def test_a_choice_rests_between_candidates_that_many_blocks_follow() -> None:
    backend = CountingBackend()
    index = MetaIndex(backend, AllAvailable())
    chain = {key: record(key - 1 if key else None, key) for key in range(FOLLOWED)}
    tails = {FOLLOWED + i: record(FOLLOWED - 1, FOLLOWED) for i in range(FOLLOWERS)}
    await index.put(chain | tails)
    backend.read = 0
    holding = Holding(1, instance(), group(), {}, len(chain) + len(tails), 1 << 30)
    need = Need(Reason.SIZE, 1000, lambda _place: True, [holding], "g")
    source = Source(holding, HeadsFirst(), Chains(index), partial(bool, 0))
    rests = Rests(backend)
    found = await choose(Goal(need, 1000, 1 << 30, 1000, 0.0), [source], Shares(need, 0.0), rests, Walk())
    assert found == []
    assert len(rests.reads) >= FOLLOWED
    assert max(rests.reads) <= 2 * FOLLOWERS
