"""What a process of a test runs that is asked by lines of JSON: one question, one answer (see mooncake_rig.Process)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def serve(target: object) -> None:
    """Answer until the input ends, which ends the process: none outlives the process that started it.

    Args:
        target: each of its methods is a call; its exceptions are returned and end nothing.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries is no answer
    for line in sys.stdin:
        print(json.dumps(_answered(target, json.loads(line))), file=answers, flush=True)
    os._exit(0)  # threads may hang in a storage


def _answered(target: object, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": getattr(target, question.pop("call"))(**question)}
    except Exception as error:
        return {"raised": f"{type(error).__name__}: {error}"}
