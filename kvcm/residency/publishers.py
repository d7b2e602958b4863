"""Publishers of KV events that clients registered, for subscribers to follow.

The manager connects to none of them: a registration is a note that a subscriber reads, which checks endpoints by its
own rules. The state is soft: it is kept in memory, and is gone after a restart.

Invariant U1: a group has at most one registration of each (model, engine, rank), and of each endpoint.
Invariant U2: what one group registers neither hides, changes nor bounds the registrations of another.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from kvcm.model.errors import CapacityError, DuplicateEntityError, InvalidArgumentError

__all__ = ["MOST_OF_GROUP", "HashProfile", "Publisher", "PublisherRegistry"]

MOST_OF_GROUP: Final = 1024
"""Registrations of one instance group."""
_MOST_GROUPS: Final = 4096

_MOST_RANK: Final = 65_535
_MOST_BLOCK_TOKENS: Final = 1 << 20
_TEXTS: Final = (("engine", 1), ("model_name", 1), ("lora_name", 0), ("type", 0))
_MOST_TEXT: Final = 256
_MOST_ENDPOINT: Final = 256
_ENDPOINT: Final = re.compile(
    r"tcp://(?:\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9][A-Za-z0-9_.-]{0,252}|\*):(?P<port>[0-9]{1,5})"
)
_SEED: Final = re.compile(r"random|0|[1-9][0-9]{0,9}")
_MOST_SEED: Final = (1 << 32) - 1
_ALGORITHMS: Final = ("sha256", "sha256_cbor")


@dataclass(frozen=True, slots=True)
class HashProfile:
    """How a publisher hashes blocks, in the words of the index API.

    Attributes:
        strategy: `vllm_v1`.
        algorithm: `sha256` or `sha256_cbor`.
        python_hash_seed: `random`, or a number from 0 to 4294967295.
        index_projection: `low64_be`.

    Raises:
        InvalidArgumentError: a value is not allowed; names it.
    """

    strategy: str
    algorithm: str
    python_hash_seed: str
    index_projection: str

    def __post_init__(self) -> None:
        for name, allowed in (
            ("strategy", ("vllm_v1",)),
            ("algorithm", _ALGORITHMS),
            ("index_projection", ("low64_be",)),
        ):
            value = getattr(self, name)
            if value not in allowed:
                raise _refused(f"hash_profile.{name}", value, f"must be {' or '.join(allowed)}")
        seed = self.python_hash_seed
        if not _SEED.fullmatch(seed) or (seed != "random" and int(seed) > _MOST_SEED):
            raise _refused("hash_profile.python_hash_seed", seed, f"must be random or a number from 0 to {_MOST_SEED}")


@dataclass(frozen=True, slots=True)
class Publisher:
    """One rank of an engine that publishes KV events.

    Attributes:
        group: instance group; "" for any.
        model_name: of its model, or the id of an instance.
        engine: as routers call it.
        rank: data-parallel rank.
        endpoint: of its events.
        block_size: tokens of a block.
        replay_endpoint: of its replays; "" for none.
        lora_name: adapter; "" for none.
        type: kind of publisher; "" where it is not known.
        hash_profile: how it hashes blocks; None where it is not known.

    Raises:
        InvalidArgumentError: a value is not allowed; names it.
    """

    group: str
    model_name: str
    engine: str
    rank: int
    endpoint: str
    block_size: int
    replay_endpoint: str = ""
    lora_name: str = ""
    type: str = ""
    hash_profile: HashProfile | None = None

    def __post_init__(self) -> None:
        for name, least in _TEXTS:
            text = getattr(self, name)
            if not least <= len(text.encode()) <= _MOST_TEXT or not (text.isprintable() or not text):
                raise _refused(name, text, f"must be {least} to {_MOST_TEXT} bytes without control characters")
        if "#" in self.engine:
            raise _refused("engine", self.engine, "must have no '#'")
        if not 0 <= self.rank <= _MOST_RANK:
            raise _refused("rank", self.rank, f"must be from 0 to {_MOST_RANK}")
        if not 1 <= self.block_size <= _MOST_BLOCK_TOKENS:
            raise _refused("block_size", self.block_size, f"must be from 1 to {_MOST_BLOCK_TOKENS}")
        _check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint:
            _check_endpoint("replay_endpoint", self.replay_endpoint)

    @property
    def key(self) -> tuple[str, str, int]:
        """What it is called in its group."""
        return self.model_name, self.engine, self.rank


def _check_endpoint(name: str, endpoint: str) -> None:
    """Allow TCP alone: other transports of ZMQ would name files and processes of the subscriber's host."""
    match = _ENDPOINT.fullmatch(endpoint) if len(endpoint) <= _MOST_ENDPOINT else None
    if match is None or not 1 <= int(match["port"]) <= 65_535:
        raise _refused(name, endpoint, "must be tcp://host:port")


def _refused(name: str, value: object, rule: str) -> InvalidArgumentError:
    shown = repr(value[:_MOST_TEXT]) if isinstance(value, str) else str(value)
    return InvalidArgumentError(f"{name} is {shown}, {rule}", name, f"is {shown}, {rule}")


class PublisherRegistry:
    """The registered publishers."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[tuple[str, str, int], Publisher]] = {}

    def register(self, publisher: Publisher) -> bool:
        """Register a publisher; return whether it is a new one.

        Raises:
            DuplicateEntityError: its engine's rank or its endpoint is registered in another way.
            CapacityError: there are too many.
        """
        group = self._groups.get(publisher.group, {})
        known = group.get(publisher.key)
        if known == publisher:
            return False
        if known is not None:
            raise DuplicateEntityError(
                f"engine {publisher.engine!r} rank {publisher.rank} of model {publisher.model_name!r} is registered "
                f"with endpoint {known.endpoint} and block_size {known.block_size}: unregister it first"
            )
        for other in group.values():
            if other.endpoint == publisher.endpoint:
                raise DuplicateEntityError(
                    f"endpoint {publisher.endpoint} is registered for engine {other.engine!r} rank {other.rank}"
                )
            if other.model_name == publisher.model_name and other.block_size != publisher.block_size:
                raise DuplicateEntityError(
                    f"block_size is {publisher.block_size}, but others of model {publisher.model_name!r} are "
                    f"registered with {other.block_size}"
                )
        if len(group) >= MOST_OF_GROUP:
            raise CapacityError(f"{len(group)} publishers are registered in this group, the most that are allowed")
        if not group and len(self._groups) >= _MOST_GROUPS:
            raise CapacityError(f"publishers are registered in {_MOST_GROUPS} groups, the most that are allowed")
        self._groups.setdefault(publisher.group, {})[publisher.key] = publisher
        return True

    def unregister(
        self, groups: Container[str], engine: str, *, rank: int | None = None, model_name: str = ""
    ) -> list[Publisher]:
        """Remove the registrations that fit, and return them.

        Args:
            groups: in which.
            engine: of them.
            rank: of them; None for all.
            model_name: of them; "" for all.
        """
        found = [
            each
            for each in self.all(groups)
            if each.engine == engine and rank in {None, each.rank} and model_name in {"", each.model_name}
        ]
        for each in found:
            del self._groups[each.group][each.key]
            if not self._groups[each.group]:
                del self._groups[each.group]
        return found

    def all(self, groups: Container[str]) -> list[Publisher]:
        """Return the publishers of some groups, ordered by group, model, engine and rank."""
        return [
            publishers[key]
            for group, publishers in sorted(self._groups.items())
            if group in groups
            for key in sorted(publishers)
        ]
