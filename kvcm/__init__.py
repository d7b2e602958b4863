"""KVCM: the KV-cache manager that lets every engine of a cluster reuse the KV that any of them computed.

`kvcm.__version__` is the version of the installed package, which has it from git; `0+unknown` if none is installed.
"""

from typing import TYPE_CHECKING

__all__ = ["__version__"]

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> str:
    # On demand: importlib.metadata takes milliseconds, and engines import kvcm.connectors below this package.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        version = metadata.version("kvcm")
    except metadata.PackageNotFoundError:  # a bare tree on the path
        version = "0+unknown"
    globals()["__version__"] = version
    return version
