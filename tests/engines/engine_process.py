"""An engine in a process of its own, under the control of a test.

The process runs one of the scripts beside this file in the engine's own environment. Commands go to its standard input
and answers come back through a pipe of their own, one JSON document per line: engines print a lot, and that goes to a
file whose end is part of every error.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from engine_kinds import FOLDER, ROOT, EngineKind

_START_SECONDS = 180.0
_ANSWER_SECONDS = 120.0
_CLOSE_SECONDS = 30.0
_OBSERVE_SECONDS = 0.5  # a process that ended may have left children that hold the pipe open
_TAIL_LINES = 40
_WAIT_SECONDS = 60.0


class EngineDiedError(RuntimeError):
    """The process ended before it answered."""


class EngineRefusedError(RuntimeError):
    """The command raised in the engine; the message is that exception, with its traceback."""


class EngineTimeoutError(RuntimeError):
    """No answer in time."""


@dataclass(frozen=True, slots=True)
class Generated:
    """The answer to one prompt.

    Attributes:
        tokens: the generated ones.
        finish_reason: as the engine calls it.
        cached_tokens: of the prompt, those that were not computed, as the engine counts them.
        details: what else the engine says about it.
    """

    tokens: list[int]
    finish_reason: str | None = None
    cached_tokens: int = 0
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class EngineProcess:
    """A running engine; see `start_engine`.

    Attributes:
        kind: which engine.
        process: its first process, which leads a group of all others.
        log: where everything that they print goes.
        started: the report of the script when it was ready: `version`, `seconds`, and others by script.
    """

    kind: EngineKind
    process: subprocess.Popen[bytes]
    log: Path
    answers_fd: int
    started: dict[str, Any] = field(default_factory=dict)
    _unread: bytes = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def alive(self) -> bool:
        """Whether the first process still runs."""
        return self.process.poll() is None

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 16, *, seconds: float = _ANSWER_SECONDS, **arguments: Any
    ) -> list[Generated]:
        """Generate greedily for prompts of token ids, all given to the engine at once."""
        answers = self.ask("generate", seconds=seconds, prompts=prompts, max_tokens=max_tokens, **arguments)
        return [Generated(**answer) for answer in answers]

    def ask(self, command: str, *, seconds: float = _ANSWER_SECONDS, **arguments: Any) -> Any:
        """Call a method of the script's engine and return what it returns.

        Raises:
            EngineRefusedError: the method raised.
            EngineTimeoutError: no answer in time; the process goes on and its answers are out of step, so end it.
            EngineDiedError: the process ended.
        """
        self.send(command, **arguments)
        return self.answer(seconds=seconds)

    def send(self, command: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer; `answer` returns those in the order of the commands."""
        assert self.process.stdin is not None
        line = json.dumps({"command": command, "arguments": arguments}).encode() + b"\n"
        try:
            self.process.stdin.write(line)
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._died() from error

    def answer(self, *, seconds: float = _ANSWER_SECONDS) -> Any:
        """Return the answer to the oldest command that has not been answered; raises as `ask` does."""
        answer = json.loads(self._line(time.monotonic() + seconds, seconds))
        if "error" in answer:
            raise EngineRefusedError(f"{answer['error']}\n{self._tail()}")
        return answer["value"]

    def printed(self) -> str:
        """Return all that its processes have printed."""
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """End all of its processes the hard way, as a crash of the machine would."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._close_pipes()

    def close(self) -> None:
        """Let it shut down, the hard way when it takes too long; whatever it leaves behind is ended."""
        if self.answers_fd < 0:
            return
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_CLOSE_SECONDS)
        self.kill()

    def _close_pipes(self) -> None:
        if self.answers_fd >= 0:
            os.close(self.answers_fd)
            self.answers_fd = -1
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def _line(self, deadline: float, seconds: float) -> bytes:
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineTimeoutError(f"{self.kind.name} did not answer in {seconds} s{self._tail()}")
            if not select.select([self.answers_fd], [], [], min(left, _OBSERVE_SECONDS))[0]:
                if not self.alive:
                    raise self._died()
                continue
            read = os.read(self.answers_fd, 1 << 16)
            if not read:
                raise self._died()
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _died(self) -> EngineDiedError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        return EngineDiedError(f"{self.kind.name} ended with exit code {self.process.poll()}{self._tail()}")

    def _tail(self) -> str:
        lines = self.printed().splitlines()[-_TAIL_LINES:]
        return "\n".join([f"\n--- the end of {self.log} ---", *lines])


def until(condition: Callable[[], Any], seconds: float = _WAIT_SECONDS) -> Any:
    """Wait until something is so, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not so after {seconds} s: {condition}")
        time.sleep(0.02)
    return found


class StartEngine(Protocol):
    """Starts an engine for a test, or skips that where it is not installed; a fixture ends what it started."""

    def __call__(self, kind: EngineKind, model: Path, **options: Any) -> EngineProcess:
        """Start it; the options are those of `start_engine`."""


def start_engine(
    kind: EngineKind,
    model: Path,
    log: Path,
    *,
    environment: dict[str, str] | None = None,
    seconds: float = _START_SECONDS,
    **options: Any,
) -> EngineProcess:
    """Start an engine with a model and wait until it takes commands.

    Args:
        kind: which engine.
        model: the directory of the model.
        log: the file for what it prints.
        environment: variables beside those of the kind.
        seconds: how long the start may take.
        options: of the engine, over those that all tests want; see the scripts.

    Raises:
        EngineRefusedError: it raised while starting.
        EngineTimeoutError: it did not start in time.
        EngineDiedError: it ended.
    """
    engine = _spawn(kind, {"model": str(model), "options": options}, log, environment or {})
    try:
        engine.started = engine.answer(seconds=seconds)
    except BaseException:
        engine.kill()
        raise
    return engine


def _spawn(kind: EngineKind, document: dict[str, Any], log: Path, environment: dict[str, str]) -> EngineProcess:
    answers, their_end = os.pipe()
    command = [str(kind.python), str(FOLDER / kind.script), str(their_end), json.dumps(document)]
    paths = [*map(str, kind.paths), str(FOLDER), str(ROOT)]
    variables = os.environ | kind.environment | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    try:
        with log.open("ab") as prints:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=prints, stderr=prints, env=variables, pass_fds=[their_end],
                start_new_session=True,
            )  # fmt: skip
    except BaseException:
        os.close(answers)
        raise
    finally:
        os.close(their_end)
    return EngineProcess(kind, process, log, answers)
