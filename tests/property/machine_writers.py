"""Rules of writers: start, finish right and wrong, renew, write early and late."""

from collections.abc import Callable, Sequence

import client_bytes
from cache_world import decoded
from hypothesis import strategies as st
from hypothesis.stateful import rule
from machine_core import CHAINS, GROUPS, INSTANCES, KEYS, OWNERS, PICKS, POOL, MachineCore
from model_parts import Plan

from kvcm.cache.sessions import WriteRequest
from kvcm.model.masks import NO_MASK, BlockMask
from kvcm.model.uri import LocationUri


class WriterRules(MachineCore):
    @rule(
        owner=OWNERS,
        keys=CHAINS,
        groups=GROUPS,
        timeout=st.sampled_from([0, -1, 1, 5, 40, 9999]),
        replicas=st.sampled_from([0, 1, 2]),
        parent=st.one_of(st.none(), KEYS),
    )
    def start(
        self, owner: str, keys: list[int], groups: list[str] | None, timeout: int, replicas: int, parent: int | None
    ) -> None:
        names = () if groups is None else tuple(groups[: len(keys)])
        request = WriteRequest(tuple(keys), names, timeout, replicas, parent)
        expected = self.model.start(owner, request)
        started = self.call(self.manager.start_write(owner, request))
        if not isinstance(expected, Plan):
            assert started is expected
            return
        session, count = started.session, len(keys)
        assert started.mask == canonical_mask(expected.flags)
        assert [i not in started.mask.unmasked(count) for i in range(count)] == expected.flags
        assert (started.refused, bool(started.refusal)) == (expected.refused, expected.refused > 0)
        assert session.deadline == self.clock.now() + expected.seconds
        assert session.id not in self.ended | set(self.model.sessions)
        chunks = decoded(started.chunks)
        assert [(kind, size) for kind, size, _ in chunks] == [(w.kind, len(w.specs)) for w in expected.blocks]
        for wanted, (_, _, specs) in zip(expected.blocks, chunks, strict=True):
            assert [name for name, _ in specs] == [name for name, _ in wanted.specs]
            for (_, uri), (_, size) in zip(specs, wanted.specs, strict=True):
                self.check_new_address(uri, wanted.storage, size)
        self.uris_of[session.id] = [[uri for _, uri in specs] for _, _, specs in chunks]
        addresses = [dict(specs) for _, _, specs in chunks]
        self.model.started(owner, expected, session.id, session.location_id, addresses)

    @rule(owner=OWNERS, keys=CHAINS, groups=GROUPS, replicas=st.sampled_from([1, 1, 2, 3]))
    def write_everything(self, owner: str, keys: list[int], groups: list[str] | None, replicas: int) -> None:
        """The usual case: a writer that does what it came for."""
        known = set(self.uris_of)
        self.start(owner, keys, groups, 0, replicas, None)
        for session_id in set(self.uris_of) - known:
            for uris in self.uris_of[session_id]:
                self.put_bytes(uris)
            self.finish_call(owner, session_id, BlockMask(offset=len(self.uris_of[session_id])))

    @rule(owner=OWNERS, end=st.integers(1, 7), replicas=st.sampled_from([1, 2]))
    def write_a_prefix(self, owner: str, end: int, replicas: int) -> None:
        self.write_everything(owner, list(POOL[:end]), None, replicas)

    @rule(owner=OWNERS, keys=CHAINS, pick=PICKS, groups=GROUPS)
    def write_copies_on_one_storage(self, owner: str, keys: list[int], pick: int, groups: list[str] | None) -> None:
        """While the other storages are down, so that blocks come to lie on several of different speeds."""
        up = [name for name in self.model.shelves if self.model.rank(name) is not None]
        others = [name for name in up if name != up[pick % len(up)]]
        for name in others:
            self.switch(name, enabled=False)
        self.write_everything(owner, keys, groups, 3)
        for name in others:
            self.switch(name, enabled=True)

    def check_new_address(self, uri: str, storage: str, size: int) -> None:
        """Invariant 5: no extent is ever handed out twice."""
        address = LocationUri.parse(uri)
        assert (address.storage, address.size, str(address)) == (storage, size, uri)
        extent = (storage, address.path, address.blkid)
        assert extent not in self.extents
        self.extents.add(extent)

    @rule(pick=PICKS, offset=st.integers(0, 8))
    def finish_with_offset(self, pick: int, offset: int) -> None:
        self.finish(pick, lambda count: BlockMask(offset=min(offset, count)))

    @rule(pick=PICKS, bits=st.integers(0, 255))
    def finish_with_flags(self, pick: int, bits: int) -> None:
        self.finish(pick, lambda count: BlockMask(flags=tuple(bool(bits >> i & 1) for i in range(count))))

    @rule(pick=PICKS, wrong=st.sampled_from(["offset", "negative", "long", "short", "unset"]))
    def finish_with_a_wrong_mask(self, pick: int, wrong: str) -> None:
        masks: dict[str, Callable[[int], BlockMask]] = {
            "offset": lambda count: BlockMask(offset=count + 1),
            "negative": lambda count: BlockMask(offset=-1),
            "long": lambda count: BlockMask(flags=(True,) * (count + 1)),
            "short": lambda count: BlockMask(flags=(True,) * max(0, count - 1)),
            "unset": lambda count: NO_MASK,
        }
        self.finish(pick, masks[wrong])

    @rule(pick=PICKS, owner=OWNERS)
    def finish_somebody_elses(self, pick: int, owner: str) -> None:
        session_id = self.any_session(pick) or "f" * 32
        session = self.model.sessions.get(session_id)
        if session is None or session.instance_id != owner:
            self.finish_call(owner, session_id, BlockMask(offset=0))
        self.finish_call(owner, "0" * 32, BlockMask(offset=0))

    def finish(self, pick: int, mask: Callable[[int], BlockMask]) -> None:
        session_id = self.any_session(pick)
        if session_id is None:
            return
        session = self.model.sessions.get(session_id)
        if session is None:
            count = len(self.uris_of[session_id])
            self.finish_call(INSTANCES[pick % 2].instance_id, session_id, mask(count))
            return
        success = mask(len(session.keys))
        for position, uris in enumerate(self.uris_of[session_id]):
            if success.offset is None or position < success.offset:
                self.put_bytes(uris)
        self.finish_call(session.instance_id, session_id, success)

    @rule(pick=PICKS, owner=st.none() | OWNERS)
    def repeat_a_finish(self, pick: int, owner: str | None) -> None:
        """Whatever was removed, evicted or written since: the answer is the first one."""
        finished = list(self.model.finished.values())
        if finished:
            before = finished[pick % len(finished)]
            self.finish_call(owner or before.session.instance_id, before.session.id, BlockMask(flags=before.flags))

    def finish_call(self, owner: str, session_id: str, success: BlockMask) -> None:
        """Invariant 3: what is refused does not end the session, what is accepted ends it for good."""
        expected = self.model.finish(owner, session_id, success)
        assert self.call(self.manager.finish_write(owner, session_id, success)) == expected
        self.note_ended()

    @rule(pick=PICKS, owner=OWNERS, timeout=st.sampled_from([-3, 0, 2, 50, 9999]))
    def renew_write(self, pick: int, owner: str, timeout: int) -> None:
        session_id = self.any_session(pick) or "e" * 32
        expected = self.model.renew(owner, session_id, timeout)
        renewed = self.call(self.manager.renew_write(owner, session_id, timeout))
        assert (renewed if isinstance(renewed, type) else renewed.deadline) == expected

    @rule(pick=PICKS)
    def write_early_or_late(self, pick: int) -> None:
        """A writer that is ahead of its finish, or was stopped and comes back after the end of its session."""
        known = [*self.model.sessions, *sorted(self.ended)]
        if known:
            for uris in self.uris_of[known[pick % len(known)]]:
                self.put_bytes(uris)

    def put_bytes(self, uris: Sequence[str]) -> None:
        for uri in uris:
            if uri.startswith("file:"):
                client_bytes.write(uri)


def canonical_mask(flags: list[bool]) -> BlockMask:
    """An offset when the masked positions are a prefix, flags otherwise (wire.md 5.5)."""
    first = flags.index(False) if False in flags else len(flags)
    return BlockMask(flags=tuple(flags)) if True in flags[first:] else BlockMask(offset=first)
