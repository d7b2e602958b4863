"""How much the long tests try: some in every run, all with `make thorough`."""

from __future__ import annotations

import os

__all__ = ["examples", "is_thorough"]

_FRACTION = 4
_LEAST = 15


def examples(thorough: int) -> int:
    """Return how many examples to try now, of so many in a thorough run."""
    return thorough if is_thorough() else max(_LEAST, thorough // _FRACTION)


def is_thorough() -> bool:
    """Return whether everything is to be tried."""
    return os.environ.get("KVCM_TESTS") == "thorough"
