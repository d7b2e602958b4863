"""Prefixes for `Traffic`: host pages that another request has computed, as a prefix store would hand them over."""

from __future__ import annotations

from typing import Any

import torch
from layer_traffic import Shape, Tokens, Traffic

from gpu_tier.assembly import build
from gpu_tier.config import SparseConfig
from gpu_tier.manager.prefix_attach import AttachedPrefix, SidecarRun

__all__ = ["diverging", "host_rows_are_right", "prefix_of", "publishing"]


def publishing(shape: Shape, config: dict[str, Any]) -> Traffic:
    """Return traffic whose requests all have a host copy."""
    settings = SparseConfig.parse({"page_size": shape.page, "debug_checks": True, **config})
    coordinator = build(
        settings, shape.geometry, num_q_heads=shape.q_heads, sm_scale=shape.sm_scale, device_pages=shape.device_pages,
        max_requests=shape.max_requests, max_tokens=shape.max_tokens, publishes=True,
    )  # fmt: skip
    return Traffic(shape, config, coordinator)


def prefix_of(traffic: Traffic, seed: int, n_tokens: int, *, has_sidecar: bool = True) -> AttachedPrefix:
    """Compute the first tokens of a sequence, and keep their host pages when the request ends."""
    manager, algorithm = traffic.coordinator.manager, traffic.coordinator.algorithm
    request = traffic.begin(n_tokens + 5, seed)
    traffic.prompt([request], chunk=40)
    manager.settle(request)
    pages = manager.host_tokens.pages(request)[: n_tokens // traffic.shape.page]
    manager.host.allocator.share(pages)
    sidecar = algorithm.export_sidecar(request, 0, n_tokens) if has_sidecar else None
    traffic.end(request)
    runs = () if sidecar is None else (SidecarRun(0, sidecar.data.clone()),)
    return AttachedPrefix(pages, n_tokens, runs)


def diverging(traffic: Traffic, first: int, second: int, at: int) -> Tokens:
    """Return the sequence of one seed up to a token, and of another from there on."""
    a, b = traffic.sequence(first), traffic.sequence(second)

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :at], y[:, at:]], 1)

    extra = {name: joined(a.extra[name], b.extra[name]) for name in a.extra}
    return Tokens(joined(a.q, b.q), joined(a.k, b.k), joined(a.v, b.v), extra)


def host_rows_are_right(traffic: Traffic, request: int) -> int:
    """Check that host pages hold exactly the KV of a request; return how many tokens were compared."""
    manager, sequence = traffic.coordinator.manager, traffic.sequences[request]
    manager.settle(request)
    n = traffic.coordinator.trackers[request].seq_len
    assert manager.host_tokens.backed_up(request) == n
    slots = manager.host_tokens.slots(request, 0, n)
    for layer_id in manager.layers:
        layer = manager.device.geometry.layer_index(layer_id)
        for part, (rows, numbers) in enumerate(
            zip(traffic.shape.geometry.parts, (sequence.k, sequence.v), strict=False)
        ):
            found = manager.host.read(layer_id, part, slots)
            assert torch.equal(found, rows.encode(numbers[layer, :n]))
    return n
