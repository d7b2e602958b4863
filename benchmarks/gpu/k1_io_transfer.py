"""K1, claim: scattered rows cross the link to the host at most of the speed of one large copy.

Each row moves random items between a pinned host pool and the device, at least 4 MB a call, and stands beside the peak
of a plain copy measured in the same process. Targets are for the whole device moving rows; the sweep over
multiprocessors says how few suffice while attention runs on the others. Before a case is timed, its bytes are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import checkout  # noqa: F401 - first: it makes the rest importable
import torch
from device_run import DeviceRun, run
from pinned_pool import pinned_pool
from report import Row
from torch import Tensor

from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind, Layout
from kvcm.gpu_tier.pools.device_pool import DeviceKVPool
from kvcm.gpu_tier.pools.transfer import Engine, KVTransfer
from kvcm.gpu_tier.runtime import DeviceRuntime, runtime_for

MEASURES = "copies of 256 B to whole pages between pinned host memory and the device against the peak of the link"
WHOLE_DEVICE = 1 << 10
INDEX_SETS = 4
MLA = KVGeometry(KVKind.MLA, 8, 1, 576, 512, KVDtype.BF16)
MHA = KVGeometry(KVKind.MHA, 8, 8, 128, 128, KVDtype.BF16)
# A KV block of 2 KB: eight tokens of one head, keys and values apart.
BLOCKS = KVGeometry(KVKind.MHA, 8, 1, 128, 128, KVDtype.BF16)


@dataclass(frozen=True, slots=True)
class Case:
    """One way to move items.

    Attributes:
        name: for people.
        geometry: of both pools.
        layout: of the host pool.
        items: of a call, over all rows of the plan.
        unit_tokens: tokens of an item.
        target: share of the link's peak to be reached, both directions; None for none.
        per_head: whether each head moves items of its own.
        layers: that a call moves.
        is_contiguous: whether the items follow each other in both pools.
        engine: what moves them.
        blocks: multiprocessors.
        kernels: implementation.
    """

    name: str
    geometry: KVGeometry
    layout: Layout
    items: int
    unit_tokens: int
    target: float | None
    per_head: bool = False
    layers: int = 1
    is_contiguous: bool = False
    engine: Engine = Engine.KERNEL
    blocks: int = WHOLE_DEVICE
    kernels: str = "auto"


CASES = [
    Case("contiguous, copy engine", MLA, Layout.LAYER_FIRST, 512, 64, 0.95, layers=8, is_contiguous=True,
         engine=Engine.DMA),
    Case("scattered 2 KB blocks", BLOCKS, Layout.LAYER_FIRST, 4096, 8, 0.80),
    Case("scattered 1,152 B latents", MLA, Layout.PAGE_FIRST, 8192, 1, 0.70),
    Case("scattered 256 B rows of one head", MHA, Layout.LAYER_FIRST, 32768, 1, 0.40, per_head=True),
    Case("64-token pages, page_first, all layers", MHA, Layout.PAGE_FIRST, 64, 64, 0.85, layers=8),
]  # fmt: skip
SWEEP = [
    replace(CASES[2], name=f"{CASES[2].name}, {n} blocks", blocks=n, target=None) for n in (1, 2, 4, 8, 16, 32, 64)
]
SMALL = [replace(CASES[2], name=f"{CASES[2].name}, {n} items", items=n, target=None) for n in (64, 512, 2048)]

IN_TRITON = [replace(case, name=f"{case.name}, Triton", kernels="triton", target=None) for case in CASES[1:]]


class Mover:
    """The pools of a case and its plans.

    Args:
        this: the run.
        case: the transfer.
        runtime: of the device.
    """

    def __init__(self, this: DeviceRun, case: Case, runtime: DeviceRuntime) -> None:
        self.case = case
        geometry = case.geometry
        heads = geometry.num_kv_heads if case.per_head else 1
        self.per_row = case.items // heads
        tokens = 2 * max(self.per_row, 64) * case.unit_tokens
        pages = -(-tokens // geometry.page_size)
        self.host = pinned_pool(geometry, pages, case.layout, runtime)
        self.device = DeviceKVPool(geometry, pages, runtime)
        config = SparseConfig("dsa", io_blocks=case.blocks, kernels=case.kernels)
        self.transfer = KVTransfer(self.host, self.device, runtime, config)
        self.layers = geometry.layers[: case.layers]
        this.clock.fill(self.host.data)
        where = torch.device("cpu") if case.engine is Engine.DMA else this.device
        slots = tokens // case.unit_tokens
        self.plans = [(self._slots(slots, heads, where), self._slots(slots, heads, where)) for _ in range(INDEX_SETS)]
        self.src, self.dst = (tensor.clone() for tensor in self.plans[0])
        share = 1 if case.per_head else geometry.num_kv_heads
        row_bytes = sum(part.row_bytes for part in geometry.parts)
        self.nbytes = case.items * case.unit_tokens * case.layers * row_bytes * share

    def _slots(self, items: int, heads: int, where: torch.device) -> Tensor:
        if self.case.is_contiguous:
            chosen = [torch.arange(self.per_row)] * heads
        else:
            chosen = [torch.randperm(items)[: self.per_row] for _ in range(heads)]
        return (torch.stack(chosen) * self.case.unit_tokens).to(where)

    def prepare(self, step: int) -> None:
        """Take the next plan: the bytes of the step before may be in a cache."""
        src, dst = self.plans[step % INDEX_SETS]
        self.src.copy_(src)
        self.dst.copy_(dst)

    def load(self) -> None:
        """Move the items to the device."""
        self.transfer.load(self.src, self.dst, **self._how())

    def store(self) -> None:
        """Move the items to the host."""
        self.transfer.store(self.dst, self.src, **self._how())

    def _how(self) -> dict[str, Any]:
        case = self.case
        return {
            "layers": self.layers, "per_head": case.per_head, "unit_tokens": case.unit_tokens, "engine": case.engine,
        }  # fmt: skip

    def is_right(self, this: DeviceRun) -> bool:
        """Load one plan and store it again, and compare every byte both times."""
        self.device.data.zero_()
        self.load()
        is_loaded = self._is_same()
        self.host.data.zero_()
        self.store()
        is_stored = self._is_same()
        this.clock.fill(self.host.data)
        return is_loaded and is_stored

    def _is_same(self) -> bool:
        self.device.data[:1].cpu()  # waits for the transfers in flight
        case, geometry = self.case, self.case.geometry
        offsets = torch.arange(case.unit_tokens, device=self.src.device)
        for row, (src, dst) in enumerate(zip(self.src, self.dst, strict=True)):
            read, written = ((slots[:, None] + offsets).flatten() for slots in (src, dst))
            heads = slice(row, row + 1) if case.per_head else slice(None)
            for layer in self.layers:
                kv = self.device.layer(layer)
                for part, rows in enumerate((kv.k, kv.v)[: len(geometry.parts)]):
                    assert rows is not None
                    theirs = self.host.read(layer, part, read)[:, heads]
                    if not torch.equal(rows.data[written.to(rows.data.device)][:, heads].cpu(), theirs):
                        return False
        return True


def measure_case(this: DeviceRun, case: Case, runtime: DeviceRuntime) -> None:
    """Both directions of a case."""
    mover = Mover(this, case, runtime)
    ok = mover.is_right(this)
    this.add_check(Row(case.name, "bytes are equal", int(ok), "", target="1", ok=ok))
    steps: list[tuple[str, Callable[[], None], float]] = [
        ("to the device", mover.load, this.peaks.h2d), ("to the host", mover.store, this.peaks.d2h),
    ]  # fmt: skip
    for direction, step, peak in steps:
        # The copy engine takes its runs from the host, which works them out: such a step is no graph.
        is_graph = case.engine is not Engine.DMA
        samples = this.time(
            f"{case.name}, {direction}", step, mover.prepare, is_graph=is_graph, host_goes_ahead=not is_graph
        )
        this.add_share(
            case.name,
            f"speed {direction}, {mover.nbytes / 1e6:.1f} MB a call",
            mover.nbytes / samples.median,
            peak,
            case.target,
        )
        this.add_time(f"{case.name}, {direction}", samples)
    mover.host.close()


def measure(this: DeviceRun) -> None:
    """All cases, then the sweeps."""
    runtime = runtime_for(this.device)
    cases = CASES if this.is_quick else [*CASES, *SWEEP, *SMALL, *IN_TRITON]
    for case in cases:
        if this.leaves_out(case.name):
            continue
        small = replace(case, items=16, layers=min(case.layers, 2)) if this.is_smoke else case
        measure_case(this, small, runtime)


def main(argv: Sequence[str] | None = None) -> int:
    return run(__doc__ or "", MEASURES, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
