"""KV events: what this engine stored, for routers that send a request to where its prefix is.

They are made only when vLLM is configured to publish KV events. The medium is vLLM's name for storage; which blocks the
manager evicts is not known here, so consumers have to treat them as hints.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

__all__ = ["StoredEvents"]

_MOST_EVENTS = 10_000


class StoredEvents:
    """Collects events until vLLM takes them; safe to use from several threads.

    Args:
        is_wanted: whether anybody takes them.
        block_tokens: tokens per block.
    """

    def __init__(self, is_wanted: bool, block_tokens: int) -> None:
        self._is_wanted = is_wanted
        self._block_tokens = block_tokens
        self._events: deque[BlockStored] = deque(maxlen=_MOST_EVENTS)

    def stored(self, request: Any, blocks: Sequence[int]) -> None:
        """Note that blocks of a request, by their positions, are stored now."""
        if not self._is_wanted:
            return
        hashes, size = request.block_hashes, self._block_tokens
        lora = request.lora_request
        for block in blocks:
            event = BlockStored(
                block_hashes=[maybe_convert_block_hash(hashes[block])],
                parent_block_hash=maybe_convert_block_hash(hashes[block - 1]) if block else None,
                token_ids=list(request.all_token_ids[block * size : (block + 1) * size]),
                block_size=size,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_STORAGE,
                lora_name=lora.name if lora else None,
            )
            self._events.append(event)

    def take(self) -> Iterable[BlockStored]:
        """Return the events since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]
