"""Compiles kernels: loops over whole traces that Python would take minutes for.

A kernel is a plain function over arrays and numbers; it holds no lock of the interpreter, so threads replay in
parallel, and its machine code is kept beside the source for the next process. Kernels that call each other belong into
one file: kept code is compiled again when its own file changes, not when another one does. A kernel that is called in a
loop uses every array it gets behind its last branch, too: then the compiler sees that counting references to the arrays
comes to nothing, which otherwise takes several times as long as a short kernel itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

__all__ = ["compiled"]

Kernel = TypeVar("Kernel", bound=Callable[..., object])


def compiled(function: Kernel) -> Kernel:
    """Return a function as machine code; it is compiled at its first call."""
    return cast(Kernel, numba.njit(cache=True, nogil=True)(function))
