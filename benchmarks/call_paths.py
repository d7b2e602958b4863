"""Counts the functions and files that a call runs through, on a live manager with RocksDB.

python benchmarks/call_paths.py                 a table: functions and files of each call, by package
python benchmarks/call_paths.py --list          and the names of the functions
python benchmarks/call_paths.py --json FILE     and as JSON
python benchmarks/call_paths.py --check         exit code 1 where a figure is above its limit

One engine writes and reads 64 blocks over gRPC, several times. A function counts for a call when it runs in each of
these rounds, and outside the manager's background tasks. Nothing is timed, so a loaded machine gives the same figures.
Comprehensions, lambdas and properties count like any other function; generated code and libraries do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

import grpc.aio

import kvcm
from kvcm.app import Manager
from kvcm.config import Settings
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.protocol import meta_service_pb2_grpc as rpc
from kvcm.telemetry.logs import configure_logs

__all__ = ["CallPath", "Function", "exceeded", "main", "measure"]

BLOCKS: Final = 64
ROUNDS: Final = 8
WARMUP_ROUNDS: Final = 2
"""Rounds that fill caches and open storages: an engine at work does neither."""
PAUSE_SECONDS: Final = 0.03
"""Between calls, so that work that a call left behind does not count for the next one."""

ROOT: Final = Path(kvcm.__file__).resolve().parents[1]
PRODUCT: Final = f"{ROOT}/kvcm/"
GENERATED: Final = f"{PRODUCT}protocol/"
BACKGROUND: Final = "_keep_running"
"""The function of `kvcm/app.py` that every background task runs in."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that a call may run through; None where only the files are limited."""

    files: int
    functions: int | None = None


LIMITS: Final[Mapping[str, Limit]] = {
    "StartWriteCache": Limit(files=32),
    "FinishWriteCache": Limit(files=28),
    "GetCacheLocation": Limit(files=20, functions=50),
}


class Function(NamedTuple):
    """One function of the product: its file below the repository, and its qualified name."""

    file: str
    name: str

    @property
    def package(self) -> str:
        """The folder of the file."""
        return str(Path(self.file).parent)


@dataclass(frozen=True, slots=True)
class CallPath:
    """The functions that a call runs in every round."""

    functions: frozenset[Function]

    @property
    def files(self) -> frozenset[str]:
        """The files of the functions."""
        return frozenset(function.file for function in self.functions)

    def by_package(self) -> dict[str, tuple[int, int]]:
        """Return functions and files by package."""
        functions = Counter(function.package for function in self.functions)
        files = Counter(str(Path(file).parent) for file in self.files)
        return {package: (functions[package], files[package]) for package in sorted(functions)}


class Recorder:
    """Collects the functions that run, in every thread, while a call is open."""

    def __init__(self) -> None:
        self._background: set[asyncio.Task[Any]] = set()
        self._running: set[Function] | None = None
        self._rounds: dict[str, list[set[Function]]] = {}

    def start(self) -> None:
        """Follow every function that is called from now on, in this thread and in new ones."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def stop(self) -> None:
        """Follow none."""
        sys.setprofile(None)
        threading.setprofile(None)

    async def record(self, name: str, call: Awaitable[Any]) -> Any:
        """Await a call, and keep what ran meanwhile as one round of it."""
        self._running = ran = set()
        try:
            return await call
        finally:
            self._running = None
            self._rounds.setdefault(name, []).append(ran)

    def paths(self) -> dict[str, CallPath]:
        """Return what ran in all rounds of each call."""
        return {name: CallPath(frozenset(set.intersection(*rounds))) for name, rounds in self._rounds.items()}

    def _on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or not frame.f_code.co_filename.startswith(PRODUCT):
            return
        task = _current_task()
        if task is not None and frame.f_code.co_qualname == BACKGROUND:
            self._background.add(task)
        file = frame.f_code.co_filename
        if self._running is not None and task not in self._background and not file.startswith(GENERATED):
            self._running.add(Function(file[len(str(ROOT)) + 1 :], frame.f_code.co_qualname))


def _current_task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        return None


async def measure() -> dict[str, CallPath]:
    """Start a manager, make the calls of an engine, and return the path of each."""
    recorder = Recorder()
    recorder.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            settings = Settings(rpc_port=0, http_port=0, admin_rpc_port=0, admin_http_port=0, data_dir=folder)
            async with (
                Manager(settings).running() as endpoint,
                grpc.aio.insecure_channel(f"{endpoint.host}:{endpoint.meta_rpc_port}") as channel,
            ):
                stub: Any = rpc.MetaServiceStub(channel)  # type: ignore[no-untyped-call]
                await _register(stub)
                for turn in range(WARMUP_ROUNDS):
                    await _round(stub, Recorder(), turn)
                for turn in range(WARMUP_ROUNDS, WARMUP_ROUNDS + ROUNDS):
                    await _round(stub, recorder, turn)
    finally:
        recorder.stop()
    return recorder.paths()


async def _register(stub: Any) -> None:
    answer = await stub.RegisterInstance(
        pb.RegisterInstanceRequest(
            trace_id="call-paths",
            instance_group="default",
            instance_id="engine",
            block_size=16,
            location_spec_infos=[pb.LocationSpecInfo(name="kv", size=64)],
            model_deployment=pb.ModelDeployment(model_name="model", dtype="bf16"),
        )
    )
    assert answer.header.status.code == pb.OK, answer


async def _round(stub: Any, recorder: Recorder, turn: int) -> None:
    """Write 64 new blocks and read them."""
    asked = {"trace_id": f"call-paths-{turn}", "instance_id": "engine"}
    keys = range(turn * 1000, turn * 1000 + BLOCKS)
    start = stub.StartWriteCache(pb.StartWriteCacheRequest(**asked, block_keys=keys))
    started = await recorder.record("StartWriteCache", start)
    await asyncio.sleep(PAUSE_SECONDS)
    request = pb.FinishWriteCacheRequest(
        **asked, write_session_id=started.write_session_id, success_blocks=pb.BlockMask(offset=BLOCKS)
    )
    finished = await recorder.record("FinishWriteCache", stub.FinishWriteCache(request))
    await asyncio.sleep(PAUSE_SECONDS)
    read = stub.GetCacheLocation(pb.GetCacheLocationRequest(**asked, block_keys=keys, query_type=pb.QT_PREFIX_MATCH))
    found = await recorder.record("GetCacheLocation", read)
    await asyncio.sleep(PAUSE_SECONDS)
    assert finished.header.status.code == pb.OK, finished
    assert len(found.locations) == BLOCKS, found


def exceeded(paths: Mapping[str, CallPath]) -> list[str]:
    """Return a sentence for each figure above its limit."""
    found = []
    for name, limit in LIMITS.items():
        path = paths[name]
        if len(path.files) > limit.files:
            found.append(f"{name} runs through {len(path.files)} files, at most {limit.files} are allowed")
        if limit.functions is not None and len(path.functions) > limit.functions:
            found.append(f"{name} runs {len(path.functions)} functions, at most {limit.functions} are allowed")
    return found


def _as_json(paths: Mapping[str, CallPath]) -> dict[str, Any]:
    return {
        name: {
            "functions": len(path.functions),
            "files": len(path.files),
            "packages": {
                package: {"functions": functions, "files": files}
                for package, (functions, files) in path.by_package().items()
            },
            "names": [f"{file} {function}" for file, function in sorted(path.functions)],
        }
        for name, path in paths.items()
    }


def _print_table(paths: Mapping[str, CallPath], *, with_names: bool) -> None:
    print(f"{'':<28}{'functions':>10}{'files':>7}")
    for name, path in paths.items():
        print(f"{name:<28}{len(path.functions):>10}{len(path.files):>7}")
        for package, (functions, files) in path.by_package().items():
            print(f"  {package:<26}{functions:>10}{files:>7}")
            if with_names:
                for file, function in sorted(path.functions):
                    if str(Path(file).parent) == package:
                        print(f"    {file} {function}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and compare with the limits if asked."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures and the names to a file")
    parser.add_argument("--list", action="store_true", help="print the names of the functions")
    parser.add_argument("--check", action="store_true", help="fail where a figure is above its limit")
    options = parser.parse_args(arguments)
    configure_logs(logging.WARNING)
    paths = asyncio.run(measure())
    _print_table(paths, with_names=options.list)
    if options.json:
        options.json.write_text(json.dumps(_as_json(paths), indent=2) + "\n")
    problems = exceeded(paths) if options.check else []
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
