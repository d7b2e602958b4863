"""Every causal language model that transformers can build small: shared KV depends on the tokens before it alone."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from kvcm.connectors.transformers.model_kv import probe_model
from kvcm.model.errors import InvalidArgumentError

BORDER = 128
LENGTHS = {"max_position_embeddings": BORDER, "n_positions": BORDER, "sliding_window": 64}
# Names of one thing in several architectures; each configuration keeps those that it knows.
SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **{"vocab_size": 256, "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
PREFIX = 24
MOST_PARAMETERS = 40_000_000
OF_ROPE = dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8)
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}


def small_models(**settings: Any) -> Iterator[Any]:
    """Yield a model of each architecture that can be built with these settings."""
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
        try:
            config = kind(**SIZES, **LENGTHS, **deepcopy(settings))  # some keep and change them
            with torch.device("meta"):
                size = sum(parameter.numel() for parameter in model_class(config).parameters())
            if size <= MOST_PARAMETERS:
                torch.manual_seed(0)
                yield model_class(config).eval()
        except Exception:  # sizes that do not fit each other, or packages that are not there
            continue


@torch.no_grad()
def prefix_kv(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return the KV of the first tokens, of all layers that keep it."""
    cache = DynamicCache(config=model.config)
    model(input_ids=tokens, past_key_values=cache, use_cache=True)
    layers: list[Any] = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    kept = [layer for layer in layers if layer.keys.shape[2] == tokens.shape[1]]
    return [torch.cat([layer.keys[0], layer.values[0]], dim=-1)[:, :PREFIX] for layer in kept]


def assert_independent(model: Any, most_tokens: int) -> None:
    tokens = torch.randint(3, 256, (1, BORDER + 10), generator=torch.Generator().manual_seed(1))
    alone = prefix_kv(model, tokens[:, :PREFIX])
    for length in (PREFIX + 1, 63, 64, 65, BORDER - 1, BORDER, BORDER + 1):
        if length <= most_tokens:
            inside = prefix_kv(model, tokens[:, :length])
            for kv, expected in zip(inside, alone[: len(inside)] if len(inside) == len(alone) else [], strict=False):
                assert torch.allclose(kv, expected, rtol=1e-3, atol=1e-4), (type(model).__name__, length)


@pytest.mark.ci
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # of transformers: some architectures are old
@pytest.mark.parametrize(("settings", "least"), [(OF_ROPE, 80), (DYNAMIC, 40)], ids=["as configured", "dynamic RoPE"])
def test_kv_of_accepted_models_depends_on_the_prefix_alone(settings: dict[str, Any], least: int) -> None:
    accepted: dict[str, int | None] = {}
    for model in small_models(**settings):
        try:
            limit = probe_model(model, 16).max_tokens
        except InvalidArgumentError:
            continue
        assert_independent(model, limit or BORDER - 2)  # tables of positions end there
        accepted[type(model).__name__] = limit
    if settings is DYNAMIC:
        accepted = {name: limit for name, limit in accepted.items() if limit is not None}
        assert set(accepted.values()) == {BORDER - 1}
    assert len(accepted) >= least, accepted
