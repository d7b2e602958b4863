"""Calls about blocks that the meta and the admin package share: GetCacheMeta and RemoveCache."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

from kvcm.cache.manager import CacheManager
from kvcm.cache.meta import BlockMeta
from kvcm.cache.pages import pages
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import block_keys_from_tokens
from kvcm.model.locations import Location, SpecUri, decode_chunk
from kvcm.registry.validation import require
from kvcm.service.calls import Reply
from kvcm.service.limits import RequestLimits
from kvcm.service.translate import mask_of

__all__ = ["BlockCalls"]

_TOKENS_ON_LOOP = 16_384  # some milliseconds; more are hashed in a thread, beside other requests
_TEXTS_AT_ONCE = 64  # with eight parts each some milliseconds
_NO_LOCATION = b"\x12\x00"  # an empty CacheLocation as field 2 of an answer


class BlockCalls:
    """Block calls of one package.

    Args:
        cache: answers them.
        limits: sizes of requests.
        meta_response: class of GetCacheMetaResponse in the package.
        common_response: class of CommonResponse in the package.
    """

    def __init__(
        self, cache: CacheManager, limits: RequestLimits, meta_response: type[Any], common_response: type[Any]
    ) -> None:
        self._cache = cache
        self._limits = limits
        self._meta_response = meta_response
        self._common_response = common_response

    async def keys(self, api: str, request: Any) -> Sequence[int]:
        """Return the block keys of a request: as given, else made from its tokens (wire.md 5.2).

        Raises:
            UnknownInstanceError: the instance is not registered.
            InvalidArgumentError: neither is given, there are too many, or the instance has no block size.
        """
        instance = self._cache.cache(request.instance_id).instance
        self._limits.check(len(request.block_keys), len(request.token_ids))
        if request.block_keys:
            keys: list[int] = request.block_keys[:]  # a list, made faster than by `list`
            return keys
        require(request.token_ids, f"{api}.block_keys and token_ids", "is required: one of the two")
        if instance.block_size <= 0:
            raise InvalidArgumentError(
                f"tokens size per block error: instance {instance.instance_id!r} has block_size "
                f"{instance.block_size}, token_ids need one > 0"
            )
        tokens = list(request.token_ids)
        if len(tokens) <= _TOKENS_ON_LOOP:
            return block_keys_from_tokens(tokens, instance.block_size)
        return await asyncio.to_thread(block_keys_from_tokens, tokens, instance.block_size)

    async def get_cache_meta(self, request: Any) -> Reply:
        """Answer GetCacheMeta: one entry per unmasked key; all locations of a key are in its meta text."""
        keys = await self.keys("GetCacheMeta", request)
        blocks = await self._cache.metas(request.instance_id, keys, mask_of(request, "block_mask"))
        message = self._meta_response()
        for page in pages(blocks, _TEXTS_AT_ONCE):
            message.metas.extend([_meta_text(block, request.detail_level) for block in page])
            if len(page) < len(blocks):
                await asyncio.sleep(0)
        return Reply(message, [block.locations[0].chunk if block.locations else _NO_LOCATION for block in blocks])

    async def remove_cache(self, request: Any) -> Reply:
        """Answer RemoveCache."""
        keys = await self.keys("RemoveCache", request)
        await self._cache.remove(request.instance_id, keys, mask_of(request, "block_mask"))
        return Reply(self._common_response())


def _meta_text(block: BlockMeta, detail_level: int) -> str:
    if not block.locations:
        return '{"status":"CLS_NOT_FOUND"}'
    best = block.locations[0]
    meta: dict[str, Any] = {"id": best.id, "status": f"CLS_{best.status.name}"}
    if len(block.locations) > 1 or detail_level > 0:
        meta["locations"] = [_location_text(location) for location in block.locations]
    if detail_level > 0:
        # Keys are 64-bit numbers, which many JSON readers would round: a text, as everywhere in this interface.
        meta |= {"parent": None if block.parent is None else str(block.parent), "depth": block.depth}
    return json.dumps(meta, separators=(",", ":"), ensure_ascii=False)


def _location_text(location: Location) -> dict[str, Any]:
    return {
        "id": location.id,
        "status": f"CLS_{location.status.name}",
        "type": location.storage_type.name,
        "storage": location.storage,
        "size": str(location.size_bytes),
        "written_at": location.written_at,
        "location_specs": [_spec_text(spec) for spec in decode_chunk(location.chunk).specs],
    }


def _spec_text(spec: SpecUri) -> dict[str, str]:
    text = {"name": spec.name, "uri": spec.uri}
    return text | {"checksum": str(spec.checksum)} if spec.checksum else text
