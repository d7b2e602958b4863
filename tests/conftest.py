"""Fixtures for the tests of every room: servers that are shared by the whole run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "store"))

pytest_plugins = ["redis_servers"]
