"""Identity of a model: models with equal identities share KV.

Models may share KV exactly when the same tokens give the same KV: same architecture and configuration, same weights,
same dtype, same stored layout. All of that is registered with the manager, which rejects an engine that differs, and is
also part of every block key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache

import torch
from transformers import PreTrainedModel

from kvcm.connectors.reuse.registration import KvIdentity
from kvcm.connectors.transformers.model_kv import ModelParts

__all__ = ["model_identity", "tensor_checksum"]

# ---- exact checksums of tensors: one pass in place, the same result on every device and in every layout ----
#
# The bytes are read as signed 32-bit words, chunk by chunk. Of each chunk two sums are kept, in 64-bit integers that
# wrap around, so that the order of addition does not matter: the plain one, and one weighted by position.
#
# 1. One changed word changes the plain sum.
# 2. Two swapped words of one chunk change the weighted sum: words differ by at most 31 factors of 2, and so do weights,
#    whose lower halves are a permutation; the product has less than the 64 that would make it wrap to 0. Swapped
#    between chunks, they change both plain sums.
# 3. Everything else (rows, permutations, other training) is caught like by a random hash of 64 bits: the weights look
#    random. Weights that grow evenly would not do: swapping two rows of equal sums would leave the sum as it is.
#
# No protection against forgery: an attacker can choose weights of two models with equal sums.

# Small enough for the caches of a core, large enough that starting the operations costs little. Part of the result.
_CHUNK_WORDS = 1 << 18
_WORD_BYTES = 4
_LOW_HALF = 0xFFFF_FFFF


def tensor_checksum(tensor: torch.Tensor) -> bytes:
    """Return a checksum of the elements of a tensor, bit by bit; shape and dtype are not part of it.

    Args:
        tensor: strided, on any device.
    """
    weights = _weights(tensor.device)
    sums: list[torch.Tensor] = []
    for words in _chunks(tensor.detach()):
        values = words.to(torch.int64)
        sums += [values.sum(), values.mul_(weights[: values.numel()]).sum()]
    return torch.stack(sums).cpu().numpy().tobytes() if sums else b""


def _chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensor's bytes as words, the last ones filled up with zeros."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    is_aligned = data.storage_offset() % _WORD_BYTES == 0
    chunk_bytes = _CHUNK_WORDS * _WORD_BYTES
    for start in range(0, data.numel(), chunk_bytes):
        chunk = data[start : start + chunk_bytes]
        missing = -chunk.numel() % _WORD_BYTES
        if missing or not is_aligned:
            chunk = torch.nn.functional.pad(chunk, (0, missing)).clone()
        yield chunk.view(torch.int32)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    positions = torch.arange(_CHUNK_WORDS, dtype=torch.int64, device=device)
    return (_mixed(positions + _CHUNK_WORDS) << 32) | _mixed(positions)


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return a permutation of the numbers below 2**32 that looks random (the end of MurmurHash3)."""
    numbers = ((numbers ^ (numbers >> 16)) * 0x85EB_CA6B) & _LOW_HALF
    numbers = ((numbers ^ (numbers >> 13)) * 0xC2B2_AE35) & _LOW_HALF
    return numbers ^ (numbers >> 16)


_HASHING = "kvcm-chain/2"
# Settings that leave the KV of given tokens as it is. Everything else counts, known or not.
_IRRELEVANT_SETTINGS = frozenset(
    {
        "architectures",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def model_identity(model: PreTrainedModel, parts: ModelParts, model_name: str | None) -> KvIdentity:
    """Return the settings that the KV of given tokens depends on.

    Args:
        model: whose configuration and weights count.
        parts: of its stored blocks.
        model_name: for people; default is the model's class.
    """
    return KvIdentity(
        model=model_name or type(model).__name__,
        weights=_weights_digest(model),
        engine="transformers",
        dtype=parts.kv[0].layout.dtype,
        hashing=_HASHING,
        formats=parts.formats,
        extra={"config": _config_digest(model)},
    )


def _config_digest(model: PreTrainedModel) -> str:
    settings = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in _IRRELEVANT_SETTINGS and not name.startswith("_")
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _weights_digest(model: PreTrainedModel) -> str:
    """Hash everything that is saved of the model, every element of it: one may be all that fine-tuning changed."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
            digest.update(tensor_checksum(value))
        else:  # returned by a module's `get_extra_state`
            digest.update(f"{name} {json.dumps(value, sort_keys=True, default=str)}\n".encode())
    return digest.hexdigest()[:32]
