"""Reuse inside transformers, against a real manager: the same tokens, and the right bytes in every block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import torch
import xxhash
from manager_process import ManagerProcess
from pool_parts import CAPACITY, NODE
from reuse_cases import BLOCK, MODEL, PATIENT, Connect, Find, Stored, checked, damage, plain, prompt, read_block, run
from reuse_models import model_of
from reuse_process import BATCH
from script_process import run_script
from transformers import Cache, DynamicCache
from waiting import until

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.layout import tensors
from kvcm.connectors.transformers import KVReuse


def block_bytes(cache: Cache, block: int) -> bytes:
    """Return a block of a cache in the stored format, by plain indexing."""
    tokens = slice(block * BLOCK, (block + 1) * BLOCK)
    parts = [tensor[0, :, tokens] for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return torch.stack(parts).contiguous().numpy().tobytes()


@pytest.mark.feature("transformers", "the same bytes per block")
def test_stored_bytes_are_the_computed_bytes_block_by_block(connect: Connect, stored: Stored) -> None:
    reuse, ids = connect(), prompt(100)
    output, report = run(reuse, ids)
    assert report.bytes_saved == 7 * reuse.parts.block_bytes
    cache = DynamicCache(config=MODEL.config)
    with torch.no_grad():  # as it was computed: the prompt at once, then token by token
        MODEL(ids, past_key_values=cache)
        for position in range(100, 123):
            MODEL(output[:, position : position + 1], past_key_values=cache)
    blocks = stored(reuse, output[0].tolist())
    assert [block == block_bytes(cache, index) for index, block in enumerate(blocks)] == [True] * 7
    assert len(set(blocks)) == 7

    # A second turn computes only new tokens, on top of the loaded blocks, bit by bit as computed here.
    longer = torch.cat([output, prompt(40, seed=5)], dim=1)
    final, report = run(reuse, longer, max_new_tokens=2)
    assert report.loaded_tokens == 112
    cache.crop(112 - 123)
    with torch.no_grad():
        MODEL(longer[:, 112:], past_key_values=cache)
    blocks = stored(reuse, final[0].tolist())
    assert [block == block_bytes(cache, index) for index, block in enumerate(blocks)] == [True] * 10


def test_staged_blocks_are_loaded_to_their_places(
    connect: Connect, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal tokens do not show it, since K carries its position: the cache is compared with the store."""
    monkeypatch.setattr(tensors, "_MAX_PIECES", 1)
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
    prompt_and_answer = [(keys[:3], None), ([keys[3]], keys[2]), ([keys[4]], keys[3])]
    assert sent == [*prompt_and_answer, (keys[5:7], keys[4])]  # the last is the second prompt, behind the loaded blocks


def test_long_chains_are_sent_in_batches(connect: Connect) -> None:
    size = connect().parts.block_bytes
    reuse, ids = connect(settings=replace(PATIENT, save_batch_bytes=3 * size)), prompt(160)
    _, report = run(reuse, ids, max_new_tokens=1)
    assert report.blocks_saved == 10
    assert reuse.counters["start_write"].ok == 4
    assert run(reuse, ids)[1].loaded_tokens == 144


# ---- Bytes that change on the disk: detected at the load, computed again, forgotten and saved again ----


@pytest.fixture(params=["memory of the cache", "staging"])
def any_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks move from and to the cache itself, or through the staging buffer."""
    if request.param == "staging":
        monkeypatch.setattr(tensors, "_MAX_PIECES", 1)


@pytest.mark.usefixtures("any_memory")
def test_saved_blocks_have_their_checksums(connect: Connect, find: Find) -> None:
    reuse, ids = connect(), prompt(100)
    run(reuse, ids)
    locations = find(reuse, ids)
    assert len(locations) == 6
    assert [location.checksums for location in locations] == [
        {"tp0": xxhash.xxh3_64_intdigest(read_block(location.uris["tp0"]))} for location in locations
    ]


@pytest.mark.feature("transformers", "changed bytes are found")
@pytest.mark.usefixtures("any_memory")
def test_a_corrupt_block_is_saved_again(connect: Connect, find: Find) -> None:
    reuse, ids = connect(), prompt(300)
    expected, report = run(reuse, ids)
    assert torch.equal(expected, plain(ids))
    assert report.blocks_saved == 20
    before = find(reuse, ids)
    damage(before[9].uris["tp0"])
    report = checked(reuse, expected, ids)
    assert (report.matched_tokens, report.loaded_tokens, report.blocks_corrupt) == (288, 9 * BLOCK, 1)
    assert report.reason.startswith("block 9: the bytes have checksum ")
    assert report.blocks_saved == 1  # its location was removed at the manager, and those behind it are right
    after = find(reuse, ids)
    assert [index for index in range(18) if before[index] != after[index]] == [9]
    assert after[9].checksums == before[9].checksums
    report = checked(reuse, expected, ids)
    assert (report.loaded_tokens, report.blocks_corrupt, report.reason) == (288, 0, "")


def test_corrupt_blocks_are_reported_at_once(connect: Connect, find: Find) -> None:
    reuse, ids = connect(), prompt(100)
    expected, _ = run(reuse, ids)
    for location in find(reuse, ids)[::2]:
        damage(location.uris["tp0"])
    report = checked(reuse, expected, ids)
    assert (report.loaded_tokens, report.blocks_corrupt, report.blocks_saved) == (0, 3, 3)
    assert run(reuse, ids)[1].loaded_tokens == 96


def test_blocks_without_checksums_are_loaded_as_they_are(connect: Connect, find: Find) -> None:
    without, ids = connect(settings=replace(PATIENT, checksums=False)), prompt(100)
    expected, _ = run(without, ids)
    assert [each.checksums for each in find(without, ids)] == [{}] * 6
    report = checked(connect(), expected, ids)
    assert (report.loaded_tokens, report.reason) == (96, "")


# ---- Reuse through a memory pool: the connector maps it and reports it to the manager; other nodes miss ----


def saves(reuse: KVReuse, ids: torch.Tensor) -> bool:
    """Generate, and return whether blocks were saved: not before the manager has looked at the pool."""
    report = checked(reuse, plain(ids), ids)
    return report.blocks_saved > 0


def connected(manager: ManagerProcess, group: str, instance_id: str) -> KVReuse:
    return KVReuse.connect(MODEL, manager.address, group, instance_id, block_tokens=16, settings=PATIENT)


def test_tokens_are_reused_on_the_node_and_computed_elsewhere(
    manager: ManagerProcess, instance_id: str, node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = f"pool-{uuid4().hex[:8]}"
    manager.add_pool(pool, NODE, CAPACITY)
    ids = prompt(100)
    expected = plain(ids)
    with connected(manager, pool, instance_id) as reuse:
        until(lambda: saves(reuse, ids))
    with connected(manager, pool, instance_id) as reuse:
        report = checked(reuse, expected, ids)
        assert report.loaded_tokens == 96
        assert report.reason == ""
    monkeypatch.setenv("KVCM_NODE_ID", "node-b")
    with connected(manager, pool, instance_id) as reuse:
        report = checked(reuse, expected, ids)
        assert (report.matched_tokens, report.blocks_saved) == (0, 0)


# ---- One process stores, another one loads: keys, registration and bytes mean the same in both ----


def generate(manager: ManagerProcess, instance_id: str, kind: str, pool_blocks: int = 0) -> Any:
    return run_script("reuse_process.py", manager.address, instance_id, kind, str(pool_blocks), beside="store")


@pytest.mark.ci
@pytest.mark.timeout(600)
@pytest.mark.feature("transformers", "saves, and another process loads")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral", "bamba"])
def test_another_process_goes_on(manager: ManagerProcess, instance_id: str, kind: str) -> None:
    ids, mask = BATCH
    expected = model_of(kind).generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False).tolist()
    first = generate(manager, instance_id, kind)
    assert first == {"tokens": expected, "loaded": [0, 0], "saved": 7 + 4, "reason": ""}
    second = generate(manager, instance_id, kind, pool_blocks=20 if kind == "llama" else 0)
    assert second == {"tokens": expected, "loaded": [96, 32], "saved": 0, "reason": ""}
