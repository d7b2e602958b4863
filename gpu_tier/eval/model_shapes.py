"""The shapes of models whose decode steps are modelled, and the device that they run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvcm.gpu_tier.errors import ConfigError
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind

__all__ = ["MODEL_SHAPES", "Device", "ModelShape", "model_shape"]


@dataclass(frozen=True, slots=True)
class Device:
    """What bounds a decode step on one GPU.

    Attributes:
        hbm_bytes_per_second: measured speed of device memory.
        link_bytes_per_second: measured peak of the link to host memory.
        flops_per_second: measured speed of dense bf16 products.
        link_efficiency: share of the peak that scattered rows reach; measured with benchmarks/gpu/k1_io_transfer.py.
        layer_overhead_seconds: launches and planning of one sparse layer that nothing hides; a measurement too.
    """

    hbm_bytes_per_second: float = 4.3e12
    link_bytes_per_second: float = 55e9
    flops_per_second: float = 790e12
    link_efficiency: float = 1.0
    layer_overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        for field in ("hbm_bytes_per_second", "link_bytes_per_second", "flops_per_second"):
            if getattr(self, field) <= 0:
                raise ConfigError(field, getattr(self, field), "must be above 0")
        if not 0 < self.link_efficiency <= 1:
            raise ConfigError("link_efficiency", self.link_efficiency, "must be above 0 and at most 1")
        if self.layer_overhead_seconds < 0:
            raise ConfigError("layer_overhead_seconds", self.layer_overhead_seconds, "must not be negative")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model as one GPU sees it.

    Attributes:
        name: for people.
        geometry: of its KV on this GPU.
        num_q_heads: query heads Hq on this GPU.
        weight_bytes: weights on this GPU.
        active_weight_bytes: of them, what one token reads; of a mixture of experts less than all.
        active_params: parameters that one token is multiplied with.
    """

    name: str
    geometry: KVGeometry
    num_q_heads: int
    weight_bytes: int
    active_weight_bytes: int
    active_params: int

    def __post_init__(self) -> None:
        if self.num_q_heads % self.geometry.num_kv_heads:
            raise ConfigError("num_q_heads", self.num_q_heads, f"a multiple of {self.geometry.num_kv_heads} KV heads")
        if not 0 <= self.active_weight_bytes <= self.weight_bytes:
            raise ConfigError("active_weight_bytes", self.active_weight_bytes, f"at most {self.weight_bytes}")

    def with_kv(self, dtype: KVDtype | None, page_size: int | None) -> ModelShape:
        """Return the same model with its KV in another form."""
        geometry = replace(
            self.geometry, dtype=dtype or self.geometry.dtype, page_size=page_size or self.geometry.page_size
        )
        return replace(self, geometry=geometry)

    def step_weight_bytes(self, batch: int) -> int:
        """Bytes of weights that a step of `batch` tokens reads at most: experts of different tokens may differ."""
        return min(self.weight_bytes, batch * self.active_weight_bytes)


_LLAMA3_8B = ModelShape(
    name="llama3-8b",
    geometry=KVGeometry(
        kind=KVKind.MHA, num_layers=32, num_kv_heads=8, head_dim=128, v_head_dim=128, dtype=KVDtype.BF16
    ),
    num_q_heads=32,
    weight_bytes=16_060_000_000,
    active_weight_bytes=16_060_000_000,
    active_params=8_030_000_000,
)

# One GPU of eight, fp8 weights: attention runs data parallel, so all heads and layers and their 11.4 billion parameters
# are here; the experts' 660 billion, an eighth each, serve the tokens of all eight GPUs.
_DEEPSEEK_V32 = ModelShape(
    name="deepseek-v3.2",
    geometry=KVGeometry(
        kind=KVKind.MLA, num_layers=61, num_kv_heads=1, head_dim=576, v_head_dim=512, dtype=KVDtype.BF16
    ),
    num_q_heads=128,
    weight_bytes=11_400_000_000 + 659_600_000_000 // 8,
    active_weight_bytes=37_000_000_000,
    active_params=37_000_000_000,
)

MODEL_SHAPES: Mapping[str, ModelShape] = {shape.name: shape for shape in (_LLAMA3_8B, _DEEPSEEK_V32)}


def model_shape(name: str) -> ModelShape:
    """Return a preset.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in MODEL_SHAPES:
        raise ConfigError.choice("model_shape", name, MODEL_SHAPES)
    return MODEL_SHAPES[name]
