"""Scorers in this process, of a real manager, and the calls of other gateways by the generated stubs."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from kvcm.protocol import indexer_pb2, indexer_pb2_grpc, kv_indexer_pb2, kv_indexer_pb2_grpc
from kvcm.scorer.scorer import Scorer
from kvcm.scorer.settings import ScorerSecrets, settings_of

__all__ = ["DISK", "GPU", "HOST", "INDEXER", "Rig", "report", "scorer", "write_tokenizer"]

GPU, HOST, DISK = "MEDIUM_GPU", "MEDIUM_HOST", "MEDIUM_DISK"
INDEXER = "/kv_indexer.v1.KVIndexer/"
_SECONDS = 30.0


def report(instance: str, engine: str, held: Mapping[str, Sequence[int]], **more: Any) -> dict[str, Any]:
    """Return the fields of a report: all that an engine holds, keys by medium."""
    changes = [{"medium": medium, "added_keys": struct.pack(f"<{len(keys)}q", *keys)} for medium, keys in held.items()]
    whole = {"first": True, "last": True}
    sent = {"stream": "run", "sequence": 1, "changes": changes, "snapshot": whole, **more}
    return {"instance_id": instance, "engine": engine, **sent}


def write_tokenizer(path: Path, words: int = 64) -> Tokenizer:
    """Write a tokenizer of words `w1`, `w2`…, whose token ids are their numbers, and which begins prompts with token 0.

    It cuts prompts off, as tokenizers of small models do, which engines do not.
    """
    made = Tokenizer(WordLevel({"<s>": 0, **{f"w{number}": number for number in range(1, words)}}, unk_token="<s>"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.enable_truncation(3)
    made.save(str(path))
    return made


class Rig:
    """A running scorer, and a client of its addresses.

    Args:
        scorer: it.
        addresses: that it serves.
        key: that the client shows.
    """

    def __init__(self, scorer: Scorer, addresses: Sequence[str], key: str) -> None:
        self.scorer = scorer
        self.addresses = list(addresses)
        self.channels = [grpc.aio.insecure_channel(address) for address in addresses]
        self._metadata = (("authorization", f"Bearer {key}"),) if key else ()

    async def match(
        self, hashes: Sequence[int], max_blocks: int = 0, place: int = 0
    ) -> kv_indexer_pb2.MatchExternalKvPrefixResponse:
        """Return the answer of KVIndexer."""
        stub: Any = kv_indexer_pb2_grpc.KVIndexerStub(self.channels[place])
        request = kv_indexer_pb2.MatchExternalKvPrefixRequest(hashes=hashes, max_blocks=max_blocks)
        answer: Any = await stub.MatchExternalKvPrefix(request, timeout=_SECONDS, metadata=self._metadata)
        return answer

    async def matched(self, hashes: Sequence[int], max_blocks: int = 0, place: int = 0) -> list[tuple[str, int]]:
        """Return workers and blocks, in the order of the answer."""
        answer = await self.match(hashes, max_blocks, place)
        return [(each.worker_address, each.matched_prefix_blocks) for each in answer.matches]

    async def pods(
        self, prompt: str, *pods: str, model: str = "m", place: int = 0
    ) -> list[tuple[str, float, int | None]]:
        """Return pods, their scores and ranks, in the order of the answer."""
        stub: Any = indexer_pb2_grpc.IndexerServiceStub(self.channels[place])
        request = indexer_pb2.GetPodScoresRequest(prompt=prompt, model_name=model, pod_identifiers=pods)
        answer = await stub.GetPodScores(request, timeout=_SECONDS, metadata=self._metadata)
        return [
            (each.pod, each.score, each.data_parallel_rank if each.HasField("data_parallel_rank") else None)
            for each in answer.scores
        ]

    async def raw(self, path: str, body: bytes, place: int = 0) -> tuple[grpc.StatusCode, str]:
        """Return status and text of a call with any bytes."""
        call: Any = self.channels[place].unary_unary(path)
        try:
            await call(body, timeout=_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    def count(self, service: str, code: str) -> float:
        """Return how many requests had a status."""
        labels = {"service": service, "code": code}
        return self.scorer.metrics.get_sample_value("kvcm_scorer_requests_total", labels) or 0.0


@contextlib.asynccontextmanager
async def scorer(
    *managers: str, secrets: ScorerSecrets | None = None, key: str = "", **options: Any
) -> AsyncIterator[Rig]:
    """Run a scorer; options are those of the command, addresses have port 0."""
    settings = settings_of({"manager": list(managers), "score_timeout_ms": 30_000, **options})
    made = Scorer(settings, secrets)
    async with made.running() as bound:
        rig = Rig(made, list(map(str, bound)), key)
        try:
            yield rig
        finally:
            for channel in rig.channels:
                await channel.close()


@contextlib.asynccontextmanager
async def refused() -> AsyncIterator[list[grpc.aio.AioRpcError]]:
    """Yield a list that has the error of the block, which must fail with a status, at its end."""
    found: list[grpc.aio.AioRpcError] = []
    try:
        yield found
    except grpc.aio.AioRpcError as error:
        found.append(error)
    assert found, "was served"
