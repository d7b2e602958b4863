"""/v1/pins."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import FailFast, Field

from kvcm.service.rejections import Problem, ProblemError
from kvcm.service.rest.calls import CallRunner, fields_of
from kvcm.service.rest.conversion import encode_name, message_to_dict
from kvcm.service.rest.documents import BlockKey, Document, Int64, NamePath, Page, PageQuery, TokenPath, Whole, page_of
from kvcm.service.rest.routing import add_route, answer

__all__ = ["MadePinDocument", "NewPinDocument", "PinDocument", "PinResource"]

_MAX_KEYS = 65_536
_MAX_TOKENS = 1 << 20
_MAX_TTL_SECONDS = 30 * 86_400


class PinDocument(Document):
    """A pin: it keeps a prefix from eviction."""

    pin_id: str
    """Names it."""
    owner: str
    """Name of the owner."""
    blocks: Int64
    """Blocks."""
    bytes: Int64
    """Bytes."""
    deadline_ms: Int64
    """When it ends, unix time in ms."""
    last_block_key: BlockKey
    """The last of its keys, which stands for the whole prefix."""


class NewPinDocument(Document):
    """A prefix to pin, by its keys or its tokens."""

    instance_id: Annotated[str, Field(min_length=1, max_length=256)]
    """The instance."""
    block_keys: Annotated[list[BlockKey], Field(max_length=_MAX_KEYS), FailFast()] = Field(default_factory=list)
    """Block keys of the prefix in order, as texts. They win when token_ids are given too."""
    token_ids: Annotated[list[Int64], Field(max_length=_MAX_TOKENS), FailFast()] = Field(default_factory=list)
    """Tokens of the prefix."""
    owner: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the owner, shown in lists."""
    ttl_seconds: Annotated[Whole, Field(ge=1, le=_MAX_TTL_SECONDS)]
    """For how long."""


class MadePinDocument(Document):
    """A pin that was made."""

    pin_id: str
    """Names the pin."""
    pinned_blocks: Int64
    """Blocks that are pinned: the longest prefix that could be read."""
    pinned_bytes: Int64
    """Their bytes."""
    deadline_ms: Int64
    """When it ends, unix time in ms."""


class PinQuery(PageQuery):
    """Whose pins."""

    instance: Annotated[str, Field(min_length=1, max_length=256, description="The instance.")]


class PinResource:
    """Pins.

    Args:
        calls: runs the calls behind them.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the routes."""
        add_route(
            router=router,
            method="GET",
            path="/v1/pins",
            endpoint=self.list_pins,
            model=Page[PinDocument],
            problems=[404],
        )
        add_route(
            router=router,
            method="POST",
            path="/v1/pins",
            endpoint=self.create_pin,
            model=MadePinDocument,
            status=201,
            problems=[404, 409, 507],
        )
        add_route(
            router=router,
            method="DELETE",
            path="/v1/pins/{instance}/{pin_id}",
            endpoint=self.delete_pin,
            status=204,
            problems=[404],
        )

    async def list_pins(self, request: Request, query: Annotated[PinQuery, Query()]) -> Response:
        """List the pins of an instance, ordered by id."""
        listed = await self._calls.run(request, "PinService.ListPins", instance_id=query.instance)
        return answer(page_of(listed.pins, lambda pin: (pin.pin_id,), query))

    async def create_pin(self, request: Request, body: Annotated[NewPinDocument, Body()]) -> Response:
        """Pin the longest readable prefix of some keys."""
        made = message_to_dict(await self._calls.run(request, "PinService.PinPrefix", **fields_of(body)))
        if not made["pin_id"]:
            text = f"nothing of this prefix can be read in instance {body.instance_id!r}: there is nothing to pin"
            raise ProblemError(Problem(409, text))
        location = f"/v1/pins/{encode_name(body.instance_id)}/{encode_name(made['pin_id'])}"
        return answer(made, 201, {"location": location})

    async def delete_pin(self, request: Request, instance: NamePath, pin_id: TokenPath) -> Response:
        """End a pin early. One that has ended already is no error."""
        await self._calls.run(request, "PinService.UnpinPrefix", instance_id=instance, pin_id=pin_id)
        return Response(status_code=204)
