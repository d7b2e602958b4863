"""Batches padded at the left, against a real manager: every row loads its stored prefix, all tokens are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from late_storage import use_late_storage
from manager_process import ManagerProcess
from reuse_cases import BLOCK, MODEL, NEW, PATIENT, Connect, Stored, checked, files_of, padded, plain, prompt, run
from reuse_models import KINDS, model_of
from thoroughness import is_thorough

from kvcm.connectors.transformers import GenerationReport

REPRESENTATIVES = {"llama", "gemma3", "bamba"}


@pytest.fixture(
    params=[kind if kind in REPRESENTATIVES else pytest.param(kind, marks=pytest.mark.ci) for kind in sorted(KINDS)]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def without_us(model: Any, batch: Sequence[torch.Tensor], **arguments: Any) -> torch.Tensor:
    arguments = {"max_new_tokens": NEW, "do_sample": False} | arguments
    output: torch.Tensor = model.generate(batch[0], attention_mask=batch[1], **arguments)
    return output


def loaded(report: GenerationReport) -> list[int]:
    return [row.loaded_tokens for row in report.rows]


def test_rows_of_one_batch_serve_those_of_another(connect: Connect, kind: str) -> None:
    """Padding is no part of KV: a prompt in another row, with other padding, or alone is the same prompt."""
    model, first, second = model_of(kind), prompt(50), prompt(90, 2)
    reuse = connect(model)
    run(reuse, *padded([first, second]))
    for prompts in ([first], [second], [prompt(120, 3), second, first], [second, first[:, :40]]):
        batch = padded(prompts)
        report = checked(reuse, without_us(model, batch, max_new_tokens=6), *batch, max_new_tokens=6)
    assert loaded(report)[0] == 80
    reuse = connect(model)
    run(reuse, *padded([prompt(60, 7)]))
    batch = padded([prompt(60, 7), prompt(61, 8)])
    report = checked(reuse, without_us(model, batch), *batch)
    assert loaded(report) == [48, 0]


def test_padding_given_to_one_row(connect: Connect, kind: str) -> None:
    model, ids = model_of(kind), torch.cat([torch.zeros(1, 11, dtype=torch.long), prompt(60)], dim=1)
    mask = (torch.arange(71) >= 11).long()[None]
    reuse, expected = connect(model), without_us(model, (ids, mask))
    for tokens in (0, 48):
        report = checked(reuse, expected, ids, mask)
        assert report.loaded_tokens == tokens


lengths = st.lists(st.integers(1, 70), min_size=1, max_size=4)


@pytest.mark.feature("transformers", "several requests at once")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mistral", "bamba"])
@settings(
    max_examples=12 if is_thorough() else 5, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(lengths=lengths, shared=st.integers(0, 60), seed=st.integers(0, 5), new=st.integers(1, 20))
def test_any_batch_gives_the_tokens_of_transformers(
    connect: Connect, kind: str, lengths: list[int], shared: int, seed: int, new: int
) -> None:
    """All examples share an instance, so that later ones find prefixes of earlier ones."""
    model = model_of(kind)
    beginning = prompt(70, seed)[:, :shared]
    batch = padded([torch.cat([beginning, prompt(70, 10 + row)], dim=1)[:, :n] for row, n in enumerate(lengths)])
    reuse = connect(model)
    expected = without_us(model, batch, max_new_tokens=new)
    for _ in range(2):
        report = checked(reuse, expected, *batch, max_new_tokens=new)
        assert report.reason == ""
    # A chain may break off where two rows store the same block: hybrids leave states where their own rows stop.
    assert loaded(report) == [(n - 1) // BLOCK * BLOCK for n in lengths]
    reuse.close()


def test_stored_bytes_of_a_padded_row_are_those_of_the_prompt_alone(connect: Connect, stored: Stored) -> None:
    """What a batch of two computed differs in rounding from what one row computes, and is the same KV."""
    reuse, prompts = connect(), [prompt(100), prompt(64, 2)]
    run(reuse, *padded(prompts), max_new_tokens=1)
    in_batch = stored(reuse, prompts[1][0].tolist())
    model_alone = connect(block_tokens=BLOCK, publish=False)
    ids, mask = padded([prompts[1]])
    output = model_alone.generate(ids, attention_mask=mask, max_new_tokens=1, return_dict_in_generate=True)
    for block, data in enumerate(in_batch):
        assert data is not None
        tokens = slice(block * BLOCK, (block + 1) * BLOCK)
        layers = output.past_key_values.layers
        alone = torch.stack([buffer[0, :, tokens] for layer in layers for buffer in layer.buffers()]).flatten()
        assert torch.allclose(torch.frombuffer(bytearray(data), dtype=torch.float32), alone, atol=1e-5)


@pytest.mark.feature("transformers", "several requests at once", "the same bytes per block")
def test_each_block_of_each_row_is_loaded_to_its_place(connect: Connect, stored: Stored) -> None:
    reuse, prompts = connect(), [prompt(100), prompt(37, 2), prompt(80, 3)]
    batch = padded(prompts)
    run(reuse, *batch, max_new_tokens=1)
    output, report = run(reuse, *batch, max_new_tokens=1, return_dict_in_generate=True)
    assert loaded(report) == [96, 32, 64]
    for row, ids in enumerate(prompts):
        padding = 100 - ids.shape[1]
        for block, data in enumerate(stored(reuse, ids[0].tolist())[: loaded(report)[row] // BLOCK]):
            columns = slice(padding + block * BLOCK, padding + (block + 1) * BLOCK)
            layers = output.past_key_values.layers
            kv = torch.stack([tensor[row, :, columns] for layer in layers for tensor in (layer.keys, layer.values)])
            assert kv.numpy().tobytes() == data, (row, block)


@pytest.mark.feature("transformers", "blocks that fail to load: computed again")
def test_a_row_that_fails_costs_only_that_row(connect: Connect, manager: ManagerProcess, instance_id: str) -> None:
    prompts = [prompt(100), prompt(80, 2)]
    batch, reuse = padded(prompts), connect()
    run(reuse, *padded([prompts[0]]))
    before = set(files_of(manager, instance_id))
    run(reuse, *padded([prompts[1]]))
    gone = set(files_of(manager, instance_id)) - before
    assert gone
    for path in gone:
        path.unlink()
    report = checked(reuse, without_us(MODEL, batch), *batch)
    assert loaded(report) == [96, 0]
    assert [row.matched_tokens for row in report.rows] == [96, 64]
    assert report.reason
    output, report = run(reuse, *batch)
    assert loaded(report) == [96, 64]
    assert torch.equal(output, without_us(MODEL, batch))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_memory_of_a_late_load_is_not_used(connect: Connect, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model, batch = model_of(kind), padded([prompt(100), prompt(80, 2)])
    expected, _ = run(connect(model), *batch)
    storages = use_late_storage(monkeypatch, blocks=8)
    reuse = connect(model, settings=replace(PATIENT, transfer_threads=1))
    with model.register_forward_pre_hook(lambda *_: storages[0].scribble()):
        output, report = run(reuse, *batch)
    assert storages[0].late
    assert sum(loaded(report)) < 160
    assert torch.equal(output, expected)


def test_a_row_that_has_ended_publishes_no_padding(connect: Connect, stored: Stored) -> None:
    batch = padded([prompt(100), prompt(37, 2)])
    free = without_us(MODEL, batch)
    end = int(free[0, 100 + 2])  # the first row ends with its third token
    assert end not in free[1, 100:].tolist()
    arguments = {"eos_token_id": end, "pad_token_id": 0, "max_new_tokens": 60}
    reuse = connect()
    output, report = run(reuse, *batch, **arguments)
    assert torch.equal(output, without_us(MODEL, batch, **arguments))
    assert report.new_tokens == 3 + 60
    assert [block is not None for block in stored(reuse, output[0].tolist())] == [True] * 6 + [False] * 4
    assert report.blocks_saved == 6 + (37 + 59) // BLOCK


def test_equal_rows_are_stored_once(connect: Connect) -> None:
    reuse, batch = connect(), padded([prompt(100)] * 3)
    report = checked(reuse, without_us(MODEL, batch), *batch)
    assert report.blocks_saved == 7
    assert loaded(run(reuse, *batch)[1]) == [96] * 3


def test_less_is_computed_than_without_reuse(connect: Connect) -> None:
    """Rows that are behind are computed by themselves, so that one unknown row does not cost the others their reuse."""
    known, unknown = prompt(160), prompt(150, 2)
    reuse = connect()
    run(reuse, *padded([known]), max_new_tokens=1)
    computed: list[int] = []

    def count(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        computed.append(options["input_ids"].numel())

    with MODEL.register_forward_pre_hook(count, with_kwargs=True):
        run(reuse, *padded([known, unknown]), max_new_tokens=1)
    assert computed == [134, 2 * 16]  # the second row up to where the first one begins, then both
    assert torch.equal(plain(known), run(reuse, *padded([known]))[0])
