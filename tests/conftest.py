"""Fixtures for the tests of every room: servers that are shared by the whole run, and index backends on them."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("store", "contract", "gpu_tier"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

pytest_plugins = ["redis_servers", "feature_records"]
