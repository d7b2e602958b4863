"""The recall transformer is the same model however it is driven, and its data ask what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gpu_tier.engine.model import DecoderModel, ModelState
from gpu_tier.engine.recall_data import KEYS, SEPARATOR, VOCAB, QuestionPosition, recall_batch
from gpu_tier.engine.recall_model import RecallModel, load_recall_model, save_recall_model
from gpu_tier.errors import ConfigError


def random_model() -> RecallModel:
    torch.manual_seed(0)
    return RecallModel().requires_grad_(False)


def driven(model: DecoderModel, tokens: Tensor, extend_lens: list[int]) -> Tensor:
    """Return the logits of one request's tokens, computed through the hooks of the layer driver in pieces."""
    states: list[ModelState] = [{}]
    keys: list[list[Tensor]] = [[] for _ in range(model.num_layers)]
    values: list[list[Tensor]] = [[] for _ in range(model.num_layers)]
    logits, start = [], 0
    for length in extend_lens:
        positions = torch.arange(start, start + length)
        hidden = model.embed(tokens[start : start + length], positions)
        for layer in range(model.num_layers):
            inputs = model.attention_inputs(layer, hidden, positions, states, [length])
            assert inputs.v is not None
            keys[layer].append(inputs.k)
            values[layer].append(inputs.v)
            k, v = torch.cat(keys[layer]), torch.cat(values[layer])
            group = model.num_q_heads // model.num_kv_heads
            scores = torch.einsum("thd,nhd->htn", inputs.q, k.repeat_interleave(group, 1)) * model.sm_scale
            scores = scores.masked_fill(torch.arange(len(k)) > positions[:, None], -torch.inf)
            attention = torch.einsum("htn,nhd->thd", scores.softmax(-1), v.repeat_interleave(group, 1))
            hidden = model.attention_output(layer, hidden, attention)
        logits.append(model.logits(hidden))
        start += length
    return torch.cat(logits)


@pytest.mark.parametrize("extend_lens", [[23], [20, 1, 1, 1], [1, 2, 5, 15], [4, 19]])
def test_pieces_give_what_one_pass_gives(extend_lens: list[int]) -> None:
    model = random_model()
    tokens = torch.randint(VOCAB, (23,), generator=torch.Generator().manual_seed(1))
    whole = model.logits(model(tokens[None]))[0]
    torch.testing.assert_close(driven(model, tokens, extend_lens), whole, atol=1e-4, rtol=1e-4)


def test_rows_of_a_batch_do_not_see_each_other() -> None:
    model = random_model()
    hidden = torch.randn(7, 128, generator=torch.Generator().manual_seed(2))
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3])
    together = model.attention_inputs(0, hidden, positions, [{}, {}], [3, 4])
    alone = model.attention_inputs(0, hidden[3:], positions[3:], [{}], [4])
    torch.testing.assert_close(together.k[3:], alone.k)
    torch.testing.assert_close(together.q[3:], alone.q)


@pytest.mark.parametrize("position", ["none", "first", "last"])
def test_answers_are_the_values_of_the_needles_that_are_asked(position: QuestionPosition) -> None:
    batch = recall_batch(3, 20, 8, torch.Generator().manual_seed(0), position)
    for context, questions, answers in zip(batch.context, batch.questions, batch.answers, strict=True):
        assert int(context[-1]) == SEPARATOR
        text = context.tolist()
        begin = {"none": 0, "first": 1 + 8 * 4, "last": 0}[position]
        needles = [tuple(text[i : i + 4]) for i in range(begin, begin + 80, 4)]
        assert all(value >= KEYS for *_, value in needles)
        assert len({needle[:3] for needle in needles}) == 20
        for question, answer in zip(questions.tolist(), answers.tolist(), strict=True):
            assert (*question, answer) in needles
    shown = {"none": False, "first": True, "last": True}[position]
    assert (batch.context.shape[1] > 81) == shown


def test_joined_questions_end_where_their_answers_are_due() -> None:
    batch = recall_batch(2, 5, 3, torch.Generator().manual_seed(0))
    tokens, ends = batch.joined()
    assert tokens.shape == (2, 21 + 4 * 3 - 1)
    for index, end in enumerate(ends.tolist()):
        assert torch.equal(tokens[:, end - 2 : end + 1], batch.questions[:, index])


def test_a_checkpoint_is_loaded_only_if_it_is_the_known_one(tmp_path: Path) -> None:
    model = random_model()
    path = tmp_path / "model.safetensors"
    sha256 = save_recall_model(model, path)
    loaded = load_recall_model(path, sha256)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    with pytest.raises(ConfigError, match="SHA-256"):
        load_recall_model(path, "0" * 64)
