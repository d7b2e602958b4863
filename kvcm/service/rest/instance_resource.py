"""/v1/instances."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import Field

from kvcm.service.rest.call_book import CallBook
from kvcm.service.rest.changing import check_same_name, fields_of
from kvcm.service.rest.documents import MOST_ENTRIES, Document, FreeText, Int32, Int64, Name, NamePath, Text
from kvcm.service.rest.etags import check_preconditions, etag_of
from kvcm.service.rest.messages import plain
from kvcm.service.rest.names import encoded_name
from kvcm.service.rest.paging import Page, PageQuery, page_of
from kvcm.service.rest.routing import add_route, answer, answer_item, not_found

__all__ = ["InstanceDocument", "InstanceResource"]


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
    spec_names: list[Text] = Field(default_factory=list, max_length=MOST_ENTRIES)
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


class InstanceDocument(Document):
    """A registered instance. It cannot be changed: only removed, with its blocks, and registered anew."""

    quota_group_name: Annotated[Text, Field(json_schema_extra={"readOnly": True})] = ""
    """The group's global_quota_group_name when the instance was registered. What is sent is ignored."""
    instance_group_name: Name
    """The group that the instance belongs to."""
    instance_id: Text = ""
    """Its id; that of the path where it is left out."""
    block_size: Int32 = 0
    """Tokens per block."""
    location_spec_infos: Annotated[list[SpecInfoDocument], Field(min_length=1, max_length=MOST_ENTRIES)]
    """The parts of a block."""
    model_deployment: ModelDeploymentDocument
    """Identity of the model."""
    location_spec_groups: Annotated[list[SpecGroupDocument], Field(max_length=MOST_ENTRIES)] = Field(
        default_factory=list
    )
    """Named sets of parts."""


class InstanceQuery(PageQuery):
    """Which instances."""

    group: Annotated[str, Field(max_length=256, description="Only those of this instance group.")] = ""


class InstanceResource:
    """Instances.

    Args:
        book: runs the calls behind them.
    """

    def __init__(self, book: CallBook) -> None:
        self._book = book

    def routes(self, router: APIRouter) -> None:
        """Add the routes."""
        one = "/v1/instances/{name}"
        add_route(router, "GET", "/v1/instances", self.list_instances, Page[InstanceDocument])
        add_route(router, "GET", one, self.get_instance, InstanceDocument, problems=[404])
        add_route(router, "PUT", one, self.put_instance, InstanceDocument, problems=[409, 412])
        add_route(router, "DELETE", one, self.delete_instance, status=204, problems=[404, 412])

    async def list_instances(self, request: Request, query: Annotated[InstanceQuery, Query()]) -> Response:
        """List instances, ordered by id."""
        listed = await self._book.run(request, "AdminService.ListInstanceInfo", instance_group_name=query.group)
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
        await self._book.run(request, "AdminService.RegisterInstance", **fields)
        instance = await self._existing(request, name)
        if known is not None:
            return answer_item(request, instance, etag_of(instance))
        headers = {"location": f"/v1/instances/{encoded_name(name)}"}
        return answer_item(request, instance, etag_of(instance), 201, headers)

    async def delete_instance(self, request: Request, name: NamePath) -> Response:
        """Remove an instance and, in the background, all its blocks."""
        if "if-match" in request.headers:
            check_preconditions(request.headers, etag_of(await self._existing(request, name)))
        await self._book.run(request, "AdminService.RemoveInstance", instance_id=name)
        return Response(status_code=204)

    async def _find(self, request: Request, name: str) -> dict[str, Any] | None:
        found = await self._book.find(request, "AdminService.GetInstanceInfo", instance_id=name)
        return None if found is None else plain(found.instance_info)

    async def _existing(self, request: Request, name: str) -> dict[str, Any]:
        if (instance := await self._find(request, name)) is None:
            raise not_found("instance", name)
        return instance
