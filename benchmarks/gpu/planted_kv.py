"""KV of requests that is never all in memory: what a benchmark clusters and stores, computed where it is read.

Keys follow each other in runs about one topic, like those of the synthetic data that quality is measured with
(`kvcm.gpu_tier.eval.synth`, S1), without rotation: neighbours are alike and clusters of a segment differ in size.
One span
of tokens is drawn; a request's KV in a layer begins somewhere in it and goes round, so no two have the same rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvcm.gpu_tier.geometry import KVGeometry

__all__ = ["PlantedKV"]

_SPAN = 1 << 16
_TOPICS = 1024
_RUN_TOKENS = 24
_STRIDE = 977  # tokens between the beginnings of two layers, odd


class PlantedKV:
    """Reads keys and values of any request, as `KeySource` and `RawRows`.

    Args:
        geometry: of the KV; with values.
        device: where it is computed.
        span: tokens that are drawn.
    """

    def __init__(self, geometry: KVGeometry, device: torch.device, span: int = _SPAN) -> None:
        self._geometry, self._device, self._span = geometry, device, span
        heads = geometry.num_kv_heads
        topics = torch.nn.functional.normalize(torch.randn(heads, _TOPICS, geometry.head_dim, device=device), dim=-1)
        runs = torch.rand(span, device=device) < 1 / _RUN_TOKENS
        of_run = torch.randint(_TOPICS, (span,), device=device)
        topic = of_run[runs.cumsum(0)[:span].clamp_max(span - 1)]
        mean = topics.mean(1) * 8
        noise = 0.45 * torch.randn(span, heads, geometry.head_dim, device=device)
        keys = mean + 6 * topics[:, topic].transpose(0, 1) + noise
        values = torch.randn(span, heads, geometry.v_head_dim, device=device)
        self._rows = [part.encode(x) for part, x in zip(geometry.parts, (keys, values), strict=True)]

    def rows_of(self, layer_id: int, part: int, request: int, tokens: Tensor) -> Tensor:
        """Return the rows of some tokens as bytes, ``uint8 [n, H, row_bytes]``."""
        begin = (request * self._geometry.num_layers + self._geometry.layer_index(layer_id)) * _STRIDE
        return self._rows[part][(tokens.long() + begin) % self._span]

    def raw(self, layer_id: int, part: int, request: int, start: int, stop: int) -> Tensor:
        """See `RawRows`."""
        return self.rows_of(layer_id, part, request, torch.arange(start, stop, device=self._device))

    def keys(self, layer_id: int, request: int, start: int, stop: int) -> Tensor:
        """See `KeySource`."""
        return self._geometry.parts[0].decode(self.raw(layer_id, 0, request, start, stop))

    def rows(self, layer_id: int, request: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """See `KeySource`."""
        keys = self.keys(layer_id, request, start, stop)
        return keys, self._geometry.parts[1].decode(self.raw(layer_id, 1, request, start, stop))
