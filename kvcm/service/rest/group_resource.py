"""/v1/groups."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query, Request, Response
from pydantic import Field

from kvcm.model.errors import ErrorCode
from kvcm.service.rejections import Problem, ProblemError
from kvcm.service.rest.calls import (
    MAX_ATTEMPTS,
    CallRefusedError,
    CallRunner,
    apply_patch,
    change_existing,
    check_same_name,
    conflict,
    fields_of,
)
from kvcm.service.rest.conversion import encode_name, message_to_dict
from kvcm.service.rest.documents import (
    MAX_ENTRIES,
    Document,
    FreeText,
    Int32,
    Int64,
    Name,
    NamePath,
    Page,
    PageQuery,
    Ratio,
    StorageTypeName,
    Text,
    page_of,
)
from kvcm.service.rest.routing import (
    MERGE_PATCH,
    add_route,
    answer,
    answer_item,
    check_preconditions,
    etag_of,
    not_found,
)

__all__ = [
    "CurveDocument",
    "CurveResource",
    "GroupDocument",
    "GroupResource",
    "GroupStoreResource",
]

# Instance groups as JSON documents.

_Policy = Literal["POLICY_UNSPECIFIED", "POLICY_LRU", "POLICY_LFU", "POLICY_TTL"]
_Strategy = Literal[
    "CPS_UNSPECIFIED", "CPS_ALWAYS_3FS", "CPS_PREFER_3FS", "CPS_ALWAYS_MOONCAKE", "CPS_PREFER_MOONCAKE",
    "CPS_ALWAYS_TAIR_MEMPOOL", "CPS_PREFER_TAIR_MEMPOOL", "CPS_ALWAYS_VCNS_3FS", "CPS_PREFER_VCNS_3FS",
]  # fmt: skip


class TriggerStrategyDocument(Document):
    """When reclaiming begins."""

    used_size: Int64 = 0
    """Bytes in use above which reclaiming begins; 0 = not used."""
    used_percentage: Ratio = 0.0
    """Share of a limit above which reclaiming begins, as a ratio; above 1 is never; 0 = not used."""
    hysteresis: Ratio | None = None
    """How far below the mark reclaiming goes, as a ratio of the same limit; unset = 0.02."""


class EvictionPolicyDocument(Document):
    """Order and age of eviction."""

    name: Text = ""
    """lru, lfu, lfu_aging, ttl, fifo, sieve, s3fifo or leaf_lru; empty = as the level above says."""
    ttl_seconds: Int64 = 0
    """Blocks leave at this age although there is space; 0 = never."""
    ttl_sliding: bool = False
    """Whether age counts from the last read; from the write otherwise."""


class PrefixClassDocument(Document):
    """A class of blocks: those that fit every condition set here."""

    name: Text
    """Name in metrics and messages, unique in the group."""
    min_depth: Int32 = 0
    """Least depth in the prefix chain, counted from 0."""
    end_depth: Int32 = 0
    """Depth from which on blocks are not of this class; 0 = no limit."""
    min_reads: Int32 = 0
    """Least number of reads since the block was stored."""
    instance_ids: list[Text] = Field(default_factory=list, max_length=MAX_ENTRIES)
    """Instances whose blocks it takes; empty = all of the group."""
    priority: Int32 = 0
    """Blocks of a lower priority leave first; others have 0."""
    policy: EvictionPolicyDocument | None = None
    """Order and age of these blocks."""
    budget: Ratio = 0.0
    """Share of the group's quota, as a ratio: above it the class gives up blocks before any other; 0 = no limit."""


class InstanceOverrideDocument(Document):
    """Settings of one instance that differ from its group's."""

    instance_id: Text
    """The instance; it need not be registered yet."""
    policy: EvictionPolicyDocument | None = None
    """Order and age of its blocks."""
    weight: Ratio = 0.0
    """How much of the group's capacity it deserves beside others, which have 1; 0 = 1."""


class ReclaimStrategyDocument(Document):
    """How a group gives space back."""

    storage_unique_name: Text = "any"
    """Has no effect; the original requires it."""
    reclaim_policy: _Policy = "POLICY_UNSPECIFIED"
    """Which blocks leave first; `policy.name` wins where it is set."""
    trigger_strategy: TriggerStrategyDocument = TriggerStrategyDocument(used_percentage=0.8)
    """When reclaiming begins; left out: above 0.8 of any limit."""
    trigger_period_seconds: Int32 = 0
    """Seconds between checks."""
    reclaim_step_size: Int32 = 0
    """Bytes to reclaim in one step."""
    reclaim_step_percentage: Int32 = 0
    """Share of the quota to reclaim in one step, in percent."""
    delay_before_delete_ms: Int32 = 0
    """How long a location stays readable for readers that hold it after it vanished from answers."""
    policy: EvictionPolicyDocument | None = None
    """Which blocks leave first, by name, and after what time they leave anyway."""
    share: Text = ""
    """Which instance of the group gives up blocks: `group_lru` (or empty), `proportional` or `fixed`."""
    prefix_classes: list[PrefixClassDocument] = Field(default_factory=list, max_length=MAX_ENTRIES)
    """Blocks that are treated apart; of several rules that fit a block the first one counts."""
    instance_overrides: Annotated[list[InstanceOverrideDocument], Field(max_length=MAX_ENTRIES)] = Field(
        default_factory=list
    )
    """Settings of single instances that differ."""


class MetaStorageDocument(Document):
    """Where metadata is stored: there is one store per deployment, which this has to agree with."""

    storage_type: Text = "local"
    """`local` or `redis`."""
    storage_uri: Text = ""
    """Address of the store; of type `local` it is ignored."""


class MetaCachePolicyDocument(Document):
    """Cache in front of the metadata store."""

    capacity: Int64 = 0
    """Size in MB; 0 = no cache."""
    type: Text = "LRU"
    """Name of the policy."""
    cache_shard_bits: Int32 = 0
    """Binary logarithm of the number of shards."""
    high_pri_pool_ratio: Ratio = 0.0
    """Share of the cache kept for entries of high priority."""


class MetaIndexerDocument(Document):
    """Metadata index of each instance of a group."""

    max_key_count: Int64 = 0
    """Most keys that one instance may have; 0 = not limited."""
    mutex_shard_num: Int64 = 0
    """Number of lock shards: a power of two, at most max_key_count; 0 = the manager's choice."""
    batch_key_size: Int64 = 0
    """Keys handled under one lock."""
    meta_storage_backend_config: MetaStorageDocument = MetaStorageDocument()
    """Where metadata is stored."""
    meta_cache_policy_config: MetaCachePolicyDocument = MetaCachePolicyDocument()
    """Cache in front of it."""
    persist_metadata_interval_time_ms: Int64 | None = None
    """Has no effect: every change is stored when it is made."""


class CacheConfigDocument(Document):
    """How a group caches."""

    reclaim_strategy: ReclaimStrategyDocument = ReclaimStrategyDocument()
    """How space is given back."""
    data_storage_strategy: _Strategy = "CPS_PREFER_3FS"
    """Which storage gets new blocks. ALWAYS fails without that kind, PREFER falls back to the first candidate."""
    meta_indexer_config: MetaIndexerDocument = MetaIndexerDocument()
    """Metadata index."""


class TypeQuotaDocument(Document):
    """Quota of one kind of storage."""

    storage_type: StorageTypeName
    """The kind."""
    capacity: Int64 = 0
    """Bytes allowed on it."""


class GroupQuotaDocument(Document):
    """Quota of a group."""

    capacity: Int64 = 0
    """Bytes allowed in all."""
    quota_config: list[TypeQuotaDocument] = Field(default_factory=list, max_length=MAX_ENTRIES)
    """Limits of single kinds of storage."""


class StorageGuaranteeDocument(Document):
    """A minimum of bytes that a group can always have on a storage that it shares."""

    storage_unique_name: Text
    """The storage."""
    guaranteed_bytes: Int64 = 0
    """Bytes."""


class GroupDocument(Document):
    """Instances that share one quota."""

    name: Text = ""
    """Its name; that of the path where it is left out."""
    storage_candidates: Annotated[list[Name], Field(min_length=1, max_length=MAX_ENTRIES)]
    """Names of the storages that the group may use, in order of preference."""
    global_quota_group_name: Name
    """Name of the quota that the group draws from, together with the others that name it."""
    max_instance_count: Int64 = 0
    """Most instances that the group may have."""
    quota: GroupQuotaDocument | None = None
    """Bytes that the group may use; unset = nothing may be written."""
    cache_config: CacheConfigDocument = CacheConfigDocument()
    """How the group caches."""
    user_data: FreeText = ""
    """Free text."""
    version: Annotated[Int64, Field(json_schema_extra={"readOnly": True})] = 0
    """Grows with every change. The manager counts: ignored in requests."""
    storage_guarantees: Annotated[list[StorageGuaranteeDocument], Field(max_length=MAX_ENTRIES)] = Field(
        default_factory=list
    )
    """Bytes on storages that no other group may take."""
    pin_budget_bytes: Int64 = 0
    """Bytes that pins of the group may hold at most; 0 = nothing can be pinned."""
    extra_info: FreeText = ""
    """Opaque text for clients, which registrations answer."""
    event_report_storage_candidates: Annotated[list[Name], Field(max_length=MAX_ENTRIES)] = Field(default_factory=list)
    """Names of the event report storages whose reporters its instances have, at most one of each type."""
    revisit_interval_buckets: Text = ""
    """Has no effect."""


_CREATE = "AdminService.CreateInstanceGroup"
_UPDATE = "AdminService.UpdateInstanceGroup"
_GET = "AdminService.GetInstanceGroup"
_Group = dict[str, Any]


class GroupResource:
    """Instance groups.

    Args:
        calls: runs the calls behind them.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the routes."""
        one = "/v1/groups/{name}"
        add_route(router=router, method="GET", path="/v1/groups", endpoint=self.list_groups, model=Page[GroupDocument])
        add_route(router=router, method="GET", path=one, endpoint=self.get_group, model=GroupDocument, problems=[404])
        add_route(
            router=router, method="PUT", path=one, endpoint=self.put_group, model=GroupDocument, problems=[409, 412]
        )
        add_route(
            router=router,
            method="PATCH",
            path=one,
            endpoint=self.patch_group,
            model=GroupDocument,
            problems=[404, 409, 412],
        )
        add_route(router=router, method="DELETE", path=one, endpoint=self.delete_group, status=204, problems=[404, 412])

    async def list_groups(self, request: Request, query: Annotated[PageQuery, Query()]) -> Response:
        """List instance groups, ordered by name."""
        listed = await self._calls.run(request, "GroupService.ListInstanceGroup")
        return answer(page_of(listed.instance_groups, lambda group: (group.name,), query))

    async def get_group(self, request: Request, name: NamePath) -> Response:
        """Get a group."""
        group = await self._existing(request, name)
        return answer_item(request, group, _tag(group))

    async def put_group(self, request: Request, name: NamePath, body: Annotated[GroupDocument, Body()]) -> Response:
        """Create or replace a group. `If-None-Match: *` only creates, `If-Match` only replaces that state."""
        check_same_name("name", body.name, name)
        for _ in range(MAX_ATTEMPTS):
            known = await self._find(request, name)
            check_preconditions(request.headers, None if known is None else _tag(known))
            if await self._store(request, fields_of(body, name=name), known):
                return await self._stored(request, name, 201 if known is None else 200)
        raise conflict(request, name)

    async def patch_group(
        self, request: Request, name: NamePath, body: Annotated[dict[str, Any], Body(media_type=MERGE_PATCH)]
    ) -> Response:
        """Change fields of a group by a JSON merge patch (RFC 7396): null takes a field back to its default."""
        for _ in range(MAX_ATTEMPTS):
            known = await self._existing(request, name)
            check_preconditions(request.headers, _tag(known))
            wanted = apply_patch(GroupDocument, known, body)
            check_same_name("name", wanted.name, name)
            if await self._store(request, fields_of(wanted, name=name), known):
                return await self._stored(request, name, 200)
        raise conflict(request, name)

    async def delete_group(self, request: Request, name: NamePath) -> Response:
        """Remove a group. Its instances stay readable and refuse writes."""
        if "if-match" in request.headers:
            check_preconditions(request.headers, _tag(await self._existing(request, name)))
        removal = self._calls.run(request, "AdminService.RemoveInstanceGroup", name=name)
        await change_existing(removal, lambda: self._existing(request, name))
        return Response(status_code=204)

    async def _store(self, request: Request, group: _Group, known: _Group | None) -> bool:
        """Create a group, or replace the known one; False if a concurrent change was faster.

        Raises:
            CallRefusedError: for any other reason.
        """
        try:
            if known is None:
                await self._calls.run(request, _CREATE, instance_group={**group, "version": 1})
            else:
                version = known["version"]
                newer = {**group, "version": version + 1}
                await self._calls.run(request, _UPDATE, instance_group=newer, current_version=version)
        except CallRefusedError as error:
            if error.code not in {ErrorCode.INVALID_ARGUMENT, ErrorCode.DUPLICATE_ENTITY}:
                raise
            now = await self._find(request, group["name"])
            if (now and now["version"]) == (known and known["version"]):
                raise
            return False
        return True

    async def _find(self, request: Request, name: str) -> _Group | None:
        found = await self._calls.find(request, _GET, name=name)
        return None if found is None else message_to_dict(found.instance_group)

    async def _existing(self, request: Request, name: str) -> _Group:
        if (group := await self._find(request, name)) is None:
            raise not_found("group", name)
        return group

    async def _stored(self, request: Request, name: str, status: int) -> Response:
        group = await self._existing(request, name)
        headers = {"location": f"/v1/groups/{encode_name(name)}"} if status == 201 else None
        return answer_item(request, group, _tag(group), status, headers)


def _tag(group: _Group) -> str:
    return etag_of(group, group["version"])


# /v1/groups/{name}/curve.


class CurvePointDocument(Document):
    """One point of a curve."""

    bytes: Int64
    """Capacity."""
    hit_ratio: Ratio
    """Share of the blocks asked for that are found with it."""


class CurveTargetDocument(Document):
    """A capacity that gives a part of the attainable hits."""

    part: Ratio
    """The part."""
    hit_ratio: Ratio
    """The share of the blocks asked for which that is."""
    bytes: Int64
    """The capacity."""


class CurvePresentDocument(Document):
    """Where a group stands on its curve."""

    quota_bytes: Int64
    """Its quota."""
    kept_bytes: Int64
    """The level that eviction keeps: the soft mark, or the quota without one."""
    used_bytes: Int64
    """Bytes in use."""
    predicted_ratio: Ratio
    """Share of the blocks asked for that are found with `kept_bytes`."""


class CurveDocument(Document):
    """The value of capacity to a group, estimated from a sample of the lookups of the manager that answers."""

    since_ms: Int64
    """Since when lookups of the group are counted, unix time in ms. Lookups of an hour ago count half, and so on."""
    lookups: Int64
    """Blocks that were asked for, older ones counted less."""
    sampled_keys: Int64
    """Keys in the sample."""
    attainable_ratio: Ratio
    """Share of the blocks asked for that a cache of any size would find."""
    points: list[CurvePointDocument]
    """The curve, ascending: where it rises."""
    targets: list[CurveTargetDocument]
    """Capacities for 60, 80, 90, 95 and 99 % of the attainable hits; empty while no key was found again."""
    present: CurvePresentDocument
    """Where the group stands now."""


class CurveResource:
    """Curves of groups.

    Args:
        calls: runs the calls behind it.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the route."""
        path = "/v1/groups/{name}/curve"
        add_route(
            router=router,
            method="GET",
            path=path,
            endpoint=self.get_group_curve,
            model=CurveDocument,
            problems=[404, 409],
        )

    async def get_group_curve(self, request: Request, name: NamePath) -> Response:
        """Get the hit ratio of a group by its capacity. 409 while there is no estimate: `detail` says what to set, or
        what to wait for."""
        curve = self._calls.run(request, "InsightService.GetCurve", instance_group=name)
        found = message_to_dict(await change_existing(curve, lambda: self._check_group(request, name)))
        why_not = found.pop("why_not")
        if not found.pop("is_known"):
            raise ProblemError(Problem(409, f"of group {name!r} there is no estimate: {why_not}"))
        return answer(found)

    async def _check_group(self, request: Request, name: str) -> None:
        if await self._calls.find(request, "AdminService.GetInstanceGroup", name=name) is None:
            raise not_found("group", name)


# /v1/groups/{name}/store and /v1/stores.

_STATES = {"BLOCK_MOVE_WAITING": "waiting", "BLOCK_MOVE_COPYING": "copying", "BLOCK_MOVE_CLEARING": "clearing"}
_LIST_STORES = "GroupService.ListGroupStore"


class BlockMoveDocument(Document):
    """The move of an instance's blocks to another metadata store."""

    instance: str
    """Id of the instance."""
    source: str
    """Name of the store that they leave."""
    target: str
    """Name of the store that they come to."""
    state: Literal["waiting", "copying", "clearing"]
    """waiting: it has not begun. copying: calls go to the source. clearing: calls go to the target, and the source is
    to be cleared; or the move was given up, and the target is."""
    copied_blocks: Int64
    """Blocks that this attempt copied; -1 on managers that do not lead."""
    failures: Int64
    """Attempts that failed; -1 on managers that do not lead."""
    reason: str
    """Why it does not go on at the moment, or which manager knows; empty while it does."""


class GroupStoreOrder(Document):
    """Keep the blocks of a group in a metadata store."""

    store: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    """Name of the store, as in `kvcm.store.block_stores` of every manager; `registry` for the one of the registry."""


class GroupStoreDocument(Document):
    """Where the blocks of a group are."""

    name: str
    """Name of the group."""
    store: str
    """Name of the store that they are to be kept in; `registry` for the one that keeps the registry."""
    instance_count: Int64
    """Instances of the group."""
    placed_instance_count: Int64
    """Those whose blocks lie in that store."""
    fixed_instance_count: Int64
    """Those that cannot be moved: an earlier release registered them. Register them again."""
    moves: list[BlockMoveDocument]
    """Instances that are to be moved, or whose former store is still to be cleared, by id."""


class BlockStoreDocument(Document):
    """A metadata store, as the manager sees it that answers."""

    name: str
    """Its name; `registry` for the one that keeps the registry."""
    is_usable: bool
    """Whether the manager uses it."""
    reason: str
    """Why it does not, or what else is wrong with it; empty while all is well."""
    instance_count: Int64
    """Instances whose blocks lie there."""


class GroupStoreResource:
    """Metadata stores, and those that groups are kept in.

    Args:
        calls: runs the calls behind it.
    """

    def __init__(self, calls: CallRunner) -> None:
        self._calls = calls

    def routes(self, router: APIRouter) -> None:
        """Add the routes."""
        path, model = "/v1/groups/{name}/store", GroupStoreDocument
        add_route(
            router=router, method="GET", path="/v1/stores", endpoint=self.list_stores, model=Page[BlockStoreDocument]
        )
        add_route(router=router, method="GET", path=path, endpoint=self.get_group_store, model=model, problems=[404])
        add_route(
            router=router,
            method="PUT",
            path=path,
            endpoint=self.put_group_store,
            model=model,
            status=202,
            problems=[404],
        )

    async def list_stores(self, request: Request, query: Annotated[PageQuery, Query()]) -> Response:
        """List metadata stores, ordered by name."""
        listed = await self._calls.run(request, _LIST_STORES)
        stores = sorted(listed.stores, key=lambda store: str(store.name))
        return answer(page_of(stores, lambda store: (store.name,), query))

    async def get_group_store(self, request: Request, name: NamePath) -> Response:
        """Get the metadata store of a group, and how far the moves of its instances are."""
        return answer(await self._existing(request, name))

    async def put_group_store(
        self, request: Request, name: NamePath, body: Annotated[GroupStoreOrder, Body()]
    ) -> Response:
        """Keep the blocks of a group in a metadata store: those that lie in another one move there in the background,
        while engines read and write them."""
        move = self._calls.run(request, "GroupService.MoveInstanceGroup", name=name, store=body.store)
        await change_existing(move, lambda: self._existing(request, name))
        return answer(await self._existing(request, name), 202)

    async def _existing(self, request: Request, name: str) -> dict[str, Any]:
        listed = await self._calls.run(request, _LIST_STORES)
        found = [group for group in listed.groups if group.name == name]
        if not found:
            raise not_found("group", name)
        group = message_to_dict(found[0])
        return {**group, "moves": [_move(move) for move in group["moves"]]}


def _move(move: dict[str, Any]) -> dict[str, Any]:
    state = _STATES.get(move["state"], "waiting")
    others = {name: move[name] for name in ("source", "target", "copied_blocks", "failures", "reason")}
    return {"instance": move["instance_id"], "state": state, **others}
