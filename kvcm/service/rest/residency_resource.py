"""/v1/score and /v1/instances/{name}/residency."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import FailFast, Field

from kvcm.service.rest.calls import CallRunner, check_one_prompt
from kvcm.service.rest.conversion import message_to_dict
from kvcm.service.rest.documents import (
    MAX_ENTRIES,
    BlockKey,
    Document,
    Int32,
    Int64,
    Name,
    NamePath,
    Ratio,
    Text,
)
from kvcm.service.rest.routing import add_route, answer

__all__ = ["ResidencyDocument", "ResidencyResource", "ScoreResource", "ScoresDocument"]

_MAX_KEYS: Final = 65_536
_MAX_TOKENS: Final = 1 << 20


# /v1/score.


class CostsDocument(Document):
    """What loading and computing cost; 0 = as the manager is configured."""

    compute_tokens_per_second: Annotated[Ratio, Field(ge=0)] = 0.0
    """Tokens that an engine computes in a second."""
    host_bytes_per_second: Annotated[Ratio, Field(ge=0)] = 0.0
    """Bytes that it loads in a second from the host's memory."""
    disk_bytes_per_second: Annotated[Ratio, Field(ge=0)] = 0.0
    """From the host's disk."""
    storage_bytes_per_second: Annotated[Ratio, Field(ge=0)] = 0.0
    """From a storage."""


class ScoreRequestDocument(Document):
    """A prompt, by its keys or its tokens; one of the two."""

    instance_id: Name
    """The instance."""
    block_keys: Annotated[list[BlockKey], Field(max_length=_MAX_KEYS), FailFast()] = Field(default_factory=list)
    """Block keys of the prompt in order, as texts."""
    token_ids: Annotated[list[Int64], Field(max_length=_MAX_TOKENS), FailFast()] = Field(default_factory=list)
    """Tokens of the prompt."""
    cache_salt: Text = ""
    """Salt of the request, which separates its blocks from those of others."""
    engines: list[Text] = Field(default_factory=list, max_length=MAX_ENTRIES)
    """The candidates, host:port; none = every engine that reports."""
    prompt_tokens: Annotated[Int64, Field(ge=0)] = 0
    """Tokens of the prompt; 0 = those given, or of all blocks."""
    costs: CostsDocument = Field(default_factory=CostsDocument)
    """What loading and computing cost."""


class EngineScoreDocument(Document):
    """What one engine's rank has of the prompt: tokens of whole blocks from its start. Each count includes the media
    before it."""

    engine: str
    """The engine."""
    rank: Int32
    """Its data-parallel rank."""
    gpu_tokens: Int64
    """In GPU memory."""
    host_tokens: Int64
    """In GPU or host memory."""
    disk_tokens: Int64
    """In these or on the host's disk."""
    storage_tokens: Int64
    """In these or in a storage."""
    best_peer: str
    """The other engine that holds the most of the prompt; empty for none."""
    best_peer_tokens: Int64
    """Tokens that it holds."""
    load_seconds: Ratio
    """Seconds to load blocks."""
    compute_seconds: Ratio
    """Seconds to compute the rest."""
    score: Ratio
    """Seconds saved against computing the whole prompt: the higher the better."""
    is_complete: bool
    """Whether everything that the engine holds is known."""


class ScoresDocument(Document):
    """Scores, best first."""

    engines: list[EngineScoreDocument]
    """One for each candidate and rank."""
    storage_tokens: Int64
    """Tokens of the prompt from its start that lie in storages."""
    prompt_tokens: Int64
    """Tokens of the prompt that were assumed."""
    block_tokens: Int64
    """Tokens of a block."""


class ScoreResource:
    """Scores of engines for a prompt.

    Args:
        calls: runs the call behind it.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        add_route(
            router=router,
            method="POST",
            path="/v1/score",
            endpoint=self.score,
            model=ScoresDocument,
            problems=[404],
        )

    async def score(self, request: Request, body: Annotated[ScoreRequestDocument, Body()]) -> Response:
        """Get how much of a prompt each engine holds, and what the rest costs. This does not count as an access."""
        check_one_prompt(body.block_keys, body.token_ids)
        found = await self._calls.run(request, "ResidencyService.Score", **body.model_dump())
        return answer(message_to_dict(found))


# /v1/instances/{name}/residency.


class MediumDocument(Document):
    """Blocks of a medium."""

    medium: Literal["gpu", "host", "disk"]
    """The memory."""
    blocks: Int64
    """Blocks in it."""


class ReporterDocument(Document):
    """A reporter of an engine's rank."""

    engine: str
    """The engine."""
    rank: Int32
    """Its data-parallel rank."""
    state: Literal["complete", "partial", "quiet"]
    """Whether everything that it holds is known, or not, or it sent nothing for too long."""
    sequence: Int64
    """Its last sequence number."""
    quiet_ms: Int64
    """Milliseconds since its last report."""
    media: list[MediumDocument]
    """What it holds."""
    gaps: Int64
    """Gaps found in its reports."""


class ResidencyDocument(Document):
    """What engines hold of an instance, as this manager knows it."""

    reporters: list[ReporterDocument]
    """Ordered by engine and rank."""
    memory_bytes: Int64
    """Bytes of memory that knowing it takes."""
    blocks: Int64
    """Blocks that any reporter holds."""


class ResidencyResource:
    """Reporters of an instance.

    Args:
        calls: runs the call behind it.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        add_route(
            router=router,
            method="GET",
            path="/v1/instances/{name}/residency",
            endpoint=self.list_reporters,
            model=ResidencyDocument,
            problems=[404],
        )

    async def list_reporters(self, request: Request, name: NamePath) -> Response:
        """Get the engines that report what they hold of an instance, and how much that is."""
        found = await self._calls.run(request, "ResidencyService.ListReporters", instance_id=name)
        return answer(
            {
                "reporters": [_reporter(message_to_dict(each)) for each in found.reporters],
                "memory_bytes": found.memory_bytes,
                "blocks": found.blocks,
            }
        )


def _reporter(document: dict[str, Any]) -> dict[str, Any]:
    media = [each | {"medium": each["medium"].removeprefix("MEDIUM_").lower()} for each in document["media"]]
    return document | {"state": document["state"].removeprefix("REPORTER_").lower(), "media": media}
