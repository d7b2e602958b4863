"""Errors of the GPU tier.

GpuTierError
├── ConfigError        a setting, a shape or an argument is not allowed; names the field and the value
├── PoolExhaustedError      a pool has too little left; says how much was asked for and how to get more
├── AllocationError    pages were freed or shared that are not held: a defect of the caller
├── StateError         a hook was called in a state of the request that does not allow it
└── KernelUnavailableError  the implementation asked for cannot run here; names the missing part
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = [
    "AllocationError",
    "ConfigError",
    "GpuTierError",
    "KernelUnavailableError",
    "PoolExhaustedError",
    "StateError",
]


class GpuTierError(Exception):
    """Something of the GPU tier cannot go on."""


class ConfigError(GpuTierError, ValueError):
    """A setting, a shape or an argument is not allowed.

    Args:
        field: the name of the setting or argument.
        value: what it was.
        allowed: what it may be, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}={value!r}: {allowed}")
        self.field = field
        self.value = value

    @classmethod
    def choice(cls, field: str, value: object, choices: Iterable[object]) -> ConfigError:
        """Return the error of a value that is none of `choices`."""
        return cls(field, value, f"must be one of {', '.join(map(str, choices))}")


class PoolExhaustedError(GpuTierError):
    """A pool has fewer free pages than were asked for."""


class AllocationError(GpuTierError):
    """Pages were freed or shared that are not held."""


class StateError(GpuTierError):
    """A hook was called in a state of the request that does not allow it."""


class KernelUnavailableError(GpuTierError):
    """The implementation of a kernel that was asked for cannot run here."""
