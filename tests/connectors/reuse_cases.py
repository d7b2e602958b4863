"""A small model and what the tests of reuse do with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from manager_process import ManagerProcess
from transformers import LlamaConfig, LlamaForCausalLM

from kvcm.connectors.results import Location
from kvcm.connectors.transformers import GenerationReport, KVReuse, ReuseSettings
from kvcm.model.uri import LocationUri

torch.set_num_threads(1)  # for a model this small, threads mostly wait for each other

BLOCK = 16
NEW = 24
PATIENT = ReuseSettings(
    register_seconds=20.0, call_seconds=20.0, load_seconds=60.0, save_seconds=60.0, flush_seconds=60.0
)


SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> LlamaForCausalLM:
    """Return a small Llama whose answers depend on their context."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"num_hidden_layers": 3, "head_dim": 16} | changes)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    return model.to(dtype)


MODEL = make_model()


def prompt(tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, 256, (1, tokens), generator=torch.Generator().manual_seed(seed))


Batch = tuple[torch.Tensor, torch.Tensor]


def padded(prompts: Sequence[torch.Tensor]) -> Batch:
    """Return the ids and the attention mask of a batch."""
    columns = max(ids.shape[1] for ids in prompts)
    ids = torch.zeros(len(prompts), columns, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(prompts):
        ids[row, columns - tokens.shape[1] :] = tokens[0]
        mask[row, columns - tokens.shape[1] :] = 1
    return ids, mask


def plain(input_ids: torch.Tensor, model: Any = MODEL, **arguments: Any) -> torch.Tensor:
    """Generate without reuse."""
    arguments = {"max_new_tokens": NEW, "do_sample": False} | arguments
    output: torch.Tensor = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **arguments)
    return output


def run(
    reuse: KVReuse, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **arguments: Any
) -> tuple[torch.Tensor, GenerationReport]:
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    arguments = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False} | arguments
    output = reuse.generate(input_ids, **arguments)
    assert reuse.last_report is not None
    return output, reuse.last_report


def checked(reuse: KVReuse, expected: torch.Tensor, *inputs: torch.Tensor, **arguments: Any) -> GenerationReport:
    """Generate, check the tokens, and return the report."""
    output, report = run(reuse, *inputs, **arguments)
    assert torch.equal(output, expected)
    return report


Connect = Callable[..., KVReuse]
Stored = Callable[[KVReuse, list[int]], list[bytes | None]]
Find = Callable[[KVReuse, torch.Tensor], list[Location]]


def read_block(uri: LocationUri) -> bytes:
    return Path(uri.path).read_bytes()[uri.offset : uri.offset + uri.size]


def overwrite(uri: LocationUri, data: bytes) -> None:
    path = Path(uri.path)
    whole = bytearray(path.read_bytes())
    whole[uri.offset : uri.offset + uri.size] = data
    path.write_bytes(whole)


def damage(uri: LocationUri) -> None:
    """Change a part, so that its checksum does not match."""
    overwrite(uri, bytes(byte ^ 0x5A for byte in read_block(uri)))


def files_of(manager: ManagerProcess, instance_id: str) -> list[Path]:
    return [path for path in manager.files if f"/{instance_id}/" in str(path)]
