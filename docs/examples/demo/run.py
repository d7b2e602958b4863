"""The demo: one engine talks and stores its KV, another one continues the conversation and loads it.

Starts a manager on free loopback ports with a temporary directory, runs the engines as processes of their own,
measures the time to the first token with and without the manager, checks tokens and stored bytes, and cleans up. The
exit code is 0 when all checks hold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from conversation import SHARED, prompts
from manager import Manager, start_manager, stop
from rich.console import Console
from tables import Check, checks_table, turns_table

_ENGINE = Path(__file__).with_name("engine.py")
_INSTANCE = "demo"
_SECOND = "user of engine B"
_REPEATS = 3
_LEAST_SHARED_TOKENS = 4096
_LEAST_LOADED = 0.9
_GREATEST_RATIO = 1 / 3
_SCRATCH_TOLERANCE = 1e-4


@dataclass
class Demo:
    """Processes and files of the demo, so that they can be removed after any failure."""

    console: Console
    directory: Path
    manager: Manager | None = None
    engines: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run_engine(self, name: str, speaker: str, *options: str) -> dict[str, Any]:
        """Run an engine process to its end and return its result."""
        assert self.manager is not None
        result = self.directory / f"{name}.json"
        command = [sys.executable, str(_ENGINE), "--name", name, "--speaker", speaker, "--result", str(result)]
        command += ["--manager", self.manager.address, "--instance", _INSTANCE, *options]
        # Threads that wait for each other sleep instead of spinning. By default they spin, and where other programs use
        # the processor too, that makes everything several times slower, short computations most of all.
        environment = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", **os.environ}
        self.engines.append(subprocess.Popen(command, env=environment, start_new_session=True))
        with self.console.status(f"engine {name} is running"):
            code = self.engines[-1].wait()
        if code != 0:
            raise SystemExit(f"engine {name} ended with exit code {code}")
        return dict(json.loads(result.read_text()))

    def clean_up(self, keep: bool) -> None:
        """End all processes and remove all files, except the manager and its storage when they are to be kept."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C must not leave half of it behind
        for engine in self.engines:
            stop(engine)
        if keep and self.manager is not None:
            ports, process = self.manager.ports, self.manager.process
            self.console.print("The manager keeps running, on 127.0.0.1:")
            for name, port in ports.items():
                self.console.print(f"  {name.removesuffix('_port'):<12}{port}")
            self.console.print("To stop it and remove its data:")
            self.console.print(f"  kill {process.pid}; rm -r {self.directory}", soft_wrap=True)
            return
        if self.manager is not None:
            stop(self.manager.process)
        shutil.rmtree(self.directory, ignore_errors=True)


def main() -> int:
    """Run the demo and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the manager and its storage running at the end")
    parser.add_argument("--json", type=Path, help="write rows and checks to this file")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    console = Console()
    demo = Demo(console, Path(tempfile.mkdtemp(prefix="kvcm-demo-")))
    keep = False
    try:
        started = time.monotonic()
        rows, checks = run(demo)
        passed = all(check.ok for check in checks)
        keep = arguments.keep
        report(console, rows, checks, time.monotonic() - started)
        if arguments.json:
            arguments.json.write_text(
                json.dumps({"rows": rows, "checks": [check.as_dict() for check in checks]}, indent=1)
            )
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    finally:
        demo.clean_up(keep)
    return 0 if passed else 1


def run(demo: Demo) -> tuple[list[dict[str, Any]], list[Check]]:
    """Run all processes; return the rows of the table and the checks."""
    (demo.directory / "manager").mkdir()
    demo.manager = start_manager(demo.directory / "manager")
    first = demo.run_engine("A", SHARED)
    second = demo.run_engine("B", _SECOND, "--repeats", str(_REPEATS), "--verify", str(demo.directory / "A.json"))
    swapped = swap_keys_and_values(demo.manager.files, second)
    try:
        misled = demo.run_engine("B-misled", _SECOND, "--turns", "1", "--read-only", "--no-checksums")
        wary = demo.run_engine("B-wary", _SECOND, "--turns", "1")
    finally:
        untouched = [path for path, status in swapped.items() if _status(path) == status]
        swap_keys_and_values(untouched, second)  # twice is as before, for --keep; the others were stored again
    rows = [
        {"engine": engine["name"], "turn": number, **_row(turn)}
        for engine in (first, second)
        for number, turn in enumerate(engine["turns"], 1)
    ]
    return rows, checks_of(first, second, misled, wary)


def checks_of(
    first: dict[str, Any], second: dict[str, Any], misled: dict[str, Any], wary: dict[str, Any]
) -> list[Check]:
    """Return the verdicts over the results of the engines."""
    turns = [*first["turns"], *second["turns"]]
    shared = _common_prefix(prompts(SHARED)[-1], prompts(_SECOND)[0])
    begin, verified = second["turns"][0], second["verified"]
    loaded = begin["loaded_tokens"] / shared
    ratios = [turn["first_token_seconds"] / turn["first_token_seconds_alone"] for turn in second["turns"]]
    equal = sum(turn["tokens_equal"] for turn in turns)
    wrong, noticed = misled["turns"][0], wary["turns"][0]
    return [
        Check(
            "the prefix that both engines share is long",
            f"{shared:,} tokens",
            f">= {_LEAST_SHARED_TOKENS:,}",
            shared >= _LEAST_SHARED_TOKENS,
        ),
        Check(
            "generated tokens are the same with and without the manager",
            f"{equal} of {len(turns)} turns",
            "all",
            equal == len(turns),
        ),
        Check(
            "engine B loads what engine A stored",
            f"{loaded:.1%} of the shared prefix",
            f">= {_LEAST_LOADED:.0%}",
            loaded >= _LEAST_LOADED,
        ),
        Check(
            "stored bytes equal the KV recomputed in the same pieces",
            f"{verified['equal']} of {verified['blocks']} blocks, bit by bit",
            "all",
            verified["equal"] == verified["blocks"] > 0,
        ),
        Check(
            "stored KV is that of one prefill from scratch",
            f"greatest relative difference {verified['scratch_difference']:.1e}",
            f"<= {_SCRATCH_TOLERANCE:.0e}",
            verified["scratch_difference"] <= _SCRATCH_TOLERANCE,
        ),
        Check(
            "K and V swapped in the store change the tokens, without checksums",
            f"{_differing(wrong, begin)} of {len(begin['tokens'])} tokens differ",
            ">= 1",
            wrong["loaded_tokens"] > 0 and not wrong["tokens_equal"],
        ),
        Check(
            "with checksums they are noticed, computed and stored again",
            f"{noticed['loaded_tokens']:,} tokens loaded, {noticed['blocks_saved']} blocks saved, "
            f"{_differing(noticed, begin)} tokens differ",
            "0 loaded, 0 differ",
            noticed["loaded_tokens"] == 0 and noticed["blocks_saved"] > 0 and noticed["tokens_equal"],
        ),
        Check(
            "time to the first token of engine B, against computing",
            ", ".join(f"{ratio:.3f}" for ratio in ratios),
            f"<= {_GREATEST_RATIO:.3f}",
            max(ratios) <= _GREATEST_RATIO,
        ),
    ]


def report(console: Console, rows: list[dict[str, Any]], checks: list[Check], seconds: float) -> None:
    """Print the tables and the verdict."""
    console.print(turns_table(rows))
    console.print(
        "TTFT: seconds from the call of generate to the choice of the first new token, on two CPU threads. With the "
        "manager it includes match, load and the prefill of the rest; new blocks are saved after it, while further "
        f"tokens are generated. Engine B: fastest of {_REPEATS} alternating measurements. Files are in the page cache.",
        style="dim",
    )
    console.print(checks_table(checks))
    passed = all(check.ok for check in checks)
    verdict = "[bold green]All checks hold.[/]" if passed else "[bold red]Checks failed.[/]"
    console.print(f"{verdict} {seconds:.0f} s")


def swap_keys_and_values(files: list[Path], engine: dict[str, Any]) -> dict[Path, tuple[int, int] | None]:
    """Swap the K and the V half of every layer of every stored block; return by file its checksum afterwards."""
    half = engine["block_bytes"] // engine["layers"] // 2
    for path in files:
        halves = np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 2, half)
        path.write_bytes(halves[:, ::-1].tobytes())
    return {path: _status(path) for path in files}


def _status(path: Path) -> tuple[int, int] | None:
    """Return what changes when a file is written or replaced, None when it is not there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def _differing(one: dict[str, Any], other: dict[str, Any]) -> int:
    return sum(a != b for a, b in zip(one["tokens"], other["tokens"], strict=True))


def _row(turn: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in turn.items() if name not in {"prompt", "tokens"}}


def _common_prefix(one: bytes, other: bytes) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
