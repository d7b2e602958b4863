"""The model of a game, its conversations, and the tokens that follow each of them when everything is computed.

The model is a small Llama with random weights of a fixed seed; they are large enough that the next token depends on the
whole context, so wrong KV shows in the tokens. All conversations begin alike, those of a topic go on alike, and every
turn of a conversation is the beginning of the next one.

    python game_prompts.py <conversations> <file>

computes the tokens and adds them to a file, which later games read.
"""

from __future__ import annotations

import json
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

__all__ = ["BLOCK_TOKENS", "NEW_TOKENS", "TURNS", "continued", "expected_tokens", "make_model", "prompt"]

BLOCK_TOKENS = 16
NEW_TOKENS = 8
TURNS = 6
_TOPICS = 4
_SYSTEM_TOKENS, _TOPIC_TOKENS, _TURN_TOKENS = 64, 64, 48
_VOCABULARY = 256
_SEED = 78
_STANDARD_DEVIATION = 0.08
_CONFIG = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WORKERS = 2


def make_model() -> Any:
    """Return the model; every process that calls this has the same one, on one thread."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(_SEED)
    model = LlamaForCausalLM(LlamaConfig(**_CONFIG)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=_STANDARD_DEVIATION)
    return model


def prompt(conversation: int, turn: int) -> list[int]:
    """Return the tokens of a turn of a conversation, both counted from 0."""
    topic = conversation % _TOPICS
    parts = [("system", _SYSTEM_TOKENS), (f"topic {topic}", _TOPIC_TOKENS)]
    parts += [(f"conversation {conversation} turn {number}", _TURN_TOKENS) for number in range(turn + 1)]
    return [token for text, count in parts for token in _tokens(text, count)]


def _tokens(text: str, count: int) -> list[int]:
    chosen = random.Random(text)
    return [chosen.randrange(1, _VOCABULARY) for _ in range(count)]


def continued(model: Any, tokens: list[int]) -> list[int]:
    """Return what the model says next, everything computed."""
    import torch

    ids = torch.tensor([tokens])
    with torch.no_grad():
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    return [int(token) for token in output[0, len(tokens) :]]


def expected_tokens(conversations: int, file: Path) -> dict[str, list[int]]:
    """Return what follows each turn, by `<conversation>/<turn>`; what the file has not is computed and added.

    Args:
        conversations: how many, from 0 on.
        file: that keeps the tokens between games.
    """
    made_with = _fingerprint()
    known: dict[str, list[int]] = {}
    if file.exists():
        kept = json.loads(file.read_text())
        known = kept["tokens"] if kept["made_with"] == made_with else {}
    missing = [number for number in range(conversations) if f"{number}/{TURNS - 1}" not in known]
    if missing:
        with ProcessPoolExecutor(_WORKERS) as pool:
            for found in pool.map(_computed, (missing[start::_WORKERS] for start in range(_WORKERS))):
                known |= found
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"made_with": made_with, "tokens": known}))
        new.replace(file)
    return known


def _computed(conversations: list[int]) -> dict[str, list[int]]:
    model = make_model()
    return {
        f"{number}/{turn}": continued(model, prompt(number, turn)) for number in conversations for turn in range(TURNS)
    }


def _fingerprint() -> str:
    """Return a text that changes whenever tokens may."""
    from importlib.metadata import version

    code = Path(__file__).read_bytes()
    return sha256(code + version("torch").encode() + version("transformers").encode()).hexdigest()


if __name__ == "__main__":
    expected_tokens(int(sys.argv[1]), Path(sys.argv[2]))
