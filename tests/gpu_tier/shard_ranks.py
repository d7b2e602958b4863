"""Ranks of one model, each a process: they hold a range of its heads or of its layers, and write what they computed.

Processes are spawned, so that nothing is shared but what goes through pipes, as bytes, and through files without
pickled objects.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from layer_traffic import Shape, Tokens, Traffic
from torch import Tensor

from kvcm.gpu_tier.types import Selection

__all__ = ["MODEL", "WHOLE", "Rank", "all_ranks", "decode_traffic", "heads_of", "layers_of"]

_SECONDS = 100


@dataclass(frozen=True)
class Rank:
    """What a process holds: KV heads and layers of a model, by their numbers in it."""

    heads: range
    layers: range


# Traffic: queries and KV that are given.

MODEL = Shape(layers=3, heads=4, device_pages=200)
WHOLE = Rank(range(4), range(3))
LENGTHS, STEPS = (60, 17, 110), 12


class _Part(Traffic):
    """Traffic over a part of `MODEL`, with the model's numbers; keeps what was selected."""

    def __init__(self, rank: Rank, config: dict[str, Any]) -> None:
        self.rank = rank
        self.kept: dict[str, np.ndarray[Any, Any]] = {}
        shape = replace(MODEL, heads=len(rank.heads), layers=len(rank.layers), start_layer=rank.layers.start)
        super().__init__(shape, config)

    def sequence(self, seed: int) -> Tokens:
        draw = torch.Generator().manual_seed(seed)
        shape = (MODEL.layers, MODEL.max_tokens, MODEL.heads)
        q = torch.randn(*shape, MODEL.group, MODEL.dims, generator=draw)
        k, v = (torch.randn(*shape, MODEL.dims, generator=draw) for _ in range(2))
        layers, heads = (slice(part.start, part.stop) for part in (self.rank.layers, self.rank.heads))
        q, k, v = (x[layers, :, heads].contiguous() for x in (q, k, v))
        return Tokens(q.flatten(2, 3), k, v)

    def _check_output(self, batch: Any, layer: int, out: Tensor) -> None:
        super()._check_output(batch, layer, out)
        self.kept |= _named(self._selections[-1], f"{batch.lengths[0]}.{layer + self.shape.start_layer}")


def _named(selection: Selection, name: str) -> dict[str, np.ndarray[Any, Any]]:
    found = {f"{name}.ids": selection.indices.numpy(), f"{name}.lengths": selection.lengths.numpy()}
    if selection.estimate is not None:
        found[f"{name}.estimated"] = selection.estimate.indices.numpy()
    return found


def decode_traffic(rank: Rank, out: Path, _pipe: Connection | None, cases: Mapping[str, dict[str, Any]]) -> None:
    """Decode made-up requests and write selections and outputs of each case, ``out f32 [steps, L, B, Hq, dv]``."""
    for name, config in cases.items():
        traffic = _Part(rank, config)
        requests = [traffic.begin(n, seed) for seed, n in enumerate(LENGTHS)]
        traffic.prompt(requests, 13)
        outputs = torch.stack([traffic.decode(requests) for _ in range(STEPS)])
        np.savez(out / f"{name}.npz", out=outputs.numpy(), **traffic.kept)  # type: ignore[arg-type]


# An engine: the model's own queries and KV, which depend on what all ranks computed before.


# Processes.


def all_ranks(run: Callable[..., None], ranks: Sequence[Any], folder: Path, *args: Any) -> list[Path]:
    """Run processes at once, pairs of them joined by a pipe, and return the folder that each wrote to."""
    context = multiprocessing.get_context("spawn")
    ends = context.Pipe() if len(ranks) == 2 else (None,) * len(ranks)
    folders = [folder / str(number) for number in range(len(ranks))]
    processes = []
    for rank, out, end in zip(ranks, folders, ends, strict=True):
        out.mkdir(parents=True)
        process = context.Process(target=_run, args=(run, rank, out, end, *args))
        process.start()
        processes.append(process)
    for process in processes:
        process.join(_SECONDS)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * len(ranks)
    return folders


def _run(run: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    run(*args)


def heads_of(array: np.ndarray[Any, Any], rank: Rank, axis: int, group: int = 1) -> np.ndarray[Any, Any]:
    """Return a rank's heads of all, along an axis; with `group` query heads of each."""
    return array.take(range(rank.heads.start * group, rank.heads.stop * group), axis)


def layers_of(array: np.ndarray[Any, Any], rank: Rank, axis: int) -> np.ndarray[Any, Any]:
    """Return a rank's layers of all, along an axis."""
    return array.take(rank.layers, axis)
