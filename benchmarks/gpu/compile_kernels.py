"""Do the Triton kernels compile for a GPU, and what do they take of it? This needs no GPU.

A stub stands for the driver, so that every launch of `kernel_checks` is compiled for compute capability 9.0 as it would
be on a device, with the arguments that it really gets, and then not run. Registers, stack (what did not fit into
registers: nothing, of a kernel's default tiling) and shared memory are those of the compiled code. Whether it is right
and fast only a device can say.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # before a kernel is defined
os.environ["GPU_TIER_TUNING"] = "first"  # measuring needs a device
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what unset means, without the warning
import checkout
import torch
import triton
from kernel_checks import Check, Sizes, checks
from report import Row, arguments, publish
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvcm.gpu_tier.kernels.registry import implementations
from kvcm.gpu_tier.kernels.tuning import Tiling, TunedKernel
from kvcm.gpu_tier.runtime import NullRuntime

MOST_SHARED_BYTES = 227 * 1024
SIZES = Sizes(tokens=512, selected=128, batch=4, steps=2)
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


class StubDriver:
    """What Triton asks of a driver before it launches anything."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled kernel.

    Attributes:
        name: of the function.
        shared_bytes: shared memory of a program.
        binary: for the device.
    """

    name: str
    shared_bytes: int
    binary: bytes

    def resources(self) -> tuple[str, int, int, int]:
        """Return its name, registers and bytes of the stack of a thread, and bytes of shared memory."""
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.binary)
            file.flush()
            text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        found = _RESOURCES.search(text)
        assert found is not None, text
        registers, stack, local = map(int, found.groups())
        return self.name, registers, stack + local, self.shared_bytes


@contextmanager
def compiling() -> Iterator[list[Compiled]]:
    """Compile launches instead of running them; the list grows with each kernel seen for the first time."""
    launch = JITFunction.run
    seen: dict[int, Any] = {}
    found: list[Compiled] = []

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        made = launch(self, *args, grid=grid, warmup=True, **options)
        if id(made) not in seen:
            seen[id(made)] = made
            found.append(Compiled(self.fn.__name__, made.metadata.shared, made.asm["cubin"]))
        return made

    driver.set_active(StubDriver())
    JITFunction.run = compile_only
    try:
        yield found
    finally:
        JITFunction.run = launch


def tuned_kernels(check: Check) -> list[TunedKernel]:
    """Return the kernels with tile sizes to choose from that a check may launch; its modules are loaded."""
    modules = [module for name, module in sys.modules.items() if name.startswith("kvcm.gpu_tier.kernels.")]
    return list({id(one): one for m in modules for one in vars(m).values() if isinstance(one, TunedKernel)}.values())


def rows_of(check: Check, tiling: Tiling | None, found: list[Compiled]) -> Iterator[Row]:
    """Compile what a check launches."""
    done = len(found)
    for kernel in tuned_kernels(check):
        if tiling is None or tiling in kernel.tilings:
            kernel.forced = tiling
    case = f"{check.kernel}: {check.case}" + (f", {tiling}" if tiling is not None else "")
    try:
        check.run("triton")
    except Exception as error:  # any error of Triton is the finding
        yield Row(case, f"does not compile: {error}"[:300], 1, "", target="= 0", ok=False)
    for name, registers, stack, shared in sorted({one.resources() for one in found[done:]}):
        yield Row(case, f"{name}: registers of a thread", registers, "")
        # A tiling that does not fit is passed over when tilings are measured, and one that spills is slow.
        default = tiling is None
        ok = stack == 0 if default else None
        yield Row(case, f"{name}: stack of a thread", stack, "B", target="= 0" if default else "", ok=ok)
        ok = shared <= MOST_SHARED_BYTES if default else None
        yield Row(case, f"{name}: shared memory", shared, "B", MOST_SHARED_BYTES, target="fits", ok=ok)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--all-tilings", action="store_true", help="every tiling that tuning chooses from; minutes")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    with compiling() as found:
        for check in checks(NullRuntime(), SIZES):
            if "triton" not in implementations(check.kernel):
                continue
            rows += rows_of(check, None, found)
            if options.all_tilings:
                tilings = {tiling: None for kernel in tuned_kernels(check) for tiling in kernel.tilings}
                rows += [row for tiling in tilings for row in rows_of(check, tiling, found)]
    rows.append(Row("all", f"kernels compiled with Triton {triton.__version__}, {checkout.ROOT.name}", len(found), ""))
    return 0 if publish("Triton kernels compiled for compute capability 9.0", rows, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
