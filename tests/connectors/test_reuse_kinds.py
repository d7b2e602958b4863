"""Models with sliding windows and with states, against a real manager: the same tokens, the right bytes, and no others.

Every kind goes through the same: cold save, load in another `KVReuse` of an equal model, bytes of every part, wrong
bytes, partial hits, parts that are gone. Longer than 400 lines because these steps share their fixtures.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from manager_process import ManagerProcess
from reuse_cases import BLOCK, NEW, PATIENT, Connect, Find, checked, damage, overwrite, plain, prompt, read_block, run
from reuse_models import HYBRIDS, KINDS, REFUSED, WINDOW, WINDOWS, jamba, model_of
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.layout import tensors
from kvcm.connectors.transformers import KVReuse
from kvcm.connectors.transformers.model_kv import STATE, pack_state, probe_model
from kvcm.model.errors import InvalidArgumentError

REPRESENTATIVES = {"llama", "gemma3", "mistral", "bamba"}  # full attention, windows beside it and alone, states
REACH = 3  # blocks of 16 that a window of 40 tokens reaches into


def _kinds() -> list[Any]:
    features = {**dict.fromkeys(WINDOWS, "sliding-window layers"), **dict.fromkeys(HYBRIDS, "linear-attention layers")}
    shown = {kind: [pytest.mark.feature("transformers", name)] for kind, name in features.items()}
    in_ci = {kind: [pytest.mark.ci] for kind in KINDS if kind not in REPRESENTATIVES}
    return [pytest.param(kind, marks=shown.get(kind, []) + in_ci.get(kind, [])) for kind in sorted(KINDS)]


@pytest.fixture(params=_kinds())
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_known_prefixes_are_loaded_and_tokens_stay_the_same(connect: Connect, kind: str) -> None:
    ids = prompt(100)
    expected = plain(ids, model_of(kind))
    first, report = run(connect(model_of(kind)), ids)
    assert torch.equal(first, expected)
    assert (report.loaded_tokens, report.blocks_saved, report.reason) == (0, 7, "")
    second, report = run(connect(KINDS[kind]()), ids)
    assert torch.equal(second, expected)
    assert (report.matched_tokens, report.loaded_tokens, report.reason) == (96, 96, "")
    assert (report.prompt_tokens, report.new_tokens, report.blocks_saved, report.bytes_saved) == (100, NEW, 0, 0)
    assert 0 < report.load_seconds < report.first_token_seconds < report.total_seconds


def test_only_needed_parts_are_loaded(connect: Connect, kind: str) -> None:
    reuse, ids = connect(model_of(kind)), prompt(100)
    parts = reuse.parts
    run(reuse, ids)
    _, report = run(reuse, ids)
    needed = sum(part.layout.block_bytes * (6 if part.window is None else REACH) for part in parts.kv)
    assert report.bytes_loaded == needed + (parts.state.size_bytes if parts.state else 0)


@pytest.mark.feature("transformers", "the same bytes per block")
def test_each_part_of_each_block_is_loaded_to_its_place(connect: Connect, find: Find, kind: str) -> None:
    reuse, ids, model = connect(model_of(kind)), prompt(100), model_of(kind)
    run(reuse, ids, max_new_tokens=1)
    seen: list[bytes] = []

    def record_state(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        if reuse.parts.state:
            layers = options["past_key_values"].layers
            seen.append(pack_state(reuse.parts.state, layers, 0).numpy().tobytes())

    with model.register_forward_pre_hook(record_state, with_kwargs=True):
        output, report = run(reuse, ids, max_new_tokens=1, return_dict_in_generate=True)
    assert report.loaded_tokens == 96
    blocks = find(reuse, ids)
    assert len(blocks) == 6
    compared = 0
    for part in reuse.parts.kv:
        layers = [output.past_key_values.layers[index] for index in part.layers]
        for block in range(0 if part.window is None else 6 - REACH, 6):
            tokens = slice(block * BLOCK, (block + 1) * BLOCK)
            in_cache = torch.stack([buffer[0, :, tokens] for layer in layers for buffer in layer.buffers()])
            assert in_cache.numpy().tobytes() == read_block(blocks[block].uris[part.name]), (part.name, block)
            compared += 1
    assert compared == sum(6 if part.window is None else REACH for part in reuse.parts.kv)
    assert len({read_block(uri) for location in blocks for uri in location.uris.values()}) == sum(
        len(location.uris) for location in blocks
    )
    if reuse.parts.state:
        assert seen[0] == read_block(blocks[5].uris[STATE])


@pytest.mark.feature("transformers", "the same bytes per block")
def test_saved_bytes_equal_those_that_the_model_computed(connect: Connect, find: Find, kind: str) -> None:
    """Bit by bit against a cache of transformers that went the same way: up to the last full block, then the rest."""
    reuse, ids, model = connect(model_of(kind)), prompt(100), model_of(kind)
    run(reuse, ids, max_new_tokens=1)
    cache = DynamicCache(config=model.config)
    captured: dict[int, list[torch.Tensor]] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer):
            captured[index] = []
            layer.update = _recording(layer.update, captured[index])
    state = b""
    with torch.no_grad():
        for start, end in [(0, 96), (96, 100)] if reuse.parts.state else [(0, 100)]:
            model(ids[:, start:end], past_key_values=cache)
            if reuse.parts.state and end == 96:
                state = pack_state(reuse.parts.state, cache.layers, 0).numpy().tobytes()
    blocks = find(reuse, ids)
    for part in reuse.parts.kv:
        for block in range(6):
            tokens = slice(block * BLOCK, (block + 1) * BLOCK)
            computed = torch.stack(
                [
                    torch.cat(pieces, dim=2)[0, :, tokens]
                    for index in part.layers
                    for pieces in (captured[index][::2], captured[index][1::2])
                ]
            )
            assert computed.numpy().tobytes() == read_block(blocks[block].uris[part.name]), (part.name, block)
    assert [STATE in location.uris for location in blocks] == [False] * 5 + [bool(reuse.parts.state)]
    if reuse.parts.state:
        assert state == read_block(blocks[5].uris[STATE])


def _recording(update: Callable[..., Any], pieces: list[torch.Tensor]) -> Callable[..., Any]:
    def recorded(keys: torch.Tensor, values: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        pieces.extend((keys, values))
        return update(keys, values, *arguments, **options)

    return recorded


@pytest.mark.feature("transformers", "changed bytes, when not looked for, change the tokens")
def test_loaded_parts_are_used(connect: Connect, find: Find, kind: str) -> None:
    """Control of all other tests: wrong bytes of any part change the tokens."""
    ids = prompt(97)  # the first token that is computed sees the state at once
    reuse = connect(model_of(kind), settings=replace(PATIENT, checksums=False))
    expected, _ = run(reuse, ids)
    blocks = find(reuse, ids)
    for part in reuse.parts.kv:
        before = [read_block(location.uris[part.name]) for location in blocks]
        for location, data in zip(blocks, before, strict=True):
            halves = torch.frombuffer(bytearray(data), dtype=torch.float32).view(part.layout.layers, 2, -1)
            overwrite(location.uris[part.name], halves.flip(1).contiguous().numpy().tobytes())
        output, report = run(reuse, ids)
        assert report.loaded_tokens == 96
        assert not torch.equal(output, expected), part.name
        for location, data in zip(blocks, before, strict=True):
            overwrite(location.uris[part.name], data)
    if reuse.parts.state:
        uri = blocks[5].uris[STATE]
        values = torch.frombuffer(bytearray(read_block(uri)), dtype=torch.float32)
        overwrite(uri, values.flip(0).contiguous().numpy().tobytes())
        output, report = run(reuse, ids)
        assert report.loaded_tokens == 96
        assert not torch.equal(output, expected)


@pytest.mark.feature("transformers", "conversation of several turns")
def test_answers_are_reused_by_the_next_turn(connect: Connect, kind: str) -> None:
    model, ids = model_of(kind), prompt(50)
    reuse = connect(model)
    for turn in range(4):
        expected = plain(ids, model)
        output, report = run(reuse, ids)
        assert torch.equal(output, expected)
        known = (50 + turn * (NEW + 10)) if turn else 0
        assert report.loaded_tokens == (0 if not turn else (known - 10 - 1) // BLOCK * BLOCK)
        ids = torch.cat([output, prompt(10, seed=100 + turn)], dim=1)


@pytest.mark.parametrize("tokens", [1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 1])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral", "bamba"])
def test_one_token_is_always_computed(connect: Connect, kind: str, tokens: int) -> None:
    reuse, ids = connect(model_of(kind)), prompt(tokens)
    expected = plain(ids, model_of(kind))
    assert torch.equal(run(reuse, ids)[0], expected)
    report = checked(reuse, expected, ids)
    assert report.loaded_tokens == (tokens - 1) // BLOCK * BLOCK


@pytest.mark.feature("transformers", "partial hit")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen2"])
def test_partial_hits(connect: Connect, kind: str) -> None:
    reuse, ids = connect(model_of(kind)), prompt(100)
    run(reuse, ids)
    other = torch.cat([ids[:, :70], prompt(50, seed=9)], dim=1)
    report = checked(reuse, plain(other, model_of(kind)), other)
    assert report.loaded_tokens == 64
    assert run(reuse, other)[1].loaded_tokens == 112


def test_long_answers_grow_the_cache_past_windows(connect: Connect, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Blocks of the answer are saved before the buffer of a window lets go of them."""
    monkeypatch.setattr("kvcm.connectors.transformers.reuse._MAX_SPARE_TOKENS", 4)
    reuse, ids = connect(model_of(kind)), prompt(30)
    expected = plain(ids, model_of(kind), max_new_tokens=150)
    output, report = run(reuse, ids, max_new_tokens=150)
    assert torch.equal(output, expected)
    assert report.blocks_saved == 179 // BLOCK
    longer = torch.cat([output, prompt(5)], dim=1)
    again, report = run(connect(KINDS[kind]()), longer)
    assert torch.equal(again, plain(longer, model_of(kind)))
    assert report.loaded_tokens == 179 // BLOCK * BLOCK


def test_a_window_alone_needs_its_last_blocks_only(connect: Connect, manager: ManagerProcess, instance_id: str) -> None:
    model, ids = model_of("mistral"), prompt(200)
    reuse = connect(model)
    expected, _ = run(reuse, ids)
    with ManagerClient(manager.address, instance_id) as client:
        assert client.remove(reuse.block_keys(ids[0].tolist())[:5], timeout_seconds=20)
    report = checked(connect(KINDS["mistral"](), publish=False), expected, ids)
    assert (report.matched_tokens, report.loaded_tokens) == (192, 192)


@pytest.mark.feature("transformers", "changed bytes are found", "blocks that fail to load: computed again")
def test_lost_parts_make_the_prefix_shorter_and_come_back(connect: Connect, find: Find, kind: str) -> None:
    model, ids = model_of(kind), prompt(180)
    reuse = connect(model)
    expected, _ = run(reuse, ids)
    blocks = find(reuse, ids)
    assert len(blocks) == 11
    for name in blocks[10].uris:
        damage(blocks[10].uris[name])
        report = checked(reuse, expected, ids)
        # Hybrids have no other state, and of windows alone the manager names no other blocks.
        fallback = 0 if reuse.parts.state or kind == "mistral" else 160
        assert (report.matched_tokens, report.loaded_tokens) == (176, fallback)
        assert (report.blocks_corrupt, report.blocks_saved) == (1, 1)
        report = checked(reuse, expected, ids)
        assert (report.loaded_tokens, report.reason) == (176, "")
        blocks = find(reuse, ids)


@pytest.mark.parametrize("kind", sorted(WINDOWS))
def test_a_lost_part_of_a_window_costs_the_blocks_that_need_it(connect: Connect, find: Find, kind: str) -> None:
    reuse, ids = connect(model_of(kind)), prompt(180)
    expected, _ = run(reuse, ids)
    window = f"window{WINDOW}"
    damage(find(reuse, ids)[9].uris[window])
    report = checked(reuse, expected, ids)
    assert report.loaded_tokens == (0 if kind == "mistral" else 144)
    damage(find(reuse, ids)[2].uris[window])  # far behind the window, so the model does not need it
    report = checked(reuse, expected, ids)
    assert (report.loaded_tokens, report.reason) == (176, "")


@pytest.mark.parametrize("kind", ["bamba", "falcon_h1"])
def test_where_prompts_part_the_second_one_leaves_a_state(connect: Connect, find: Find, kind: str) -> None:
    model = model_of(kind)
    reuse, shared = connect(model), prompt(70)
    prompts = [torch.cat([shared, prompt(50, seed=seed)], dim=1) for seed in (11, 12, 13)]
    loaded = []
    for ids in prompts:
        report = checked(reuse, plain(ids, model), ids)
        loaded.append(report.loaded_tokens)
    assert loaded == [0, 0, 64]
    assert [STATE in location.uris for location in find(reuse, prompts[2])] == [False] * 3 + [True] + [False] * 2 + [
        True
    ]


@pytest.mark.parametrize("kind", ["bamba", "lfm2"])
def test_an_answer_leaves_one_state(connect: Connect, find: Find, kind: str) -> None:
    reuse, ids = connect(model_of(kind)), prompt(20)
    output, report = run(reuse, ids, max_new_tokens=80)
    assert report.blocks_saved == 6
    assert [STATE in location.uris for location in find(reuse, output)] == [True] + [False] * 4 + [True]


@pytest.mark.feature("transformers", "refuses what it does not support")
@pytest.mark.parametrize("std", [0.05, 0.16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_does_not_go_on_is_refused(dtype: torch.dtype, std: float) -> None:
    with pytest.raises(InvalidArgumentError, match="JambaForCausalLM does not go on from the state"):
        probe_model(jamba(std).to(dtype), BLOCK)


@pytest.mark.feature("transformers", "refuses what it does not support")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("llama4", "chunked_attention"),
        ("mamba2", "no layer with attention"),
        ("minimax", "cannot compute with the cache of transformers: .*MiniMax uses cache of its own"),
    ],
)
def test_other_kinds_are_refused_with_the_reason(kind: str, reason: str) -> None:
    with pytest.raises(InvalidArgumentError, match=reason):
        KVReuse.connect(REFUSED[kind](), "127.0.0.1:1", "default", "i")


@pytest.mark.parametrize("kind", ["llama", "gemma3", "bamba"])
def test_half_precision(connect: Connect, kind: str) -> None:
    model, ids = KINDS[kind]().to(torch.bfloat16), prompt(100)
    reuse = connect(model)
    assert {part.layout.dtype for part in reuse.parts.kv} == {"bfloat16"}
    expected, report = run(reuse, ids)
    assert torch.equal(expected, plain(ids, model))
    assert report.blocks_saved == 7
    output, report = run(reuse, ids)
    assert report.loaded_tokens == 96
    assert torch.equal(output, expected)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral", "bamba"])
def test_memory_that_must_be_staged(connect: Connect, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """As on an accelerator: blocks go through a buffer that holds fewer of them than there are."""
    ids, model = prompt(180), model_of(kind)
    expected = plain(ids, model)
    patience = replace(PATIENT, staging_blocks=3)
    for most_pieces, loaded in ((1, 0), (1024, 176), (1, 176)):  # staged blocks are stored like all others
        monkeypatch.setattr(tensors, "_MAX_PIECES", most_pieces)
        report = checked(connect(model, settings=patience), expected, ids)
        assert report.loaded_tokens == loaded
