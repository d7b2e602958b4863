"""Lets SGLang, as released for GPUs, start on a machine that has none. Python imports this before anything else.

Three things are stood in, everything else is SGLang's own code:

* torchvision of the package index is built for another torch; importing it needs two operators to be declared;
* host memory is not registered with a GPU;
* the copies between the pool of the device and that of the host, which are compiled kernels, are plain indexing.

Whatever depends on the order of streams of a GPU is therefore not tested with this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_declared: list[Any] = []  # operators live as long as the library that declares them


def _declare_operators() -> None:
    from torch.library import Library

    library = Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def _do_not_register(module: ModuleType) -> None:
    module._cuda_host_register = module._cuda_host_unregister = lambda *_, **__: None


def _copy_tokens(sources: Any, targets: Any, source_tokens: Any, target_tokens: Any, page_size: int) -> None:
    """Both pools hold each layer by token."""
    for source, target in zip(sources, targets, strict=True):
        target[target_tokens.long()] = source[source_tokens.long()]


def _pages_to_layer(
    pages: Any, layers: Any, page_tokens: Any, layer_tokens: Any, layer_id: int, page_size: int
) -> None:
    """One layer of the host's pages [page, layer, token, head, dim] to the device's tokens."""
    numbers = page_tokens[::page_size].long() // page_size
    for page, layer in zip(pages, layers, strict=True):
        layer[layer_tokens.long()] = page[numbers, layer_id].flatten(0, 1)


def _layers_to_pages(layers: Any, pages: Any, layer_tokens: Any, page_tokens: Any, page_size: int) -> None:
    """All layers of the device, first those of K and then those of V, to the host's pages."""
    numbers = page_tokens[::page_size].long() // page_size
    count = len(layers) // len(pages)
    for at, layer in enumerate(layers):
        of_page = layer[layer_tokens.long()].unflatten(0, (-1, page_size))
        pages[at // count][numbers, at % count] = of_page


def _copy_by_indexing(module: ModuleType) -> None:
    module.transfer_kv_direct = _copy_tokens
    module.transfer_kv_per_layer_direct_pf_lf = _pages_to_layer
    module.transfer_kv_all_layer_direct_lf_pf = _layers_to_pages


_BEFORE: dict[str, Callable[[], None]] = {"torchvision": _declare_operators}
_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.common": _do_not_register,
    "sglang.srt.mem_cache.pool_host.mha": _copy_by_indexing,
}


class _StandIns(MetaPathFinder):
    """Finds modules as usual and wraps how the ones above are executed."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in _BEFORE and name not in _AFTER:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            _BEFORE.get(name, lambda: None)()
            execute(module)
            _AFTER.get(name, lambda _: None)(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _StandIns())
