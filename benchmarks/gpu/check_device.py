"""Are the kernels right on this device? Every implementation against the reference, then the tests that need a GPU.

One command for the first hour with a new GPU, driver or version of Triton. Nothing is interpreted: kernels run as they
were compiled for the device. It ends with the tests of `tests/gpu_tier` that say that they need a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib.util import find_spec

import checkout
import torch
from device_run import DeviceRun, run
from kernel_checks import Check, Sizes, checks
from report import Row
from torch import Tensor

from kvcm.gpu_tier.errors import KernelUnavailableError
from kvcm.gpu_tier.kernels.registry import implementations
from kvcm.gpu_tier.runtime import runtime_for

MEASURES = (
    "nothing: it compares every kernel, compiled for the device, with its reference, and runs the tests for a GPU"
)
TESTS_SECONDS = 360
MOST_SECONDS = 570
SMOKE = Sizes(tokens=128, selected=16, batch=4, steps=3, dims=16, latent_heads=16)


def difference(mine: Tensor, right: Tensor) -> float:
    """Return ‖mine - right‖ / ‖right‖; infinity where one is NaN or infinite and the other is not."""
    mine, right = mine.double(), right.double()
    finite = right.isfinite()
    if not torch.equal(mine[~finite], right[~finite]) or not bool(mine[finite].isfinite().all()):
        return float("inf")
    scale = float(right[finite].norm())
    gap = float((mine[finite] - right[finite]).norm())
    return gap / scale if scale else gap


def compare(this: DeviceRun, check: Check, impl: str) -> None:
    """Publish how far an implementation is from the reference."""
    case = f"{check.kernel}, {impl}: {check.case}"
    wanted = "every bit is equal" if not check.tolerance else f"<= {check.tolerance:g}"
    try:
        mine, right = check.run(impl), check.run("reference")
        apart = max(difference(one, other) for one, other in zip(mine, right, strict=True))
    except KernelUnavailableError as error:
        this.add_check(Row(case, f"cannot run: {error}"[:300], 1, "", target="= 0", ok=False))
        return
    except Exception as error:  # one kernel does not hide the others
        traceback.print_exc()
        text = f"failed: {type(error).__name__}: {error}"[:300]
        this.add_check(Row(case, text, 1, "", target="= 0", ok=False))
        return
    this.add_check(Row(case, "largest relative difference", apart, "", target=wanted, ok=apart <= check.tolerance))


def run_tests(this: DeviceRun) -> None:
    """Run the tests that need a GPU, without the settings of this repository: those ask for plug-ins."""
    folder = checkout.ROOT / "benchmarks" / "gpu"
    paths = os.pathsep.join(str(path) for path in (checkout.ROOT, checkout.ROOT / "tests", folder))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "GPU_TIER_TUNING": "first", "PYTHONPATH": paths}
    command = [
        sys.executable, "-m", "pytest", "-q", "-c", str(folder / "pytest.ini"), "--rootdir", str(checkout.ROOT),
        "--confcutdir", str(checkout.ROOT / "tests" / "gpu_tier"), "-p", "device_tests", "--no-header",
        "--continue-on-collection-errors",
        str(checkout.ROOT / "tests" / "gpu_tier"),
    ]  # fmt: skip
    if find_spec("xdist") is not None:
        command += ["--numprocesses", str(min(8, os.cpu_count() or 1))]  # most of the time is compilation
    seconds = max(1.0, min(TESTS_SECONDS, MOST_SECONDS - this.seconds))
    try:
        code = subprocess.run(command, env=environment, check=False, timeout=seconds).returncode
    except subprocess.TimeoutExpired:
        code = -1
    text = f"exit status of pytest, -1 after {seconds:.0f} s"
    this.add_check(Row("tests that need a GPU", text, code, "", target="0", ok=code == 0))


def measure(this: DeviceRun) -> None:
    """All checks of all implementations that the kernels have."""
    runtime = runtime_for(this.device)
    for check in checks(runtime, SMOKE if this.is_smoke else Sizes()):
        for impl in implementations(check.kernel):
            if impl != "reference" and (this.clock.is_gpu or impl != "cuda"):
                compare(this, check, impl)
    if this.clock.is_gpu:
        run_tests(this)


def main(argv: Sequence[str] | None = None) -> int:
    return run(__doc__ or "", MEASURES, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
