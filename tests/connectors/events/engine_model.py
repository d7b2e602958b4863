"""A model of an engine that publishes KV events, and one of a manager that takes reports: what the tests compare."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from kvcm.connectors.events.blocks import Memory
from kvcm.model.errors import ErrorCode
from kvcm.model.key_schemes import SGLANG_SHA256, VLLM_SHA256, KeyScheme, block_hashes, block_keys, vllm_root
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

__all__ = ["BLOCK_TOKENS", "SGLANG", "VLLM", "ModelEngine", "ModelManager", "event_number", "stored"]

BLOCK_TOKENS = 4
VLLM = KeyScheme(VLLM_SHA256, vllm_root(VLLM_SHA256), 0x1234_5678_9ABC_DEF0, BLOCK_TOKENS)
SGLANG = KeyScheme(SGLANG_SHA256, b"", -5, BLOCK_TOKENS)
_encode = msgspec.msgpack.Encoder().encode


def event_number(scheme: KeyScheme, digest: bytes) -> int:
    """Return a hash as the engine publishes it."""
    if scheme.is_vllm:
        return int.from_bytes(digest[-8:], "big")
    return int.from_bytes(digest[:8], "big", signed=True)


def stored(
    scheme: KeyScheme, tokens: Sequence[int], first: int = 0, last: int | None = None, salt: str = "", **fields: Any
) -> dict[str, Any]:
    """Return vLLM's or SGLang's event of the blocks first … last-1 of a prompt, with the hashes of the scheme."""
    hashes = [event_number(scheme, digest) for digest in block_hashes(scheme, tokens, salt)]
    last = len(hashes) if last is None else last
    size = scheme.block_tokens
    event = {
        "type": "BlockStored",
        "block_hashes": hashes[first:last],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": list(tokens[first * size : last * size]),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
    }
    if salt and scheme.is_vllm:
        event["extra_keys"] = [[salt] if index == 0 else None for index in range(first, last)]
    return event | ({"lora_name": None} if scheme.is_vllm else {}) | fields


@dataclass
class ModelEngine:
    """One rank: physical copies of blocks in two media, and the messages that it published.

    Attributes:
        scheme: of its hashes.
        kept: messages that it replays.
        run: number of the run; another one has other time stamps.
    """

    scheme: KeyScheme
    kept: int = 8
    run: int = 0
    copies: Counter[tuple[str, int, int]] = field(default_factory=Counter)  # medium, prompt, block
    messages: deque[tuple[int, bytes]] = field(default_factory=deque)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    times: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def prompt(self, number: int) -> list[int]:
        """Return the tokens of a prompt: those of even numbers begin with those of the number before."""
        return [number // 2 + 1] * BLOCK_TOKENS * 2 + [number + 100] * BLOCK_TOKENS * 2

    def restart(self) -> None:
        """Begin another run, which holds nothing."""
        self.run += 1
        self.copies.clear()
        self.messages.clear()
        self.numbers = itertools.count()

    def publish(self, *events: dict[str, Any]) -> tuple[int, bytes]:
        """Number a message, keep it for replays, and return it."""
        message = (next(self.numbers), _encode([float(next(self.times)), list(events), 0]))
        self.messages.append(message)
        if len(self.messages) > self.kept:
            self.messages.popleft()
        return message

    def store(self, number: int, blocks: int, medium: str = "GPU") -> tuple[int, bytes]:
        """Store further copies of the first blocks of a prompt."""
        hashes = self._hashes(number)
        for block in range(blocks):
            self.copies[medium, hashes[block], block] += 1
        return self.publish(stored(self.scheme, self.prompt(number), 0, blocks, medium=medium))

    def remove(self, index: int) -> tuple[int, bytes] | None:
        """Remove a copy of a block that it holds, the last ones of chains first; None where it holds nothing."""
        held = sorted((copy for copy in self.copies if self.copies[copy] > 0), key=lambda copy: (-copy[2], copy))
        if not held:
            return None
        copy = held[index % len(held)]
        self.copies[copy] -= 1
        return self.publish({"type": "BlockRemoved", "block_hashes": [copy[1]], "medium": copy[0]})

    def clear(self) -> tuple[int, bytes]:
        """Drop all blocks."""
        self.copies.clear()
        return self.publish({"type": "AllBlocksCleared"})

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """Return the kept messages from a number on."""
        return [message for message in self.messages if message[0] >= first]

    def pairs(self) -> set[tuple[Memory, int]]:
        """Return the blocks that it holds, by our keys."""
        keys = {}
        for number in range(8):
            keys |= dict(zip(self._hashes(number), block_keys(self.scheme, self.prompt(number)), strict=True))
        media = {"GPU": pb.MEDIUM_GPU, "CPU": pb.MEDIUM_HOST}
        return {(Memory(media[medium], ""), keys[each]) for (medium, each, _), n in self.copies.items() if n > 0}

    def _hashes(self, number: int) -> list[int]:
        return [event_number(self.scheme, digest) for digest in block_hashes(self.scheme, self.prompt(number))]


@dataclass
class _Known:
    """What a manager knows of one reporter."""

    stream: str
    sequence: int = 0
    is_complete: bool = False
    pairs: set[tuple[Memory, int]] = field(default_factory=set)
    parts: set[tuple[Memory, int]] | None = None
    scheme: pb.KeyScheme = field(default_factory=pb.KeyScheme)


@dataclass
class ModelManager:
    """Takes reports as `residency_service.proto` says, word for word.

    Attributes:
        node_id: its own.
        named: node id, host and port of the managers that serve.
        known: by engine and rank.
        ended: streams that others took the place of.
        timeout_ms: of its answers.
        requests: all that came.
    """

    node_id: str = ""
    named: Sequence[tuple[str, str, int]] = ()
    known: dict[tuple[str, int], _Known] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    timeout_ms: int = 30_000
    requests: list[pb.ReportResidencyRequest] = field(default_factory=list)

    def restart(self) -> None:
        """Forget everything, as the state is soft."""
        self.known.clear()
        self.ended.clear()

    def pairs(self, engine: str = "engine:1", rank: int = 0) -> set[tuple[Memory, int]]:
        """Return the blocks that it takes a rank to hold."""
        return self.known[engine, rank].pairs if (engine, rank) in self.known else set()

    def report(self, request: pb.ReportResidencyRequest) -> pb.ReportResidencyResponse:
        """Apply a report."""
        self.requests.append(request)
        name = (request.engine, request.rank)
        known = self.known.get(name)
        if known is not None and request.stream in self.ended:
            return self._answer(request, _Known(request.stream, request.sequence, is_complete=True))
        if known is None or known.stream != request.stream:
            self.ended |= set() if known is None else {known.stream}
            known = self.known[name] = _Known(request.stream)
        if request.HasField("key_scheme"):
            known.scheme = request.key_scheme
        if request.sequence > known.sequence:
            self._apply(known, request)
        if request.stopped:
            del self.known[name]
        return self._answer(request, known)

    def _answer(self, request: pb.ReportResidencyRequest, known: _Known) -> pb.ReportResidencyResponse:
        answer = pb.ReportResidencyResponse(
            applied_sequence=known.sequence,
            snapshot_required=not known.is_complete,
            timeout_ms=self.timeout_ms,
            resident_blocks=len(known.pairs),
        )
        answer.header.status.code = int(ErrorCode.OK)  # type: ignore[assignment]
        if not request.changes:
            answer.node_id = self.node_id
            for node_id, host, port in self.named:
                answer.managers.add(node_id=node_id, host=host, meta_rpc_port=port)
        return answer

    def _apply(self, known: _Known, request: pb.ReportResidencyRequest) -> None:
        if request.sequence != known.sequence + 1:
            known.pairs.clear()
            known.parts, known.is_complete = None, False
        known.sequence = request.sequence
        if not request.HasField("snapshot"):
            for change in request.changes:
                _change(known.pairs, change)
                if known.parts is not None:
                    _change(known.parts, change)
            return
        if request.snapshot.first:
            known.parts = set()
        if known.parts is None:
            return  # of a snapshot whose beginning is not known
        for change in request.changes:
            assert not change.removed_keys, request
            assert not change.cleared, request
            _change(known.parts, change)
        if request.snapshot.last:
            known.pairs, known.parts, known.is_complete = known.parts, None, True


def _change(pairs: set[tuple[Memory, int]], change: pb.ResidencyChange) -> None:
    memory = Memory(change.medium, change.spec_name)
    if change.cleared:
        pairs -= {pair for pair in pairs if pair[0].medium == change.medium}
    pairs -= {(memory, int(key)) for key in np.frombuffer(change.removed_keys, "<i8")}
    pairs |= {(memory, int(key)) for key in np.frombuffer(change.added_keys, "<i8")}
