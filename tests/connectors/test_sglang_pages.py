"""Pages of SGLang's host pools as memory: every layout, byte by byte."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from host_pools import PAGE, MHATokenToKVPoolHost, MLATokenToKVPoolHost, StrangePoolHost, slots

from connectors.sglang.page_memory import PageMemory
from kvcm.model.errors import InvalidArgumentError

_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
_POOLS = (MHATokenToKVPoolHost, MLATokenToKVPoolHost)


def stored(memory: PageMemory, *pages: int) -> list[bytes]:
    return [b"".join(piece.tobytes() for piece in page) for page in memory.pages(slots(*pages))]


def expected(pool: MHATokenToKVPoolHost, page: int) -> bytes:
    """The bytes of a page as the documentation has them, by plain indexing."""
    tokens = slice(page * PAGE, (page + 1) * PAGE)
    if pool.layout == "layer_first":
        part = pool.kv_buffer[:, :, tokens]  # [tensor][layer][token][head][dim]
    elif pool.layout == "page_first":
        part = pool.kv_buffer[:, tokens]  # [tensor][token][layer][head][dim]
    else:
        part = pool.kv_buffer[:, page]
    return part.contiguous().numpy().tobytes()


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("kind", _POOLS)
def test_pages_are_stored_in_the_documented_order(kind: type[MHATokenToKVPoolHost], layout: str) -> None:
    pool = kind(layout)
    memory = PageMemory(pool)
    assert stored(memory, 3, 0, 4) == [expected(pool, page) for page in (3, 0, 4)]
    assert memory.page_bytes == len(expected(pool, 0))


@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("kind", _POOLS)
def test_what_was_stored_of_one_pool_fills_another(kind: type[MHATokenToKVPoolHost], layout: str) -> None:
    source, target = kind(layout), kind(layout, fill=10_000)
    from_memory, to_memory = PageMemory(source), PageMemory(target)
    untouched = stored(to_memory, 0, 2, 3, 4)
    to_memory.fill(to_memory.pages(slots(1))[0], np.frombuffer(stored(from_memory, 3)[0], np.uint8))
    assert stored(to_memory, 1) == stored(from_memory, 3)
    assert stored(to_memory, 0, 2, 3, 4) == untouched


def test_layers_apart_and_layers_together_are_the_same_stored_pages() -> None:
    apart, together = MHATokenToKVPoolHost("layer_first"), MHATokenToKVPoolHost("page_first_direct")
    for page in range(5):
        tokens = slice(page * PAGE, (page + 1) * PAGE)
        together.kv_buffer[:, page] = apart.kv_buffer[:, :, tokens]
    one, other = PageMemory(apart), PageMemory(together)
    assert stored(one, 0, 1, 4) == stored(other, 0, 1, 4)
    assert one.format.text == other.format.text


def test_other_orders_and_shapes_have_other_formats() -> None:
    formats = {PageMemory(kind(layout)).format.text for kind in _POOLS for layout in _LAYOUTS}
    assert len(formats) == 2 * (len(_LAYOUTS) - 1)
    found = PageMemory(MHATokenToKVPoolHost("page_first")).format
    others = [
        dataclasses.replace(found, **change)
        for change in ({"layers": (0, 4)}, {"layers": (1, 4)}, {"tokens": 8}, {"heads": 4}, {"dim": 16})
    ]
    others.append(dataclasses.replace(found, dtype="bfloat16"))
    assert len({found.text, *(other.text for other in others)}) == 7


def test_half_precision_is_bytes_too() -> None:
    pool = MHATokenToKVPoolHost("page_first_direct")
    pool.kv_buffer, pool.dtype = pool.kv_buffer.to(torch.bfloat16), torch.bfloat16
    memory = PageMemory(pool)
    assert stored(memory, 2)[0] == pool.kv_buffer[:, 2].contiguous().view(torch.uint8).numpy().tobytes()
    assert "bfloat16" in memory.format.text


def test_pools_whose_pages_cannot_be_stored_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="host pool is StrangePoolHost, must be one of MHATokenToKVPoolHost"):
        PageMemory(StrangePoolHost("page_first"))
    pool = MHATokenToKVPoolHost("page_first")
    pool.layout = "page_unified"
    with pytest.raises(InvalidArgumentError, match="hicache_mem_layout is 'page_unified', must be one of layer_first"):
        PageMemory(pool)
    pool = MHATokenToKVPoolHost("layer_first")
    pool.target_layer_num = 2
    with pytest.raises(InvalidArgumentError, match="layers of a draft model"):
        PageMemory(pool)
    pool = MHATokenToKVPoolHost("page_first")
    pool.kv_buffer = pool.kv_buffer.transpose(1, 2)
    with pytest.raises(InvalidArgumentError, match="not one piece of host memory"):
        PageMemory(pool)


def test_slots_that_are_no_pages_of_the_pool_are_refused() -> None:
    pool = MHATokenToKVPoolHost("page_first")
    memory = PageMemory(pool)
    with pytest.raises(InvalidArgumentError, match="must be whole pages"):
        memory.pages(slots(1)[:2])
    pool.kv_buffer = pool.kv_buffer.clone()  # what the pool says now is elsewhere
    with pytest.raises(InvalidArgumentError, match="not in the host pool"):
        memory.pages(slots(1))
