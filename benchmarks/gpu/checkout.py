"""Makes the checkout importable: on a GPU machine these scripts run from a copy of the tree, nothing installed."""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["ROOT"]

ROOT = Path(__file__).parents[2]

for _folder in (ROOT / "benchmarks", ROOT):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))
