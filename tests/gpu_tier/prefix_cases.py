"""Blocks whose bytes follow from their key: an attached page shows whether they are the right ones."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from memory_connector import MemoryConnector, MemoryStorage
from torch import Tensor

from kvcm.gpu_tier.connector import KV_SPEC, KVFormat
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind, Layout
from kvcm.gpu_tier.manager.prefixes import AttachedPrefix, PrefixAttach, PrefixStore, SidecarSpec
from kvcm.gpu_tier.pools.host_pool import HostKVPool
from kvcm.gpu_tier.runtime import NullRuntime

PAGE = 4
MHA = KVGeometry(KVKind.MHA, 2, 2, 4, 4, KVDtype.F16, page_size=PAGE)
MLA = KVGeometry(KVKind.MLA, 2, 1, 6, 4, KVDtype.BF16, page_size=PAGE)
SIDECAR_BYTES = 24


def page_keys(token_ids: Sequence[int], page: int = PAGE) -> list[int]:
    """Return a key per full page that depends on all tokens before."""
    keys, before = [], b""
    for start in range(0, len(token_ids) - len(token_ids) % page, page):
        before = hashlib.sha256(before + repr(list(token_ids[start : start + page])).encode()).digest()
        keys.append(int.from_bytes(before[:7], "little"))
    return keys


def format_of(geometry: KVGeometry, layout: Layout = Layout.PAGE_FIRST, first_head: int = 0) -> KVFormat:
    rope = {"theta": 10_000.0}
    return KVFormat.of(geometry, layout, model="test", weights="0", rope=rope, first_head=first_head)


def block_bytes(key: int, name: str, count: int) -> Tensor:
    """Return the bytes that a part of a block has."""
    seed = hashlib.sha256(f"{key} {name}".encode()).digest()[:7]
    generator = torch.Generator().manual_seed(int.from_bytes(seed, "little"))
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def sidecars_of(prefix: AttachedPrefix) -> Tensor:
    """Return the sidecars of an attached prefix, one row per page."""
    pages = [run.first_page + row for run in prefix.sidecars for row in range(len(run.rows))]
    assert pages == list(range(len(pages)))
    return torch.cat([torch.empty(0, SIDECAR_BYTES, dtype=torch.uint8), *(run.rows for run in prefix.sidecars)])


class Tier:
    """A host pool and a prefix store, and the part of an engine that computes pages."""

    def __init__(
        self,
        storage: MemoryStorage | None,
        *,
        geometry: KVGeometry = MHA,
        layout: Layout = Layout.PAGE_FIRST,
        pages: int = 16,
        sidecar: str = "required",
        parameters: int = 1,
        is_manual: bool = False,
        most_writing: float = 1.0,
    ) -> None:
        self.host = HostKVPool(geometry, pages, layout, NullRuntime())
        name = format_of(geometry, layout).sidecar_spec("dsa", {"index_dim": parameters})
        self.spec = SidecarSpec(name, SIDECAR_BYTES, sidecar == "required") if sidecar else None
        self.connector = MemoryConnector(storage or MemoryStorage(), is_manual=is_manual)
        has_storage = self.connector if storage is not None else None
        self.store = PrefixStore(self.host, has_storage, page_keys, self.spec, most_writing)
        self.allocator = self.host.allocator

    def compute(self, tokens: Sequence[int], prefix: AttachedPrefix | None = None) -> list[int]:
        """Return pages with all full blocks of some tokens, the attached ones among them."""
        pages = list(prefix.pages) if prefix is not None else []
        keys = page_keys(tokens)
        new = self.allocator.alloc(len(keys) - len(pages))
        for page, key in zip(new, keys[len(pages) :], strict=True):
            data = block_bytes(key, KV_SPEC, self.host.geometry.page_bytes)
            for piece in self.host.page_pieces(page):
                piece.copy_(data[: piece.numel()])
                data = data[piece.numel() :]
        return pages + new

    def sidecar(self, tokens: Sequence[int], first_page: int = 0) -> Tensor | None:
        """Return the sidecars of all full blocks from a page on."""
        if self.spec is None:
            return None
        keys = page_keys(tokens)[first_page:]
        rows = [block_bytes(key, self.spec.name, SIDECAR_BYTES) for key in keys]
        return torch.stack(rows) if rows else torch.empty(0, SIDECAR_BYTES, dtype=torch.uint8)

    def serve(self, tokens: Sequence[int]) -> None:
        """Compute a prompt, publish it, and end the request."""
        self.allocator.free(self.publish(tokens))
        self.store.step()

    def publish(self, tokens: Sequence[int]) -> list[int]:
        """Compute a prompt and publish it; returns its pages."""
        pages = self.compute(tokens)
        self.store.publish(tokens, pages, len(tokens), sidecar=self.sidecar(tokens))
        return pages

    @property
    def sidecar_name(self) -> str:
        assert self.spec is not None
        return self.spec.name

    def attached(self, attach: PrefixAttach) -> AttachedPrefix:
        """Return the prefix of an attach that is done."""
        prefix = self.store.poll(attach)
        assert prefix is not None
        return prefix

    def end(self, prefix: AttachedPrefix) -> None:
        """Give a prefix back; nothing else is held."""
        self.store.release(prefix)
        self.check_nothing_is_held()

    def attach(self, tokens: Sequence[int]) -> AttachedPrefix:
        """Attach a prefix from a storage that answers at once."""
        attach = self.store.begin(tokens)
        for _ in range(4):
            prefix = self.store.poll(attach)
            if prefix is not None:
                return prefix
        raise AssertionError("no answer")

    def check(self, tokens: Sequence[int], prefix: AttachedPrefix) -> None:
        """Check that an attached prefix has the bytes that its tokens have."""
        assert prefix.n_tokens == len(prefix.pages) * PAGE < len(tokens)
        keys = page_keys(tokens)
        for page, key in zip(prefix.pages, keys, strict=False):
            found = torch.cat([piece.flatten() for piece in self.host.page_pieces(page)])
            assert torch.equal(found, block_bytes(key, KV_SPEC, self.host.geometry.page_bytes))
        if self.spec is None:
            assert not prefix.sidecars
            return
        data = sidecars_of(prefix)
        if self.spec.is_required:
            assert len(data) == len(prefix.pages)
        wanted = [block_bytes(key, self.spec.name, SIDECAR_BYTES) for key in keys[: len(data)]]
        assert torch.equal(data, torch.stack(wanted) if wanted else data)

    def check_nothing_is_held(self) -> None:
        """Check that no page is held and nothing of the storage is pinned."""
        for number in list(self.connector.lookups):
            self.connector.answer(number)  # those that are not waited for
        self.store.step()
        assert self.store.is_idle
        assert self.allocator.in_use == 0
        assert self.allocator.available == self.allocator.num_pages
        assert not any(self.connector.storage.pins.values())
        assert not self.connector.lookups
        assert not self.connector.loads
