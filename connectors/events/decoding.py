"""Reads batches of KV events, as vLLM and SGLang publish them: msgpack, events as maps, or as arrays of older releases.

Fields and types of events that are not known are ignored. Damage is counted and never raises. What a damaged event of
stored blocks held is not reported, which does no harm; but a damaged event of removed blocks may leave blocks behind
that are gone, so its batch counts as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from kvcm.connectors.events.packages import msgpack_decoder

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "Event", "EventBatch", "EventHash", "decode_batch"]

EventHash: TypeAlias = int | bytes
"""Hash of a block in events: 64 bits without sign, or all bytes."""

_MASK: Final = (1 << 64) - 1
_MIN_HASH_BYTES: Final = 16
# The order of arrays, which had no names: fields were added at the end.
_STORED_FIELDS: Final = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality", "ownership"),
)
_REMOVED_FIELDS: Final = ("block_hashes", "medium", "group_idx", "locality", "ownership")


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of one chain that an engine has now.

    Attributes:
        hashes: of the blocks, in order.
        parent: hash of the block before the first one, None at the start of a prompt.
        token_ids: of all blocks, one after the other; with EAGLE pairs of tokens.
        block_tokens: tokens of a block, 0 where the event does not say.
        medium: memory, in the engine's words; "" where the event does not say.
        has_adapter: whether an adapter (LoRA) was applied.
        extra_keys: per block, further values that the hash covers; () for none.
        cache_salt: of the request, where the event has it apart; "" for none.
        group: number of the group of layers, None where the event does not say.
        group_kind: kind of the group, "" where the event does not say.
        is_remote: whether the memory is another host's.
    """

    hashes: tuple[EventHash, ...]
    parent: EventHash | None
    token_ids: Sequence[Any]
    block_tokens: int
    medium: str = ""
    has_adapter: bool = False
    extra_keys: Sequence[Any] = ()
    cache_salt: str = ""
    group: int | None = None
    group_kind: str = ""
    is_remote: bool = False


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks of which one copy is gone.

    Attributes:
        hashes: of the blocks.
        medium: memory, in the engine's words; "" where the event does not say.
        group: number of the group of layers, None where the event does not say.
        is_remote: whether the memory is another host's.
    """

    hashes: tuple[EventHash, ...]
    medium: str = ""
    group: int | None = None
    is_remote: bool = False


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """All blocks of the rank are gone."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one message.

    Attributes:
        timestamp: seconds since 1970 when the engine made it, 0 where the message does not say.
        events: in order.
        unknown: events of types that are not known.
        malformed: events that cannot be read; 1 for a whole message that cannot.
        is_lossy: whether blocks may be gone of which the batch should have said so.
    """

    timestamp: float
    events: tuple[Event, ...] = ()
    unknown: int = 0
    malformed: int = 0
    is_lossy: bool = False


_UNREADABLE: Final = EventBatch(0.0, malformed=1, is_lossy=True)


def decode_batch(payload: bytes) -> EventBatch:
    """Return the events of a message; never raises because of it."""
    try:
        message = msgpack_decoder()(payload)
    except Exception:  # decoders of msgpack raise whatever a damaged message leads them to
        return _UNREADABLE
    if not isinstance(message, list) or len(message) < 2 or not isinstance(message[1], list):
        return _UNREADABLE
    timestamp = message[0] if isinstance(message[0], float | int) else 0.0
    events: list[Event] = []
    unknown = malformed = 0
    is_lossy = False
    for entry in message[1]:
        name, fields = _named_fields(entry)
        read = _READERS.get(name)
        if read is None:
            # A type that is not known is a later engine's; an entry without any is damage that may hide a removal.
            unknown, malformed, is_lossy = unknown + bool(name), malformed + (not name), is_lossy or not name
            continue
        try:
            events.append(read(fields))
        except (TypeError, ValueError, KeyError):
            malformed += 1
            is_lossy = is_lossy or name != "BlockStored"
    return EventBatch(float(timestamp), tuple(events), unknown, malformed, is_lossy)


def _named_fields(entry: object) -> tuple[str, Mapping[str, Any]]:
    """Return the type and the fields of an event, "" for one that has no type."""
    if isinstance(entry, dict):
        name = entry.get("type")
        return (name, entry) if isinstance(name, str) else ("", {})
    if isinstance(entry, list) and entry and isinstance(entry[0], str):
        names = _STORED_FIELDS if entry[0] == "BlockStored" else _REMOVED_FIELDS
        return entry[0], dict(zip(names, entry[1:], strict=False))
    return "", {}


def _stored(fields: Mapping[str, Any]) -> BlockStored:
    parent = fields.get("parent_block_hash")
    return BlockStored(
        hashes=_hashes(fields["block_hashes"]),
        parent=None if parent is None else _hash(parent),
        token_ids=_typed(fields.get("token_ids") or [], list),
        block_tokens=_typed(fields.get("block_size") or 0, int),
        medium=_typed(fields.get("medium") or "", str),
        has_adapter=fields.get("lora_name") is not None or fields.get("lora_id") is not None,
        extra_keys=_typed(fields.get("extra_keys") or [], list),
        cache_salt=_typed(fields.get("cache_salt") or "", str),
        group=_group(fields),
        group_kind=_typed(fields.get("kv_cache_spec_kind") or "", str),
        is_remote=_is_remote(fields),
    )


def _removed(fields: Mapping[str, Any]) -> BlockRemoved:
    return BlockRemoved(
        hashes=_hashes(fields["block_hashes"]),
        medium=_typed(fields.get("medium") or "", str),
        group=_group(fields),
        is_remote=_is_remote(fields),
    )


def _cleared(fields: Mapping[str, Any]) -> AllBlocksCleared:
    return AllBlocksCleared()


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Event]]] = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": _cleared,
}


def _hashes(values: object) -> tuple[EventHash, ...]:
    return tuple([_hash(value) for value in _typed(values, list)])


def _hash(value: object) -> EventHash:
    """Return a hash in one form for each engine: SGLang writes 64 bits with sign, vLLM without, or all bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value & _MASK
    if isinstance(value, bytes) and len(value) >= _MIN_HASH_BYTES:
        return value
    raise ValueError(f"{value!r} is no block hash")


def _group(fields: Mapping[str, Any]) -> int | None:
    group = fields.get("group_idx")
    return None if group is None else _typed(group, int)


def _is_remote(fields: Mapping[str, Any]) -> bool:
    return fields.get("locality") == "REMOTE"


def _typed(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
