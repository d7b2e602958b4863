"""Clients that do everything at once to the same few blocks, and keep a history of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any

import grpc
from key_history import Block, History, Outcome, Removal, Write
from manager_site import BLOCK_BYTES, Site, Wire, code_of

from kvcm.model.uri import LocationUri
from kvcm.protocol import meta_service_pb2 as pb

MIXED = (0.66, 0.18, 0.145, 0.015)
_MOST_BLOCKS = 24
_DEADLINE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Sent:
    """A request and its outcome.

    Attributes:
        call: its name.
        sent: monotonic seconds.
        seconds: until the answer, or until it was clear that there is none.
        code: of the answer, None when there was none.
        keys: blocks that it was about.
        message: of the answer, or what went wrong.
    """

    call: str
    sent: float
    seconds: float
    code: int | None
    keys: int = 1
    message: str = ""

    @property
    def is_late_finish(self) -> bool:
        """Whether a session may have been over before its client came to finish it."""
        return self.call == "FinishWriteCache" and self.code == pb.INVALID_ARGUMENT


@dataclass(frozen=True, slots=True)
class Read:
    """The answer to a lookup.

    Attributes:
        instance: of the blocks.
        uris: by key, "" where nothing is served.
        sent: monotonic seconds.
        ended: when the answer came.
    """

    instance: str
    uris: dict[int, str]
    sent: float
    ended: float


@dataclass(slots=True)
class Load:
    """What clients share.

    Attributes:
        site: where they work.
        keys: block keys that they use, of every instance.
        history: what they did.
        requests: every request, in the order of the answers.
        reads: every answered read.
        most_seconds: longest session.
        is_over: clients stop before their next request.
        survives: whether clients go on after a request that was not answered.
    """

    site: Site
    keys: range
    history: History
    requests: list[Sent] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    most_seconds: int = 1
    is_over: bool = False
    survives: bool = False

    @property
    def blocks(self) -> list[Block]:
        """Every block that there may be."""
        return [(instance, key) for instance in self.site.instances for key in self.keys]

    def start(
        self,
        wires: Sequence[Wire],
        clients: int,
        random: Random,
        pause_seconds: float = 0.0,
        shares: Sequence[float] = MIXED,
    ) -> asyncio.Future[Any]:
        """Start clients, spread over managers; the load is over when the result is there."""
        work = (
            Client(self, wires[number % len(wires)], Random(random.random()), pause_seconds, shares).run()
            for number in range(clients)
        )
        return asyncio.gather(*work)

    async def end(self, work: asyncio.Future[Any]) -> None:
        """Let clients stop before their next request."""
        self.is_over = True
        await work

    def outcomes(self) -> Counter[str]:
        """Count requests by call and code."""
        return Counter(f"{sent.call}:{_code_name(sent.code)}" for sent in self.requests)


def _code_name(code: int | None) -> str:
    return "none" if code is None else pb.ErrorCode.Name(code)


class Client:
    """One client; requests follow each other, other clients work at the same time.

    Args:
        load: that the clients share.
        wire: the manager that it talks to.
        random: what it does next.
        pause_seconds: most seconds between two requests.
        shares: of writes, reads, removals and trims among what it does.
    """

    def __init__(
        self, load: Load, wire: Wire, random: Random, pause_seconds: float = 0.0, shares: Sequence[float] = MIXED
    ) -> None:
        self._load, self._wire, self._random = load, wire, random
        self._pause_seconds = pause_seconds
        self._shares = shares
        self._is_cut_off = False
        self._actions: list[Callable[[str], Awaitable[None]]] = [self._write, self._read, self._remove, self._trim]

    async def run(self) -> None:
        """Work until the load is over, or the manager is gone."""
        while not self._load.is_over and not self._is_cut_off:
            (deed,) = self._random.choices(self._actions, self._shares)
            await deed(self._random.choice(self._load.site.instances))
            await asyncio.sleep(self._random.uniform(0, self._pause_seconds))

    async def ask(self, name: str, request: Any) -> Any:
        """Send a request; returns the answer, None when there was none."""
        sent, answer, message = time.monotonic(), None, ""
        try:
            answer = await getattr(self._wire.meta, name)(request, timeout=_DEADLINE_SECONDS)
            message = answer.header.status.message
        except grpc.RpcError as error:
            message = str(error)
            self._is_cut_off = not self._load.survives
        seconds = time.monotonic() - sent
        code = code_of(answer) if answer is not None else None
        self._load.requests.append(Sent(name, sent, seconds, code, _key_count(request), message))
        return answer

    def _chain(self) -> list[int]:
        keys = self._load.keys
        start = self._random.randrange(len(keys))
        return list(keys[start : start + self._random.randint(1, _MOST_BLOCKS)])

    async def _write(self, instance: str) -> None:
        keys, sent = self._chain(), time.monotonic()
        seconds = self._random.randint(1, self._load.most_seconds)
        request = pb.StartWriteCacheRequest(instance_id=instance, block_keys=keys, write_timeout_seconds=seconds)
        answer = await self.ask("StartWriteCache", request)
        if answer is None or code_of(answer) != pb.OK:
            return
        wanted = [key for key, masked in zip(keys, _flags(answer.block_mask, len(keys)), strict=True) if not masked]
        uris = dict(zip(wanted, (place.location_specs[0].uri for place in answer.locations), strict=True))
        write = Write(instance, answer.write_session_id, uris, sent, time.monotonic(), seconds)
        self._load.history.granted(write)
        await self._store_and_finish(write)

    async def _store_and_finish(self, write: Write) -> None:
        fate = self._random.random()
        if not write.is_certainly_open:
            return  # abandoned
        written = list(write.uris)
        if fate < 0.22:
            written = [key for key in written if self._random.random() < 0.6]
        for key in written:
            store_bytes(write.uris[key])
        if fate > 0.88 or self._load.is_over:
            return  # abandoned
        await asyncio.sleep(self._random.uniform(0, 0.02))
        write.succeeded = frozenset(written if fate < 0.8 else [])
        await self.finish(write)

    async def finish(self, write: Write) -> None:
        """Finish a session as it was decided, perhaps not for the first time."""
        assert write.succeeded is not None
        mask = pb.BlockMask(bool_masks=pb.BoolMasksType(values=[key in write.succeeded for key in write.uris]))
        write.finish_sent = min(write.finish_sent, time.monotonic())
        write.outcome = Outcome.UNKNOWN
        is_repeated = write.finish_ended < float("inf")
        answer = await self.ask(
            "FinishWriteCache",
            pb.FinishWriteCacheRequest(
                instance_id=write.instance, write_session_id=write.session_id, success_blocks=mask
            ),
        )
        write.finish_ended = time.monotonic()
        if answer is not None and code_of(answer) == pb.OK:
            write.outcome = Outcome.OK
        elif answer is not None and code_of(answer) == pb.INVALID_ARGUMENT and not is_repeated:
            write.outcome = Outcome.REFUSED

    async def _read(self, instance: str) -> None:
        keys, sent = self._chain(), time.monotonic()
        answer = await self.ask(
            "GetCacheLocation",
            pb.GetCacheLocationRequest(instance_id=instance, block_keys=keys, query_type=pb.QT_BATCH_GET),
        )
        if answer is not None and code_of(answer) == pb.OK:
            uris = (location.location_specs[0].uri for location in answer.locations)
            self._load.reads.append(Read(instance, dict(zip(keys, uris, strict=True)), sent, time.monotonic()))

    async def _remove(self, instance: str) -> None:
        keys = self._chain()[: self._random.choice((1, 4, _MOST_BLOCKS))]
        request = pb.RemoveCacheRequest(instance_id=instance, block_keys=keys)
        await self._removal(instance, frozenset(keys), "RemoveCache", request)

    async def _trim(self, instance: str) -> None:
        request = pb.TrimCacheRequest(instance_id=instance, strategy=pb.TS_REMOVE_ALL_CACHE)
        is_all = self._random.random() < 0.4
        if not is_all:
            now = int(time.time())
            request = pb.TrimCacheRequest(
                instance_id=instance, strategy=pb.TS_TIMESTAMP, begin_timestamp=now - 1, end_timestamp=now + 1
            )
        await self._removal(instance, None, "TrimCache", request, is_all=is_all)

    async def _removal(
        self, instance: str, keys: frozenset[int] | None, name: str, request: Any, *, is_all: bool = True
    ) -> None:
        removal = Removal(instance, keys, time.monotonic(), float("inf"), is_confirmed=False)
        number = self._load.history.removing(removal)
        answer = await self.ask(name, request)
        if answer is not None and code_of(answer) == pb.OK:
            self._load.history.removed(number, time.monotonic(), is_confirmed=is_all)


def _key_count(request: Any) -> int:
    if hasattr(request, "block_keys"):
        return len(request.block_keys)
    return len(request.success_blocks.bool_masks.values) if hasattr(request, "success_blocks") else 1


def _flags(mask: Any, count: int) -> list[bool]:
    if mask.WhichOneof("info") == "offset":
        return [position < mask.offset for position in range(count)]
    return [*mask.bool_masks.values, *[False] * (count - len(mask.bool_masks.values))]


def bytes_of(uri: str) -> bytes:
    """Return what a client writes to a place: different for every place there ever is."""
    return blake2b(uri.encode(), digest_size=32).digest() * (BLOCK_BYTES // 32)


def store_bytes(uri: str) -> None:
    place = LocationUri.parse(uri)
    if place.scheme != "file":
        return
    path = Path(place.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.pwrite(descriptor, bytes_of(uri), place.offset)
    finally:
        os.close(descriptor)


def bytes_stored(uri: str) -> bytes:
    """Return what lies at a place; of a storage without bytes, what should."""
    place = LocationUri.parse(uri)
    if place.scheme != "file":
        return bytes_of(uri)
    with contextlib.suppress(FileNotFoundError), Path(place.path).open("rb") as file:
        file.seek(place.offset)
        return file.read(place.size)
    return b""


def lacking_bytes(served: Mapping[Block, str]) -> dict[Block, str]:
    """Return those whose bytes are not those that were written."""
    return {block: uri for block, uri in served.items() if bytes_stored(uri) != bytes_of(uri)}


def without_bytes(served: Mapping[Block, str]) -> list[str]:
    """Return the served blocks whose bytes are not those that were written."""
    wrong = lacking_bytes(served)
    return [f"{block} is served without the bytes that were written to {uri}" for block, uri in wrong.items()]


async def served_blocks(wire: Wire, load: Load, *, peek: bool = True) -> dict[Block, str]:
    """Ask for every block and return those that are served, and where."""
    served: dict[Block, str] = {}
    for instance in load.site.instances:
        answer = await wire.meta.GetCacheLocation(
            pb.GetCacheLocationRequest(
                instance_id=instance, block_keys=load.keys, query_type=pb.QT_BATCH_GET, peek=peek
            ),
            timeout=_DEADLINE_SECONDS,
        )
        assert code_of(answer) == pb.OK, answer.header
        for key, location in zip(load.keys, answer.locations, strict=True):
            if location.location_specs[0].uri:
                served[instance, key] = location.location_specs[0].uri
    return served


async def metas_of(wire: Wire, load: Load) -> dict[Block, str]:
    """Ask for the state of every block and return the meta text of those that are known."""
    metas: dict[Block, str] = {}
    for instance in load.site.instances:
        answer = await wire.meta.GetCacheMeta(
            pb.GetCacheMetaRequest(instance_id=instance, block_keys=load.keys, detail_level=1),
            timeout=_DEADLINE_SECONDS,
        )
        assert code_of(answer) == pb.OK, answer.header
        texts = zip(load.keys, answer.metas, strict=True)
        metas.update({(instance, key): text for key, text in texts if "CLS_NOT_FOUND" not in text})
    return metas


async def finish_later(load: Load, wire: Wire, random: Random) -> list[str]:
    """Be the clients that live on after the manager died: repeat unanswered requests, and finish half of the sessions
    that are still open. Returns what went wrong."""
    client = Client(load, wire, random)
    wrong: list[str] = []
    for write in load.history.writes:
        is_open = write.outcome is None and write.is_certainly_open and random.random() < 0.5
        if is_open:
            write.succeeded = frozenset(write.uris)
            for uri in write.uris.values():
                store_bytes(uri)
        if is_open or write.outcome is Outcome.UNKNOWN:
            await client.finish(write)
            left = write.sent + write.seconds - time.monotonic()
            code = load.requests[-1].code
            # An empty session lives no longer than it has to, and nothing depends on it.
            allowed = {pb.OK} if is_open and left > 0 and write.uris else {pb.OK, pb.INVALID_ARGUMENT}
            if code not in allowed:
                wrong.append(f"session {write.session_id[:8]}, open for {left:.2f} s more: {load.requests[-1]}")
    return wrong
