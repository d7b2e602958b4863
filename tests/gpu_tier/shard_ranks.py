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
from coordinator_rig import PAGE, config_of, prompt
from layer_traffic import Shape, Tokens, Traffic
from sharing_rig import SHORT
from torch import Tensor

from kvcm.gpu_tier.assembly import build
from kvcm.gpu_tier.engine.decode_engine import DecodeEngine
from kvcm.gpu_tier.engine.decoder_models import LlamaDecoder, LlamaShape
from kvcm.gpu_tier.engine.interfaces import AttentionInputs, ModelState
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry
from kvcm.gpu_tier.types import Selection

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
    """Traffic over a part of `MODEL`, with the model's numbers; keeps the selections."""

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

_LLAMA = LlamaShape()
_TOKENS = prompt(150)
_NEW = 16


class _Link:
    """The other rank. Numbers go as f64, so that adding parts in another order hardly rounds differently."""

    def __init__(self, pipe: Connection, number: int) -> None:
        self._pipe = pipe
        self.number = number

    def send(self, x: Tensor) -> None:
        self._pipe.send_bytes(x.double().contiguous().numpy().tobytes())

    def receive(self, *shape: int) -> Tensor:
        data = bytearray(self._pipe.recv_bytes())
        return torch.frombuffer(data, dtype=torch.float64).view(*shape)

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of both ranks' numbers, the same bits on both."""
        if self.number == 0:
            self.send(x)
            return x + self.receive(*x.shape)
        other = self.receive(*x.shape)
        self.send(x)
        return other + x


class _Llama(LlamaDecoder):
    """A model that computes in f64 and attends in f32: differences in rounding rarely reach the KV."""

    def attention_inputs(self, *args: Any) -> AttentionInputs:
        inputs = super().attention_inputs(*args)
        assert inputs.v is not None
        return AttentionInputs(inputs.q.float(), inputs.k.float(), inputs.v.float())


class _HeadsOfLlama(_Llama):
    """A tensor-parallel rank: its heads' projections, and the sum of what attention adds to the hidden states."""

    def __init__(self, whole: LlamaDecoder, heads: range, link: _Link) -> None:
        group = _LLAMA.num_q_heads // _LLAMA.num_kv_heads
        shape = replace(_LLAMA, num_kv_heads=len(heads), num_q_heads=len(heads) * group)
        kv = slice(heads.start * shape.head_dim, heads.stop * shape.head_dim)
        q = slice(kv.start * group, kv.stop * group)
        weights = dict(whole.weights)
        for layer in range(shape.num_layers):
            prefix = f"model.layers.{layer}.self_attn"
            weights[f"{prefix}.q_proj.weight"] = weights[f"{prefix}.q_proj.weight"][q]
            for name in ("k_proj", "v_proj"):
                weights[f"{prefix}.{name}.weight"] = weights[f"{prefix}.{name}.weight"][kv]
            self_output = weights[f"{prefix}.o_proj.weight"]
            weights[f"{prefix}.o_proj.weight"] = self_output[:, q]
        super().__init__(shape, weights)
        self._link = link

    def attention_output(self, layer_id: int, hidden: Tensor, attention: Tensor) -> Tensor:
        output = self.weights[f"model.layers.{layer_id}.self_attn.o_proj.weight"]
        added = self._link.add(attention.flatten(-2).to(hidden.dtype) @ output.T)
        nothing = attention.new_zeros(attention.shape)
        return super().attention_output(layer_id, hidden + added, nothing)


class _StageOfLlama:
    """A pipeline stage: hidden states come from the stage before; all stages get the logits of the last one."""

    def __init__(self, whole: LlamaDecoder, layers: range, link: _Link) -> None:
        self._whole, self._layers, self._link = whole, layers, link
        self.kind, self.num_layers, self.sm_scale = whole.kind, len(layers), whole.sm_scale
        self.num_q_heads, self.num_kv_heads = whole.num_q_heads, whole.num_kv_heads
        self.head_dim, self.v_head_dim = whole.head_dim, whole.v_head_dim

    @property
    def _is_last(self) -> bool:
        return self._layers.stop == self._whole.num_layers

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        if self._layers.start:
            return self._link.receive(len(token_ids), _LLAMA.d_model)
        return self._whole.embed(token_ids, positions)

    def attention_inputs(
        self, layer_id: int, hidden: Tensor, positions: Tensor, states: Sequence[ModelState], extend_lens: Sequence[int]
    ) -> AttentionInputs:
        return self._whole.attention_inputs(layer_id, hidden, positions, states, extend_lens)

    def attention_output(self, layer_id: int, hidden: Tensor, attention: Tensor) -> Tensor:
        hidden = self._whole.attention_output(layer_id, hidden, attention)
        if layer_id == self._layers[-1] and not self._is_last:
            self._link.send(hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        if not self._is_last:
            return self._link.receive(len(hidden), _LLAMA.vocab)
        logits = self._whole.logits(hidden)
        self._link.send(logits)
        return logits


def generate(rank: Rank | None, out: Path, pipe: Connection | None, algorithm: str) -> None:
    """Generate from a prompt and write tokens, logits and selections; `rank` None is one process for all."""
    whole = _Llama.random(_LLAMA, dtype=torch.float64)
    model: Any = whole
    layers = range(_LLAMA.num_layers) if rank is None else rank.layers
    if rank is not None:
        assert pipe is not None
        link = _Link(pipe, int(rank.heads.start + rank.layers.start > 0))
        is_stage = len(rank.heads) == _LLAMA.num_kv_heads
        model = _StageOfLlama(whole, layers, link) if is_stage else _HeadsOfLlama(whole, rank.heads, link)
    geometry = KVGeometry(
        model.kind, len(layers), model.num_kv_heads, model.head_dim, model.v_head_dim, KVDtype.F32, PAGE, layers.start
    )
    coordinator = build(
        config_of(algorithm, SHORT[algorithm]), geometry, num_q_heads=model.num_q_heads, sm_scale=model.sm_scale,
        device_pages=100, max_requests=8, max_tokens=256,
    )  # fmt: skip
    engine = DecodeEngine(model, coordinator, chunk_tokens=32, layers=layers)
    request = engine.add(_TOKENS)
    kept: dict[str, np.ndarray[Any, Any]] = {}
    retrieve = coordinator.algorithm.retrieve_topk

    def keeping(queries: Tensor, layer_id: int, batch: Any, *args: Any, **more: Any) -> Selection:
        selection = retrieve(queries, layer_id, batch, *args, **more)
        kept.update(_named(selection, f"{batch.lengths[0]}.{layer_id}"))
        return selection

    coordinator.algorithm.retrieve_topk = keeping  # type: ignore[method-assign]
    logits = []
    while len(engine.tokens(request)) < len(_TOKENS) + _NEW:
        engine.step()
        logits += [row.numpy() for row in engine.logits.values()]
    tokens = np.array(engine.tokens(request))
    engine.finish(request)
    np.savez(out / f"{algorithm}.npz", tokens=tokens, logits=np.stack(logits), **kept)  # type: ignore[arg-type]


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
