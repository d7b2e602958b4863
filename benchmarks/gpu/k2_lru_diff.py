"""K2, claim: planning a step of the device buffers costs microseconds, and none of them on the host.

One call plans one layer of B requests: which of the K selected tokens are in the buffer of C, which slots are
evicted, which tokens are loaded where. Plan only, no bytes move. The layers of a step are captured in one graph and
the time is divided by them. K6 measures the share of a whole step.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import checkout  # noqa: F401 - first: it makes the rest importable
import torch
from device_run import DeviceRun, run
from dsa_decode import Workload, counted_hit_rate, decode_batch
from report import Row
from sliding_trace import SlidingTrace

from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind
from kvcm.gpu_tier.manager.residency import LruDiffPolicy
from kvcm.gpu_tier.runtime import runtime_for
from kvcm.gpu_tier.types import Selection, Unit

MEASURES = "the LRU diff of 1 to 64 requests, 2,048 of 2,048 to 8,192 tokens, against a target of 15 µs a layer"
LAYERS = 16
TARGET_MICROSECONDS = 15.0
MOST_STEPS = 256


@dataclass(frozen=True, slots=True)
class Case:
    """Requests B of n tokens, K of C tokens, the trace's hit rate, and the implementation."""

    batch: int
    n_tokens: int = 131072
    selected: int = 2048
    capacity: int = 4096
    hit_rate: float = 0.9
    kernels: str = "auto"

    @property
    def name(self) -> str:
        """For people."""
        sizes = f"K={self.selected}, C={self.capacity}, B={self.batch}, n={self.n_tokens}"
        return f"{sizes}, hit rate {self.hit_rate:.2f} (input)" + (
            f", {self.kernels}" if self.kernels != "auto" else ""
        )


HEADLINE = Case(32)
CASES = [
    HEADLINE, Case(1), Case(8), Case(64), Case(32, capacity=2048), Case(32, capacity=8192), Case(32, n_tokens=32768),
    Case(32, hit_rate=0.5), Case(32, hit_rate=1.0),
    Case(32, kernels="triton"),
]  # fmt: skip
SMOKE = [Case(2, 256, 16, 32, 0.75)]


def measure_case(this: DeviceRun, case: Case) -> None:
    """Plan the layers of some steps."""
    layers = 2 if this.is_smoke else LAYERS
    geometry = KVGeometry(KVKind.MLA, layers, 1, 576, 512, KVDtype.BF16)
    config = SparseConfig("dsa", top_k=case.selected, device_buffer_size=case.capacity)
    work = Workload(geometry, config, 128, case.batch, case.n_tokens, MOST_STEPS, case.hit_rate)
    runtime, device = runtime_for(this.device), this.device
    _, host_loc = work.tables(device)
    policy = LruDiffPolicy(
        geometry, capacity=case.capacity, unit_tokens=1, selecting_heads=1, max_requests=case.batch,
        max_items=work.max_tokens, host_loc=host_loc, runtime=runtime, kernels=case.kernels,
    )  # fmt: skip
    slots = torch.arange(case.batch * (case.capacity + 2), dtype=torch.int32, device=device).view(case.batch, -1)
    for request in range(case.batch):
        policy.admit(request, slots[request, : case.capacity], slots[request, case.capacity :], case.n_tokens)
    trace = SlidingTrace(layers * case.batch, case.n_tokens - 1, case.selected, case.hit_rate, device)
    selected = torch.zeros(layers, case.batch, 1, case.selected, dtype=torch.int32, device=device)
    lens = torch.full((case.batch, 1), case.selected, dtype=torch.int32, device=device)
    seq_lens = torch.zeros(case.batch, dtype=torch.int32, device=device)
    batch, mask = decode_batch(work, seq_lens), torch.ones(case.batch, dtype=torch.bool, device=device)

    def prepare(step: int) -> None:
        selected.copy_(trace.select(step, case.n_tokens + step).view(selected.shape))
        seq_lens.fill_(case.n_tokens + step + 1)

    def plan() -> None:
        for layer in range(layers):
            policy.resolve(layer, batch, Selection(Unit.TOKEN, 1, selected[layer], lens), mask)

    prepare(0)
    samples = this.time(case.name, plan, prepare)
    later = itertools.count(this.clock.total_steps)
    rate = counted_hit_rate(policy, lambda: prepare(next(later)), plan)
    policy.check()
    microseconds = samples.median / layers * 1e6
    target = TARGET_MICROSECONDS if case == HEADLINE else None
    this.add_time(f"{case.name}, per layer", samples, 1 / layers)
    if target is not None:
        this.add(
            Row(
                case.name,
                "plan of one layer",
                microseconds,
                "µs",
                target,
                microseconds / target,
                "<= 1",
                microseconds <= target,
            )
        )
    this.add(Row(case.name, "hit rate counted", rate, "", case.hit_rate))


def measure(this: DeviceRun) -> None:
    """All cases."""
    for case in SMOKE if this.is_smoke else [HEADLINE] if this.is_quick else CASES:
        if not this.leaves_out(case.name):
            measure_case(this, case)


def main(argv: Sequence[str] | None = None) -> int:
    return run(__doc__ or "", MEASURES, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
