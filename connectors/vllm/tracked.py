"""What the scheduler's side knows of one request of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors.keys import HashKeys
from connectors.reuse.lookups import Found
from kvcm.model.keys import BlockKey

__all__ = ["ReservedBlock", "TrackedRequest"]


@dataclass(frozen=True, slots=True)
class ReservedBlock:
    """A block that is pinned until it is known to be computed, and then saved.

    Attributes:
        index: position in the request.
        block_ids: of the engine, by id of the group.
        step: that computes it.
    """

    index: int
    block_ids: Mapping[int, int]
    step: int


@dataclass(slots=True)
class TrackedRequest:
    """One request, from its arrival to its end.

    Attributes:
        request: vLLM's own object, which goes on changing.
        hash_keys: makes block keys of vLLM's hashes.
        found: what the manager knows of it, None before it has answered.
        is_asked: whether a lookup is under way or its lease is held.
        may_load: false after a load failed: a second one would most likely fail too, and then again.
        may_save: whether the manager answered, and there is no gap.
        has_gap: whether a block was dropped: what follows it cannot be found.
        is_loading: whether its blocks are being loaded.
        local_tokens: that vLLM's own cache had when it last asked for more.
        promised_tokens: that were found beyond those.
        next_block: first block that is neither stored nor reserved.
        reserved: blocks that wait until they are known to be computed, in order.
    """

    request: Any
    hash_keys: HashKeys
    found: Found | None = None
    is_asked: bool = False
    may_load: bool = True
    may_save: bool = False
    has_gap: bool = False
    is_loading: bool = False
    local_tokens: int = 0
    promised_tokens: int = 0
    next_block: int = 0
    reserved: list[ReservedBlock] = field(default_factory=list)
    _keys: list[BlockKey] = field(default_factory=list)
    _last_hash: bytes = b""

    @property
    def id(self) -> str:
        """Of the request."""
        return str(self.request.request_id)

    def keys(self, end: int) -> Sequence[BlockKey]:
        """Return the keys of the first `end` blocks, or of as many as have a hash."""
        hashes = self.request.block_hashes
        end, known = min(end, len(hashes)), len(self._keys)
        if known and (known > len(hashes) or hashes[known - 1] != self._last_hash):
            self._keys, known = [], 0  # vLLM takes hashes back when a streamed prompt goes on otherwise
        if end > known:
            self._keys += self.hash_keys.keys(hashes[known:end])
            self._last_hash = hashes[end - 1]
        return self._keys[:end]

    def is_decoding(self, block_tokens: int) -> bool:
        """Return whether all reserved blocks hold new tokens."""
        return self.reserved[0].index >= self.request.num_prompt_tokens // block_tokens

    def take_computed(self, block_tokens: int, processed_steps: int, least: int) -> list[ReservedBlock]:
        """Return the reserved blocks that are computed for certain, which are not reserved any more.

        Args:
            block_tokens: tokens per block.
            processed_steps: number of the last step whose outcome is known.
            least: blocks; when there are fewer, they stay reserved.
        """
        request = self.request
        tokens = request.num_computed_tokens - request.num_in_flight_tokens
        computed = min(tokens // block_tokens, len(request.block_hashes))
        # Without a step under way all of its steps are processed, the one included that vLLM is processing now.
        last = processed_steps if request.num_in_flight_tokens else None
        count = 0
        for block in self.reserved:
            if block.index >= computed or (last is not None and block.step > last):
                break
            count += 1
        count = count if count >= least else 0
        taken, self.reserved = self.reserved[:count], self.reserved[count:]
        return taken
