"""Quality of selections: an algorithm chooses on S1 or S5 as it would in an engine, and attention over its choice is
compared with attention over everything.

What an algorithm estimates of the rest is merged with attention over its choice, as in an engine. Budgets are equal in
tokens or in bytes:

* tokens: every method may select so many tokens;
* bytes: every method may hold so many bytes on the device, its representation of all keys and the KV of its selection
  together. What a representation costs is taken from the selection. The oracle needs all keys and is exempt: it is the
  ceiling, not a method. What is estimated is read from the representation and costs nothing more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_tier.config import SparseConfig
from gpu_tier.eval.driven import Choices, Driven, make_algorithm
from gpu_tier.eval.methods import PAGE, method
from gpu_tier.eval.metrics import Errors, attended, attention_weights, errors, mass_recall, recall_at, steady_tokens
from gpu_tier.eval.synth import KVSample
from gpu_tier.kernels.lse_merge import lse_merge

__all__ = ["QualityResult", "evaluate", "judged", "kv_bytes", "method_for_bytes", "selections"]

_ELEMENT_BYTES = 2  # KV is counted as bf16


@dataclass(frozen=True, slots=True)
class QualityResult:
    """One method on one sample.

    Attributes:
        method: the algorithm.
        tokens: tokens selected in a step, steady ones included, the mean.
        estimated: tokens whose attention is estimated in a step, the mean.
        kv_bytes: bytes of the selected tokens' KV in bf16, one layer and KV head.
        representation_bytes: bytes on the device that the method chooses by, likewise.
        recall: share of the true top k found; k is `recall_k`.
        recall_k: tokens that are sought.
        mass: see `mass_recall`.
        errors: of the outputs, with what is estimated.
        errors_alone: of the outputs without it.
    """

    method: str
    tokens: float
    estimated: float
    kv_bytes: float
    representation_bytes: int
    recall: float
    recall_k: int
    mass: float
    errors: Errors
    errors_alone: Errors


def kv_bytes(tokens: float, d: int) -> float:
    """Return the bytes of so many tokens' keys and values of one layer and KV head, in bf16."""
    return tokens * 2 * d * _ELEMENT_BYTES


def method_for_bytes(name: str, budget: float, sample: KVSample) -> SparseConfig | None:
    """Return the settings under which a method holds `budget` bytes, None when its representation leaves too little."""
    n, d = sample.k.shape
    everything = make_algorithm(method(name, n, n), sample)
    representation = 0 if name == "oracle" else everything.representation_bytes(n)
    tokens = int((budget - representation) / kv_bytes(1, d))
    return method(name, tokens, n) if tokens >= 2 * PAGE else None


def selections(config: SparseConfig, sample: KVSample) -> Tensor:
    """Return the tokens that an algorithm attends to, ``bool [T, n]``, for each query of the sample."""
    return Driven(config, sample).choices().selected


def evaluate(config: SparseConfig, sample: KVSample, recall_k: int = 100) -> QualityResult:
    """Return the quality of an algorithm on a sample."""
    driven = Driven(config, sample)
    return judged(driven, driven.choices(), sample, recall_k)


def judged(driven: Driven, choices: Choices, sample: KVSample, recall_k: int) -> QualityResult:
    """Return the quality of what an algorithm chose.

    Tokens that this method or the metric keeps without retrieval are neither sought nor found.
    """
    n, d = sample.k.shape
    weights = attention_weights(sample.q, sample.k, sample.scale)
    full = weights @ sample.v
    steady = steady_tokens(n) | choices.steady
    tokens = float(choices.selected.sum(1).float().mean())
    alone = attended(weights, sample.v, choices.selected)
    return QualityResult(
        method=driven.algorithm.context.config.algorithm,
        tokens=tokens,
        estimated=float(choices.estimated.sum(1).float().mean()),
        kv_bytes=kv_bytes(tokens, d),
        representation_bytes=driven.algorithm.representation_bytes(n),
        recall=recall_at(recall_k, weights, choices.selected, steady),
        recall_k=recall_k,
        mass=mass_recall(weights, choices.selected, steady),
        errors=errors(_with_estimates(alone, choices, sample), full, sample.v),
        errors_alone=errors(alone, full, sample.v),
    )


def _with_estimates(alone: Tensor, choices: Choices, sample: KVSample) -> Tensor:
    """Return ``alone f32 [T, G, dv]``, attention over the choice, merged with what each step estimates of the rest."""
    scores = sample.q.float() @ sample.k.float().T * sample.scale
    lse = scores.masked_fill(~choices.selected[:, None], float("-inf")).logsumexp(-1)
    merged = alone.clone()
    for step, estimate in enumerate(choices.estimates):
        if estimate is not None:
            parts = torch.stack([alone[step, None], estimate.o]), torch.stack([lse[step, None], estimate.lse])
            lse_merge(*parts, merged[step, None], torch.empty_like(estimate.lse), impl="reference")
    return merged
