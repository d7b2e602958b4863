"""Checks of settings: each error names the setting, its value and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gpu_tier.errors import ConfigError

__all__ = ["at_least", "check_known", "choice", "ratio"]


def check_known(cls: type[Any], data: Mapping[str, Any], where: str) -> None:
    """Refuse keys that are no fields of a dataclass, with the nearest that is."""
    known = [f.name for f in fields(cls)]
    for key in data:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else f"; known are {', '.join(known) or 'none'}"
            raise ConfigError(f"{where}{key}", data[key], f"no such setting{hint}")


def at_least(config: object, least: int, *names: str) -> None:
    """Refuse fields that are not integers of at least `least`."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(name, value, f"must be an integer of at least {least}")


def ratio(config: object, *names: str) -> None:
    """Refuse fields that are not above 0 and at most 1; None is allowed."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not 0 < value <= 1:
            raise ConfigError(name, value, "must be above 0 and at most 1")


def choice(config: object, name: str, choices: tuple[object, ...]) -> None:
    """Refuse a field that is none of the choices."""
    if getattr(config, name) not in choices:
        raise ConfigError.choice(name, getattr(config, name), choices)
