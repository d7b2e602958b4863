"""Where the modules of the fleet are, and those of its tests."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("benchmarks", "tests/e2e", "tests/optimizer"):
    sys.path.append(str(Path(__file__).parents[2] / folder))
