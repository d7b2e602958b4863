"""Judges every single answer that clients got while everything was going on, and measures how stale it was.

A read is stale if its answer was no longer true when it was sent: a location whose removal had been confirmed, or
nothing where a confirmed write was. By how much is measured; an answer that was never true is a violation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from key_history import Block, History, Outcome, Write
from mixed_load import Read


@dataclass(slots=True)
class ReadVerdict:
    """What reads showed.

    Attributes:
        entries: keys that were asked for.
        wrong: answers that were never true.
        removed_but_read: seconds between the confirmation of a removal and a read that still found the location.
        written_but_missed: seconds between the confirmation of a write and a read that did not find it.
    """

    entries: int = 0
    wrong: list[str] = field(default_factory=list)
    removed_but_read: list[float] = field(default_factory=list)
    written_but_missed: list[float] = field(default_factory=list)


def judge_reads(history: History, reads: Iterable[Read]) -> ReadVerdict:
    """Judge answered reads against a history that began with nothing served."""
    verdict = ReadVerdict()
    for read in reads:
        for key, uri in read.uris.items():
            verdict.entries += 1
            block = (read.instance, key)
            if uri:
                _found(history, block, uri, read, verdict)
            due = _surely_there(history, block, read)
            if due is not None and due.uris[key] != uri:
                verdict.written_but_missed.append(read.sent - due.finish_ended)
    return verdict


def _found(history: History, block: Block, uri: str, read: Read, verdict: ReadVerdict) -> None:
    write = history.writer_of(uri)
    if write is None or write.instance != block[0] or write.uris.get(block[1]) != uri:
        # The answer to its start may have been lost; then no client can have finished it.
        verdict.wrong.append(f"{block}: {uri} was read and never granted")
    elif write.succeeded is None or block[1] not in write.succeeded or write.finish_sent > read.ended:
        verdict.wrong.append(f"{block}: {uri} was read and never finished")
    elif write.outcome is Outcome.REFUSED:
        verdict.wrong.append(f"{block}: {uri} was read and its finish was refused")
    else:
        gone = [
            each.ended
            for each in history.removals_of(block)
            if each.is_confirmed and each.sent > write.granted and each.ended < read.sent
        ]
        if gone:
            verdict.removed_but_read.append(read.sent - min(gone))


def _surely_there(history: History, block: Block, read: Read) -> Write | None:
    """Return the write whose location every read that was sent then has to find."""
    for write in history.writes_of(block):
        is_confirmed = write.outcome is Outcome.OK and write.finish_ended < read.sent
        if not is_confirmed or write.succeeded is None or block[1] not in write.succeeded:
            continue
        if not any(each.ended > write.sent and each.sent < read.ended for each in history.removals_of(block)):
            return write
    return None


def certain_bytes(history: History, instances: Iterable[str], block_bytes: int) -> int:
    """Return the most bytes that were certainly in use at one moment: granted, and not yet ended or removed."""
    of_group = set(instances)
    steps: list[tuple[float, int]] = []
    for write in history.writes:
        if write.instance not in of_group:
            continue
        for key in write.uris:
            end = _certain_end(history, write, key)
            if end > write.granted:
                steps += [(write.granted, block_bytes), (end, -block_bytes)]
    most = used = 0
    for _, change in sorted(steps):
        used += change
        most = max(most, used)
    return most


def _certain_end(history: History, write: Write, key: int) -> float:
    removals = history.removals_of((write.instance, key))
    removed = min((each.sent for each in removals if each.ended > write.sent), default=float("inf"))
    if write.succeeded is not None and key in write.succeeded and write.outcome is Outcome.OK:
        return removed
    return min(removed, write.held_from_to[1])
