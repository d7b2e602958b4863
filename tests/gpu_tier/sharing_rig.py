"""Engines over small models that share prefixes through a storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from coordinator_rig import MODELS, PAGE, config_of, coordinator_of, nothing_is_held, prompt, whole
from retrieval_cases import PQ, WAVE

from kvcm.gpu_tier.connector import KVConnector, KVFormat
from kvcm.gpu_tier.engine.decode_engine import DecodeEngine
from kvcm.gpu_tier.engine.sharing_engine import SharingEngine, sidecar_of
from kvcm.gpu_tier.geometry import KVDtype
from kvcm.gpu_tier.manager.prefixes import PrefixStore

torch.set_num_threads(1)  # for models this small, threads mostly wait for each other

NEW = 20
CHUNK = 32
# Sparse for real: a tenth of a prompt of 200 tokens.
SHORT: dict[str, dict[str, Any]] = {
    "full": {},
    "full_offload": {"algo": {"chunk_tokens": 48}},
    "oracle": {"top_k": 24, "device_buffer_size": 48, "algo": {"k": 24}},
    "streaming_llm": {"top_k": 64, "algo": {"window": 40, "page": PAGE}},
    "quest": {"top_k": 96, "device_buffer_size": 128, "algo": {"token_budget": 96, "skip_layers": 1}},
    "dsa": {"top_k": 24, "device_buffer_size": 48, "algo": {"index_heads": 4, "index_dim": 32}},
    "snapkv": {"algo": {"cap": 40, "w_obs": 8, "mode": "retrievable"}},
    "pqcache": {"algo": {**PQ, "token_budget": 24}},
    "retroinfer": {"algo": WAVE},
}
# Where everything stays on the device, or is dropped there, prompts go to the host only to be published.
OTHER_RESIDENCIES: dict[str, dict[str, Any]] = {
    "quest": {"residency": "device"},
    "dsa": {"residency": "device"},
    "snapkv": {"algo": {"cap": 40, "w_obs": 8}},
    "pqcache": {"residency": "device"},
    "retroinfer": {"residency": "device"},
}
ALGORITHMS = [*(("llama", name) for name in SHORT if name != "dsa"), ("latent", "dsa"), ("latent", "full")]


class Rig:
    """One engine process: a coordinator, a store and the engine that joins them."""

    def __init__(
        self,
        model_name: str,
        algorithm: str,
        connect: Callable[[KVFormat, int, dict[str, int]], KVConnector] | None,
        page_keys: Callable[[Sequence[int]], Sequence[int]] | None = None,
        *,
        dtype: KVDtype = KVDtype.F32,
        sparse: bool = True,
        pages: int = 100,
        decoder: Any = None,
        device: str = "cpu",
        **changes: Any,
    ) -> None:
        model = decoder or MODELS[model_name]
        config = config_of(algorithm, SHORT[algorithm] if sparse else whole(algorithm, has_indexer=True), **changes)
        self.coordinator = coordinator_of(model, config, pages, dtype, max_tokens=320, device=device, publishes=True)
        host, geometry = self.coordinator.manager.host, self.coordinator.manager.device.geometry
        kv = KVFormat.of(geometry, config.host_layout, model=model_name, weights="0", rope={"theta": 10_000.0})
        sidecar = sidecar_of(self.coordinator, kv)
        sidecars = {} if sidecar is None else {sidecar.name: sidecar.page_bytes}
        self.connector = connect(kv, geometry.page_bytes, sidecars) if connect is not None else None
        keys = page_keys or self.connector.page_keys  # type: ignore[union-attr]
        self.store = PrefixStore(host, self.connector, keys, sidecar)
        self.decoder = DecodeEngine(model, self.coordinator, device=device, chunk_tokens=CHUNK)
        self.engine = SharingEngine(self.decoder, self.coordinator, self.store)

    def run(self, tokens: Sequence[int], new: int = NEW) -> tuple[list[int], int, int]:
        """Run one prompt to its end: its tokens, how many were attached, and the steps until its first token."""
        number = self.engine.submit(tokens)
        first_token_after = steps = attached = 0
        while len(self.engine.tokens(number)) < len(tokens) + new:
            self.engine.step()
            steps += bool(self.engine.running)
            attached = self.engine.attached_tokens(number)
            if not first_token_after and len(self.engine.tokens(number)) > len(tokens):
                first_token_after = steps
        found = self.engine.tokens(number)
        self.engine.finish(number)
        assert self.store.flush(60)
        return found, attached, first_token_after

    def is_empty(self) -> bool:
        return nothing_is_held(self.coordinator) and self.store.is_idle


def continued(model_name: str, algorithm: str, tokens: Sequence[int], new: int = NEW, **options: Any) -> list[int]:
    """Return a prompt and its answer, computed without sharing anything."""
    engine = Rig(model_name, algorithm, None, lambda _: (), **options).decoder
    request = engine.add(tokens)
    while len(engine.tokens(request)) < len(tokens) + new:
        engine.step()
    return engine.tokens(request)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return a prompt of random tokens, the same in every process."""
    return prompt(length, seed)
