"""Interface between the tier and a connector to a storage: values and a Protocol, without torch.

A *block* is a page of the host pool: a fixed number of tokens, whose key depends on every token before it. A *spec* is
a named part of a block: its KV, and the sidecar of an algorithm. The tier hands out pieces of host memory; it never
talks to a storage.

Nothing here waits. What takes long begins with one call and is asked for with another, so that a decode step never
stands still for a network, and a failure is an answer like any other: blocks that are not there.

Why a write is one call and not three (ask for leave, write, publish): each of them waits for another process, and a
session that was begun must end exactly once in every case; only one place, the connector, ensures that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # connectors work in processes without torch, which these import
    from kvcm.gpu_tier.geometry import KVGeometry, Layout

__all__ = [
    "KV_SPEC", "KVConnector", "KVFormat", "LoadProgress", "LoadTicket", "PageDst", "PageSrc", "PrefixHandle",
    "PrefixMatch", "WriteProgress", "WriteTicket", "fingerprint8",
]  # fmt: skip

KV_SPEC = "tp0"
"""Name of the spec that holds a block's KV when one device has all heads."""

_FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class KVFormat:
    """What the bytes of a block depend on besides its tokens: blocks of another format are never read.

    Attributes:
        kind: mha or mla.
        model: id of the model.
        weights: distinguishes its weights from others under that id.
        kv_dtype: how numbers are stored.
        layout: order of the host pool's pages.
        page_tokens: tokens of a block.
        shape: layers, heads and dims, in a fixed form.
        rope: parameters of the rotary embedding; keys are stored rotated.
    """

    kind: str
    model: str
    weights: str
    kv_dtype: str
    layout: str
    page_tokens: int
    shape: str
    rope: Mapping[str, object] = field(default_factory=dict)

    @classmethod
    def of(
        cls, geometry: KVGeometry, layout: Layout, *, model: str, weights: str, rope: Mapping[str, object],
        first_head: int = 0,
    ) -> KVFormat:  # fmt: skip
        """Return the format of a host pool of this geometry and layout.

        Args:
            geometry: of the KV that is held here.
            layout: of the pool.
            model: id of the model.
            weights: distinguishes its weights from others under that id.
            rope: parameters of the rotary embedding.
            first_head: number of the first KV head held here, of a tensor-parallel rank. Blocks of ranks that hold
                other heads have the same size and must not be taken for each other.
        """
        g = geometry
        layers = f"layers {g.layers.start}-{g.layers.stop - 1}"
        heads = f"{g.num_kv_heads} heads" + (f" from {first_head}" if first_head else "")
        shape = f"{layers}, {heads}, dims {g.head_dim} and {g.v_head_dim}"
        return cls(str(g.kind), model, weights, str(g.dtype), str(layout), g.page_size, shape, dict(rope))

    def sidecar_spec(self, algorithm: str, parameters: Mapping[str, object]) -> str:
        """Return the name of the spec that holds an algorithm's sidecar of a block."""
        return f"index.{algorithm}.{fingerprint8(self, algorithm, parameters)}"


def fingerprint8(kv: KVFormat, algorithm: str, parameters: Mapping[str, object]) -> str:
    """Return 8 hex digits that differ when sidecars of blocks cannot be exchanged.

    Args:
        kv: of the KV that the sidecar is of.
        algorithm: whose sidecar it is.
        parameters: settings of the algorithm, values that JSON knows.
    """
    fields = {
        "kind": kv.kind, "model": kv.model, "weights": kv.weights, "dtype": kv.kv_dtype, "layout": kv.layout,
        "page": kv.page_tokens, "shape": kv.shape, "rope": dict(kv.rope), "algorithm": algorithm,
        "parameters": dict(parameters), "version": _FORMAT_VERSION,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class PrefixHandle:
    """A lookup: it keeps what it found from being deleted until it is released.

    Attributes:
        number: identifies the handle within its connector.
        keys: of the blocks asked for.
    """

    number: int
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What a lookup found.

    Attributes:
        blocks: leading blocks that have every required spec.
        optional: of each optional spec, leading blocks that have it, at most `blocks`.
        reason: why nothing is known, "" when the storage's manager answered.
    """

    blocks: int
    optional: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PageDst:
    """Where a block goes.

    Attributes:
        block: its position in the handle's keys.
        parts: by name of the spec, the writable pieces of memory that are filled one behind the other.
    """

    block: int
    parts: Mapping[str, Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class PageSrc:
    """A block to write.

    Attributes:
        key: of the block.
        parts: by name of the spec, the pieces of memory that are its bytes one behind the other; they must stay as they
            are until the write is done.
    """

    key: int
    parts: Mapping[str, Sequence[memoryview]]


@dataclass(frozen=True, slots=True)
class LoadTicket:
    """A load; `number` identifies it within its connector."""

    number: int


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far a load is.

    Attributes:
        ends: by name of the spec, the first block that is not there: all blocks of the load before it have that spec.
        is_done: nothing more arrives.
        is_settled: the memory is no longer written to. A storage that hangs may do so long after the load is done.
        reason: why not all arrived, "" while none failed.
    """

    ends: Mapping[str, int]
    is_done: bool
    is_settled: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WriteTicket:
    """A write; `number` identifies it within its connector."""

    number: int


@dataclass(frozen=True, slots=True)
class WriteProgress:
    """How far a write is.

    Attributes:
        is_done: nothing more is read from the memory that counts.
        stored: leading blocks that can be loaded now, those included that others had stored or are storing.
        reason: why not all are, "" while none failed.
    """

    is_done: bool
    stored: int = 0
    reason: str = ""


class KVConnector(Protocol):
    """Brings blocks from a storage to host memory, and back.

    No method waits for a storage or a network, and none raises because of one. All are called by one thread.
    """

    def use_memory(self, memory: Sequence[memoryview]) -> None:
        """Register the memory of the blocks, so that a storage can move them without a copy. Called once, first.

        Args:
            memory: contiguous; it stays until the connector is closed.
        """

    def match_prefix(self, keys: Sequence[int], required: Sequence[str], optional: Sequence[str] = ()) -> PrefixHandle:
        """Begin to look for the longest run of leading blocks that have all of `required`.

        Args:
            keys: of the blocks, from the start of the prompt.
            required: names of specs without which a block is none.
            optional: names of specs that are good to have.
        """

    def matched(self, handle: PrefixHandle) -> PrefixMatch | None:
        """Return the result of the lookup, None while it is pending."""

    def load(self, handle: PrefixHandle, pages: Sequence[PageDst]) -> LoadTicket:
        """Begin to load blocks that the lookup found, in ascending order and without a gap."""

    def poll(self, ticket: LoadTicket) -> LoadProgress:
        """Return how far a load is. One that is settled is forgotten with this answer."""

    def cancel(self, ticket: LoadTicket) -> None:
        """End a load as soon as may be; it still has to be polled until it is settled."""

    def release(self, handle: PrefixHandle) -> None:
        """Let what a lookup found be deleted again, once nothing of it is being loaded any more."""

    def write(self, parent: int | None, pages: Sequence[PageSrc]) -> WriteTicket:
        """Begin to store blocks that are not stored yet, and to publish each with all of its parts at once.

        Args:
            parent: key of the block before the first one, None at the start of a prompt.
            pages: consecutive blocks.
        """

    def poll_write(self, ticket: WriteTicket) -> WriteProgress:
        """Return how far a write is. One that is done is forgotten with this answer."""

    def close(self) -> None:
        """Cancel pending operations; no memory is read or written afterwards, as far as the storages obey."""
