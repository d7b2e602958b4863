"""Weights that change while an engine runs: right tokens at once, reuse right after, and no blocks of other weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from reuse_cases import BLOCK, PATIENT, Connect, checked, make_model, plain, prompt, run
from torch import nn

from kvcm.connectors.reuse.model_weights import ModelWeights, UnknownWeightsError, _device_reader, _host_reader
from kvcm.connectors.reuse.statistics import Unsaved
from kvcm.connectors.transformers import KVReuse
from kvcm.model.errors import InvalidArgumentError

IDS = prompt(100)
BLOCKS = 7  # of the prompt and its answer


def trained() -> dict[str, torch.Tensor]:
    return make_model(seed=1).state_dict()


def attention(model: Any) -> Any:
    return model.model.layers[0].self_attn


@torch.no_grad()
def one_matrix(model: Any) -> None:
    attention(model).v_proj.weight.mul_(-1)


@torch.no_grad()
def one_element(model: Any) -> None:
    attention(model).v_proj.weight[3, 5] += 50


def one_element_past_the_counter(model: Any) -> None:
    attention(model).v_proj.weight.data[3, 5] += 50


def one_element_with_numpy(model: Any) -> None:
    attention(model).v_proj.weight.detach().numpy()[3, 5] += 50


def reload(model: Any) -> None:
    model.load_state_dict(trained())


def reload_by_assignment(model: Any) -> None:
    model.load_state_dict(trained(), assign=True)


def reload_past_the_counter(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(trained()[name])


def data_replaced(model: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = trained()[name]


def new_bias(model: Any) -> None:
    attention(model).o_proj.bias = nn.Parameter(torch.ones(model.config.hidden_size))


def successor(model: Any) -> None:  # of a dead parameter: its identity, its memory, and one other element
    owned, others = attention(model).o_proj._parameters, []
    weight, identity = owned["weight"].detach(), id(owned["weight"])
    weight.numpy()[3, 5] += 50
    owned["weight"] = None
    while id(parameter := nn.Parameter(weight)) != identity:
        others.append(parameter)
    owned["weight"] = parameter


def child_of_a_leaf(model: Any) -> None:
    attention(model).o_proj.adapter = nn.Linear(2, 2)


def step_of_an_optimiser(model: Any) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
    model(IDS, labels=IDS).loss.backward()
    optimiser.step()
    model.zero_grad()


def replaced_module(model: Any) -> None:
    attention(model).v_proj = make_model(seed=1).model.layers[0].self_attn.v_proj


def scaled_positions(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


CHANGES = [
    one_matrix,
    one_element,
    one_element_past_the_counter,
    one_element_with_numpy,
    reload,
    reload_by_assignment,
    reload_past_the_counter,
    data_replaced,
    step_of_an_optimiser,
    replaced_module,
    scaled_positions,
]


def goes_on(reuse: KVReuse, model: Any) -> None:
    """Check the call after a change: right tokens, nothing loaded, and reuse from the next call on."""
    expected = plain(IDS, model)
    report = checked(reuse, expected, IDS)
    assert (report.loaded_tokens, report.blocks_saved, report.reason) == (0, BLOCKS, "")
    assert checked(reuse, expected, IDS).loaded_tokens == 96


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_before_the_next_lookup(connect: Connect, change: Callable[[Any], None]) -> None:
    model = make_model()
    reuse, unchanged = connect(model), connect(make_model())
    before, _ = run(reuse, IDS)
    change(model)
    assert not torch.equal(plain(IDS, model), before)  # the control: old KV would give other tokens
    goes_on(reuse, model)
    assert checked(unchanged, before, IDS).loaded_tokens == 96  # an engine that did not change has its own blocks
    other = make_model()
    change(other)
    assert checked(connect(other), plain(IDS, model), IDS).loaded_tokens == 96  # and one that did has those


def assert_every_block_is_accounted_for(reuse: KVReuse, computed: int, reason: Unsaved) -> None:
    """Check that each computed block was saved, or counted for this reason."""
    counts = reuse.statistics.total()
    reasons = {each for each in Unsaved if counts.get(each.counter)}
    assert reasons <= {reason, Unsaved.GAP}
    assert counts.get("saved_blocks", 0) + sum(counts[each.counter] for each in reasons) == computed


def lora(model: Any) -> Any:
    """Return an adapter that changes tokens."""
    torch.manual_seed(3)
    adapted = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    retrain(adapted)
    return adapted


@torch.no_grad()
def retrain(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn_like(parameter) * 0.3)


@torch.no_grad()
def rescale(model: Any) -> None:
    model.base_model.model.model.layers[0].self_attn.v_proj.scale_layer(8.0)


def add_another(model: Any) -> None:
    model.add_adapter("other", LoraConfig(r=4, target_modules=["v_proj"], init_lora_weights=False))
    model.set_adapter("other")
    retrain(model)


@pytest.mark.parametrize(
    "change",
    [
        retrain,
        rescale,
        add_another,
        lambda model: model.merge_adapter(),
        lambda model: model.base_model.disable_adapter_layers(),
        lambda model: model.merge_and_unload(),
    ],
    ids=["retrained in place", "rescaled", "another", "merged", "disabled", "merged and unloaded"],
)
def test_adapters_count_by_their_content_and_by_how_they_are_applied(
    connect: Connect, change: Callable[[Any], object]
) -> None:
    model = make_model()
    adapted = lora(model)
    reuse = connect(model)
    run(reuse, IDS)
    change(adapted)
    version = ModelWeights(model).version()
    report = checked(reuse, plain(IDS, model), IDS)
    assert (report.loaded_tokens, report.reason) == (0, "")
    assert checked(reuse, plain(IDS, model), IDS).loaded_tokens == 96
    assert ModelWeights(model).version() == version


def test_a_restart_with_other_weights_under_the_same_name(connect: Connect) -> None:
    run(connect(make_model(), model_name="m"), IDS)
    retrained = make_model(seed=1)
    reuse = connect(retrained, model_name="m")
    assert reuse.registration.ok
    goes_on(reuse, retrained)


def large(seed: int = 0) -> Any:
    """Return a model that is not read whole before each call."""
    return make_model(seed, vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=3)


def test_a_name_stands_for_weights_until_they_change(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    model, twin = large(), large()
    reuse, other = connect(model, weights_version="step 1"), connect(twin, weights_version="step 1")
    expected, _ = run(reuse, IDS)
    assert checked(other, expected, IDS).loaded_tokens == 96
    for one, engine in ((model, reuse), (twin, other)):
        one_element_past_the_counter(one)
        engine.set_weights_version("step 2")
    goes_on(reuse, model)
    assert checked(other, plain(IDS, model), IDS).loaded_tokens == 96
    one_matrix(model)  # no new name
    goes_on(reuse, model)
    assert "the weights changed after their version 'step 2' was set" in caplog.text
    assert checked(connect(twin), plain(IDS, twin), IDS).loaded_tokens == 0  # a name and a digest are never equal


def test_single_elements_of_large_models_are_found_when_all_are_compared(connect: Connect) -> None:
    model = large()
    reuse = connect(model, settings=replace(PATIENT, compare_all_weights=True))
    run(reuse, IDS)
    one_element_past_the_counter(model)
    goes_on(reuse, model)


@pytest.mark.parametrize("reader", [_host_reader, _device_reader])
@pytest.mark.parametrize(
    "change",
    [one_matrix, one_element, reload, reload_past_the_counter, data_replaced, new_bias, child_of_a_leaf, successor],
)
def test_signs_find_changes_of_large_models(
    change: Callable[[Any], None], reader: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcm.connectors.reuse.model_weights._host_reader", reader)
    monkeypatch.setattr("kvcm.connectors.reuse.model_weights._SMALL_BYTES", 0)
    model = make_model()
    weights = ModelWeights(model)
    version = weights.version()
    assert weights.version() == version
    assert weights.is_unchanged()
    change(model)
    assert not weights.is_unchanged()
    assert weights.version() not in ("", version)


def test_signs_keep_no_memory_after_the_next_check_and_see_fewer_elements() -> None:
    model, memory = large(), bytearray(4 << 16)
    weights, parameter = ModelWeights(model), attention(model).q_proj.weight
    for count in (1 << 16, 1):  # then less at the same address
        parameter.data = torch.frombuffer(memory, dtype=torch.float32, count=count)
        assert not weights.is_unchanged()
        weights.version()
    parameter.data = torch.ones(1)
    weights.version()
    memory.clear()  # raises while something keeps it


def test_no_block_of_mixed_weights_is_published(connect: Connect) -> None:
    model, ids = make_model(), prompt(100)

    def change(tokens: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        if tokens.shape[1] == 110:
            one_matrix(model)
        return torch.zeros(len(tokens), dtype=torch.bool)

    reuse = connect(model)
    output, report = run(reuse, ids, stopping_criteria=[change], max_new_tokens=60)
    assert "weights changed" in report.reason
    assert_every_block_is_accounted_for(reuse, 159 // BLOCK, Unsaved.WEIGHTS)
    for other in (make_model(), model):  # the old weights and the new ones
        assert torch.equal(run(connect(other), output)[0], plain(output, other))


def test_weights_without_data_are_not_shared(connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    attention(model).elsewhere = nn.Parameter(torch.empty(3, device="meta"))
    reuse = connect(model)
    for _ in range(2):
        report = checked(reuse, plain(IDS, model), IDS)
        assert (report.loaded_tokens, report.blocks_saved) == (0, 0)
        assert "elsewhere of device meta has no memory of its own" in report.reason
    assert caplog.text.count("of device meta") == 1
    assert caplog.text.count("14 blocks were not saved") + caplog.text.count("7 blocks were not saved") == 1
    assert_every_block_is_accounted_for(reuse, 2 * BLOCKS, Unsaved.WEIGHTS)
    with pytest.raises(UnknownWeightsError):
        reuse.block_keys(IDS[0].tolist())
    reuse.set_weights_version("offloaded 1")
    goes_on(reuse, model)


def test_another_type_of_the_same_weights_must_be_connected_again(connect: Connect) -> None:
    model = make_model()
    reuse = connect(model)
    model.to(torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match=r"bfloat16 on cpu, was torch.float32 on cpu: connect it again"):
        run(reuse, IDS)
    assert torch.equal(run(connect(model), IDS)[0], plain(IDS, model))


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_name_is_checked(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"weights_version is .*, must have 1 to 256 characters"):
        KVReuse.connect(make_model(), "127.0.0.1:1", "default", "i", weights_version=name)


def test_weights_of_inference_mode_are_read_each_time() -> None:
    with torch.inference_mode():
        model = make_model()
        weights = ModelWeights(model)
        version = weights.version()
        one_element(model)
        assert weights.version() != version
