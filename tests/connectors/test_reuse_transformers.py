"""Reuse inside transformers, against a real manager: the same tokens, and the right bytes in every block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from manager_process import ManagerProcess
from reuse_cases import (
    BLOCK,
    MODEL,
    NEW,
    PATIENT,
    Connect,
    Stored,
    block_bytes,
    files_of,
    make_model,
    plain,
    prompt,
    run,
)
from transformers import DynamicCache

from connectors.client import ManagerClient
from connectors.layout import staging
from connectors.transformers import ReuseSettings


def test_known_prefixes_are_loaded_and_tokens_stay_the_same(connect: Connect) -> None:
    reuse, ids = connect(), prompt(100)
    expected = plain(ids)
    first, report = run(reuse, ids)
    assert torch.equal(first, expected)
    # 124 tokens, of which the KV of 123 is computed: 7 full blocks
    assert (report.loaded_tokens, report.blocks_saved, report.reason) == (0, 7, "")
    assert report.bytes_saved == 7 * reuse.parts.block_bytes
    second, report = run(reuse, ids)
    assert torch.equal(second, expected)
    assert (report.prompt_tokens, report.matched_tokens, report.loaded_tokens, report.new_tokens) == (100, 96, 96, NEW)
    assert report.bytes_loaded == 6 * reuse.parts.block_bytes
    assert (report.blocks_saved, report.bytes_saved) == (0, 0)
    assert 0 < report.load_seconds < report.first_token_seconds < report.total_seconds


def test_another_process_of_the_same_model_shares(connect: Connect) -> None:
    ids = prompt(100)
    run(connect(), ids)
    twin = make_model()
    output, report = run(connect(twin), ids)
    assert torch.equal(output, plain(ids, twin))
    assert report.loaded_tokens == 96


@pytest.mark.feature("transformers", "conversation of several turns")
def test_answers_are_reused_by_the_next_turn(connect: Connect) -> None:
    reuse, ids = connect(), prompt(50)
    for turn in range(4):
        expected = plain(ids)
        output, report = run(reuse, ids)
        assert torch.equal(output, expected)
        known = (50 + turn * (NEW + 10)) if turn else 0
        # everything but the last token of the last answer, and the ten tokens since, was computed before
        assert report.loaded_tokens == (0 if not turn else (known - 10 - 1) // BLOCK * BLOCK)
        ids = torch.cat([output, prompt(10, seed=100 + turn)], dim=1)


@pytest.mark.feature("transformers", "the same bytes per block")
def test_stored_bytes_are_the_computed_bytes_block_by_block(connect: Connect, stored: Stored) -> None:
    reuse, ids = connect(), prompt(100)
    output, _ = run(reuse, ids)
    cache = DynamicCache(config=MODEL.config)
    with torch.no_grad():  # as it was computed: the prompt at once, then token by token
        MODEL(ids, past_key_values=cache)
        for position in range(100, 123):
            MODEL(output[:, position : position + 1], past_key_values=cache)
    blocks = stored(reuse, output[0].tolist())
    assert [block == block_bytes(cache, index) for index, block in enumerate(blocks)] == [True] * 7
    assert len(set(blocks)) == 7

    # A second turn computes only what is new, on top of what it loaded: also bit by bit what is computed here.
    longer = torch.cat([output, prompt(40, seed=5)], dim=1)
    final, report = run(reuse, longer, max_new_tokens=2)
    assert report.loaded_tokens == 112
    cache.crop(112 - 123)
    with torch.no_grad():
        MODEL(longer[:, 112:], past_key_values=cache)
    blocks = stored(reuse, final[0].tolist())
    assert [block == block_bytes(cache, index) for index, block in enumerate(blocks)] == [True] * 10


@pytest.mark.parametrize("most_pieces", [1024, 1])
def test_each_block_is_loaded_to_its_place(
    connect: Connect, stored: Stored, monkeypatch: pytest.MonkeyPatch, most_pieces: int
) -> None:
    """Equal tokens do not show it (see below): the cache that was used is compared with the store, block by block."""
    monkeypatch.setattr(staging, "_MAX_PIECES", most_pieces)  # with 1, blocks go through the staging buffer
    reuse, ids = connect(), prompt(300)
    run(reuse, ids)
    output, report = run(reuse, ids, return_dict_in_generate=True)
    assert report.loaded_tokens == 288
    blocks = stored(reuse, output.sequences[0].tolist())
    assert [block == block_bytes(output.past_key_values, index) for index, block in enumerate(blocks)] == [True] * 20


def test_generation_inside_inference_mode(connect: Connect) -> None:
    reuse, ids = connect(), prompt(100)
    expected = plain(ids)
    with torch.inference_mode():
        first, report = run(reuse, ids)
        assert report.blocks_saved == 7
        second, report = run(reuse, ids)
    assert report.loaded_tokens == 96
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


@pytest.mark.feature("transformers", "changed bytes, when not looked for, change the tokens")
def test_loaded_kv_is_used(connect: Connect, manager: ManagerProcess, instance_id: str) -> None:
    """Control of all other tests: wrong bytes change the tokens, so right tokens mean something."""
    reuse, ids = connect(settings=replace(PATIENT, checksums=False)), prompt(100)
    expected, _ = run(reuse, ids)
    for path in files_of(manager, instance_id):
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.float32)
        swapped = data.view(-1, 3, 2, 2 * BLOCK * 16).flip(2)  # [block][layer][K, V][...]
        path.write_bytes(swapped.contiguous().numpy().tobytes())
    output, report = run(reuse, ids)
    assert report.loaded_tokens == 96
    assert not torch.equal(output, expected)


def test_permuted_blocks_would_go_unnoticed_by_tokens(
    connect: Connect, manager: ManagerProcess, instance_id: str
) -> None:
    """Why bytes are compared too: K carries its position, and attention does not care where a block lies."""
    reuse, ids = connect(settings=replace(PATIENT, checksums=False)), prompt(100)
    expected, _ = run(reuse, ids, max_new_tokens=1)
    (path,) = files_of(manager, instance_id)
    data = path.read_bytes()
    size = reuse.parts.block_bytes
    path.write_bytes(b"".join(data[start : start + size] for start in reversed(range(0, 6 * size, size))))
    output, report = run(reuse, ids, max_new_tokens=1)
    assert report.loaded_tokens == 96
    assert torch.equal(output, expected)


@pytest.mark.feature("transformers", "partial hit")
def test_partial_hits(connect: Connect) -> None:
    reuse, ids = connect(), prompt(100)
    run(reuse, ids)
    other = torch.cat([ids[:, :70], prompt(50, seed=9)], dim=1)
    output, report = run(reuse, other)
    assert torch.equal(output, plain(other))
    assert report.loaded_tokens == 64
    _, report = run(reuse, other)
    assert report.loaded_tokens == 112


@pytest.mark.parametrize(("tokens", "loaded"), [(96, 80), (97, 96), (BLOCK, 0), (BLOCK + 1, BLOCK), (5, 0), (1, 0)])
def test_one_token_is_always_computed(connect: Connect, tokens: int, loaded: int) -> None:
    reuse, ids = connect(), prompt(tokens)
    run(reuse, ids)
    output, report = run(reuse, ids)
    assert torch.equal(output, plain(ids))
    assert report.loaded_tokens == loaded


def test_sampling_with_the_same_seed_gives_the_same_tokens(connect: Connect) -> None:
    reuse, ids = connect(), prompt(100)
    outputs = []
    for generate in (lambda **a: plain(ids, **a), *[lambda **a: run(reuse, ids, **a)[0]] * 2):
        torch.manual_seed(3)
        outputs.append(generate(do_sample=True, temperature=0.7, top_k=20))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_reading_without_publishing(connect: Connect) -> None:
    ids = prompt(100)
    reader = connect(publish=False)
    _, report = run(reader, ids)
    assert (report.loaded_tokens, report.blocks_saved) == (0, 0)
    run(connect(), ids)
    _, report = run(reader, ids)
    assert (report.loaded_tokens, report.blocks_saved) == (96, 0)
    assert "start_write" not in reader.counters


def test_half_precision(connect: Connect) -> None:
    model, ids = make_model(dtype=torch.bfloat16), prompt(100)
    reuse = connect(model)
    assert reuse.parts.kv[0].layout.dtype == "bfloat16"
    expected = plain(ids, model)
    assert torch.equal(run(reuse, ids)[0], expected)
    output, report = run(reuse, ids)
    assert report.loaded_tokens == 96
    assert torch.equal(output, expected)


def test_memory_that_must_be_staged(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_MAX_PIECES", 1)  # as if the cache lay in too many pieces
    ids = prompt(300)
    reuse = connect(settings=ReuseSettings(staging_blocks=3, call_seconds=20.0))
    expected = plain(ids)
    assert torch.equal(run(reuse, ids)[0], expected)
    monkeypatch.undo()
    output, report = run(connect(), ids)  # what was staged is stored like everything else
    assert report.loaded_tokens == 288
    assert torch.equal(output, expected)
    monkeypatch.setattr(staging, "_MAX_PIECES", 1)
    output, report = run(reuse, ids)
    assert report.loaded_tokens == 288
    assert torch.equal(output, expected)


def test_long_answers_grow_the_cache(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.transformers.reuse._MAX_SPARE_TOKENS", 4)
    reuse, ids = connect(), prompt(40)
    output, report = run(reuse, ids, max_new_tokens=200)
    assert torch.equal(output, plain(ids, max_new_tokens=200))
    assert report.blocks_saved == 239 // BLOCK
    longer = torch.cat([output, prompt(5)], dim=1)
    again, report = run(reuse, longer)
    assert torch.equal(again, plain(longer))
    assert report.loaded_tokens == 239 // BLOCK * BLOCK


def test_only_the_tail_of_a_chain_is_sent_with_its_parent(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[list[int], int | None]] = []
    start_write = ManagerClient.start_write

    def spy(self: ManagerClient, keys: list[int], *, parent_block_key: int | None, **options: Any) -> object:
        sent.append((list(keys), parent_block_key))
        return start_write(self, keys, parent_block_key=parent_block_key, **options)

    monkeypatch.setattr(ManagerClient, "start_write", spy)
    reuse, ids = connect(), prompt(50)
    output, _ = run(reuse, ids, max_new_tokens=40)
    longer = torch.cat([output, prompt(30)], dim=1)
    run(reuse, longer, max_new_tokens=1)
    keys = reuse.block_keys(longer[0].tolist())
    assert (
        sent
        == [
            (keys[:3], None),  # the prompt
            ([keys[3]], keys[2]),  # filled while tokens were generated
            ([keys[4]], keys[3]),
            (keys[5:7], keys[4]),  # the second prompt, behind what was loaded
        ]
    )


def test_long_chains_are_sent_in_batches(connect: Connect) -> None:
    size = connect().parts.block_bytes
    reuse, ids = connect(settings=ReuseSettings(save_batch_bytes=3 * size, call_seconds=20.0)), prompt(160)
    _, report = run(reuse, ids, max_new_tokens=1)
    assert report.blocks_saved == 10
    assert reuse.counters["start_write"].ok == 4
    assert run(reuse, ids)[1].loaded_tokens == 144
