"""`indexer.v1.IndexerService/GetPodScores`, by which llm-d's clients ask for the pods of a prompt's text.

A pod's score is llm-d's: blocks from the prompt's start without a gap, each times the weight of the memory that it is
in. The manager answers prefixes, so a block behind the first one that is not in GPU memory counts with the weight of
the slower memory, although a copy of it may be in GPU memory: a score is never above llm-d's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcm.config import ConfigError
from kvcm.protocol import indexer_pb2 as wire
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.scorer.manager_scores import ManagerScores
from kvcm.scorer.settings import PodModel, TierWeights

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["PodScores", "load_tokenizer", "weighted_blocks"]

_MOST_TOKENS: Final = 1 << 20  # of a request to a manager
_MOST_CANDIDATES: Final = 1024  # of a request to a manager; with more, all engines are asked for
_MOST_NAME_BYTES: Final = 256


class PodScores:
    """The scores of pods, by model.

    Args:
        models: by name.
        tokenizers: by name of the model.
        scores: of the manager.
        threads: run tokenizers.
        pods: by engine, where that is not the pod.
        weights: of memories.
        has_special_tokens: whether tokenizers add special tokens.
        max_blocks: blocks of a prompt that are asked for.
    """

    def __init__(
        self,
        models: Mapping[str, PodModel],
        tokenizers: Mapping[str, Tokenizer],
        scores: ManagerScores,
        threads: Executor,
        *,
        pods: Mapping[str, str],
        weights: TierWeights,
        has_special_tokens: bool,
        max_blocks: int,
    ) -> None:
        self._models = models
        self._tokenizers = tokenizers
        self._scores = scores
        self._threads = threads
        self._pods = pods
        self._engines = {pod: engine for engine, pod in pods.items()}
        self._weights = weights
        self._has_special_tokens = has_special_tokens
        self._max_blocks = max_blocks
        self._block_tokens: dict[str, int] = {}  # by model, of the manager's last answer

    async def pod_scores(
        self, request: wire.GetPodScoresRequest, seconds_left: float | None
    ) -> wire.GetPodScoresResponse:
        """Return the scores of the pods that hold or can load the first blocks of a prompt, highest first.

        Raises:
            ScoreError: the manager does not answer.
        """
        model = self._models.get(request.model_name)
        given = [self._engines.get(pod, pod) for pod in request.pod_identifiers]
        candidates = list(filter(_may_be_engine, given))
        if model is None or not request.prompt or (given and not candidates):
            return wire.GetPodScoresResponse()  # nothing is known of it, which is no error
        loop = asyncio.get_running_loop()
        began = loop.time()
        tokens = await loop.run_in_executor(self._threads, self._tokens_of, request.model_name, request.prompt)
        if not tokens:
            return wire.GetPodScoresResponse()
        asked = pb.ScoreRequest(
            trace_id="pod-scores",
            instance_id=model.instance,
            token_ids=tokens,
            engines=candidates if len(candidates) <= _MOST_CANDIDATES else (),
        )
        left = None if seconds_left is None else seconds_left - (loop.time() - began)
        answer = await self._scores.score(asked, left)
        self._block_tokens[request.model_name] = answer.block_tokens
        return self._answer(answer, set(candidates))

    def _tokens_of(self, model: str, prompt: str) -> Sequence[int]:
        # A single text is encoded under Python's global lock; a batch is not.
        (encoded,) = self._tokenizers[model].encode_batch_fast([prompt], add_special_tokens=self._has_special_tokens)
        # A manager refuses too many blocks, and their size is known from its answers alone.
        most = min(_MOST_TOKENS, self._max_blocks * self._block_tokens.get(model, 1))
        tokens: list[int] = encoded.ids[:most]
        return tokens

    def _answer(self, answer: pb.ScoreResponse, candidates: set[str]) -> wire.GetPodScoresResponse:
        found = [each for each in answer.engines if not candidates or each.engine in candidates]
        ranks = Counter(each.engine for each in found)
        scores: list[wire.PodScore] = [
            wire.PodScore(
                pod=self._pods.get(each.engine, each.engine),
                score=weighted_blocks(each, answer.block_tokens, self._weights),
                data_parallel_rank=each.rank if ranks[each.engine] > 1 else None,
            )
            for each in found
        ]
        held = sorted((each for each in scores if each.score > 0), key=_highest_first)
        return wire.GetPodScoresResponse(scores=held)


def weighted_blocks(engine: pb.EngineScore, block_tokens: int, weights: TierWeights) -> float:
    """Return the blocks of an engine, each times the weight of the fastest memory that it counts for."""
    counted = (engine.gpu_tokens, engine.host_tokens, engine.disk_tokens, engine.storage_tokens)
    gpu, host, disk, joint = (tokens // block_tokens for tokens in counted)
    return (
        gpu * weights.gpu + (host - gpu) * weights.cpu + (disk - host) * weights.disk + (joint - disk) * weights.storage
    )


def load_tokenizer(model: str, path: Path) -> Tokenizer:
    """Return the tokenizer of a model, without truncation and padding: engines have their own limits.

    Raises:
        ConfigError: it cannot be read; names the option.
    """
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        found: Tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no class of its own
        raise ConfigError(
            f"--tokenizer {model}={path} is no tokenizer, must be a tokenizer.json or its directory: {error}"
        ) from None
    found.no_truncation()
    found.no_padding()
    return found


def _may_be_engine(name: str) -> bool:
    """Return whether an engine may report under a name; the manager refuses requests with other names."""
    return 0 < len(name.encode()) <= _MOST_NAME_BYTES and name.isprintable() and "#" not in name


def _highest_first(score: wire.PodScore) -> tuple[float, str, int]:
    return -score.score, score.pod, score.data_parallel_rank
