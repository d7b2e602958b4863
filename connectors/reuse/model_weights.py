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

import ctypes
import hashlib
import json
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import xxhash
from torch import nn
from torch.nn.modules import module as torch_modules

from kvcm.model.errors import InvalidArgumentError

__all__ = ["ModelWeights", "UnknownWeightsError", "tensor_checksum"]

_log = logging.getLogger(__name__)
_SMALL_BYTES = 4 << 20
_SAMPLES = 8  # per matrix, at even distances; fewer miss merges into a part of a joint one, as of q, k and v
_VECTOR_SAMPLES = 2  # merges change no vectors; training and reloads change them whole
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
        before = self._snapshot if self.is_unchanged() else None
        if before is None or self._compares_all:
            self._read(before)
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

    def _read(self, before: _Snapshot | None) -> None:
        snapshot = before or _Snapshot.of(self._model)
        content = self._read_all()
        if before is not None and content == self._content:
            return
        self._snapshot = None  # whatever goes wrong below, nothing is known until it is read again
        if not snapshot.holds(trusts_counters=False):
            raise UnknownWeightsError("the weights change while they are read")
        if self._version.startswith(_NAMED):
            name = self._version.removeprefix(_NAMED)
            _log.warning("the weights changed after their version %r was set: their digest is used", name)
        self._snapshot, self._content, self._version = snapshot, content, f"content:{content}"


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
        reference, text = self._known.get(id(value), (type(None), ""))
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


class _Registered:
    """Counts what modules register that a snapshot was made of."""

    def __init__(self) -> None:
        self.count = 0
        self.watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def __call__(self, module: nn.Module, *_registered: object) -> None:
        self.count += module in self.watched


_registered = _Registered()
torch_modules.register_module_module_registration_hook(_registered)
torch_modules.register_module_parameter_registration_hook(_registered)
torch_modules.register_module_buffer_registration_hook(_registered)
# Copies some bytes of some tensors, and is given all those of the snapshot.
_Reader = Callable[[Sequence[torch.Tensor]], bytes]


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """The signs of one moment. Until the next check it keeps modules that were replaced, and host memory that was left.

    Attributes:
        parents: dictionaries of modules.
        modules: what is in them, one after the other.
        owners: dictionaries of parameters and buffers, as far as something is in them.
        named: other dictionaries, and what counts in them.
        identities: of all that is in these.
        references: to what is not kept, so that its identity cannot be another one's unnoticed.
        gone: those of them that are dead. Looking at each would take longer, since they are cold memory.
        empty: the others, most of them: cold memory, which is only looked at when one registered something.
        registrations: how many there were when they were empty.
        tensors: which of these have memory of their own.
        places: of them in memory, see `_places`.
        writes: to each tensor as PyTorch counts them; None where it does not count all (`torch.inference_mode`).
        readers: of some elements of each tensor: one for the CPU, and one for each type and device.
        samples: what they read.
        adapters: of PEFT, by layer.
    """

    parents: list[dict[str, Any]]
    modules: list[Any]
    owners: list[dict[str, Any]]
    named: list[tuple[dict[str, Any], str]]
    identities: list[int]
    references: list[weakref.ref[Any]]
    gone: list[weakref.ref[Any]]
    empty: list[dict[str, Any]]
    registrations: int
    tensors: list[int]
    places: list[int]
    writes: list[int] | None
    readers: list[_Reader]
    samples: list[bytes]
    adapters: list[tuple[nn.Module, tuple[object, ...]]]

    @classmethod
    def of(cls, model: nn.Module) -> _Snapshot:
        modules = list(model.modules())
        found = [entry for module in modules for entry in _tensors_of(module)]
        tensors = [tensor for _, _, tensor in found if _has_memory(tensor)]
        groups: dict[object, list[int]] = {}
        for number, tensor in enumerate(tensors):
            groups.setdefault(None if tensor.is_cpu else (tensor.dtype, tensor.device), []).append(number)
        readers = [(_device_reader if key else _host_reader)(tensors, each) for key, each in groups.items()]
        _registered.watched.update(modules)
        registrations = _registered.count
        parents: list[dict[str, Any]] = [module._modules for module in modules]
        owned: list[dict[str, Any]] = [module._parameters for module in modules]
        owned += [module._buffers for module in modules if not _dynamic_buffers(module)]
        owners, whole = [*filter(None, owned)], {*map(id, owned)}
        found += [entry for module in modules for entry in _packing_functions(module)]
        named = [(each, name) for each, name, _ in found if id(each) not in whole]
        values = _values(owners, named)
        numbers = {id(value): number for number, value in enumerate(values)}
        gone: list[weakref.ref[Any]] = []
        return cls(
            parents=[*filter(None, parents)],
            modules=_values(parents),
            owners=owners,
            named=named,
            identities=[*map(id, values)],
            references=[weakref.ref(value, gone.append) for _, _, value in found],
            gone=gone,
            empty=[each for each in (*parents, *owned) if not each],
            registrations=registrations,
            tensors=[numbers[id(tensor)] for tensor in tensors],
            places=_places(tensors),
            writes=_writes(tensors),
            readers=readers,
            samples=[read(tensors) for read in readers],
            adapters=[(module, how) for module in modules if (how := _adapters_of(module)) is not None],
        )

    def holds(self, *, trusts_counters: bool = True) -> bool:
        """Return whether no sign differs.

        Args:
            trusts_counters: writes that PyTorch does not count are a sign of a change.
        """
        values = _values(self.owners, self.named)  # from here on none of them goes
        if self.gone or [*map(id, values)] != self.identities:
            return False
        # PyTorch tells of a registration before it is made: one that was counted may show in a later check only.
        if _values(self.parents) != self.modules or (_registered.count != self.registrations and any(self.empty)):
            return False
        if any(_adapters_of(layer) != how for layer, how in self.adapters):
            return False
        tensors = [values[number] for number in self.tensors]
        if _places(tensors) != self.places:
            return False
        if self.writes is None:
            if trusts_counters:
                return False
        elif _writes(tensors) != self.writes:
            return False
        return [read(tensors) for read in self.readers] == self.samples


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return not tensor.is_meta and tensor.data_ptr() != 0
    except RuntimeError:  # a wrapper around other tensors
        return False


def _values(owners: Iterable[dict[str, Any]], named: Iterable[tuple[dict[str, Any], str]] = ()) -> list[Any]:
    return [*chain.from_iterable(map(dict.values, owners)), *[owned.get(name) for owned, name in named]]


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return the address of each tensor, and how many elements are there."""
    return [*map(torch.Tensor.data_ptr, tensors), *map(torch.Tensor.numel, tensors)]


def _writes(tensors: Iterable[torch.Tensor]) -> list[int] | None:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:
        return None


def _host_reader(tensors: Sequence[torch.Tensor], numbers: Iterable[int]) -> _Reader:
    # Views take ten times as long as reading their elements. So words are read by address, which is safe while tensors
    # have the places that they have here: storages are kept, since another thread may give tensors others meanwhile.
    chosen = [tensors[n] for n in numbers]
    storages, found = [tensor.untyped_storage() for tensor in chosen], []
    word = math.gcd(8, *[tensor.itemsize for tensor in chosen], *[tensor.data_ptr() for tensor in chosen])
    for tensor, storage in zip(chosen, storages, strict=True):
        words = np.arange(0, tensor.itemsize, word) + np.array(_some_elements(tensor))[:, None] * tensor.itemsize
        within = tensor.data_ptr() - storage.data_ptr() + words.ravel()
        found.append(storage.data_ptr() + within[(within >= 0) & (within < storage.nbytes())])
    addresses = np.concatenate(found)
    first, last = int(addresses.min()), int(addresses.max())
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (last + word - first)).from_address(first)).view(f"u{word}")
    offsets = (addresses - first) // word

    def read(_tensors: object, _kept: object = storages) -> bytes:
        return memory.take(offsets).tobytes()

    return read


def _device_reader(tensors: Sequence[torch.Tensor], numbers: Iterable[int]) -> _Reader:
    chosen = [(n, _some_elements(tensors[n]), int(tensors[n].storage_offset())) for n in numbers]
    views = [(n, ((len(some),), (some.step,), offset + some.start)) for n, some, offset in chosen]

    @torch.no_grad()
    def read(now: Sequence[torch.Tensor]) -> bytes:
        return torch.cat([now[n].as_strided(*view) for n, view in views]).view(torch.uint8).cpu().numpy().tobytes()

    return read


def _some_elements(tensor: torch.Tensor) -> range:
    """Return their places, counted from the first."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    count = min(_SAMPLES if tensor.dim() > 1 else _VECTOR_SAMPLES, extent)
    step = extent // count
    return range(step // 2, count * step, step)
