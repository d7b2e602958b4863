"""/v1/instances and /v1/instances/{name}/explore."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import FailFast, Field

from kvcm.cache.instance_cache import batches
from kvcm.service.rest.calls import CallRunner, check_one_prompt, check_same_name, fields_of
from kvcm.service.rest.conversion import encode_name, message_to_dict
from kvcm.service.rest.documents import (
    MAX_ENTRIES,
    BlockKey,
    Document,
    FreeText,
    Int32,
    Int64,
    Name,
    NamePath,
    Page,
    PageQuery,
    Ratio,
    Text,
    page_of,
)
from kvcm.service.rest.routing import add_route, answer, answer_item, check_preconditions, etag_of, not_found

__all__ = ["ChainDocument", "ExploreResource", "InstanceDocument", "InstanceResource"]


_QueryType = Literal[
    "QT_UNSPECIFIED", "QT_BATCH_GET", "QT_PREFIX_MATCH", "QT_REVERSE_ROLL_SW_MATCH", "QT_PREFIX_MATCH_WITH_MAMBA"
]


class SpecInfoDocument(Document):
    """One part of every block of an instance, e.g. one tensor-parallel rank."""

    name: Name
    """Name, unique within the instance."""
    size: Int64 = 0
    """Bytes of the part for one block."""
    kind: Literal["LSK_UNSPECIFIED", "LSK_FULL_ATTENTION", "LSK_LINEAR_ATTENTION"] = "LSK_UNSPECIFIED"
    """What the part holds."""


class SpecGroupDocument(Document):
    """A named set of parts, for blocks that are stored with only some of them."""

    name: Name
    """Name, unique within the instance."""
    spec_names: list[Text] = Field(default_factory=list, max_length=MAX_ENTRIES)
    """Names of the parts."""


class ModelDeploymentDocument(Document):
    """Identity of the model whose KV is cached."""

    model_name: Name
    """Name of the model."""
    dtype: Name
    """Data type of the KV, free text."""
    use_mla: bool = False
    """True for multi-head latent attention (one matrix instead of keys and values)."""
    tp_size: Int32 = 0
    """Tensor-parallel degree."""
    dp_size: Int32 = 0
    """Data-parallel degree."""
    lora_name: FreeText = ""
    """Identity of the LoRA adapter, e.g. a hash of its checkpoint."""
    pp_size: Int32 = 0
    """Number of pipeline stages."""
    extra: FreeText = ""
    """Free text that belongs to the identity."""
    user_data: FreeText = ""
    """Free text that does not belong to the identity."""
    use_eagle_pop: bool = False
    """True for a draft model of the kind EaglePop: a full-attention prefix counts one block less."""


class InstanceDocument(Document):
    """A registered instance. It cannot be changed: only removed, with its blocks, and registered again."""

    quota_group_name: Annotated[Text, Field(json_schema_extra={"readOnly": True})] = ""
    """The group's global_quota_group_name when the instance was registered. Ignored in requests."""
    instance_group_name: Name
    """The group that the instance belongs to."""
    instance_id: Text = ""
    """Its id; that of the path where it is left out."""
    block_size: Int32 = 0
    """Tokens per block."""
    location_spec_infos: Annotated[list[SpecInfoDocument], Field(min_length=1, max_length=MAX_ENTRIES)]
    """The parts of a block."""
    model_deployment: ModelDeploymentDocument
    """Identity of the model."""
    location_spec_groups: Annotated[list[SpecGroupDocument], Field(max_length=MAX_ENTRIES)] = Field(
        default_factory=list
    )
    """Named sets of parts."""
    default_query_type: _QueryType = "QT_UNSPECIFIED"
    """How keys are matched where a request about hosts does not say it."""


class InstanceQuery(PageQuery):
    """Which instances."""

    group: Annotated[str, Field(max_length=256, description="Only those of this instance group.")] = ""


class InstanceResource:
    """Instances.

    Args:
        calls: runs the calls behind them.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the routes."""
        one = "/v1/instances/{name}"
        add_route(
            router=router,
            method="GET",
            path="/v1/instances",
            endpoint=self.list_instances,
            model=Page[InstanceDocument],
        )
        add_route(
            router=router, method="GET", path=one, endpoint=self.get_instance, model=InstanceDocument, problems=[404]
        )
        add_route(
            router=router,
            method="PUT",
            path=one,
            endpoint=self.put_instance,
            model=InstanceDocument,
            problems=[409, 412],
        )
        add_route(
            router=router, method="DELETE", path=one, endpoint=self.delete_instance, status=204, problems=[404, 412]
        )

    async def list_instances(self, request: Request, query: Annotated[InstanceQuery, Query()]) -> Response:
        """List instances, ordered by id."""
        listed = await self._calls.run(request, "AdminService.ListInstanceInfo", instance_group_name=query.group)
        page = await asyncio.to_thread(page_of, listed.instance_info, lambda instance: (instance.instance_id,), query)
        return answer(page)

    async def get_instance(self, request: Request, name: NamePath) -> Response:
        """Get an instance as it was registered."""
        instance = await self._existing(request, name)
        return answer_item(request, instance, etag_of(instance))

    async def put_instance(
        self, request: Request, name: NamePath, body: Annotated[InstanceDocument, Body()]
    ) -> Response:
        """Register an instance. Doing it again with the same document changes nothing; another one is a conflict."""
        check_same_name("instance_id", body.instance_id, name)
        known = await self._find(request, name)
        check_preconditions(request.headers, None if known is None else etag_of(known))
        fields = fields_of(body, instance_id=name, instance_group=body.instance_group_name)
        for field in ("quota_group_name", "instance_group_name"):
            del fields[field]
        await self._calls.run(request, "AdminService.RegisterInstance", **fields)
        instance = await self._existing(request, name)
        if known is not None:
            return answer_item(request, instance, etag_of(instance))
        headers = {"location": f"/v1/instances/{encode_name(name)}"}
        return answer_item(request=request, item=instance, etag=etag_of(instance), status=201, headers=headers)

    async def delete_instance(self, request: Request, name: NamePath) -> Response:
        """Remove an instance and, in the background, all its blocks."""
        if "if-match" in request.headers:
            check_preconditions(request.headers, etag_of(await self._existing(request, name)))
        await self._calls.run(request, "AdminService.RemoveInstance", instance_id=name)
        return Response(status_code=204)

    async def _find(self, request: Request, name: str) -> dict[str, Any] | None:
        found = await self._calls.find(request, "AdminService.GetInstanceInfo", instance_id=name)
        return None if found is None else message_to_dict(found.instance_info)

    async def _existing(self, request: Request, name: str) -> dict[str, Any]:
        if (instance := await self._find(request, name)) is None:
            raise not_found("instance", name)
        return instance


# /v1/instances/{name}/explore.

_MAX_KEYS: Final = 65_536
_MAX_TOKENS: Final = 1 << 20
_BATCH: Final = 64
_PREFIXES: Final = {"state": "BLOCK_", "end": "CHAIN_END_"}


class ExploreDocument(Document):
    """A chain, by its keys or its tokens; one of the two."""

    block_keys: Annotated[list[BlockKey], Field(max_length=_MAX_KEYS), FailFast()] = Field(default_factory=list)
    """Block keys of the chain in order, as texts."""
    token_ids: Annotated[list[Int64], Field(max_length=_MAX_TOKENS), FailFast()] = Field(default_factory=list)
    """Tokens of the prompt."""


class ExploredLocationDocument(Document):
    """One location of a block."""

    storage: str
    """Name of the storage."""
    storage_type: str
    """Its kind, as in metrics: file, hf3fs, mooncake …"""
    status: Literal["writing", "serving", "deleting"]
    """Its state."""
    specs: list[str]
    """Names of the specs that it holds."""
    size_bytes: Int64
    """Bytes of all of them."""
    began_at_ms: Int64
    """When its writing began, unix time in ms."""


class ExploredBlockDocument(Document):
    """One block of a chain."""

    position: Int64
    """Position in the requested chain, from 0."""
    block_key: BlockKey
    """Its key."""
    state: Literal["serving", "writing", "deleting", "absent"]
    """The state of its best location."""
    is_readable: bool
    """Whether a match returns it."""
    why_not: str
    """Why not; of a readable one, the specs that it lacks. Empty = nothing is wrong."""
    locations: list[ExploredLocationDocument]
    """Its locations, the oldest first."""
    last_access_at_ms: Int64
    """When it was last read, or else written, unix time in ms; 0 = unknown."""
    accesses: Int64
    """How often it was read, if the policy of its instance counts that."""
    age_seconds: Ratio
    """Seconds since its oldest location was begun; -1 = it is absent."""
    is_pinned: bool
    """Whether a pin keeps it from eviction."""
    parent_is_present: bool
    """Whether the block before it is in the index; true for the head of a chain."""


class ChainSummaryDocument(Document):
    """How far a chain can be read."""

    blocks: Int64
    """Requested blocks."""
    tokens_per_block: Int64
    """Tokens of one block."""
    matched_blocks: Int64
    """Blocks that a prefix match finds."""
    matched_tokens: Int64
    """Their tokens."""
    complete_blocks: Int64
    """Blocks that a match for every spec but those of linear attention finds."""
    end: Literal["none", "absent", "writing", "deleting", "storage"]
    """Why the match ends: it does not, or the next block is absent, is being written or deleted, or lies on a
    storage that cannot be read."""
    end_reason: str
    """The same for people, with the block that it is about."""


class ChainDocument(Document):
    """A chain of blocks."""

    summary: ChainSummaryDocument
    """The result of a match."""
    blocks: list[ExploredBlockDocument]
    """In the order of the chain."""


class ExploreResource:
    """Chains of blocks.

    Args:
        calls: runs the calls behind it.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        path = "/v1/instances/{name}/explore"
        add_route(
            router=router, method="POST", path=path, endpoint=self.explore_instance, model=ChainDocument, problems=[404]
        )

    async def explore_instance(
        self, request: Request, name: NamePath, body: Annotated[ExploreDocument, Body()]
    ) -> Response:
        """Get the state of every block of a chain: its locations, whether it can be read, and why not. This does not
        count as an access."""
        check_one_prompt(body.block_keys, body.token_ids)
        fields: dict[str, Any] = {"block_keys": body.block_keys, "token_ids": body.token_ids}
        found = await self._calls.run(request, "InsightService.ExploreBlocks", instance_id=name, **fields)
        blocks: list[dict[str, Any]] = []
        for batch in batches(found.blocks, _BATCH):  # a long chain takes long to convert
            blocks += [_with_enum_names(message_to_dict(block)) for block in batch]
            await asyncio.sleep(0)
        return answer({"summary": _with_enum_names(message_to_dict(found.summary)), "blocks": blocks})


def _with_enum_names(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document with its enums in words."""
    words = {
        name: document[name].removeprefix(prefix).lower() for name, prefix in _PREFIXES.items() if name in document
    }
    return document | words
