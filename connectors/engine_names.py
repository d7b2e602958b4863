"""Lazy names of a package that need an engine, so that the package's other modules are imported without it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any

__all__ = ["engine_names"]


def engine_names(
    package: str, modules: Mapping[str, str], needs: str, engines: Collection[str]
) -> Callable[[str], Any]:
    """Return a package's `__getattr__`.

    Args:
        package: its name.
        modules: where each of its names is.
        needs: the engine, for people, with the version it was tested with.
        engines: top-level packages of which none may be missing.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(import_module(modules[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in engines:
                raise
            raise ImportError(f"{package}.{name} needs {needs} in this environment: {error}") from error

    return find
