"""The prefix explorer: the states of the blocks of a prompt, and where a prefix match ends.

A chain is requested in batches, of which `ChainFold` keeps only the runs and blocks that are shown.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final
from urllib.parse import urlencode

from starlette.responses import Response

from kvcm.cache.instance_cache import batches
from kvcm.console.resources import RefusedError
from kvcm.console.visits import Routes, Visit
from kvcm.model.keys import block_keys_from_tokens
from kvcm.service.rest.conversion import encode_name

__all__ = ["MAX_SHOWN", "ROUTES", "Chain", "ChainFold", "NumbersError", "Run", "instance_names", "numbers_in"]

# Tokens and block keys as people paste them.

_MAX_KEYS: Final = 65_536
"""Blocks of one chain."""
_KEY: Final = re.compile(r"(?<![\d.])-?\d+(?:\.\d+)?")
_TOKEN: Final = re.compile(r"(?<![\d.])\d+(?:\.\d+)?")
_INT64: Final = 1 << 63
_MAX_TOKENS: Final = 1 << 20


class NumbersError(ValueError):
    """A text holds no tokens, or no keys; the message says why."""


def numbers_in(text: str, *, are_tokens: bool) -> list[int]:
    """Return the numbers of a text, with any separators: lists, commas, lines, JSON.

    Args:
        text: as pasted.
        are_tokens: whether they are tokens, which are not negative; else block keys.

    Raises:
        NumbersError: there are none, too many, or some cannot be such numbers.
    """
    what, most = ("tokens", _MAX_TOKENS) if are_tokens else ("block keys", _MAX_KEYS)
    found = [_whole(each[0], what) for each in (_TOKEN if are_tokens else _KEY).finditer(text)]
    if not found:
        raise NumbersError(f"There is no number in it: paste {what}, with anything between them.")
    if len(found) > most:
        raise NumbersError(f"There are {len(found):,} numbers in it, at most {most:,} {what} are allowed.")
    return found


def _whole(text: str, what: str) -> int:
    if "." in text:
        raise NumbersError(f"{text[:40]} is no whole number, as {what} are.")
    if len(text) > 20 or not -_INT64 <= int(text) < _INT64:
        raise NumbersError(f"{text[:40]} does not fit into 64 bits, as {what} do.")
    return int(text)


# A chain: its hits, the end of the match with the reason, and runs of blocks of the same state.

MAX_SHOWN: Final = 512
"""Blocks of one run that are listed one by one."""
_MAX_LISTED: Final = 2048  # of all runs
_MAX_RUNS: Final = 256
_MANY: Final = {"absent": "they are not there: they were never written, or they were evicted or removed"}
"""Reasons for many blocks at once."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of the same state, locations and pins.

    Attributes:
        first, last: positions.
        state: readable, incomplete, unreadable, writing, deleting or absent.
        label: the same in words.
        kind: of its badge.
        why_not: why the first is not found, or the specs that it lacks; "" for neither.
        places: storages with their types, as text.
        size_bytes: of all of them.
        blocks: some of them, one by one.
        left_out: how many are not listed.
    """

    first: int
    last: int
    state: str
    label: str
    kind: str
    why_not: str
    places: str
    size_bytes: int
    is_pinned: bool
    is_orphan: bool
    newest_ms: int
    oldest_ms: int
    read_ms: int
    reads: int
    blocks: Sequence[Any]
    left_out: int

    @property
    def count(self) -> int:
        """Number of blocks."""
        return self.last - self.first + 1

    @property
    def reason(self) -> str:
        """Why they are not found, or the specs that they lack, "" for neither; reasons with a time are the first's."""
        if self.count == 1 or not self.why_not:
            return self.why_not
        if self.state in _MANY:
            return _MANY[self.state]
        return f"{'each of them' if self.state == 'incomplete' else 'the first'}: {self.why_not}"

    def with_more(self, more: Run) -> Run:
        """Return the run with the blocks of the next one."""
        return replace(
            self,
            last=more.last,
            size_bytes=self.size_bytes + more.size_bytes,
            newest_ms=max(self.newest_ms, more.newest_ms),
            oldest_ms=min(self.oldest_ms, more.oldest_ms),
            read_ms=max(self.read_ms, more.read_ms),
            reads=self.reads + more.reads,
            blocks=[*self.blocks, *more.blocks],
            left_out=self.left_out + more.left_out,
        )


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain.

    Attributes:
        summary: of `/v1/instances/{name}/explore`.
        headline: its hits, in one sentence.
        ending: why the match ends, "" if it does not.
        lacking: blocks that some readers do not find, "" for none.
        runs: the first runs, in order.
        left_out: how many runs are not shown.
    """

    summary: Any
    headline: str
    ending: str
    lacking: str
    runs: Sequence[Run]
    left_out: int

    @property
    def legend(self) -> list[tuple[str, str]]:
        """States that occur with their labels, in the order of the chain."""
        return list({run.state: run.label for run in self.runs}.items())


_LABELS: Final = {
    "readable": ("found", "good"),
    "incomplete": ("found, parts missing", "warn"),
    "unreadable": ("there, not readable", "bad"),
    "writing": ("being written", "busy"),
    "deleting": ("being deleted", "warn"),
    "absent": ("not there", "plain"),
}


class ChainFold:
    """Joins the batches of a chain, and keeps the runs and blocks that are shown."""

    def __init__(self) -> None:
        self._summary: dict[str, Any] = {}
        self._runs: list[Run] = []
        self._run_count = self._listed = 0
        self._last: tuple[Any, ...] = ()

    def add(self, document: Any) -> None:
        """Add the next batch.

        Args:
            document: of `/v1/instances/{name}/explore`; its positions begin at 0.
        """
        begin = self._summary.get("blocks", 0)
        placed = [{**block, "position": begin + block["position"]} for block in document["blocks"]]
        for run_key, members in groupby(placed, key=_run_key):
            self._add_run(run_key, list(members))
        self._summary = _joined(self._summary, document["summary"], placed)

    def chain(self) -> Chain:
        """Return the chain of all batches."""
        summary = self._summary
        return Chain(
            summary=summary,
            headline=_headline(summary),
            ending=_ending(summary),
            lacking=_missing_specs(summary),
            runs=self._runs,
            left_out=self._run_count - len(self._runs),
        )

    def _add_run(self, run_key: tuple[Any, ...], blocks: Sequence[Any]) -> None:
        goes_on, self._last = run_key == self._last, run_key
        self._run_count += not goes_on
        if self._run_count > _MAX_RUNS:
            return
        known = self._runs.pop() if goes_on else None
        most = min(MAX_SHOWN - (len(known.blocks) if known else 0), _MAX_LISTED - self._listed)
        run = _run(blocks, max(0, most))
        self._listed += len(run.blocks)
        self._runs.append(known.with_more(run) if known else run)


def _joined(before: Mapping[str, Any], more: Mapping[str, Any], blocks: Sequence[Any]) -> dict[str, Any]:
    """Return the summary of a chain and its next batch, of these blocks."""
    end, found = more["end"], more["matched_blocks"]
    said = {
        **more,
        "end_reason": f"block {blocks[found]['position']}: {blocks[found]['why_not']}" if end != "none" else "",
    }
    if not before:
        return said
    if before["end"] != "none":  # the match ended in an earlier batch
        said |= {"end": before["end"], "end_reason": before["end_reason"], "matched_blocks": 0, "matched_tokens": 0}
    if before["complete_blocks"] < before["blocks"]:
        said["complete_blocks"] = 0
    sums = ("blocks", "matched_blocks", "matched_tokens", "complete_blocks")
    return said | {name: before[name] + said[name] for name in sums}


def _headline(summary: Any) -> str:
    found, blocks, size = summary["matched_blocks"], summary["blocks"], summary["tokens_per_block"]
    tokens = f"{summary['matched_tokens']:,} of {blocks * size:,} tokens"
    if blocks == 1:
        return f"The block is found: {tokens}." if found else "The block is not found."
    if found == blocks:
        return f"All {blocks:,} blocks are found: {tokens}."
    if not found:
        return f"None of the {blocks:,} blocks is found by a prefix match."
    return f"The first {found:,} of {blocks:,} blocks are found: {tokens}."


def _ending(summary: Any) -> str:
    return f"The match ends at {summary['end_reason']}." if summary["end"] != "none" else ""


def _missing_specs(summary: Any) -> str:
    complete, found = summary["complete_blocks"], summary["matched_blocks"]
    if complete == found:
        return ""
    return f"Readers that ask for every part of a block find {complete:,} of them."


def _run_key(block: Any) -> tuple[Any, ...]:
    """Return the value that all blocks of a run share."""
    places = tuple((each["storage"], each["status"], tuple(each["specs"])) for each in block["locations"])
    return _state(block), places, block["is_pinned"], _is_orphan(block)


def _state(block: Any) -> str:
    if block["is_readable"]:
        return "incomplete" if block["why_not"] else "readable"
    return "unreadable" if block["state"] == "serving" else str(block["state"])


def _is_orphan(block: Any) -> bool:
    return not block["parent_is_present"] and block["state"] != "absent"


def _run(blocks: Sequence[Any], most: int) -> Run:
    first, state = blocks[0], _state(blocks[0])
    label, kind = _LABELS[state]
    listed = blocks[:most]
    began = [each["began_at_ms"] for block in blocks for each in block["locations"]]
    return Run(
        first=first["position"],
        last=blocks[-1]["position"],
        state=state,
        label=label,
        kind=kind,
        why_not=str(first["why_not"]),
        places=", ".join(dict.fromkeys(_storages(first))),
        size_bytes=sum(each["size_bytes"] for block in blocks for each in block["locations"]),
        is_pinned=first["is_pinned"],
        is_orphan=_is_orphan(first),
        newest_ms=max(began, default=0),
        oldest_ms=min(began, default=0),
        read_ms=max(block["last_access_at_ms"] for block in blocks),
        reads=sum(block["accesses"] for block in blocks),
        blocks=listed,
        left_out=len(blocks) - len(listed),
    )


def _storages(block: Any) -> Iterator[str]:
    for each in block["locations"]:
        suffix = "" if each["status"] == "serving" else f", {each['status']}"
        yield f"{each['storage']} ({each['storage_type']}{suffix})"


# The page.

_PATH: Final = "/console/explorer"
_BATCH_KEYS: Final = 1024


async def _show(visit: Visit) -> Response:
    return await _page(visit, visit.query("instance"), "tokens", visit.query("numbers"))


async def _explore(visit: Visit) -> Response:
    form = await visit.form()
    instance, text = form.get("instance", "").strip(), form.get("numbers", "")
    kind = "keys" if form.get("kind") == "keys" else "tokens"
    faults: dict[str, str] = {}
    if not instance:
        faults["instance"] = "Name an instance."
    numbers: Sequence[int] = ()
    try:
        numbers = await asyncio.to_thread(numbers_in, text, are_tokens=kind == "tokens")
    except NumbersError as error:
        faults["numbers"] = str(error)
    if faults:
        return await _page(visit, instance, kind, text, faults=faults)
    try:
        keys = await _keys_of(visit, instance, numbers) if kind == "tokens" else numbers
        chain = await _chain(visit, instance, keys)
    except NumbersError as error:
        return await _page(visit, instance, kind, text, faults={"numbers": str(error)})
    except RefusedError as error:
        if error.status not in {400, 404}:
            raise
        field = "instance" if error.status == 404 else "numbers"
        return await _page(visit, instance, kind, text, faults={field: f"{error.detail}."})
    return await _page(visit, instance, kind, text, chain=chain, given=len(numbers))


async def _keys_of(visit: Visit, instance: str, tokens: Sequence[int]) -> Sequence[int]:
    """Return the keys of the blocks that tokens fill.

    Raises:
        NumbersError: there are none, or too many.
    """
    size = (await visit.get(f"/v1/instances/{encode_name(instance)}"))["block_size"]
    if size <= 0:
        raise NumbersError("The instance was registered without a block size: paste block keys.")
    count = len(tokens) // size
    if not 0 < count <= _MAX_KEYS:
        allowed = f"1 to {_MAX_KEYS:,} can be looked at"
        raise NumbersError(f"{len(tokens):,} tokens fill {count:,} blocks of {size:,}: {allowed}.")
    return await asyncio.to_thread(block_keys_from_tokens, tokens, size)


async def _chain(visit: Visit, instance: str, keys: Sequence[int]) -> Chain:
    """Return a chain, requested in batches."""
    fold = ChainFold()
    for batch in batches(keys, _BATCH_KEYS):
        body = {"block_keys": [str(key) for key in batch]}
        answer = await visit.send("POST", f"/v1/instances/{encode_name(instance)}/explore", body)
        await asyncio.to_thread(fold.add, answer.document)
    return fold.chain()


async def _page(visit: Visit, instance: str, kind: str, text: str, **found: Any) -> Response:
    faults = found.get("faults", {})
    context = {"chain": None, "given": 0, "faults": {}, **found}
    names = await instance_names(visit)
    status = 400 if faults else 200
    return visit.page("explorer.html", status, instance=instance, kind=kind, numbers=text, instances=names, **context)


async def instance_names(visit: Visit) -> list[str]:
    """Return the instances that the visitor may see; a visitor without that permission types a name."""
    principal = visit.visitor.principal
    queries = [""] if principal.has_all_groups else ["?" + urlencode({"group": name}) for name in principal.groups]
    try:
        return sorted([each["instance_id"] for query in queries for each in await visit.items(f"/v1/instances{query}")])
    except RefusedError:
        return []


ROUTES: Final[Routes] = (
    ("GET", _PATH, _show),
    ("POST", _PATH, _explore),
)
