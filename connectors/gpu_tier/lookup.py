"""One question to the manager: which leading blocks are there, with which parts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from connectors.client import ManagerClient
from connectors.gpu_tier.settings import TierSettings
from connectors.results import Location, MatchMode, MatchResult, Outcome
from connectors.reuse.link import ManagerLink
from connectors.reuse.statistics import ReuseStatistics
from connectors.transfer import TransferEngine
from gpu_tier.connector import PrefixHandle, PrefixMatch
from kvcm.model.errors import ErrorCode
from kvcm.model.keys import BlockKey

__all__ = ["FoundBlocks", "Question", "ask"]


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for.

    Attributes:
        handle: of the tier's lookup.
        required: specs without which a block is none.
        optional: specs that are good to have.
    """

    handle: PrefixHandle
    required: tuple[str, ...]
    optional: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """What the manager answered.

    Attributes:
        match: for the tier.
        locations: of the leading blocks that have all that is required.
        lease_id: keeps them readable; "" when there is no lease.
        usable_until: of the clock; nothing may be read later.
        engine: what loads them, None when nothing was found.
    """

    match: PrefixMatch
    locations: tuple[Location, ...] = ()
    lease_id: str = ""
    usable_until: float = 0.0
    engine: TransferEngine | None = None


def ask(
    link: ManagerLink,
    question: Question,
    settings: TierSettings,
    statistics: ReuseStatistics,
    clock: Callable[[], float] = time.monotonic,
) -> FoundBlocks:
    """Ask the manager; blocks for `call_seconds`, and as long for a registration that is due."""
    engine = link.engine(settings.call_seconds)
    if engine is None:
        statistics.add(lookups_failed=1)
        return _nothing(f"not registered: {link.registration.message}")
    begun = clock()
    answer = _match(link.client, question, settings)
    statistics.observe("lookup_seconds", clock() - begun)
    if answer.outcome is not Outcome.OK:
        statistics.add(lookups_failed=1)
        if answer.code == ErrorCode.INSTANCE_NOT_EXIST:
            link.forget()  # the manager lost its state; the next prompt registers anew
        return _nothing(answer.reason or "the manager did not answer")
    found = _leading(answer.locations, question.required)
    statistics.add(lookups=1, lookup_blocks=len(question.handle.keys), hit_blocks=len(found))
    optional = {name: len(_leading(found, (name,))) for name in question.optional}
    # The lease began before its answer came; nothing is begun after it ends.
    usable_until = begun + settings.lease_seconds
    return FoundBlocks(PrefixMatch(len(found), optional), found, answer.lease_id, usable_until, engine)


def _match(client: ManagerClient, question: Question, settings: TierSettings) -> MatchResult:
    keys: Sequence[BlockKey] = [BlockKey(key) for key in question.handle.keys]
    match = partial(
        client.match,
        keys,
        MatchMode.PREFIX,
        read_lease_ms=int(settings.lease_seconds * 1000),
        timeout_seconds=settings.call_seconds,
    )
    # With names, blocks that lack one of them are left out: right for what is required, wrong for what is optional.
    return match() if question.optional else match(spec_names=question.required)


def _leading(locations: Sequence[Location | None], names: Sequence[str]) -> tuple[Location, ...]:
    """Return the locations before the first one that lacks a part."""
    found: list[Location] = []
    for location in locations:
        if location is None or any(name not in location.uris for name in names):
            break
        found.append(location)
    return tuple(found)


def _nothing(reason: str) -> FoundBlocks:
    return FoundBlocks(PrefixMatch(0, reason=reason))
