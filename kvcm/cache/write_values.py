"""Values of the two-phase write, and how an open session is stored."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from kvcm.cache.checksums import CHECKSUM_BYTES, NO_CHECKSUMS, Checksums, Told
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.masks import BlockMask

__all__ = ["NO_HINT", "FinishedWrite", "Retention", "StartedWrite", "Told", "WriteRequest", "WriteSession"]

_FORMAT = 1
_PRIORITIES = range(-100, 101)
_LAPSED = 1.0  # a deadline that no open session has; to releases that do not know it, one that is over like any other
_LONGEST_SECONDS = 1_000_000_000  # of a stored time; some thirty years, so that it fits wherever it is shown


@dataclass(frozen=True, slots=True)
class Retention:
    """A writer's hint how long blocks are worth keeping.

    Attributes:
        priority: what has a lower one is evicted first; others have 0.
        ttl_seconds: they go after this time, whatever room there is; 0 is no limit.
    """

    priority: int = 0
    ttl_seconds: int = 0

    def check(self) -> None:
        """Refuse what is out of range.

        Raises:
            InvalidArgumentError: naming the field and what is allowed.
        """
        if self.priority not in _PRIORITIES:
            raise InvalidArgumentError(f"retention.priority is {self.priority}, must be from -100 to 100")
        if self.ttl_seconds < 0:
            raise InvalidArgumentError(f"retention.ttl_seconds is {self.ttl_seconds}, must be >= 0 (0 is no limit)")

    def keep_until(self, now: float) -> float:
        """Return the unix time at which blocks of a session that ends now have to go, 0 for never."""
        return now + min(self.ttl_seconds, _LONGEST_SECONDS) if self.ttl_seconds else 0.0


NO_HINT = Retention()


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """What a writer wants to store.

    Attributes:
        keys: block keys of one prefix chain, in order.
        spec_groups: empty for all specs, or one spec group per key.
        timeout_seconds: life of the session; 0 and less is the default, more than an hour is an hour.
        min_replica_count: a block is skipped only when it has so many available replicas; 0 is 1.
        parent_key: key before `keys[0]`, None at the head of a chain.
        node_id: the writer's node, whose memory pools it can write; "" for none.
    """

    keys: Sequence[int]
    spec_groups: Sequence[str] = ()
    timeout_seconds: int = 0
    min_replica_count: int = 0
    parent_key: int | None = None
    node_id: str = ""

    @property
    def replicas(self) -> int:
        """Available replicas that make a block complete, 1 at least."""
        return max(1, self.min_replica_count)


class _Document(msgspec.Struct, array_like=True, frozen=True):
    version: int
    uid: int
    deadline: float
    location_id: str
    keys: bytes
    decision: bytes | None


class _HintedDocument(_Document, array_like=True, frozen=True):
    """With a writer's hint. A session without one is stored as ever: its document is compared byte by byte."""

    priority: int = 0
    keep_until: float = 0.0


class _CheckedDocument(_HintedDocument, array_like=True, frozen=True):
    """With the checksums of the parts, too, as `Checksums` has them."""

    checksum_names: tuple[str, ...] = ()
    checksums: bytes = b""


class _OwnedDocument(_CheckedDocument, array_like=True, frozen=True):
    """The same of a principal who is known."""

    starter: str = ""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_OwnedDocument)


@dataclass(frozen=True, slots=True)
class WriteSession:
    """A session as it is stored.

    Attributes:
        id: 128 random bits, the only right to finish it.
        uid: number of the instance it belongs to.
        deadline: unix seconds.
        location_id: id of every location that it writes.
        keys: blocks to be written, in the order of the answer.
        decision: None while it is open. Then how it ends, per key whether it succeeded: whoever finds the session with
            a decision carries it out, since the one who made it may have died on the way.
        priority: what its blocks have once they serve.
        keep_until: unix seconds when its blocks have to go, 0 for never.
        checksums: of its parts; these three are part of the decision.
        starter: name of the principal who may finish it, "" for whoever knows its id.
    """

    id: str
    uid: int
    deadline: float
    location_id: str
    keys: tuple[int, ...]
    decision: tuple[bool, ...] | None = None
    priority: int = 0
    keep_until: float = 0.0
    checksums: Checksums = NO_CHECKSUMS
    starter: str = ""

    @property
    def has_lapsed(self) -> bool:
        """Whether its deadline decided, and not its writer."""
        return self.decision is not None and self.deadline == _LAPSED

    def lapsed(self) -> WriteSession:
        """Return the session as its deadline decides it: nothing succeeded."""
        return replace(self, deadline=_LAPSED, decision=(False,) * len(self.keys))

    def encoded(self) -> bytes:
        """Return the session's document; its id is the document's name."""
        decision = bytes(self.decision) if self.decision is not None else None
        fields = (_FORMAT, self.uid, self.deadline, self.location_id, array("q", self.keys).tobytes(), decision)
        hint = (self.priority, self.keep_until)
        if self.starter:
            return _encoder.encode(_OwnedDocument(*fields, *hint, *self.checksums, self.starter))
        if self.checksums.names:
            return _encoder.encode(_CheckedDocument(*fields, *hint, *self.checksums))
        if any(hint):
            return _encoder.encode(_HintedDocument(*fields, *hint))
        return _encoder.encode(_Document(*fields))

    @classmethod
    def decoded(cls, session_id: str, document: bytes) -> WriteSession:
        """Read what `encoded` wrote.

        Raises:
            StorageIOError: a newer release wrote it, or it is damaged.
        """
        try:
            stored = _decoder.decode(document)
            keys = array("q", stored.keys)
        except ValueError as error:  # msgspec's errors are such, too
            raise StorageIOError(f"a stored write session cannot be read: {error}") from error
        if stored.version != _FORMAT:
            raise StorageIOError(
                f"a stored write session has format {stored.version}, this release knows {_FORMAT}: upgrade it first"
            )
        decision = tuple(map(bool, stored.decision)) if stored.decision is not None else None
        checksums = Checksums(stored.checksum_names, stored.checksums)
        if len(checksums.values) != len(keys) * len(checksums.names) * CHECKSUM_BYTES:
            raise StorageIOError("a stored write session cannot be read: it has not one checksum per key and name")
        hint = (stored.priority, stored.keep_until)
        end = (decision, *hint, checksums, stored.starter)
        return cls(session_id, stored.uid, stored.deadline, stored.location_id, tuple(keys), *end)


@dataclass(frozen=True, slots=True)
class StartedWrite:
    """Answer to a start.

    Attributes:
        session: the open session.
        mask: which of the request's keys need not be written.
        chunks: where to write the others, encoded as field 2 of an answer, in request order.
        refused: number of blocks that were masked because they do not fit.
        refusal: why not; "" when all do.
    """

    session: WriteSession
    mask: BlockMask
    chunks: Sequence[bytes]
    refused: int = 0
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class FinishedWrite:
    """Outcome of a session.

    Attributes:
        served: blocks that became serving.
        dropped: blocks that were reported as failed.
        vanished: blocks reported as successful that were removed meanwhile.
    """

    served: int
    dropped: int
    vanished: int
