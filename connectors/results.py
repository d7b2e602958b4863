"""Results of the manager's clients: values only. An error is never raised; it is an empty result with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvcm.model.errors import ErrorCode
from kvcm.model.storages import StorageConfig
from kvcm.model.uri import LocationUri

__all__ = [
    "CallCounters",
    "ClusterInfo",
    "EncodedMatch",
    "Endpoint",
    "Location",
    "MatchMode",
    "MatchResult",
    "MissingReport",
    "Outcome",
    "Pin",
    "PoolReport",
    "Registration",
    "RegistrationState",
    "WriteGrant",
]


class MatchMode(StrEnum):
    """How keys are matched (wire.md 5.3)."""

    PREFIX = "prefix"  # the longest prefix whose blocks are all there
    BATCH = "batch"  # each key for itself
    SLIDING_WINDOW = "sliding_window"  # the right-most run of `window` keys that are all there
    PREFIX_WITH_STATE = "prefix_with_state"  # a prefix whose last block also has the linear-attention state

    @property
    def is_prefix(self) -> bool:
        """Whether the answer lists only the blocks found, in order."""
        return self in {MatchMode.PREFIX, MatchMode.PREFIX_WITH_STATE}


class Outcome(StrEnum):
    """How a call ended, as it is counted."""

    OK = "ok"
    MISS_ON_ERROR = "miss_on_error"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class CallCounters:
    """How often a call ended how, and how many attempts were repeated."""

    ok: int = 0
    miss_on_error: int = 0
    timeout: int = 0
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Location:
    """Where one block lies.

    Attributes:
        uris: by spec name; parts that are not there are left out, at least one is.
        storage_type: number of the storage's type.
        checksum: of the block's bytes, 0 when unknown.
        checksums: of the parts, by spec name, from their writer: for `TransferItem.checksum`; others are left
            out.
    """

    uris: Mapping[str, LocationUri]
    storage_type: int = 0
    checksum: int = 0
    checksums: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The result of a match.

    Attributes:
        outcome: ok also when nothing was found.
        locations: prefix modes: one per block found, in order; other modes: one per key, None where nothing is.
        lease_id: keeps the locations readable until it is released or ends; "" when none was asked for or given.
        lease_deadline_ms: when the lease ends, unix time in ms.
        code: of the manager's answer, None when there was none.
        reason: of a miss on error.
    """

    outcome: Outcome
    locations: tuple[Location | None, ...] = ()
    lease_id: str = ""
    lease_deadline_ms: int = 0
    code: ErrorCode | int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EncodedMatch:
    """The result of a match whose locations stay encoded, for a process that hands them on to the loading processes.

    Attributes:
        outcome: ok also when nothing was found.
        locations: encoded, one per entry of a `MatchResult`; `wire.decode_locations` decodes them. In prefix modes
            their number is the number of blocks found.
        lease_id: as in `MatchResult`.
        code: as in `MatchResult`.
        reason: as in `MatchResult`.
    """

    outcome: Outcome
    locations: tuple[bytes, ...] = ()
    lease_id: str = ""
    code: ErrorCode | int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WriteGrant:
    """Permission to write blocks until the session ends.

    Attributes:
        session_id: to finish, renew or abort with.
        mask: one per key asked for; true where nothing needs to be written.
        locations: where to write the others, in order.
        refusal: why blocks behind the last of them, which the mask has as true, do not fit; "" when all do.
    """

    session_id: str
    mask: tuple[bool, ...]
    locations: tuple[Location, ...]
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Pin:
    """A prefix that is not evicted for a while.

    Attributes:
        id: to end it early with; "" when nothing of the prefix could be read, so nothing is pinned.
        blocks: how many of the keys are pinned, from the first on.
        size_bytes: what they take of the group's budget.
        deadline_ms: when it ends, unix time in ms.
        owner: of the pin, by name.
        last_key: the last block of the prefix; 0 in the answer to `pin_prefix`.
    """

    id: str
    blocks: int
    size_bytes: int
    deadline_ms: int
    owner: str
    last_key: int = 0


@dataclass(frozen=True, slots=True)
class MissingReport:
    """The answer to a report of missing or corrupt bytes.

    Attributes:
        removed_locations: locations that the manager removed.
        unconfirmed_parts: parts that it can see, that are no longer where they were, or that have another checksum now.
    """

    removed_locations: int
    unconfirmed_parts: int


@dataclass(frozen=True, slots=True)
class PoolReport:
    """The answer to a report of a memory pool.

    Attributes:
        is_new_generation: the manager knew of other memory; blocks that were in it are being forgotten.
    """

    is_new_generation: bool


class RegistrationState(StrEnum):
    """The state of a registration."""

    OK = "ok"
    REFUSED = "refused"  # the manager answered no: a conflict of configuration, or its group is not there yet
    UNREACHABLE = "unreachable"  # no manager answered, or none was ready: try again later


@dataclass(frozen=True, slots=True)
class Registration:
    """Answer to a registration.

    Attributes:
        state: ok, refused or unreachable.
        storages: of the instance's group, for `TransferEngine.for_storages`.
        code: of the manager's answer, None when there was none.
        message: why it was refused or what failed.
    """

    state: RegistrationState
    storages: tuple[StorageConfig, ...] = ()
    code: ErrorCode | int | None = None
    message: str = ""

    @property
    def ok(self) -> bool:
        """Whether the instance is registered."""
        return self.state is RegistrationState.OK


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a manager serves."""

    node_id: str
    host: str
    meta_rpc_port: int
    meta_http_port: int


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """The answering manager and the leader; the endpoint is None when no leader is known."""

    self_node_id: str
    leader_node_id: str
    leader_endpoint: Endpoint | None
