"""K8, claim: clustering a layer's keys costs a few per cent of the prefill of that layer.

Each length is one request of Llama-3-8B. The layer is its products and causal attention, by the faster of torch's flash
and cuDNN; norms and rotations are left out, so the layer looks cheaper than it is. The wave index of its 8 KV heads
(8192-token segments, a centroid per 16 tokens, 10 iterations, sums of values, order of members) and the codes of PQ
(codebooks and encoding) are built of random keys on the same device: on a GPU nothing in them ends early, whatever the
keys are.

What an index costs is stated as a share of the layer's time only if the layer reaches 75 % of what the device's
products allow: of a slow layer everything is a small share. Its share of the time that the layer would take at best is
an upper bound, and always printed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import checkout  # noqa: F401 - first: it makes the rest importable
import torch
from device_clock import Samples
from device_run import LEAST_OF_ROOFLINE, DeviceRun, run
from report import Row
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu
from wave_build import build_prompt

from kvcm.gpu_tier.config import RetroInferConfig
from kvcm.gpu_tier.index.kmeans import spherical_kmeans
from kvcm.gpu_tier.index.pq import PQShape, encode, train

MEASURES = "clustering a layer's keys for RetroInfer and PQCache against the prefill of that layer, 30K to 120K tokens"
MOST_OF_LAYER = 0.05
MOST_APART = 1e-3


@dataclass(frozen=True, slots=True)
class Size:
    """How large a layer is, and its indexes.

    Attributes:
        lengths: tokens of a prompt.
        q_heads: query heads Hq.
        kv_heads: KV heads H.
        dims: of a head.
        wide: numbers between the products of the feed-forward part.
        wave: settings of RetroInfer.
        codes: sub-vectors and bits of PQ.
        iterations: of PQ.
    """

    lengths: tuple[int, ...]
    q_heads: int
    kv_heads: int
    dims: int
    wide: int
    wave: RetroInferConfig
    codes: tuple[tuple[int, int], ...]
    iterations: tuple[int, ...]

    @property
    def hidden(self) -> int:
        """Numbers of a hidden state."""
        return self.q_heads * self.dims

    def operations(self, tokens: int) -> int:
        """Return the multiplications and additions of a layer's prefill."""
        weights = self.hidden * ((self.q_heads + 2 * self.kv_heads) * self.dims + self.hidden + 3 * self.wide)
        return 2 * tokens * weights + 2 * tokens**2 * self.hidden


FULL = Size((30720, 61440, 122880), 32, 8, 128, 14336, RetroInferConfig(), ((4, 8), (2, 6)), (3, 10))
QUICK = Size((30720,), 32, 8, 128, 14336, RetroInferConfig(), ((4, 8),), (3,))
_TINY = RetroInferConfig(local=16, segment=64, update_segment=32, iterations=2)
SMOKE = Size((200,), 4, 2, 16, 32, _TINY, ((2, 3),), (1,))


class Layer:
    """One layer of a decoder, of random weights."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size = size
        columns = (size.q_heads + 2 * size.kv_heads) * size.dims
        shapes = (
            (size.hidden, columns),
            (size.hidden, size.hidden),
            (size.hidden, 2 * size.wide),
            (size.wide, size.hidden),
        )
        made = [torch.randn(shape, device=device, dtype=torch.bfloat16) / shape[0] ** 0.5 for shape in shapes]
        self.qkv, self.out, self.up, self.down = made

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``bf16 [n, hidden]`` of a prompt."""
        heads = (x @ self.qkv).unflatten(1, (-1, self.size.dims)).transpose(0, 1)[None]
        q, k, v = heads.split((self.size.q_heads, self.size.kv_heads, self.size.kv_heads), dim=1)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
        x = x + attended.transpose(0, 1).flatten(1) @ self.out
        gate, up = (x @ self.up).chunk(2, 1)
        return x + (silu(gate) * up) @ self.down  # type: ignore[no-any-return]


def prefill(this: DeviceRun, case: str, size: Size, tokens: int) -> Samples:
    """Time a layer's prefill with each of torch's attentions; return the fastest."""
    layer = Layer(size, this.device)
    x = torch.randn(tokens, size.hidden, device=this.device, dtype=torch.bfloat16)
    backends = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if this.clock.is_gpu else (SDPBackend.MATH,)
    found = []
    for backend in backends:
        name = f"{case}: layer, {backend.name.lower()}"
        with sdpa_kernel(backend):
            try:
                layer(x)
            except RuntimeError as error:
                print(f"{name}: torch has none here: {error}".splitlines()[0])
                continue
            found.append(this.time(name, lambda: layer(x), is_graph=False))
        this.add_time(name, found[-1])
    return min(found, key=lambda samples: samples.median)


def add_index(this: DeviceRun, case: str, samples: Samples, layer: Samples, best: float, target: float | None) -> None:
    """Publish what building an index takes, and of which share of a layer that is.

    Args:
        case: the index.
        samples: its times.
        layer: times of the layer.
        best: seconds of a layer at the device's measured speed of products.
        target: largest share of the layer, None to report only.
    """
    this.add_time(case, samples)
    this.add(Row(case, "of the layer's time at best: an upper bound", samples.median / best, ""))
    reached = best / layer.median
    if reached < LEAST_OF_ROOFLINE:
        reason = f"the layer reaches less than {LEAST_OF_ROOFLINE:.2f} of the roofline"
        this.add(Row(case, f"no share of the layer stated: {reason}", reached, ""))
        return
    share = samples.median / layer.median
    wanted, ok = ("", None) if target is None else (f"<= {target}", share <= target)
    this.add(Row(case, "share of the layer's prefill", share, "", ratio=share, target=wanted, ok=ok))


def check_clustering(this: DeviceRun, case: str, size: Size, keys: Tensor) -> None:
    """Compare how near the keys of one segment are to their centroids with what the reference finds."""
    x = keys[: size.wave.segment, :1].float().transpose(0, 1).contiguous()
    tokens = x.shape[1]
    clusters = tokens // size.wave.tokens_per_centroid

    def nearness(x: Tensor, kernels: str) -> float:
        labels, units = spherical_kmeans(x, [tokens], [clusters], size.wave.iterations, kernels=kernels)
        return float((x[0] * units[0, labels[0].long()]).sum(1).mean())

    reference = nearness(x.cpu(), "reference")
    apart = abs(nearness(x, "auto") / reference - 1)
    row = Row(case, "largest relative difference", apart, "", target=f"<= {MOST_APART}", ok=apart <= MOST_APART)
    this.add_check(row)


def indexes(this: DeviceRun, size: Size, keys: Tensor, values: Tensor) -> dict[str, tuple[Callable[[], object], bool]]:
    """Return the builders of indexes, by name, and whether the share of the layer has a bar."""

    def codes(shape: PQShape, iterations: int) -> Tensor:
        return encode(keys, train(keys, shape, iterations, seed=0))

    found: dict[str, tuple[Callable[[], object], bool]] = {
        "wave index": (lambda: build_prompt(keys, values, size.wave), True)
    }
    for m, b in size.codes:
        shape = PQShape(size.kv_heads, size.dims, m, b)
        for iterations in size.iterations:
            name = f"PQ m={m} b={b}, {iterations} iterations"
            found[name] = (lambda shape=shape, iterations=iterations: codes(shape, iterations), False)  # type: ignore[misc]
    return found


def measure(this: DeviceRun) -> None:
    """All lengths."""
    size = SMOKE if this.is_smoke else QUICK if this.is_quick else FULL
    for tokens in size.lengths:
        case = f"n={tokens}"
        if this.leaves_out(case):
            continue
        layer = prefill(this, case, size, tokens)
        best = size.operations(tokens) / this.peaks.flops
        this.add(Row(f"{case}: layer", "share of the roofline", best / layer.median, ""))
        keys, values = (
            torch.randn(tokens, size.kv_heads, size.dims, device=this.device, dtype=torch.bfloat16) for _ in range(2)
        )
        check_clustering(this, case, size, keys)
        for name, (build, has_bar) in indexes(this, size, keys, values).items():
            samples = this.time(f"{case}: {name}", build, is_graph=False)
            add_index(this, f"{case}: {name}", samples, layer, best, MOST_OF_LAYER if has_bar else None)


def main(argv: Sequence[str] | None = None) -> int:
    return run(__doc__ or "", MEASURES, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
