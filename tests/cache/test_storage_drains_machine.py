"""Drains, cancels, removals and additions of storages in any order, beside writers, pins and restarts.

Checked after every step: nothing new goes to a storage that is drained or gone; usage is the sum of the records
(invariant 4); what nobody asked to go stays readable (invariant 1), what is pinned too; addresses on a storage lead to
its present medium. At rest: what was drained holds no byte and no file, what was removed is forgotten.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from drain_world import BLOCK_BYTES, DrainWorld, file_of, files_below, storage_of
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from thoroughness import examples

from kvcm.cache.drains import TAKE_BACK_SECONDS
from kvcm.cache.pins import PinRequest
from kvcm.cache.sessions import StartedWrite
from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError, NotReadyError
from kvcm.model.locations import LocationStatus, decode_chunk

pytestmark = pytest.mark.timeout(400)

NAMES = ("a", "b", "c")
STORAGES = st.sampled_from(NAMES)
KEYS = st.integers(0, 8)
FIRSTS = st.tuples(KEYS, st.integers(1, 4)).map(lambda piece: list(range(piece[0], sum(piece))))


class Drains(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        self.world = DrainWorld(Path(self.directory.name), NAMES)
        self.open: list[StartedWrite] = []
        self.media = dict.fromkeys(NAMES, "1")  # of what is configured
        self.draining: set[str] = set()
        self.removed: dict[str, tuple[float, str]] = {}  # when, and the medium
        self.safe: dict[tuple[int, str], str] = {}  # nobody asked these to go: block and address, by storage
        self.pinned: dict[str, float] = {}  # addresses
        self.runner.run(self.world.begin())

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.come_to_rest())
            self.world.close()
            self.runner.close()
            self.directory.cleanup()

    @property
    def takes_writes(self) -> set[str]:
        return set(self.media) - self.draining

    @rule(keys=FIRSTS, finishes=st.booleans())
    def write(self, keys: list[int], finishes: bool) -> None:
        self.runner.run(self.do_write(keys, finishes))

    async def do_write(self, keys: list[int], finishes: bool) -> None:
        try:
            started = await self.world.start(keys)
        except NotReadyError:
            assert not self.takes_writes
            return
        assert {storage_of(chunk) for chunk in started.chunks} <= self.takes_writes
        self.open.append(started)
        if finishes:
            await self.do_finish(len(self.open) - 1)

    @rule(pick=st.integers(0, 30))
    def finish(self, pick: int) -> None:
        if self.open:
            self.runner.run(self.do_finish(pick % len(self.open)))

    async def do_finish(self, number: int) -> None:
        started = self.open.pop(number)
        try:
            await self.world.finish(started)
        except InvalidArgumentError:  # it has expired
            return
        for key, chunk in zip(started.session.keys, started.chunks, strict=True):
            if storage_of(chunk) in self.media:
                self.safe[key, decode_chunk(chunk).specs[0].uri] = storage_of(chunk)
        self.safe = {place: name for place, name in self.safe.items() if place in await self.serving()}

    async def serving(self) -> set[tuple[int, str]]:
        records = await self.world.records()
        return {
            (key, spec.uri)
            for key, record in records.items()
            for place in record.locations
            if place.status is LocationStatus.SERVING
            for spec in decode_chunk(place.chunk).specs
        }

    @rule(keys=FIRSTS, seconds=st.sampled_from([5, 60]))
    def pin(self, keys: list[int], seconds: int) -> None:
        pin = (
            self.runner.run(self.world.manager.pin("i", PinRequest(keys, "somebody", seconds))) if self.media else None
        )
        if pin is not None:
            held = set(pin.held.location_ids)
            for key, uri in self.runner.run(self.serving()):
                if key in keys[: pin.block_count] and uri.partition("?")[0].rpartition(".")[2] in held:
                    self.pinned[uri] = max(pin.deadline, self.pinned.get(uri, 0.0))

    @rule(name=STORAGES)
    def drain(self, name: str) -> None:
        if name in self.media:
            self.runner.run(self.world.drains.drain(name))
            self.draining.add(name)

    @rule(name=STORAGES)
    def cancel(self, name: str) -> None:
        if name in self.media:
            self.runner.run(self.world.drains.cancel(name))
            self.draining.discard(name)

    @rule(name=STORAGES)
    def remove(self, name: str) -> None:
        if name not in self.media:
            with pytest.raises(InvalidArgumentError):
                self.runner.run(self.world.drains.remove(name))
            return
        self.runner.run(self.world.drains.remove(name))
        self.removed[name] = self.world.clock.now(), self.media.pop(name)
        self.draining.discard(name)

    @rule(name=STORAGES, medium=st.sampled_from(["1", "1", "2"]))
    def add(self, name: str, medium: str) -> None:
        self.runner.run(self.do_add(name, medium))

    async def do_add(self, name: str, medium: str) -> None:
        try:
            await self.world.registry.storages.add(self.world.config(name, medium))
        except DuplicateEntityError:
            assert name in self.media
        except NotReadyError:  # only for another medium, and only while the old one is listed
            assert self.removed[name][1] != medium
            assert name in {each.name for each in self.world.registry.storages.drains()}
        else:
            assert name not in self.media
            self.media[name] = medium
            del self.removed[name]

    @rule(seconds=st.sampled_from([0.0, 1.0, 3.0, 11.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        due = self.world.clock.now() + seconds - TAKE_BACK_SECONDS
        gone = self.draining | {name for name, (since, _) in self.removed.items() if since <= due}
        self.safe = {place: name for place, name in self.safe.items() if name not in gone}
        self.runner.run(self.world.pass_time(seconds))

    @rule()
    def restart(self) -> None:
        self.world.close()
        self.runner.run(self.world.restart())

    @invariant()
    def everything_that_nobody_asked_to_go_is_there(self) -> None:
        self.runner.run(self.check())

    async def check(self) -> None:
        records = await self.world.records()
        places = [place for record in records.values() for place in record.locations]
        recount: Counter[str] = Counter()
        for place in places:
            recount[place.storage] += place.size_bytes
        assert {name: self.world.used_bytes(name) for name in NAMES} == {name: recount[name] for name in NAMES}
        serving = await self.serving()
        assert set(self.safe) <= serving
        readable = {key for (key, _), name in self.safe.items() if name in self.media}
        if self.media:
            assert readable <= set(await self.world.hits(sorted(records)))
        now, uris = self.world.clock.now(), {uri for _, uri in serving}
        for uri, until in self.pinned.items():
            assert until <= now or uri in uris or self._was_removed(uri)
        for place in places:
            if place.storage in self.media:
                for spec in decode_chunk(place.chunk).specs:
                    assert f"/{place.storage}/{self.media[place.storage]}/" in str(file_of(spec.uri))

    def _was_removed(self, uri: str) -> bool:
        """Whoever removes a storage means its pinned blocks, too."""
        self.ever_removed = getattr(self, "ever_removed", set()) | set(self.removed)
        return uri.partition("://")[2].partition("/")[0] in self.ever_removed

    async def come_to_rest(self) -> None:
        for _ in range(8):
            await self.world.pass_time(61.0)
        await self.world.pass_time(2.0)
        left = {each.drain.name: each for each in await self.world.drains.look(is_leader=True)}
        assert set(left) == self.draining
        for name in self.draining:
            assert (left[name].is_done, left[name].left_bytes) == (True, 0)
            assert files_below(Path(self.directory.name) / name / self.media[name]) == []
        for name in {*self.draining, *self.removed}:
            assert await self.world.places(name) == []
            assert self.world.used_bytes(name) == 0
        for (_, uri), name in self.safe.items():
            if name in self.takes_writes:
                assert file_of(uri).stat().st_size == BLOCK_BYTES


class TestDrains(Drains.TestCase):
    settings = settings(
        max_examples=examples(120),
        stateful_step_count=20,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )
