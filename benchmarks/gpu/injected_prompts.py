"""An engine of a model with random weights, whose prompts are not computed: their KV is planted, pass by pass.

Everything else is as in an engine: the coordinator's hooks, the index that is built as chunks arrive, the copies to the
host, the states of requests, and decode steps with all products of the model. What tokens come out means nothing.
"""

from __future__ import annotations

import time

import torch
from planted_kv import PlantedKV
from torch import Tensor

from kvcm.gpu_tier.assembly import build
from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.engine.decode_engine import LayerDriver
from kvcm.gpu_tier.engine.decoder_models import LlamaDecoder, LlamaShape
from kvcm.gpu_tier.geometry import KVGeometry
from kvcm.gpu_tier.request_lifecycle import RequestState

__all__ = ["InjectedEngine", "random_llama"]

_CHUNK_TOKENS = 8192
_MOST_STEPS = 64  # in which a request has to become sparse


def random_llama(shape: LlamaShape, device: torch.device) -> LlamaDecoder:
    """Return a model of bf16 weights drawn on the device, where 16 GB take seconds."""
    q, kv = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = {
        "self_attn.q_proj": (q, shape.d_model), "self_attn.k_proj": (kv, shape.d_model),
        "self_attn.v_proj": (kv, shape.d_model), "self_attn.o_proj": (shape.d_model, q),
        "mlp.gate_proj": (shape.d_ff, shape.d_model), "mlp.up_proj": (shape.d_ff, shape.d_model),
        "mlp.down_proj": (shape.d_model, shape.d_ff),
    }  # fmt: skip
    tables = ("model.embed_tokens", "lm_head")
    weights = {f"{name}.weight": _matrix(shape.vocab, shape.d_model, device) for name in tables}
    norms = ["model.norm"]
    for number in range(shape.num_layers):
        prefix = f"model.layers.{number}"
        weights |= {f"{prefix}.{name}.weight": _matrix(*size, device) for name, size in layer.items()}
        norms += [f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"]
    ones = torch.ones(shape.d_model, dtype=torch.bfloat16, device=device)
    return LlamaDecoder(shape, weights | {f"{name}.weight": ones for name in norms})


def _matrix(outputs: int, inputs: int, device: torch.device) -> Tensor:
    return torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) * inputs**-0.5


class InjectedEngine:
    """One way to hold KV, and its requests.

    Args:
        model: whose steps are run.
        config: algorithm and residency.
        geometry: of the model's KV.
        device_pages: of the arena.
        max_requests: requests.
        max_tokens: most tokens of each.
        device: where.

    Attributes:
        coordinator: of the hooks.
        requests: those that are there.
    """

    def __init__(
        self, model: LlamaDecoder, config: SparseConfig, geometry: KVGeometry, *, device_pages: int,
        max_requests: int, max_tokens: int, device: torch.device,
    ) -> None:  # fmt: skip
        self.coordinator = build(
            config, geometry, num_q_heads=model.num_q_heads, sm_scale=model.sm_scale, device_pages=device_pages,
            max_requests=max_requests, max_tokens=max_tokens, device=device,
        )  # fmt: skip
        self._model, self._geometry, self._device = model, geometry, device
        self._driver = LayerDriver(model, self.coordinator, _CHUNK_TOKENS)
        self._kv = PlantedKV(geometry, device)
        self.requests: list[int] = []

    def admit(self, n_prompt: int) -> float:
        """Take a request in and return the seconds until its prompt is ready to be decoded from as the way has it.

        Raises:
            RuntimeError: it does not become sparse.
        """
        self._wait()
        begin = time.perf_counter()
        request = self.coordinator.on_request_begin(n_prompt)
        for start in range(0, n_prompt, _CHUNK_TOKENS):
            self._inject(request, start, min(start + _CHUNK_TOKENS, n_prompt))
        self.coordinator.prompt_finished(request)
        self._wait()
        self.requests.append(request)
        seconds = time.perf_counter() - begin
        for _ in range(_MOST_STEPS):
            if self.is_settled(request):
                return seconds
            self.decode([request])  # tokens that come out meanwhile cost what they cost densely
            self._wait()
            seconds = time.perf_counter() - begin
        raise RuntimeError(f"request {request} is {self.coordinator.trackers[request].state}, and not sparse")

    def is_settled(self, request: int) -> bool:
        """Whether a request is in the state in which it stays."""
        state = self.coordinator.trackers[request].state
        wanted = RequestState.DENSE if self.coordinator.config.algorithm == "full" else RequestState.SPARSE
        return state is wanted

    def _inject(self, request: int, start: int, stop: int) -> None:
        coordinator, model = self.coordinator, self._model
        batch = coordinator.plan_prefill([request], [stop - start])
        shape = (stop - start, model.num_q_heads)
        q = torch.zeros(*shape, model.head_dim, device=self._device, dtype=torch.bfloat16)
        out = torch.zeros(1, device=self._device)
        coordinator.forward_begin(batch)
        for layer in self._geometry.layers:
            k, v = self._kv.rows(layer, request, start, stop)
            coordinator.write_kv(layer, batch, k, v)
            coordinator.attention_begin(q, k, v, layer, batch)
            coordinator.attention_end(out, layer, batch)
        coordinator.forward_end(batch)

    def decode(self, requests: list[int]) -> Tensor:
        """Decode a token of each request."""
        batch = self.coordinator.plan_decode(requests)
        tokens = torch.zeros(len(requests), dtype=torch.int64, device=self._device)
        return self._driver.run(batch, tokens, [{} for _ in requests])

    def counted(self) -> tuple[int, int]:
        """Return hits and selected tokens so far, both 0 where nothing is cached."""
        counters = getattr(self.coordinator.manager.policy, "counters", None)
        if counters is None:
            return 0, 0
        if hasattr(counters, "token_hits"):
            return counters.token_hits, counters.tokens
        return counters.hits, counters.selected

    def _wait(self) -> None:
        for stream in ("compute", "h2d", "d2h", "upd"):
            self.coordinator.runtime.record(stream).wait()

    def close(self) -> None:
        """Give host memory back."""
        self._wait()
        self.coordinator.close()
