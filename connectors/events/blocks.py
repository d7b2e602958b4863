"""The blocks that one rank of an engine holds, by our block keys: what events of the engine's own hashes come to.

An event has 64 bits of a hash, mostly others than our keys have. A key is found in one of these ways:

* All bytes of the hash are in the event (vLLM with `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0`): cut and masked.
* SGLang without a salt: the event's 64 bits are those of the key before the mask.
* Otherwise the hash is computed again along the chain, from the tokens in the event and the hash of the parent, and
  compared with the event's 64 bits. So a wrong seed, algorithm or format never leads to a wrong key: the blocks count
  as unmapped (`hash_mismatch`).
* With keys of algorithm `kvcm`: from tokens and the parent's key. There is nothing to compare with.

Not known from events: the path of an adapter (LoRA), the pairs of tokens of EAGLE with a salt, tokens of a placeholder
of vLLM's offloading, parents that were stored before the first event that was read. Such blocks are counted, by reason,
and not reported. SGLang's events do not show the `extra_key` of a request: its blocks look like those without one.

Copies: vLLM publishes a store and a removal for each physical copy of a block. A block is gone when as many removals as
stores were read. Stores that were missed make a block go early, which does no harm. Stores that are repeated without a
copy (a request with `kv_cache_report_mode` = `full`) would make it stay for ever, so where requests may ask for that,
`counts_copies` is false: then the first removal counts.

Groups of layers: a block of a model with several kinds of attention is in several groups. `group_specs` says which part
of the instance's blocks a group is. Without it, blocks of the first group of full attention are reported as whole
blocks, as all indexes of engines' events do, and those of other groups are counted as unmapped (`group`).

Invariants:

1. For each hash, memory and part there are as many copies as stores minus removals since the last clear, and at least
   one; without one there is no entry.
2. A pair of memory and part holds exactly the keys of the hashes that have copies there.
3. `Mapped` of a hash is kept while it has copies anywhere, so that children find their parent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, NamedTuple, TypeAlias

from kvcm.connectors.events.decoding import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventHash
from kvcm.model.errors import CapacityError, InvalidArgumentError
from kvcm.model.key_schemes import KVCM, SGLANG_SHA256, KeyScheme, block_hash, salt_seed
from kvcm.model.keys import BlockKey, block_keys_from_tokens
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

__all__ = ["CLEARED", "Change", "EngineKind", "HeldBlocks", "MappingSettings", "Memory"]

_FULL_ATTENTION: Final = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_EVENT_SALT_TAG: Final = b"sglang-cache-salt-v1\0"
_MEDIA: Final[Mapping[str, pb.Medium]] = {
    "": pb.MEDIUM_GPU,  # vLLM's older releases publish the GPU's events alone, and without a medium
    "GPU": pb.MEDIUM_GPU,
    "CPU": pb.MEDIUM_HOST,
    "CPU_PINNED": pb.MEDIUM_HOST,
    "DISK": pb.MEDIUM_DISK,
}
"""Storages are missing: the manager knows by itself what they have."""

EngineKind: TypeAlias = str
"""`vllm` or `sglang`."""


class Memory(NamedTuple):
    """Where a block is.

    Attributes:
        medium: memory.
        spec_name: part of the block, "" for all of it.
    """

    medium: pb.Medium
    spec_name: str


class Change(NamedTuple):
    """A change of the blocks that are held.

    Attributes:
        memory: where; None for everywhere, where everything is gone.
        key: of the block.
        is_added: whether it is there now.
    """

    memory: Memory | None
    key: BlockKey
    is_added: bool


CLEARED: Final = Change(None, BlockKey(0), is_added=False)


@dataclass(frozen=True, slots=True)
class MappingSettings:
    """How events become blocks.

    Attributes:
        engine: `vllm` or `sglang`.
        scheme: of the block keys.
        group_specs: name of the part that a group of layers is, by number; empty: see the module.
        counts_copies: whether a block is gone only when all its copies are.
        most_blocks: that are held, each as often as there are memories with it; infinite for an engine that is trusted.

    Raises:
        InvalidArgumentError: two groups are the same part, or the scheme is another engine's.
    """

    engine: EngineKind
    scheme: KeyScheme
    group_specs: Mapping[int, str]
    counts_copies: bool = True
    most_blocks: float = math.inf

    def __post_init__(self) -> None:
        if len(set(self.group_specs.values())) < len(self.group_specs):
            raise InvalidArgumentError(f"groups are {dict(self.group_specs)}: each must be a part of its own")
        is_own = self.scheme.algorithm == KVCM or self.scheme.is_vllm == (self.engine == "vllm")
        if not is_own:
            raise InvalidArgumentError(f"algorithm is {self.scheme.algorithm!r}, which is not of engine {self.engine}")


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A block whose key is known.

    Attributes:
        key: its key.
        digest: full hash, which its children's hashes cover; b"" where the key does without.
        event_digest: the same of SGLang's hashes of events, with a salt.
    """

    key: BlockKey
    digest: bytes = b""
    event_digest: bytes = b""


class _UnmappedError(Exception):
    """Blocks whose keys are not known; the argument says why."""


class HeldBlocks:
    """The current blocks of a rank.

    Args:
        settings: how events become blocks.
        on_changes: gets the changes of each batch, in order.

    Attributes:
        unmapped: blocks that were not reported, by reason.
        ignored: blocks of events of memory that is not the engine's own.
    """

    def __init__(self, settings: MappingSettings, on_changes: Callable[[Sequence[Change]], None]) -> None:
        self._settings = settings
        self._on_changes = on_changes
        self._map = _MAPPERS[_mapper_name(settings)]
        self._copies: dict[tuple[EventHash, Memory], int] = {}
        self._mapped: dict[EventHash, _Mapped] = {}
        self._memories: Counter[EventHash] = Counter()  # in how many a hash has copies
        self._keys: dict[Memory, set[BlockKey]] = {}
        self._whole_group: int | None = None
        self.unmapped: Counter[str] = Counter()
        self.ignored = 0

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def counts(self) -> dict[Memory, int]:
        """Return how many blocks are held, by where they are."""
        return {memory: len(keys) for memory, keys in self._keys.items()}

    def pairs(self) -> list[tuple[Memory, BlockKey]]:
        """Return all blocks that are held."""
        return [(memory, key) for memory, keys in self._keys.items() for key in keys]

    def holds(self, memory: Memory, key: BlockKey) -> bool:
        """Return whether a block is held."""
        return key in self._keys.get(memory, ())

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events in order, and publish what they change.

        Raises:
            CapacityError: there are more blocks than are held; the blocks are to be cleared.
        """
        changes: list[Change] = []
        for event in events:
            if isinstance(event, BlockStored):
                changes.extend(self._store(event))
            elif isinstance(event, BlockRemoved):
                changes.extend(self._remove(event))
            else:
                assert isinstance(event, AllBlocksCleared), event
                self.clear()
                changes.append(CLEARED)
        if changes:
            self._on_changes(changes)

    def clear(self) -> None:
        """Drop everything; publishes nothing."""
        self._copies.clear()
        self._mapped.clear()
        self._memories.clear()
        self._keys.clear()
        self._whole_group = None

    def _store(self, event: BlockStored) -> Iterator[Change]:
        memory = self._memory(event.medium, event.group, is_remote=event.is_remote, kind=event.group_kind)
        if memory is None:
            yield from self._skip(event)
            return
        done = 0
        try:
            for hashed, mapped in self._map(self._settings.scheme, event, self._mapped):
                done += 1
                change = self._add_copy(hashed, memory, mapped)
                if change is not None:
                    yield change
        except _UnmappedError as error:
            self.unmapped[str(error)] += len(event.hashes) - done
        except (InvalidArgumentError, TypeError, ValueError, OverflowError):
            # Tokens or extra keys of a kind that no engine hashes; the encoders say so each in its own way.
            self.unmapped["malformed"] += len(event.hashes) - done

    def _remove(self, event: BlockRemoved) -> Iterator[Change]:
        memory = self._memory(event.medium, event.group, is_remote=event.is_remote, kind=None)
        if memory is None:
            return
        for hashed in event.hashes:
            copies = self._copies.get((hashed, memory), 0)
            if copies > 1 and self._settings.counts_copies:
                self._copies[hashed, memory] = copies - 1
            elif copies:
                yield self._drop(hashed, memory)

    def _add_copy(self, hashed: EventHash, memory: Memory, mapped: _Mapped) -> Change | None:
        copies = self._copies.get((hashed, memory), 0)
        self._copies[hashed, memory] = copies + 1
        if copies:
            return None
        if len(self._copies) > self._settings.most_blocks:
            raise CapacityError(f"the engine holds more than {self._settings.most_blocks} blocks")
        self._memories[hashed] += 1
        self._mapped[hashed] = mapped
        self._keys.setdefault(memory, set()).add(mapped.key)
        return Change(memory, mapped.key, is_added=True)

    def _drop(self, hashed: EventHash, memory: Memory) -> Change:
        del self._copies[hashed, memory]
        key = self._mapped[hashed].key
        self._keys[memory].discard(key)
        self._memories[hashed] -= 1
        if not self._memories[hashed]:
            del self._memories[hashed], self._mapped[hashed]
        return Change(memory, key, is_added=False)

    def _memory(self, medium: str, group: int | None, *, is_remote: bool, kind: str | None) -> Memory | None:
        """Return where blocks of an event are, None for memory that is not reported.

        Args:
            medium: as the event has it.
            group: of layers.
            is_remote: whether it is another host's.
            kind: of the group; None for removals, which do not say.
        """
        found = _MEDIA.get(medium)
        if found is None or is_remote:
            return None
        if self._settings.group_specs:
            spec_name = self._settings.group_specs.get(group or 0)
            return None if spec_name is None else Memory(found, spec_name)
        # Placeholders of offloading have a group without its kind, so the kind counts, and else group 0 is the one.
        is_whole = group == 0 if kind == "" else kind in _FULL_ATTENTION
        if self._whole_group is None and is_whole:
            self._whole_group = group
        return Memory(found, "") if group in (None, self._whole_group) else None

    def _skip(self, event: BlockStored) -> Iterator[Change]:
        if event.is_remote or event.medium not in _MEDIA:
            self.ignored += len(event.hashes)
        else:
            self.unmapped["group"] += len(event.hashes)
        return iter(())


# ---- how keys are found: generators of pairs of a hash and its block, which raise when there are no more ----

_Known: TypeAlias = Mapping[EventHash, _Mapped]
_Mapper: TypeAlias = Callable[[KeyScheme, BlockStored, _Known], Iterator[tuple[EventHash, _Mapped]]]


def _mapper_name(settings: MappingSettings) -> str:
    return KVCM if settings.scheme.algorithm == KVCM else settings.engine


def _map_vllm(scheme: KeyScheme, event: BlockStored, known: _Known) -> Iterator[tuple[EventHash, _Mapped]]:
    if event.has_adapter and scheme.mask:
        # With our connector, keys also depend on the adapter's content, which neither event nor hash has.
        raise _UnmappedError("adapter")
    if not any(isinstance(hashed, int) for hashed in event.hashes):
        _check_block_size(scheme, event, needs_tokens=False)
        for hashed in event.hashes:
            assert isinstance(hashed, bytes)
            yield hashed, _Mapped(scheme.key(hashed))
        return
    if event.has_adapter:
        raise _UnmappedError("adapter")  # its path is in the hash, and not in the event
    if not event.token_ids or all(hashed in known for hashed in event.hashes):
        yield from _known_blocks(event, known)
        return
    _check_block_size(scheme, event)
    parent = _parent(event, known)
    digest = None if parent is None else parent.digest
    for index, (hashed, token_ids) in enumerate(_blocks(event)):
        extra = _tagged(event.extra_keys[index]) if index < len(event.extra_keys) else None
        digest = block_hash(scheme, digest, token_ids, extra)
        if int.from_bytes(digest[-8:], "big") != hashed:
            raise _UnmappedError("hash_mismatch")
        yield hashed, _Mapped(scheme.key(digest), digest)


def _map_sglang(scheme: KeyScheme, event: BlockStored, known: _Known) -> Iterator[tuple[EventHash, _Mapped]]:
    assert scheme.algorithm == SGLANG_SHA256, scheme
    if event.has_adapter:
        raise _UnmappedError("adapter")
    _check_block_size(scheme, event, needs_tokens=bool(event.cache_salt))
    if not event.cache_salt:
        for hashed in event.hashes:
            yield hashed, _Mapped(scheme.key(_eight_bytes(hashed)))
        return
    _check_tokens(event)
    parent = _parent(event, known)
    # A salt begins the chain of events in another way than that of keys.
    digest, event_digest = salt_seed(event.cache_salt), sha256(_EVENT_SALT_TAG + event.cache_salt.encode()).digest()
    if parent is not None:
        digest, event_digest = parent.digest, parent.event_digest
    for hashed, token_ids in _blocks(event):
        digest, event_digest = block_hash(scheme, digest, token_ids), block_hash(scheme, event_digest, token_ids)
        if event_digest[:8] != _eight_bytes(hashed):
            raise _UnmappedError("hash_mismatch")
        yield hashed, _Mapped(scheme.key(digest), digest, event_digest)


def _map_kvcm(scheme: KeyScheme, event: BlockStored, known: _Known) -> Iterator[tuple[EventHash, _Mapped]]:
    if event.has_adapter:
        raise _UnmappedError("adapter")
    if event.cache_salt or any(each is not None for each in event.extra_keys):
        raise _UnmappedError("extra_keys")
    _check_block_size(scheme, event)
    _check_tokens(event)
    parent = _parent(event, known)
    running = 0 if parent is None else parent.key ^ scheme.mask
    for hashed, token_ids in _blocks(event):
        (running,) = block_keys_from_tokens(token_ids, scheme.block_tokens, running)
        yield hashed, _Mapped(BlockKey(running ^ scheme.mask))


_MAPPERS: Final[Mapping[str, _Mapper]] = {"vllm": _map_vllm, "sglang": _map_sglang, KVCM: _map_kvcm}


def _check_block_size(scheme: KeyScheme, event: BlockStored, *, needs_tokens: bool = True) -> None:
    if event.block_tokens not in (0, scheme.block_tokens):
        raise _UnmappedError("block_size")
    if not needs_tokens:
        return
    if not event.token_ids:
        raise _UnmappedError("no_tokens")
    if len(event.token_ids) != len(event.hashes) * scheme.block_tokens:
        # Blocks of a window that were passed over: which tokens are whose is not known.
        raise _UnmappedError("token_count")


def _check_tokens(event: BlockStored) -> None:
    if not all(isinstance(token, int) and token >= 0 for token in event.token_ids):
        raise _UnmappedError("token_pairs")


def _known_blocks(event: BlockStored, known: _Known) -> Iterator[tuple[EventHash, _Mapped]]:
    """Yield further copies of blocks, for which no tokens are needed: vLLM's offloading publishes some without."""
    for hashed in event.hashes:
        if hashed in known:
            yield hashed, known[hashed]
    if not event.token_ids:
        raise _UnmappedError("no_tokens")


def _parent(event: BlockStored, known: _Known) -> _Mapped | None:
    """Return the block before the first one, None at the start of a prompt."""
    if event.parent is None:
        return None
    parent = known.get(event.parent)
    if parent is None or (event.cache_salt and not parent.event_digest):
        raise _UnmappedError("unknown_parent")
    return parent


def _blocks(event: BlockStored) -> Iterator[tuple[EventHash, Sequence[int]]]:
    size = len(event.token_ids) // len(event.hashes) if event.hashes else 0
    for index, hashed in enumerate(event.hashes):
        yield hashed, event.token_ids[index * size : (index + 1) * size]


def _tagged(values: Any) -> tuple[object, ...] | None:
    """Return extra keys of a block as vLLM hashes them: events have them without their tags."""
    if not values:
        return None
    return tuple([_tagged_value(value) for value in values])


def _tagged_value(value: Any) -> tuple[object, ...]:
    if isinstance(value, str):
        return ("cache_salt", value)
    if isinstance(value, bytes):
        return ("prompt_embeds", value)
    if isinstance(value, list) and len(value) == 2:
        return ("mm", value[0], value[1])
    raise _UnmappedError("extra_keys")


def _eight_bytes(hashed: EventHash) -> bytes:
    """Return the first 8 bytes of SGLang's hash."""
    if isinstance(hashed, bytes):
        return hashed[:8]
    return hashed.to_bytes(8, "big")
