"""Lets SGLang, as released for GPUs, start on a machine that has none. Python imports this before anything else.

Six things are stood in, everything else is SGLang's own code:

* torchvision of the package index is built for another torch; importing it needs two operators to be declared;
* host memory is not registered with a GPU;
* the copies between the pool of the device and that of the host, which are compiled kernels, are plain indexing;
* adapters are applied with memory that is not pinned;
* MLA's attention is computed in the one way that needs no compiled kernel;
* less host memory is left alone.

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


def _copy_tokens(src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """Both pools hold each layer by token."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def _pages_to_layer(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """One layer of the host's pages [page, layer, token, head, dim] to the device's tokens."""
    numbers = src_indices[::page_size].long() // page_size
    for page, layer in zip(src_ptrs, dst_ptrs, strict=True):
        layer[dst_indices.long()] = page[numbers, layer_id].flatten(0, 1)


def _layers_to_pages(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
    """All layers of the device, first those of K and then those of V, to the host's pages."""
    numbers = dst_indices[::page_size].long() // page_size
    count = len(src_ptrs) // len(dst_ptrs)
    for at, layer in enumerate(src_ptrs):
        of_page = layer[src_indices.long()].unflatten(0, (-1, page_size))
        dst_ptrs[at // count][numbers, at % count] = of_page


def _copy_by_indexing(module: ModuleType) -> None:
    module.transfer_kv_direct = _copy_tokens
    module.transfer_kv_per_layer_direct_pf_lf = _pages_to_layer
    module.transfer_kv_all_layer_direct_lf_pf = _layers_to_pages


def _reserve_less(module: ModuleType) -> None:
    """SGLang leaves 10 GiB of the host alone, which are not there where several tests run at once."""
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30


def _do_not_pin() -> None:
    import torch

    def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, pin_memory=False, **named: make(*arguments, **named)

    for name in ("arange", "empty", "ones", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def _absorb(module: ModuleType) -> None:
    """Of the ways to compute MLA's attention, plain torch has only the one that works on latent rows."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    module.AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)


_BEFORE: dict[str, Callable[[], None]] = {"torchvision": _declare_operators, "sglang.srt.lora.layers": _do_not_pin}
_AFTER: dict[str, Callable[[ModuleType], None]] = {
    "sglang.srt.mem_cache.pool_host.base": _reserve_less,
    "sglang.srt.mem_cache.pool_host.common": _do_not_register,
    "sglang.srt.mem_cache.pool_host.mha": _copy_by_indexing,
    "sglang.srt.mem_cache.pool_host.mla": _copy_by_indexing,
    "sglang.srt.models.deepseek_common.attention_backend_handler": _absorb,
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
