"""An engine's host pool beside a real manager; the bytes of every block follow from its key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from prefix_cases import MHA, PAGE, SIDECAR_BYTES, block_bytes, format_of, sidecars_of

from kvcm.connectors.gpu_tier.connector import BlockParts, ManagerConnector, TierSettings
from kvcm.gpu_tier.connector import KV_SPEC
from kvcm.gpu_tier.geometry import KVGeometry, Layout
from kvcm.gpu_tier.manager.prefixes import AttachedPrefix, PrefixStore, SidecarSpec
from kvcm.gpu_tier.pools.host_pool import HostKVPool
from kvcm.gpu_tier.runtime import NullRuntime

torch.set_num_threads(1)  # for tensors this small, threads mostly wait for each other

__all__ = ["PATIENT", "TierEngine", "dsa_spec"]

PATIENT = TierSettings(call_seconds=20.0, register_seconds=20.0, batch_bytes=1000)
WAIT_SECONDS = 60.0


def dsa_spec(geometry: KVGeometry, layout: Layout, index_dim: int = 128) -> str:
    return format_of(geometry, layout).sidecar_spec("dsa", {"index_dim": index_dim})


class TierEngine:
    """What an engine has of the tier, without the computing.

    Args:
        manager: address.
        instance_id: shared with other engines.
        sidecar: spec of its algorithm's sidecar, "" for none.
        is_required: whether the algorithm cannot do without.
        others: specs of other algorithms that the instance has.
        first_head: of the KV heads that it holds.
    """

    def __init__(
        self,
        manager: str,
        instance_id: str,
        *,
        geometry: KVGeometry = MHA,
        layout: Layout = Layout.PAGE_FIRST,
        sidecar: str = "",
        is_required: bool = True,
        others: Sequence[str] = (),
        group: str = "default",
        pages: int = 16,
        first_head: int = 0,
        settings: TierSettings = PATIENT,
        **changes: Any,
    ) -> None:
        self.host = HostKVPool(geometry, pages, layout, NullRuntime())
        self.sidecar = sidecar
        names = {*others, sidecar} - {""}
        parts = BlockParts(geometry.page_bytes, dict.fromkeys(names, SIDECAR_BYTES))
        kv = format_of(geometry, layout, first_head)
        self.connector = ManagerConnector.connect(manager, group, instance_id, kv, parts, settings=settings)
        spec = SidecarSpec(sidecar, SIDECAR_BYTES, is_required) if sidecar else None
        self.store = PrefixStore(self.host, self.connector, self.connector.page_keys, spec, **changes)

    def serve(self, tokens: Sequence[int]) -> None:
        """Compute a prompt, publish it, and wait for that."""
        keys = self.connector.page_keys(tokens)
        pages = self.host.allocator.alloc(len(keys))
        for page, key in zip(pages, keys, strict=True):
            data = block_bytes(key, KV_SPEC, self.host.geometry.page_bytes)
            for piece in self.host.page_pieces(page):
                piece.copy_(data[: piece.numel()])
                data = data[piece.numel() :]
        rows = [block_bytes(key, self.sidecar, SIDECAR_BYTES) for key in keys]
        self.store.publish(tokens, pages, len(tokens), sidecar=torch.stack(rows) if self.sidecar else None)
        self.host.allocator.free(pages)
        assert self.store.flush(WAIT_SECONDS)

    def attach(self, tokens: Sequence[int]) -> AttachedPrefix:
        """Attach what is known of a prompt, and check its bytes."""
        prefix = self.store.attach(tokens, WAIT_SECONDS)
        keys = self.connector.page_keys(tokens)[: len(prefix.pages)]
        for page, key in zip(prefix.pages, keys, strict=True):
            found = torch.cat([piece.flatten() for piece in self.host.page_pieces(page)])
            assert torch.equal(found, block_bytes(key, KV_SPEC, self.host.geometry.page_bytes))
        data = sidecars_of(prefix)
        if len(data):
            wanted = torch.stack([block_bytes(key, self.sidecar, SIDECAR_BYTES) for key in keys[: len(data)]])
            assert torch.equal(data, wanted)
        return prefix

    def attached_tokens(self, tokens: Sequence[int]) -> int:
        """Attach what is known of a prompt, check its bytes, and give it back."""
        prefix = self.attach(tokens)
        self.store.release(prefix)
        return prefix.n_tokens

    def close(self) -> None:
        self.connector.close()

    def __enter__(self) -> TierEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def tokens_of(pages: int, seed: int = 0) -> list[int]:
    """Return a prompt of so many full pages, and the token that has to be computed."""
    return [seed * 10_000 + position for position in range(pages * PAGE + 1)]
