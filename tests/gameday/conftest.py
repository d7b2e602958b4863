"""Where the modules of the game day are."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("benchmarks/gameday", "tests/e2e"):
    sys.path.insert(0, str(Path(__file__).parents[2] / folder))
