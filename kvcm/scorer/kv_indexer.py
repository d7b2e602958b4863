"""`kv_indexer.v1.KVIndexer/MatchExternalKvPrefix`, by which SGLang's router asks for the workers of a prompt."""

from __future__ import annotations

from collections.abc import Mapping

from kvcm.model.errors import InvalidArgumentError
from kvcm.protocol import kv_indexer_pb2 as wire
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.scorer.manager_scores import ManagerScores

__all__ = ["KvIndexer"]


class KvIndexer:
    """The prefixes of one instance.

    Args:
        instance: id of the instance.
        scores: of the manager.
        worker_prefix: makes a worker's URL of an engine's name.
        workers: URLs by engine, where the prefix does not make them.
        max_blocks: blocks of a prompt that are asked for; those behind count as missing.
    """

    def __init__(
        self,
        instance: str,
        scores: ManagerScores,
        *,
        worker_prefix: str,
        workers: Mapping[str, str],
        max_blocks: int,
    ) -> None:
        self._instance = instance
        self._scores = scores
        self._worker_prefix = worker_prefix
        self._workers = workers
        self._max_blocks = max_blocks

    async def match_prefix(
        self, request: wire.MatchExternalKvPrefixRequest, seconds_left: float | None
    ) -> wire.MatchExternalKvPrefixResponse:
        """Return the workers that hold the first blocks of a prompt in GPU or host memory, longest prefix first.

        The manager makes keys of the hashes: it alone knows the mask of the moment, which changes with the weights.

        Raises:
            InvalidArgumentError: there are no hashes.
            ScoreError: the manager does not answer.
        """
        if not request.hashes:
            raise InvalidArgumentError("hashes is empty, must be the hashes of the prompt's blocks, first block first")
        hashes = request.hashes[: min(request.max_blocks or self._max_blocks, self._max_blocks)]
        asked = pb.ScoreRequest(trace_id="kv-indexer", instance_id=self._instance, event_hashes=hashes)
        answer = await self._scores.score(asked, seconds_left)
        blocks: dict[str, int] = {}
        for each in answer.engines:  # of several ranks the best: a worker's URL names none
            held = each.host_tokens // answer.block_tokens
            blocks[each.engine] = max(held, blocks.get(each.engine, 0))
        held_by = sorted(((count, engine) for engine, count in blocks.items() if count), key=_longest_first)
        return wire.MatchExternalKvPrefixResponse(
            matches=[
                wire.ExternalKvPrefixMatch(
                    worker_address=self._worker_of(engine), matched_prefix_blocks=count, worker_id=engine
                )
                for count, engine in held_by
            ],
            best_prefix_blocks=held_by[0][0] if held_by else 0,
            blocks_read=len(hashes),
        )

    def _worker_of(self, engine: str) -> str:
        return self._workers.get(engine) or f"{self._worker_prefix}{engine}"


def _longest_first(match: tuple[int, str]) -> tuple[int, str]:
    count, engine = match
    return -count, engine
