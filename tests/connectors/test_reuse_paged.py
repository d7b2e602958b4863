"""Calls whose KV lies in a pool of blocks, against a real manager: bounded memory, and the tokens of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from late_storage import use_late_storage
from reuse_cases import BLOCK, MODEL, NEW, PATIENT, Connect, Stored, checked, make_model, padded, plain, prompt, run

from kvcm.connectors.transformers import KVReuse
from kvcm.connectors.transformers.paged_cache import BlockPool

POOL = replace(PATIENT, pool_blocks=40)


def pool_of(reuse: KVReuse) -> BlockPool:
    assert reuse._pool is not None
    return reuse._pool


def in_pool(reuse: KVReuse, ids: torch.Tensor) -> list[bytes]:
    """Return the stored form of the blocks that the pool keeps for some tokens, by plain indexing."""
    pool = pool_of(reuse)
    blocks = pool.find(reuse.block_keys(ids[0].tolist()))
    pool.release(blocks)
    return [
        torch.stack([tensor[block] for layer in sorted(pool.memory) for tensor in pool.memory[layer]]).numpy().tobytes()
        for block in blocks
    ]


@pytest.mark.feature("transformers", "paged KV", "the same bytes per block")
def test_blocks_are_loaded_into_other_blocks_and_saved_from_them(connect: Connect, stored: Stored) -> None:
    """Byte by byte: the blocks that the first process computed, the stored ones, and those that the second loaded."""
    ids = prompt(100)
    expected = plain(ids)
    first = connect(settings=POOL)
    output, report = run(first, ids)
    assert torch.equal(output, expected)
    assert (report.loaded_tokens, report.local_tokens, report.blocks_saved, report.reason) == (0, 0, 7, "")
    assert in_pool(first, output) == stored(first, output[0].tolist())

    second = connect(make_model(), settings=POOL)
    run(second, prompt(37, seed=5))  # so that other blocks are free
    report = checked(second, expected, ids)
    assert (report.loaded_tokens, report.local_tokens) == (96, 0)
    assert in_pool(second, ids) == stored(first, ids[0].tolist()) == in_pool(first, ids)
    keys = first.block_keys(ids[0].tolist())
    assert pool_of(first).find(keys) != pool_of(second).find(keys)


def test_the_next_call_reads_memory(connect: Connect) -> None:
    reuse, ids = connect(settings=POOL), prompt(50)
    for turn in range(4):
        output, report = run(reuse, ids)
        assert torch.equal(output, plain(ids))
        known = (50 + turn * (NEW + 10) - 11) // BLOCK * BLOCK if turn else 0
        assert (report.local_tokens, report.loaded_tokens, report.bytes_loaded) == (known, 0, 0)
        ids = torch.cat([output, prompt(10, seed=100 + turn)], dim=1)


@pytest.mark.feature("transformers", "paged KV", "partial hit")
def test_blocks_missing_from_the_pool_are_loaded(connect: Connect) -> None:
    ids = prompt(160)
    run(connect(), ids)
    reuse = connect(settings=POOL)
    run(reuse, ids[:, :70], max_new_tokens=1)
    output, report = run(reuse, ids)
    assert (report.local_tokens, report.loaded_tokens) == (64, 80)
    assert report.bytes_loaded == 5 * reuse.parts.block_bytes
    assert torch.equal(output, plain(ids))


@pytest.mark.feature("transformers", "paged KV")
def test_many_prompts_use_the_same_memory(connect: Connect) -> None:
    reuse = connect(settings=replace(POOL, pool_blocks=12))
    before = {id(tensor) for pair in pool_of(reuse).memory.values() for tensor in pair}
    for seed in range(8):
        ids = prompt(100 + seed, seed=seed)
        report = checked(reuse, plain(ids), ids)
        assert report.reason == ""
        assert pool_of(reuse).available == 12
    assert {id(tensor) for pair in pool_of(reuse).memory.values() for tensor in pair} == before
    _, report = run(reuse, prompt(100, seed=0))  # pushed out of the pool, not out of the storage
    assert (report.local_tokens, report.loaded_tokens) == (0, 96)


def test_a_call_without_space_has_memory_of_its_own(connect: Connect) -> None:
    reuse, ids = connect(settings=replace(POOL, pool_blocks=4)), prompt(100)
    for tokens in (0, 96):
        report = checked(reuse, plain(ids), ids)
        assert report.loaded_tokens == tokens
        assert report.reason == "the pool had too few free blocks for this call"
    assert pool_of(reuse).available == 4


def test_a_cache_that_is_returned_stays(connect: Connect) -> None:
    reuse, ids = connect(settings=POOL), prompt(100)
    output, report = run(reuse, ids, return_dict_in_generate=True)
    held = [layer.keys.clone() for layer in output.past_key_values.layers]
    run(reuse, prompt(300, seed=3))
    assert all(torch.equal(one, layer.keys) for one, layer in zip(held, output.past_key_values.layers, strict=True))
    assert report.reason == ""


@pytest.mark.feature("transformers", "paged KV", "several requests at once")
def test_batches(connect: Connect) -> None:
    ids, mask = padded([prompt(tokens, row) for row, tokens in enumerate((100, 37, 80, 5))])
    expected = MODEL.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    reuse = connect(settings=POOL)
    for local in ([0] * 4, [96, 32, 64, 0]):
        report = checked(reuse, expected, ids, mask)
        assert [row.local_tokens for row in report.rows] == local
    report = checked(connect(settings=POOL), expected, ids, mask)
    assert [row.loaded_tokens for row in report.rows] == [96, 32, 64, 0]
    checked(reuse, expected[[0, 2]], ids[[0, 2]], mask[[0, 2]])


def test_the_pool_serves_while_the_manager_is_away(connect: Connect, closed_port: int) -> None:
    reuse, ids = connect(address=f"127.0.0.1:{closed_port}", settings=replace(POOL, register_seconds=0.2)), prompt(100)
    for local in (0, 96):
        report = checked(reuse, plain(ids), ids)
        assert (report.local_tokens, report.loaded_tokens) == (local, 0)


def test_a_call_that_fails_gives_its_blocks_back(connect: Connect) -> None:
    reuse = connect(settings=POOL)

    def fail(input_ids: torch.Tensor, scores: object, **options: Any) -> torch.Tensor:
        raise RuntimeError("the caller's own criterion")

    with pytest.raises(RuntimeError, match="the caller's own"):
        run(reuse, prompt(100), stopping_criteria=[fail])
    assert torch.equal(run(reuse, prompt(50))[0], plain(prompt(50)))
    assert pool_of(reuse).available == 40


@pytest.mark.feature("transformers", "paged KV")
def test_blocks_that_a_late_load_may_change_never_come_back(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt(100)
    expected, _ = run(connect(), ids)
    storages = use_late_storage(monkeypatch, blocks=3)
    reuse = connect(settings=replace(POOL, transfer_threads=1))
    with MODEL.register_forward_pre_hook(lambda *_: storages[0].scribble()):
        output, report = run(reuse, ids)
        assert report.loaded_tokens == 3 * BLOCK
        assert torch.equal(output, expected)
        assert pool_of(reuse).available == 40 - 3
        for seed in range(4):
            other = prompt(150, seed=seed)
            assert torch.equal(run(reuse, other)[0], plain(other))
    assert storages[0].late
