"""/v1/instances/{name}/explore."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Body, Request, Response
from pydantic import FailFast, Field

from kvcm.cache.pages import pages
from kvcm.service.rest.call_book import CallBook
from kvcm.service.rest.documents import BlockKey, Document, Int64, NamePath, Ratio
from kvcm.service.rest.messages import plain
from kvcm.service.rest.problem import FieldError, Problem, ProblemError
from kvcm.service.rest.routing import add_route, answer

__all__ = ["ChainDocument", "ExploreResource"]

_MOST_KEYS: Final = 65_536
_MOST_TOKENS: Final = 1 << 20
_SHOWN_AT_ONCE: Final = 64
_PREFIXES: Final = {"state": "BLOCK_", "end": "CHAIN_END_"}


class ExploreDocument(Document):
    """A chain, by its keys or its tokens; one of the two."""

    block_keys: Annotated[list[BlockKey], Field(max_length=_MOST_KEYS), FailFast()] = Field(default_factory=list)
    """Block keys of the chain in order, as texts."""
    token_ids: Annotated[list[Int64], Field(max_length=_MOST_TOKENS), FailFast()] = Field(default_factory=list)
    """Tokens of the prompt."""


class ExploredLocationDocument(Document):
    """One place where a block lies."""

    storage: str
    """Name of the storage."""
    storage_type: str
    """Its kind, as in metrics: file, hf3fs, mooncake …"""
    status: Literal["writing", "serving", "deleting"]
    """What has become of it."""
    specs: list[str]
    """Names of the specs that it holds."""
    size_bytes: Int64
    """Bytes of all of them."""
    began_at_ms: Int64
    """When its writing began, unix time in ms."""


class ExploredBlockDocument(Document):
    """What is known of one block."""

    position: Int64
    """Position in the chain that was asked for, from 0."""
    block_key: BlockKey
    """Its key."""
    state: Literal["serving", "writing", "deleting", "absent"]
    """What has become of it: the best of its locations."""
    is_readable: bool
    """Whether a match returns it."""
    why_not: str
    """Why not; of one that can be read, what it lacks. Empty = nothing is wrong."""
    locations: list[ExploredLocationDocument]
    """Where it lies, the oldest first."""
    last_access_at_ms: Int64
    """When it was read last or else written, unix time in ms; 0 = not known."""
    accesses: Int64
    """How often it was read, as far as the policy of its instance counts that."""
    age_seconds: Ratio
    """Seconds since its oldest location was begun; -1 = it is not there."""
    is_pinned: bool
    """Whether a pin keeps it from eviction."""
    parent_is_present: bool
    """Whether the block before it is in the index; true for the head of a chain."""


class ChainSummaryDocument(Document):
    """How far a chain can be read."""

    blocks: Int64
    """Blocks that were asked for."""
    tokens_per_block: Int64
    """Tokens of one block."""
    matched_blocks: Int64
    """Blocks that a prefix match finds."""
    matched_tokens: Int64
    """Their tokens."""
    complete_blocks: Int64
    """Blocks that a match finds which asks for every spec but those of linear attention."""
    end: Literal["none", "absent", "writing", "deleting", "storage"]
    """Why the match ends: it does not, or the next block is not there, is being written or deleted, or lies on a
    storage that cannot be read."""
    end_reason: str
    """The same for people, with the block it is about."""


class ChainDocument(Document):
    """A chain of blocks."""

    summary: ChainSummaryDocument
    """What a reader who asks for it gets."""
    blocks: list[ExploredBlockDocument]
    """In the order of the chain."""


class ExploreResource:
    """Chains of blocks.

    Args:
        book: runs the call behind it.
    """

    def __init__(self, book: CallBook) -> None:
        self._book = book

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        path = "/v1/instances/{name}/explore"
        add_route(router, "POST", path, self.explore_instance, ChainDocument, problems=[404])

    async def explore_instance(
        self, request: Request, name: NamePath, body: Annotated[ExploreDocument, Body()]
    ) -> Response:
        """Tell of every block of a chain where it lies, whether it can be read, and why not. Nothing of it counts as an
        access."""
        if bool(body.block_keys) == bool(body.token_ids):
            given = "both are" if body.block_keys else "neither is"
            error = FieldError("body.block_keys", None, "one of block_keys and token_ids")
            text = f"block_keys or token_ids: {given} given, must be one of the two"
            raise ProblemError(Problem(400, text, "INVALID_ARGUMENT", errors=[error]))
        fields: dict[str, Any] = {"block_keys": body.block_keys, "token_ids": body.token_ids}
        found = await self._book.run(request, "InsightService.ExploreBlocks", instance_id=name, **fields)
        blocks: list[dict[str, Any]] = []
        for page in pages(found.blocks, _SHOWN_AT_ONCE):  # a long chain takes long to tell
            blocks += [_named(plain(block)) for block in page]
            await asyncio.sleep(0)
        return answer({"summary": _named(plain(found.summary)), "blocks": blocks})


def _named(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with its enums in words."""
    words = {
        name: document[name].removeprefix(prefix).lower() for name, prefix in _PREFIXES.items() if name in document
    }
    return document | words
