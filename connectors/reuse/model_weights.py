"""Version of a model's weights: equal versions, equal weights. It is part of every block key.

Weights change while a process runs: an optimiser steps, a checkpoint is loaded, an adapter is merged. A version is the
digest of every element, or a name that the user gives. Before each call a few signs tell whether the digest still
holds, since reading all weights takes as long as computing a token:

* Parameters, buffers and modules are the same objects as before, at the same addresses.
* PyTorch counts writes per tensor (`Tensor._version`). It does not count those through `.data`, NumPy or C.
* Therefore some elements of each tensor are compared, too. Full reloads, merges and optimiser steps change them.
* Adapters of PEFT are active, merged and scaled as before.

Signs only ever lead to a new digest; equal samples prove nothing. Small models are compared whole before each call,
which costs no more than signs. For others, a caller that writes single elements past PyTorch's counter says so with a
new name, or lets every call compare all elements.
"""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch
import xxhash
from torch import nn

from kvcm.model.errors import InvalidArgumentError

__all__ = ["ModelWeights", "UnknownWeightsError", "tensor_checksum"]

_log = logging.getLogger(__name__)
_SMALL_BYTES = 4 << 20
_SAMPLES = 8  # per tensor, at even distances; more cost as much again
_MAX_NAME_CHARACTERS = 256
_NAMED = "name:"
# Frequencies that transformers computes again for long prompts; `model_kv` finds the length from which on it does.
_DYNAMIC_ROPE_TYPES = ("dynamic", "longrope")


class UnknownWeightsError(Exception):
    """Nothing says which weights the model computes with; the message says why."""


class ModelWeights:
    """Watches the weights of one model.

    Args:
        model: any module; its parameters and buffers count, wherever they lie.
        name: given version, see `assign`; None for a digest.
        compares_all: read every element before each call, whatever the size of the model.
        is_packed: weights may have no elements because functions of their modules hold them in another form, which
            changes only when parameter or function are replaced. They are then equal in this process alone. Otherwise
            they are unknown.

    Raises:
        InvalidArgumentError: the name is empty or too long.
    """

    def __init__(
        self, model: nn.Module, name: str | None = None, *, compares_all: bool = False, is_packed: bool = False
    ) -> None:
        self._model = model
        self._packed = _Identities() if is_packed else None
        self._compares_all = compares_all or _is_small(model)
        self._snapshot: _Snapshot | None = None
        self._content = ""
        self._version = ""
        if name is not None:
            self.assign(name)

    def version(self) -> str:
        """Return the version of the weights as they are now.

        Raises:
            UnknownWeightsError: a tensor has no data that could be compared, or the weights change meanwhile.
        """
        if not self.is_unchanged() or (self._compares_all and self._content != self._read_all()):
            if self._version.startswith(_NAMED):
                name = self._version.removeprefix(_NAMED)
                _log.warning("the weights changed after their version %r was set: their digest is used", name)
            self._read()
        return self._version

    def is_unchanged(self, *, trusts_counters: bool = True) -> bool:
        """Return whether signs tell that the weights are those of the last version.

        Args:
            trusts_counters: tensors whose writes PyTorch does not count may have changed.
        """
        return self._snapshot is not None and self._snapshot.holds(trusts_counters=trusts_counters)

    def assign(self, name: str) -> None:
        """Name the weights as they are now. Engines whose weights have equal names share KV.

        Args:
            name: 1 to 256 characters. One that other weights have had makes tokens wrong.

        Raises:
            InvalidArgumentError: the name is empty or too long.
        """
        if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME_CHARACTERS:
            raise InvalidArgumentError(f"weights_version is {name!r}, must have 1 to {_MAX_NAME_CHARACTERS} characters")
        self._snapshot = _Snapshot.of(self._model)
        self._content = self._read_all() if self._compares_all else ""
        self._version = _NAMED + name

    def _read_all(self) -> str:
        return _content(self._model, self._packed)

    def _read(self) -> None:
        self._snapshot = None  # whatever goes wrong below, nothing is known until it is read again
        before = _Snapshot.of(self._model)
        content = self._read_all()
        if not before.holds(trusts_counters=False):
            raise UnknownWeightsError("the weights change while they are read")
        self._snapshot, self._content, self._version = before, content, f"content:{content}"


# ---- every element ----

_CHUNK_BYTES = 64 << 20  # what is copied from a device at once


def tensor_checksum(tensor: torch.Tensor) -> bytes:
    """Return a checksum of every element of a tensor: 16 bytes, XXH3 of its bytes in row-major order.

    It is the same on every device and in every layout; shape and dtype are not part of it. No protection against
    forgery.

    Args:
        tensor: strided, on any device but meta.
    """
    checksum = xxhash.xxh3_128()
    for chunk in torch.split(tensor.detach().contiguous().reshape(-1).view(torch.uint8), _CHUNK_BYTES):
        checksum.update(chunk.cpu().numpy().data)
    return checksum.digest()


class _Identities:
    """Gives each object a text that no other one has, in any process."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Callable[[], object], str]] = {}

    def text_of(self, value: object) -> str:
        reference, text = self._known.get(id(value), (_nothing, ""))
        if reference() is not value:
            text = uuid4().hex
            self._known[id(value)] = weakref.ref(value), text
        return text


def _content(model: nn.Module, packed: _Identities | None = None) -> str:
    """Return a digest of names, shapes, types and elements of all weights, and of how adapters are applied.

    Raises:
        UnknownWeightsError: a tensor has no data.
    """
    digest = hashlib.sha256()
    for line in (*_tensor_lines(model, packed), *_module_lines(model, packed)):
        digest.update(line)
    return digest.hexdigest()[:32]


def _tensor_lines(model: nn.Module, packed: _Identities | None) -> Iterator[bytes]:
    checksums: dict[int, bytes] = {}  # by identity: weights may be tied
    for name, tensor in _named_tensors(model):
        if tensor.numel() and not _has_memory(tensor):
            raise UnknownWeightsError(
                f"{name} of device {tensor.device} has no memory of its own: its elements are elsewhere"
            )
        if isinstance(tensor, nn.Parameter) and not tensor.numel():
            if packed is None:
                raise UnknownWeightsError(f"{name} has no elements here")
            yield f"{name} {packed.text_of(tensor)}\n".encode()
            continue
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode()
        if id(tensor) not in checksums:
            checksums[id(tensor)] = tensor_checksum(tensor)
        yield checksums[id(tensor)]


def _module_lines(model: nn.Module, packed: _Identities | None) -> Iterator[bytes]:
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name} {json.dumps(module.get_extra_state(), sort_keys=True, default=str)}\n".encode()
        if (adapters := _adapters_of(module)) is not None:
            yield f"{name} {adapters!r}\n".encode()
        if packed is not None:
            for _, attribute, function in _packing_functions(module):
                yield f"{name} {attribute} {packed.text_of(function)}\n".encode()


def _is_small(model: nn.Module) -> bool:
    tensors = [tensor for _, tensor in _named_tensors(model)]
    tensors = [tensor for tensor in tensors if tensor.numel()]
    return all(map(_has_memory, tensors)) and sum(tensor.nbytes for tensor in tensors) <= _SMALL_BYTES


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        for _, name, tensor in _tensors_of(module):
            yield f"{prefix}.{name}", tensor


def _tensors_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield parameters and buffers of one module: who holds it, name, and value."""
    dynamic = _dynamic_buffers(module)
    owned: dict[str, Any]
    for owned in (module._parameters, module._buffers):
        for name, tensor in owned.items():
            if tensor is not None and name not in dynamic:
                yield owned, name, tensor


def _packing_functions(module: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Return the functions of a module that may hold its weights, since a parameter has no elements."""
    if all(parameter is None or parameter.numel() for parameter in module._parameters.values()):
        return []
    return [(module.__dict__, name, value) for name, value in module.__dict__.items() if callable(value)]


def _dynamic_buffers(module: nn.Module) -> Iterable[str]:
    rope_type = getattr(module, "rope_type", None)
    types = set(rope_type.values()) if isinstance(rope_type, dict) else {rope_type}
    if not any(isinstance(one, str) and one in _DYNAMIC_ROPE_TYPES for one in types):
        return ()
    return {name for name in module._buffers if name.endswith("inv_freq")}


def _adapters_of(module: Any) -> tuple[object, ...] | None:
    """Return how a layer of PEFT applies its adapters, None for other modules."""
    if not hasattr(module, "merged_adapters") or not hasattr(module, "active_adapters"):
        return None
    scaling = getattr(module, "scaling", None) or {}
    return (
        tuple(module.active_adapters),
        bool(module.disable_adapters),
        tuple(module.merged_adapters),
        tuple(sorted((name, repr(value)) for name, value in scaling.items())),
    )


# ---- signs ----

_Samples = tuple[tuple[int, ...], tuple[int, ...], int]  # size, stride and offset of a view


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The signs of one moment. It keeps no tensor alive.

    Attributes:
        counts: of entries in each dictionary of a module.
        objects: modules and tensors in these dictionaries, by name.
        tensors: with memory of their own, in groups of one type and device.
        addresses: of each tensor.
        writes: to each tensor as PyTorch counts them; None where it does not count all (`torch.inference_mode`).
        views: of some elements of each tensor.
        samples: these elements, joined per group.
        adapters: of PEFT, by layer.
    """

    counts: list[tuple[dict[str, Any], int]]
    objects: list[tuple[dict[str, Any], str, Callable[[], object]]]
    tensors: list[list[weakref.ref[torch.Tensor]]]
    addresses: list[list[int]]
    writes: list[list[int]] | None
    views: list[list[_Samples]]
    samples: list[torch.Tensor]
    adapters: list[tuple[nn.Module, tuple[object, ...]]]

    @classmethod
    def of(cls, model: nn.Module) -> _Snapshot:
        modules = list(model.modules())
        found = [entry for module in modules for entry in _tensors_of(module)]
        children = [(module._modules, name, child) for module in modules for name, child in module._modules.items()]
        functions = [entry for module in modules for entry in _packing_functions(module)]
        groups: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for _, _, tensor in found:
            if _has_memory(tensor):
                groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        tensors = list(groups.values())
        views = [[_some_elements(tensor) for tensor in group] for group in tensors]
        return cls(
            counts=[(owned, len(owned)) for m in modules for owned in (m._modules, m._parameters, m._buffers)],
            objects=[(owned, name, _reference(value)) for owned, name, value in [*children, *found, *functions]],
            tensors=[[weakref.ref(tensor) for tensor in group] for group in tensors],
            addresses=[[tensor.data_ptr() for tensor in group] for group in tensors],
            writes=_writes(tensors),
            views=views,
            samples=_samples(tensors, views),
            adapters=[(module, how) for module in modules if (how := _adapters_of(module)) is not None],
        )

    def holds(self, *, trusts_counters: bool = True) -> bool:
        """Return whether no sign differs.

        Args:
            trusts_counters: writes that PyTorch does not count are a sign of a change.
        """
        for owned, count in self.counts:
            if len(owned) != count:
                return False
        for owned, name, before in self.objects:
            if owned.get(name) is not before():
                return False
        if any(_adapters_of(layer) != how for layer, how in self.adapters):
            return False
        # None of them is gone, since all were found above.
        tensors: list[list[Any]] = [[reference() for reference in group] for group in self.tensors]
        if [[tensor.data_ptr() for tensor in group] for group in tensors] != self.addresses:
            return False
        if self.writes is None:
            if trusts_counters:
                return False
        elif _writes(tensors) != self.writes:
            return False
        return all(map(torch.equal, _samples(tensors, self.views), self.samples))


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return not tensor.is_meta and tensor.data_ptr() != 0
    except RuntimeError:  # a wrapper around other tensors
        return False


def _reference(value: Any) -> Callable[[], object]:
    return _nothing if value is None else weakref.ref(value)


def _nothing() -> None:
    return None


def _writes(groups: Sequence[Sequence[torch.Tensor]]) -> list[list[int]] | None:
    try:
        return [[tensor._version for tensor in group] for group in groups]
    except RuntimeError:
        return None


def _some_elements(tensor: torch.Tensor) -> _Samples:
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(_SAMPLES, extent)
    step = extent // count
    return (count,), (step,), int(tensor.storage_offset()) + step // 2


@torch.no_grad()
def _samples(groups: Iterable[Sequence[torch.Tensor]], views: Iterable[Sequence[_Samples]]) -> list[torch.Tensor]:
    """Return a copy of some bytes of each tensor, joined per group."""
    return [
        torch.cat([tensor.as_strided(*view) for tensor, view in zip(*pair, strict=True)]).view(torch.uint8)
        for pair in zip(groups, views, strict=True)
    ]
