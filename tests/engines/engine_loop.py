"""The engine's side of `engine_process`: makes an engine and answers commands until its input ends."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol


class Engine(Protocol):
    """Every public method is a command."""

    started: dict[str, Any]

    def close(self) -> None:
        """Shut down."""


def serve(make_engine: Callable[..., Engine]) -> None:
    """Run the script: `SCRIPT FD '{"model": …, "options": {…}}'`, commands from the standard input, answers to FD."""
    answers, commands = _own_pipes(int(sys.argv[1]))
    document = json.loads(sys.argv[2])
    began = time.monotonic()
    try:
        engine = make_engine(document["model"], **document["options"])
    except BaseException:
        _answer(answers, {"error": traceback.format_exc()})
        raise
    _answer(answers, {"value": engine.started | {"seconds": time.monotonic() - began}})
    for line in commands:
        _answer(answers, _done(engine, json.loads(line)))
    engine.close()


def _own_pipes(answers_fd: int) -> tuple[Any, Any]:
    """Take both pipes away from the processes that the engine will start, and from what prints or reads here."""
    os.set_inheritable(answers_fd, False)
    commands = os.fdopen(os.dup(0), "rb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return os.fdopen(answers_fd, "wb"), commands


def _done(engine: Engine, document: dict[str, Any]) -> dict[str, Any]:
    name = document["command"]
    if name.startswith("_"):
        return {"error": f"{name} is no command"}
    try:
        return {"value": getattr(engine, name)(**document["arguments"])}
    except Exception:
        return {"error": traceback.format_exc()}


def _answer(answers: Any, document: dict[str, Any]) -> None:
    answers.write(json.dumps(document).encode() + b"\n")
    answers.flush()
