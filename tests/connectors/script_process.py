"""Scripts of this folder as processes of their own, which say in one line of JSON what came of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["run_script"]

_FOLDER = Path(__file__).parent


def run_script(name: str, *arguments: str, beside: str, **environment: str) -> Any:
    """Run a script to its end and return the last line of its output, decoded.

    Args:
        name: file of this folder.
        arguments: of the script.
        beside: folder of `tests` whose modules it imports, too.
        environment: more variables.
    """
    paths = ":".join([str(_FOLDER), str(_FOLDER.with_name(beside)), *sys.path])
    done = subprocess.run(
        [sys.executable, str(_FOLDER / name), *arguments],
        env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
