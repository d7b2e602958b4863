"""KVCM: the KV-cache manager that lets every engine of a cluster reuse the KV that any of them computed."""

from importlib import metadata as _metadata
from typing import Final

__all__ = ["__version__"]


def _installed_version() -> str:
    try:
        return _metadata.version("kvcm")
    except _metadata.PackageNotFoundError:  # a bare tree on the path
        return "0+unknown"


__version__: Final = _installed_version()
"""Of the installed package, which has it from git; `0+unknown` where none is installed."""
