"""A Hugging Face model that decodes with sparse attention over KV in host memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Any, Self

from gpu_tier.assembly import build
from gpu_tier.config import SparseConfig
from gpu_tier.engine.batch_engine import BatchEngine
from gpu_tier.engine.generation import generate
from gpu_tier.engine.hf_runner import HfRunner
from gpu_tier.engine.hf_shape import AttentionShape
from gpu_tier.engine.prefill import PrefillAttention
from gpu_tier.errors import ConfigError
from gpu_tier.rows import KVDtype

__all__ = ["SparseGenerator"]


class SparseGenerator:
    """Generates with a causal language model of transformers, whose code stays as it is.

    The model has to be like Llama: every layer is softmax attention over all tokens and takes its attention function
    from transformers' registry. Until `close`, it can be used only through this object.

    Args:
        model: in evaluation mode, on the device it is to run on.
        config: settings of the tier.
        device_pages: pages of the KV pool on the device.
        max_requests: most prompts that run at a time.
        max_tokens: most tokens of one prompt and its continuation.
        chunk_tokens: most prompt tokens of a pass.
        piece_tokens: most keys of a prompt that prefill has decoded at a time.
        prefill: kernel of prefill attention, exact or flash; see `gpu_tier.engine.prefill`.
        kv_dtype: how KV is stored; None means as the model computes.

    Attributes:
        coordinator: of the tier.
        engine: runs the passes; for those who want to add and abort requests themselves.

    Raises:
        ConfigError: the model keeps KV in a way that is not supported, or is in training mode.
        StateError: another object decodes with the model.
    """

    def __init__(
        self,
        model: Any,
        config: SparseConfig,
        *,
        device_pages: int,
        max_requests: int,
        max_tokens: int,
        chunk_tokens: int = 8192,
        piece_tokens: int = 8192,
        prefill: str = "exact",
        kv_dtype: KVDtype | None = None,
    ) -> None:
        shape = AttentionShape.of(model, config.page_size, kv_dtype)
        self.coordinator = build(
            config,
            shape.geometry,
            num_q_heads=shape.num_q_heads,
            sm_scale=shape.sm_scale,
            device_pages=device_pages,
            max_requests=max_requests,
            max_tokens=max_tokens,
            device=model.device,
        )
        attention = PrefillAttention(self.coordinator.key_reader, shape.sm_scale, piece_tokens, prefill)
        try:
            self._runner = HfRunner(model, self.coordinator, shape, attention)
        except Exception:
            self.coordinator.close()
            raise
        self.engine = BatchEngine(self._runner, self.coordinator, device=model.device, chunk_tokens=chunk_tokens)
        self._max_tokens = max_tokens
        self._is_closed = False
        self._own_stop_tokens = _stop_tokens(model)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, stop_tokens: Collection[int] | None = None
    ) -> list[list[int]]:
        """Return the greedy continuation of each prompt; one that ended by a stop token has it as its last.

        Args:
            prompts: token ids, of any lengths.
            max_new_tokens: most tokens of a continuation.
            stop_tokens: tokens that end it; None means those of the model's generation settings.

        Raises:
            ConfigError: a prompt and its continuation would have more than `max_tokens`.
            PoolExhaustedError: a prompt does not fit although nothing else runs.
        """
        longest = max((len(prompt) for prompt in prompts), default=0)
        if longest + max_new_tokens > self._max_tokens:
            allowed = f"a prompt has {longest} tokens, and max_tokens={self._max_tokens} counts both"
            raise ConfigError("max_new_tokens", max_new_tokens, allowed)
        stop = self._own_stop_tokens if stop_tokens is None else stop_tokens
        return generate(self.engine, prompts, max_new_tokens, stop)

    def close(self) -> None:
        """End what runs, give the model its own attention and the host its memory back. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for request in self.engine.requests:
            self.engine.abort(request)
        self._runner.close()
        self.coordinator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _stop_tokens(model: Any) -> frozenset[int]:
    ids = model.generation_config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
