"""Each argument of a call is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvcm.gpu_tier.errors import ConfigError

__all__ = ["each_is_refused"]


def each_is_refused(call: Callable[..., Any], good: dict[str, Any], **wrong: Any) -> None:
    """Check that a call takes good arguments, and names the wrong one when one of them is replaced."""
    call(**good)
    for name, value in wrong.items():
        with pytest.raises(ConfigError, match=rf"^[^=]*\b{name}\b"):
            call(**{**good, name: value})
