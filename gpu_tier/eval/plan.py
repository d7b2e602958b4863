"""How many requests fit, and which limit binds: device memory, host memory, or a step's time.

Everything but the hit rate and the requests' length follows from shapes; these two are inputs. Times are those of
`roofline`, nothing overlapped: a plan that a real system can only miss from below is of no use. `advise` says from
which batch on the KV is better off in host memory: below it, an algorithm that never waits for the link is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpu_tier.config import FullOffloadConfig, SparseConfig
from gpu_tier.errors import ConfigError
from gpu_tier.eval.footprint import Footprint, footprint
from gpu_tier.eval.model_shapes import Device, ModelShape
from gpu_tier.eval.roofline import StepTime, selected_tokens, skip_layers, step_time, traffic

__all__ = ["Advice", "Limits", "Plan", "Workload", "advise", "plan"]

_MOST_REQUESTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plan has to keep to.

    Attributes:
        gpu_bytes: memory of the GPU.
        host_bytes: memory of the host that may be pinned.
        latency_seconds: most time of a decode step; None for no limit.
        reserve_bytes: device memory for activations, graphs and fragments.
        staging_requests: requests in prefill at a time, whose whole KV is on the device until it was copied away.
    """

    gpu_bytes: int
    host_bytes: int
    latency_seconds: float | None = None
    reserve_bytes: int = 4 << 30
    staging_requests: int = 1

    def __post_init__(self) -> None:
        if self.gpu_bytes < 1:
            raise ConfigError("gpu_bytes", self.gpu_bytes, "must be at least 1")
        for field in ("host_bytes", "reserve_bytes", "staging_requests"):
            if getattr(self, field) < 0:
                raise ConfigError(field, getattr(self, field), "must not be negative")
        if self.latency_seconds is not None and self.latency_seconds <= 0:
            raise ConfigError("latency_seconds", self.latency_seconds, "must be above 0")


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked for: requests of one length, and how often what they select is on the device already."""

    n_tokens: int
    hit_rate: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The largest batch, and why it is no larger.

    Attributes:
        algorithm: name of the algorithm.
        residency: where its KV is.
        batch: requests; 0 when not even one fits.
        binds: "gpu memory", "host memory", "latency", or "nothing" when `_MOST_REQUESTS` fit.
        fixed_bytes: device bytes that do not grow with the batch: weights, reserve, staging.
        request: bytes of one request.
        step: time of a step of that batch; None when nothing fits.
        limits: largest batch under each limit alone, None when it does not limit.
    """

    algorithm: str
    residency: str
    batch: int
    binds: str
    fixed_bytes: int
    request: Footprint
    step: StepTime | None
    limits: dict[str, int | None]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests together."""
        return self.batch / self.step.serial if self.step else 0.0


def fixed_bytes(shape: ModelShape, config: SparseConfig, workload: Workload, limits: Limits) -> int:
    """Return the device bytes that do not grow with the batch."""
    geometry = shape.geometry
    staging = 0
    if config.residency in ("lru", "static", "blocks", "auto"):
        staging = limits.staging_requests * workload.n_tokens * geometry.token_bytes
    if isinstance(config.algo, FullOffloadConfig) and config.residency == "stream":
        staging = 2 * min(config.algo.chunk_tokens, workload.n_tokens) * geometry.token_layer_bytes
    return shape.weight_bytes + limits.reserve_bytes + staging


def time_of(shape: ModelShape, device: Device, config: SparseConfig, workload: Workload, batch: int) -> StepTime:
    """Return the time of a step of `batch` requests."""
    request = traffic(shape, config, workload.n_tokens, workload.hit_rate)
    sparse = config.algorithm != "full" and workload.n_tokens >= config.min_sparse_prompt_len
    layers = shape.geometry.num_layers - skip_layers(config, shape.geometry) if sparse else 0
    return step_time(shape, device, request, batch, layers)


def plan(shape: ModelShape, device: Device, config: SparseConfig, workload: Workload, limits: Limits) -> Plan:
    """Return the largest batch of requests of one length.

    Raises:
        ConfigError: a length or a rate that cannot be, or a buffer that does not hold what is selected.
    """
    request = footprint(shape, config, workload.n_tokens)
    _check_buffer(config, workload.n_tokens)
    fixed = fixed_bytes(shape, config, workload, limits)
    most: dict[str, int | None] = {
        "gpu memory": max(0, (limits.gpu_bytes - fixed) // request.device) if request.device else None,
        "host memory": limits.host_bytes // request.host if request.host else None,
        "latency": _most_in_time(shape, device, config, workload, limits.latency_seconds),
    }
    allowed = {name: count for name, count in most.items() if count is not None}
    batch = min([_MOST_REQUESTS, *allowed.values()])
    binds = next((name for name, count in allowed.items() if count == batch), "nothing")
    step = time_of(shape, device, config, workload, batch) if batch else None
    return Plan(config.algorithm, config.residency, batch, binds, fixed, request, step, most)


def _check_buffer(config: SparseConfig, n_tokens: int) -> None:
    selected = selected_tokens(config, n_tokens)
    if config.residency == "lru" and n_tokens >= config.min_sparse_prompt_len and config.device_buffer_size < selected:
        raise ConfigError("device_buffer_size", config.device_buffer_size, f"must hold the {selected} tokens selected")


def _most_in_time(
    shape: ModelShape, device: Device, config: SparseConfig, workload: Workload, seconds: float | None
) -> int | None:
    if seconds is None:
        return None
    fits, fails = 0, _MOST_REQUESTS + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if time_of(shape, device, config, workload, middle).serial <= seconds:
            fits = middle
        else:
            fails = middle
    return fits


@dataclass(frozen=True, slots=True)
class Advice:
    """How offload compares with a rival whose KV stays on the device.

    Attributes:
        rival: its plan.
        from_batch: smallest batch at which offload makes more tokens per second than the rival at the same batch, or at
            its largest where that is smaller; None when no batch that fits does.
        ratio_at_one: offload's speed over the rival's, one request each; None when one of them fits none.
    """

    rival: Plan
    from_batch: int | None
    ratio_at_one: float | None


def advise(
    shape: ModelShape, device: Device, config: SparseConfig, workload: Workload, limits: Limits
) -> tuple[Advice, ...]:
    """Return from which batch on KV in host memory is faster than full attention, and than the algorithm itself with
    all KV on the device.

    Below the capacity of the device all can run the same batch, and what does not wait for the link wins unless it
    reads far more; beyond it only offload can grow.
    """
    rivals = [SparseConfig("full")]
    if config.algorithm not in ("full", "full_offload"):
        rivals.append(config.replaced(residency="device"))
    offload = plan(shape, device, config, workload, limits)

    def speed(settings: SparseConfig, batch: int) -> float:
        return batch / time_of(shape, device, settings, workload, batch).serial if batch else 0.0

    def against(rival: SparseConfig) -> Advice:
        theirs = plan(shape, device, rival, workload, limits)
        batches = range(1, offload.batch + 1)
        first = next((b for b in batches if speed(config, b) > speed(rival, min(b, theirs.batch))), None)
        at_one = speed(config, 1) / speed(rival, 1) if theirs.batch and offload.batch else None
        return Advice(theirs, first, at_one)

    return tuple(against(rival) for rival in rivals)
