"""Values of the two-phase write, and how an open session is stored."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from kvcm.model.errors import StorageIOError
from kvcm.model.masks import BlockMask

__all__ = ["FinishedWrite", "StartedWrite", "WriteRequest", "WriteSession"]

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """What a writer wants to store.

    Attributes:
        keys: block keys of one prefix chain, in order.
        spec_groups: empty for all specs, or one spec group per key.
        timeout_seconds: life of the session; 0 and less is the default, more than an hour is an hour.
        min_replica_count: a block is skipped only when it has so many available replicas; 0 is 1.
        parent_key: key before `keys[0]`, None at the head of a chain.
    """

    keys: Sequence[int]
    spec_groups: Sequence[str] = ()
    timeout_seconds: int = 0
    min_replica_count: int = 0
    parent_key: int | None = None

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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Document)


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
    """

    id: str
    uid: int
    deadline: float
    location_id: str
    keys: tuple[int, ...]
    decision: tuple[bool, ...] | None = None

    def encoded(self) -> bytes:
        """Return the session's document; its id is the document's name."""
        decision = bytes(self.decision) if self.decision is not None else None
        keys = array("q", self.keys).tobytes()
        return _encoder.encode(_Document(_FORMAT, self.uid, self.deadline, self.location_id, keys, decision))

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
        return cls(session_id, stored.uid, stored.deadline, stored.location_id, tuple(keys), decision)


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
