"""What the restore drills share with the tests of upgrades and of real processes."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("e2e", "upgrade"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
