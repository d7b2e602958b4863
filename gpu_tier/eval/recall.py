"""The recall task through the whole engine: which answers a method costs.

The prompt is computed with exact attention; then the questions are decoded one after the other, token by token, so that
every step goes through the coordinator: selection, buffer, loads, sparse attention. All methods decode the same tokens,
so their answers are paired. The prompt may hold the questions too (`kvcm.gpu_tier.engine.recall_model`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvcm.gpu_tier.assembly import build
from kvcm.gpu_tier.config import PQCacheConfig, RetroInferConfig, SparseConfig
from kvcm.gpu_tier.coordinator import SparseCoordinator
from kvcm.gpu_tier.engine.decode_engine import LayerDriver
from kvcm.gpu_tier.engine.interfaces import ModelState
from kvcm.gpu_tier.engine.recall_model import RecallBatch, RecallModel
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind
from kvcm.gpu_tier.manager.residency import LruDiffPolicy
from kvcm.gpu_tier.manager.token_blocks import TokenBlockPolicy
from kvcm.gpu_tier.manager.wave_buffer import WaveBuffer
from kvcm.gpu_tier.manager.wave_gpu import WaveGpuBuffer

__all__ = ["RecallRun", "recall", "tokens_for_bytes"]

_PIECE_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class RecallRun:
    """What one method answered.

    Attributes:
        correct: ``bool [B, Q]``.
        attention: ``f32 [B, 3·Q, L, Hq, dv]`` attention outputs at the questions' tokens.
        hit_rate: selected items that were on the device, of those selected; None where nothing is loaded. Steady tokens
            of residency `blocks` do not count.
    """

    correct: Tensor
    attention: Tensor
    hit_rate: float | None

    @property
    def accuracy(self) -> float:
        """Share of the questions answered."""
        return float(self.correct.float().mean())

    def relative_error(self, full: RecallRun) -> float:
        """Return the mean of ``|o - o_full| / |o_full|`` over layers, heads and the tokens of questions.

        What a layer gets wrong the next one starts from, so errors of both layers are in the second's.
        """
        distance = (self.attention - full.attention).norm(dim=-1)
        return float((distance / full.attention.norm(dim=-1)).mean())


class _Recording(RecallModel):
    """The model, which notes the attention outputs that reach it."""

    seen: list[Tensor]

    def attention_output(self, layer_id: int, hidden: Tensor, attention: Tensor) -> Tensor:
        """See `DecoderModel`."""
        self.seen.append(attention)
        return super().attention_output(layer_id, hidden, attention)


@dataclass(slots=True)
class _Decode:
    """Requests whose tokens are given, not generated."""

    coordinator: SparseCoordinator
    driver: LayerDriver
    requests: list[int] = field(default_factory=list)
    states: list[ModelState] = field(default_factory=list)

    def prefill(self, context: Tensor) -> None:
        state: ModelState = {}
        request = self.coordinator.on_request_begin(len(context))
        self.driver.run(self.coordinator.plan_prefill([request], [len(context)]), context, [state])
        self.coordinator.prompt_finished(request)
        self.requests.append(request)
        self.states.append(state)

    def step(self, tokens: Tensor) -> Tensor:
        return self.driver.run(self.coordinator.plan_decode(self.requests), tokens, self.states)

    def end(self) -> None:
        for request in self.requests:
            self.coordinator.on_request_end(request)


def tokens_for_bytes(model: RecallModel, config: SparseConfig, share: float, n_tokens: int) -> int:
    """Return the tokens that a method may select when it holds a share of the context's KV bytes on the device.

    Args:
        model: the recall transformer; its KV is counted as bf16.
        config: settings of the method; its representations are those of these.
        share: of the KV's bytes that representations and selected KV may take together.
        n_tokens: tokens of the context.
    """
    kv = 4 * model.num_layers * model.num_kv_heads * model.head_dim
    context = torch.zeros(1, n_tokens, dtype=torch.int64)
    # Representations do not depend on the residency.
    algorithm = _coordinator(model, config.replaced(residency="device"), context).algorithm
    representation = 0 if config.algorithm == "oracle" else algorithm.representation_bytes(n_tokens)
    return int((share * n_tokens * kv - representation) / kv)


@torch.no_grad()
def recall(model: RecallModel, config: SparseConfig, batch: RecallBatch) -> RecallRun:
    """Return what a method answers to a batch of contexts with questions.

    Args:
        model: the recall transformer.
        config: settings of the method.
        batch: the data.
    """
    tokens, ends = batch.joined()
    recording = _recording(model)
    coordinator = _coordinator(model, config, tokens)
    decode = _Decode(coordinator, LayerDriver(recording, coordinator, _PIECE_TOKENS))
    prompt = batch.context.shape[1]
    for context in batch.context:
        decode.prefill(context)
    correct: list[Tensor] = []
    attention: list[Tensor] = []
    asked = set(ends.tolist())
    of_questions = {end - i for end in asked for i in range(batch.questions.shape[2])}
    for position in range(prompt, tokens.shape[1]):
        recording.seen = []
        logits = decode.step(tokens[:, position])
        if position in of_questions:
            attention.append(torch.stack(recording.seen, 1))
        if position in asked:
            correct.append(logits.argmax(-1) == batch.answers[:, len(correct)])
    rate = _hit_rate(coordinator)
    decode.end()
    coordinator.close()
    return RecallRun(torch.stack(correct, 1), torch.stack(attention, 1), rate)


def _recording(model: RecallModel) -> _Recording:
    recording = _Recording()
    recording.load_state_dict(model.state_dict())
    recording.seen = []
    return recording.requires_grad_(False)


def _coordinator(model: RecallModel, config: SparseConfig, tokens: Tensor) -> SparseCoordinator:
    rows, length = tokens.shape
    geometry = KVGeometry(
        kind=KVKind.MHA,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        v_head_dim=model.v_head_dim,
        dtype=KVDtype.F32,
        page_size=config.page_size,
    )
    pages = -(-length // config.page_size) + 2
    buffer = 2 * config.device_buffer_size + _cached(config, length)
    return build(
        config,
        geometry,
        num_q_heads=model.num_q_heads,
        sm_scale=model.sm_scale,
        device_pages=rows * (2 * pages + -(-buffer // config.page_size)),
        max_requests=rows,
        max_tokens=length,
    )


def _cached(config: SparseConfig, n_tokens: int) -> int:
    """Return the tokens of the block cache of a request, at most."""
    match config.algo:
        case RetroInferConfig(cache_ratio=ratio):
            return int(ratio * n_tokens)
        case PQCacheConfig(cache_tokens=tokens):
            return tokens
    return 0


def _hit_rate(coordinator: SparseCoordinator) -> float | None:
    policy = coordinator.manager.policy
    counted = (LruDiffPolicy, TokenBlockPolicy, WaveBuffer, WaveGpuBuffer)
    return policy.counters.hit_rate if isinstance(policy, counted) else None
