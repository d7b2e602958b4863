"""Claim: an engine that loads the KV of a known prefix answers in a fraction of the time, with the same tokens.

Runs the demo (`docs/examples/demo/run.py`): engine A stores a conversation, engine B, a process started afterwards,
continues it. Every turn is measured with the manager and, by the same process with the same model, without it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import Row, arguments, publish

DEMO = Path(__file__).parents[1] / "docs" / "examples" / "demo" / "run.py"
GREATEST_RATIO = 1 / 3


def run_demo() -> dict[str, Any]:
    """Run the demo and return what it wrote."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "demo.json"
        subprocess.run([sys.executable, str(DEMO), "--json", str(result)], check=False)
        return dict(json.loads(result.read_text()))


def turn_row(turn: dict[str, Any]) -> Row:
    """Return the figures of one turn; only the second engine has a target, the first one fills the storage."""
    value, baseline = turn["first_token_seconds"], turn["first_token_seconds_alone"]
    case = (
        f"engine {turn['engine']}, turn {turn['turn']}: {turn['prompt_tokens']:,} tokens, "
        f"{turn['loaded_tokens']:,} loaded"
    )
    ratio = value / baseline
    if turn["engine"] != "B":
        return Row(case, "time to first token", value, "s", baseline, ratio)
    ok = ratio <= GREATEST_RATIO
    return Row(case, "time to first token", value, "s", baseline, ratio, f"with/without <= {GREATEST_RATIO:.3f}", ok)


def check_row(check: dict[str, Any]) -> Row:
    """Return one of the demo's own checks: 1 when it holds."""
    return Row(
        f"{check['what']}: {check['found']}", "holds", int(check["ok"]), "", target=check["wanted"], ok=check["ok"]
    )


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--from", dest="source", type=Path, help="read what the demo wrote instead of running it")
    options = parser.parse_args()
    demo = json.loads(options.source.read_text()) if options.source is not None else run_demo()
    rows = [*map(turn_row, demo["rows"]), *map(check_row, demo["checks"])]
    return 0 if publish("reuse: a second engine loads what the first has computed", rows, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
