"""How much tests try: `KVCM_TESTS` is `quick` or `thorough` in the targets of these names, and unset in `make test`."""

from __future__ import annotations

import os

__all__ = ["examples", "is_quick", "is_thorough"]

_FRACTION, _LEAST = 5, 12
_QUICK_FRACTION, _QUICK_LEAST = 25, 5


def examples(thorough: int) -> int:
    """Return how many examples to try now, of so many in a thorough run."""
    if is_thorough():
        return thorough
    return max(_QUICK_LEAST, thorough // _QUICK_FRACTION) if is_quick() else max(_LEAST, thorough // _FRACTION)


def is_quick() -> bool:
    """Return whether a developer waits for the answer."""
    return os.environ.get("KVCM_TESTS") == "quick"


def is_thorough() -> bool:
    """Return whether everything is to be tried."""
    return os.environ.get("KVCM_TESTS") == "thorough"
