"""Stands in for the compiled kernels, which need a GPU: SGLang imports the names, and a call of one raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_: object, **__: object) -> NoReturn:
        raise RuntimeError(f"the kernel {name} was called on a machine without a GPU")

    return kernel
