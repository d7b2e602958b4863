"""KV that depends on more than the tokens before it: on later tokens, the length of the prompt, or other arguments."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from reuse_cases import BLOCK, PATIENT, Connect, checked, make_model, padded, plain, prompt, run

from kvcm.connectors.transformers import KVReuse
from kvcm.connectors.transformers.model_kv import probe_model
from kvcm.model.errors import InvalidArgumentError

BORDER = 128
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + number for number in range(8)],
    "original_max_position_embeddings": BORDER,
}
ROPES = {
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER},
    "longrope": {"rope_parameters": LONG, "max_position_embeddings": 4 * BORDER},
}


@pytest.fixture(params=ROPES)
def model(request: pytest.FixtureRequest) -> Any:
    return make_model(**ROPES[request.param])


def test_prompts_over_the_border_are_computed_and_those_below_it_reused(connect: Connect, model: Any) -> None:
    reuse, twin = connect(model), deepcopy(model)  # frequencies follow the longest prompt since a short one
    limit = probe_model(model, BLOCK).max_tokens
    assert limit == (BORDER if model.config.rope_parameters["rope_type"] == "longrope" else BORDER - 1)
    for tokens, loaded in ((100, 0), (100, 96), (150, 0), (limit + 1, 0), (limit, 96), (101, 96), (150, 0)):
        ids = prompt(200)[:, :tokens]
        report = checked(reuse, plain(ids, twin), ids)
        assert report.loaded_tokens == loaded
        assert (f"KV depends on its length from {limit + 1} on" in report.reason) == (tokens > limit)
    assert reuse.statistics.total()["unsaved_length_blocks"] >= 3 * (limit // BLOCK)


def test_blocks_that_an_answer_fills_behind_the_border_are_not_published(connect: Connect, model: Any) -> None:
    ids = prompt(100)
    reuse = connect(model)
    output, report = run(reuse, ids, max_new_tokens=80)
    assert torch.equal(output, plain(ids, model, max_new_tokens=80))
    saved = probe_model(model, BLOCK).max_tokens // BLOCK
    assert report.blocks_saved == saved
    assert reuse.statistics.total()["unsaved_length_blocks"] == 179 // BLOCK - saved


def test_a_long_row_changes_the_others_of_its_batch(connect: Connect, model: Any) -> None:
    reuse, twin, short, long = connect(model), deepcopy(model), prompt(60), prompt(150, seed=2)
    run(reuse, short)
    ids, mask = padded([short, long])
    expected = twin.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
    report = checked(reuse, expected, ids, mask)
    assert (report.loaded_tokens, report.blocks_saved) == (0, 0)


def test_a_row_that_grows_over_the_border_ends_publication_of_all(connect: Connect, model: Any) -> None:
    reuse, ids = connect(model), padded([prompt(20), prompt(120, seed=2)])
    report = run(reuse, *ids, max_new_tokens=40)[1]
    limit = probe_model(model, BLOCK).max_tokens
    assert (
        report.blocks_saved == 20 // BLOCK + limit // BLOCK
    )  # the 2nd block of the short row is full behind the border


def test_the_pool_keeps_no_blocks_from_behind_the_border(connect: Connect, model: Any) -> None:
    reuse = connect(model, publish=False, settings=replace(PATIENT, pool_blocks=64))
    ids = prompt(100)
    output, _ = run(reuse, ids, max_new_tokens=80)
    report = checked(reuse, plain(output[:, :120], model, max_new_tokens=4), output[:, :120], max_new_tokens=4)
    assert report.local_tokens == 112
    assert run(reuse, output)[1].local_tokens == 0


@pytest.mark.parametrize(
    "settings",
    [{}, *({"rope_parameters": {"rope_type": kind, "factor": 2.0, "rope_theta": 1e4}} for kind in ("linear", "yarn"))],
)
def test_other_positions_have_no_border(settings: dict[str, Any]) -> None:
    assert probe_model(make_model(**settings), BLOCK).max_tokens is None


def test_kv_that_depends_on_later_tokens_is_refused() -> None:
    model = make_model()

    def quantise(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        scale = output.abs().amax() / 127
        return (output / scale).round() * scale

    model.model.layers[1].self_attn.k_proj.register_forward_hook(quantise)
    with pytest.raises(InvalidArgumentError, match="LlamaForCausalLM depends on the tokens that follow, in layer 1"):
        probe_model(model, BLOCK)


def test_kv_that_depends_on_one_length_is_refused() -> None:
    model = make_model(max_position_embeddings=64)

    def shift(module: Any, arguments: Any, options: dict[str, Any], output: Any) -> Any:
        positions = options["position_ids"]
        return tuple(part * 0.9 for part in output) if positions.max() == 64 else output

    model.model.rotary_emb.register_forward_hook(shift, with_kwargs=True)
    with pytest.raises(InvalidArgumentError, match="depends on whether a prompt has 64 tokens"):
        probe_model(model, BLOCK)


@pytest.mark.parametrize(
    "arguments", [{"position_ids": torch.arange(10)[None]}, {"adapter_names": ["x"]}, {"pixel_values": torch.ones(1)}]
)
def test_what_else_kv_would_depend_on_is_refused(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with (
        KVReuse.connect(make_model(), "127.0.0.1:1", "default", "i") as reuse,
        pytest.raises(InvalidArgumentError, match=f"{name} is given, must be left out"),
    ):
        reuse.generate(prompt(10), **arguments)


def test_pad_tokens_without_a_mask_are_padding_as_for_generate(connect: Connect) -> None:
    model = make_model()
    reuse, options = connect(model), {"max_new_tokens": 24, "do_sample": False}
    ids = torch.cat([torch.zeros(2, 5, dtype=torch.long), torch.cat([prompt(60), prompt(60, seed=2)])], dim=1)
    assert torch.equal(reuse.generate(ids, **options), model.generate(ids, **options))
    assert reuse.last_report is not None
    assert reuse.last_report.prompt_tokens == 120
    ids[0, 30] = 0
    with pytest.raises(
        InvalidArgumentError, match="attention_mask is missing, pad_token_id 0 stands for it: it must be"
    ):
        reuse.generate(ids, **options)
    assert torch.equal(run(reuse, ids)[0], plain(ids, model))  # they are tokens when a mask says so
    model.generation_config.eos_token_id = 0  # then `generate` does not take them for padding
    assert torch.equal(reuse.generate(ids, **options), model.generate(ids, **options))
