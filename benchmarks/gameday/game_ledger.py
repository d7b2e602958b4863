"""Judges a ledger: every block that a manager acknowledged is there with the bytes that were acknowledged, or its
absence is explained: the game spoiled its bytes, or it was evicted and the manager published that.

All functions are pure; `game_audit` gathers their arguments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvcm.model.uri import LocationUri

__all__ = ["Block", "Found", "Gone", "Judgement", "blocks_of", "gone_of", "judged"]

_LEGAL = {
    "evicted": None,
    "expired": {"ttl"},
}  # types of events that take a block away for a good reason → their reasons
_NOTED_SECONDS = 2.0  # at most so long after the manager has carried it out a ledger records an acknowledgement


class Part(NamedTuple):
    """A part of a location, as its writer acknowledged it."""

    uri: str
    checksum: int


@dataclass(slots=True)
class Block:
    """The acknowledgement of a block.

    Attributes:
        instance: that it belongs to.
        key: of the block.
        locations: parts by spec name, for each time that it was acknowledged.
        at: unix seconds of each.
    """

    instance: str
    key: int
    locations: list[dict[str, Part]] = field(default_factory=list)
    at: list[float] = field(default_factory=list)


class Found(NamedTuple):
    """What a reader gets of a block at the end.

    Attributes:
        parts: uri and checksum of the bytes that were loaded, by spec name; None for a checksum of bytes that could not
            be loaded. Empty when the manager does not know the block.
        reason: why bytes could not be loaded, or why no manager could be asked for the block.
    """

    parts: Mapping[str, tuple[str, int | None]]
    reason: str = ""


class Gone(NamedTuple):
    """An event that says that blocks are gone."""

    type: str
    reason: str
    at: float


@dataclass(slots=True)
class Judgement:
    """The outcome of acknowledged blocks.

    Attributes:
        served: blocks that are there with the right bytes.
        evicted: blocks that were evicted, by the events.
        spoiled: blocks that are not there, or not with the right bytes, since the game damaged them.
        lost: blocks that are not there for no good reason, in words.
        wrong: blocks that are there with other bytes, in words.
        untold: blocks of instances whose blocks are evicted that are missing without an event, perhaps since a
            manager was killed, in words.
    """

    served: int = 0
    evicted: int = 0
    spoiled: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    untold: list[str] = field(default_factory=list)


def blocks_of(lines: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], Block]:
    """Return the blocks of ledgers, by instance and key."""
    blocks: dict[tuple[str, int], Block] = {}
    for line in lines:
        block = blocks.setdefault((line["instance"], line["key"]), Block(line["instance"], line["key"]))
        block.locations.append({spec: Part(uri, checksum) for spec, (uri, checksum) in line["parts"].items()})
        block.at.append(line["at"])
    return blocks


def gone_of(events: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int], list[Gone]]:
    """Return the managers' events on blocks that are gone, by instance and key."""
    gone: defaultdict[tuple[str, int], list[Gone]] = defaultdict(list)
    for event in events:
        if event["type"] in {"evicted", "removed", "expired"}:
            reported = Gone(event["type"], event.get("reason", ""), event["trigger_time_us"] / 1e6)
            for key in event["keys"]:
                gone[event["source"], key].append(reported)
    return gone


def judged(
    blocks: Iterable[Block],
    found: Mapping[tuple[str, int], Found],
    gone: Mapping[tuple[str, int], Sequence[Gone]],
    is_spoiled: Callable[[LocationUri], bool],
    evicting: frozenset[str],
    kills: Sequence[float],
) -> Judgement:
    """Judge every acknowledged block.

    Args:
        blocks: of the ledgers.
        found: what a reader gets at the end.
        gone: the managers' events.
        is_spoiled: whether the game damaged bytes at a place.
        evicting: instances whose blocks may be evicted; others are never full.
        kills: unix seconds at which managers were killed: one takes along the events that it had not written yet.
    """
    judgement = Judgement()
    for block in blocks:
        place = (block.instance, block.key)
        now = found.get(place, Found({}))
        since = [reported for reported in gone.get(place, ()) if reported.at >= max(block.at) - _NOTED_SECONDS]
        if now.parts:
            _judge_bytes(judgement, block, now, is_spoiled)
        elif all(_touched(location, is_spoiled) for location in block.locations):
            judgement.spoiled += 1
        elif block.instance in evicting and not now.reason:
            _judge_eviction(judgement, block, since, kills)
        else:
            judgement.lost.append(_reported(block, since, now.reason))
    return judgement


def _judge_bytes(judgement: Judgement, block: Block, now: Found, is_spoiled: Callable[[LocationUri], bool]) -> None:
    reported = {part.uri: part.checksum for location in block.locations for part in location.values()}
    damaged = [
        uri for uri, checksum in now.parts.values() if checksum is None or reported.get(uri, checksum) != checksum
    ]
    if not damaged:
        judgement.served += 1
    elif all(is_spoiled(LocationUri.parse(uri)) for uri in damaged):
        judgement.spoiled += 1
    else:
        judgement.wrong.append(f"block {block.key} of {block.instance} has other bytes at {damaged}: {now.reason}")


def _judge_eviction(judgement: Judgement, block: Block, since: Sequence[Gone], kills: Sequence[float]) -> None:
    """Judge a block that is gone and may be; events before its last acknowledgement explain nothing."""
    if any(_is_legal(reported) for reported in since):
        judgement.evicted += 1
    elif not since and any(kill >= max(block.at) - _NOTED_SECONDS for kill in kills):
        judgement.untold.append(_reported(block, since))
    else:
        judgement.lost.append(_reported(block, since))


def _reported(block: Block, since: Sequence[Gone], reason: str = "") -> str:
    reported = "; ".join(f"{each.type} {each.reason} at {each.at:.3f}" for each in since) or "no manager reported why"
    uris = [part.uri for location in block.locations for part in location.values()]
    return f"block {block.key} of {block.instance}, acknowledged at {block.at}, at {uris}: {reason or reported}"


def _touched(location: Mapping[str, Part], is_spoiled: Callable[[LocationUri], bool]) -> bool:
    return any(is_spoiled(LocationUri.parse(part.uri)) for part in location.values())


def _is_legal(reported: Gone) -> bool:
    reasons = _LEGAL.get(reported.type, set())
    return reasons is None or reported.reason in reasons
