"""Drives a coordinator as an engine does, with made-up queries and KV, and checks what attention would read.

A value says where it comes from: number 0 of a value row is its request, 1 the layer, 2 the head, 3 the token. After
every `attention_begin` each selected item is read back from the slot that the metadata names and has to say so: steady
tokens first, then the items in the order of the selection. `ClockRuntime` is a device whose streams carry vector
clocks: each thing done on a stream advances its clock, events carry it and fences merge it, so that
`happened_before(a, b)` says whether streams and events order a before b on every device. Copies to the host can be
held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import kvcm.gpu_tier.assembly
from kvcm.gpu_tier.assembly import build
from kvcm.gpu_tier.config import SparseConfig
from kvcm.gpu_tier.coordinator import SparseCoordinator
from kvcm.gpu_tier.errors import PoolExhaustedError
from kvcm.gpu_tier.geometry import KVDtype, KVGeometry, KVKind
from kvcm.gpu_tier.index.wave_index import SegmentSink, WaveSegment
from kvcm.gpu_tier.manager.prefixes import AttachedPrefix, SidecarRun
from kvcm.gpu_tier.request_lifecycle import RequestState
from kvcm.gpu_tier.runtime import DeviceRuntime, Event
from kvcm.gpu_tier.types import AttnMetadata, ForwardBatch, PagedMeta, Selection, TokenMeta, Unit

Clock = dict[str, int]


@dataclass(frozen=True)
class Mark:
    """Something that was done on a stream."""

    label: tuple[object, ...]
    stream: str
    clock: Clock = field(hash=False)

    def happened_before(self, other: Mark) -> bool:
        """Whether every device has done this before it does the other."""
        return other.clock.get(self.stream, 0) >= self.clock[self.stream]


class _ClockEvent(Event):
    def __init__(self, runtime: ClockRuntime, stream: str, clock: Clock) -> None:
        self.runtime, self.stream, self.clock = runtime, stream, clock
        self.is_held = stream == "d2h" and runtime.holds_offloads

    def is_done(self) -> bool:
        return not self.is_held

    def wait(self) -> None:
        for event in self.runtime.held:  # a stream's work ends in order
            event.is_held = False
            if event is self:
                break


class ClockRuntime(DeviceRuntime):
    """See the module."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.holds_offloads = False
        self.marks: list[Mark] = []
        self._clocks: dict[str, Clock] = {}
        self._current = "compute"
        self._events: list[_ClockEvent] = []

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        """See `DeviceRuntime`."""
        before, self._current = self._current, name
        yield
        self._current = before

    def mark(self, *label: object) -> None:
        """Note that something is done on the current stream."""
        clock = self._tick(self._current)
        self.marks.append(Mark(label, self._current, dict(clock)))

    def _tick(self, stream: str) -> Clock:
        clock = self._clocks.setdefault(stream, {})
        clock[stream] = clock.get(stream, 0) + 1
        return clock

    def record(self, name: str = "compute") -> Event:
        """See `DeviceRuntime`."""
        event = _ClockEvent(self, name, dict(self._clocks.setdefault(name, {})))
        self._events.append(event)
        return event

    def fence(self, event: Event, name: str = "compute") -> None:
        """See `DeviceRuntime`."""
        assert isinstance(event, _ClockEvent)
        clock = self._clocks.setdefault(name, {})
        for stream, time in event.clock.items():
            clock[stream] = max(clock.get(stream, 0), time)

    @property
    def held(self) -> list[_ClockEvent]:
        """The copies to the host that have not ended, oldest first."""
        return [event for event in self._events if event.is_held]

    def let_go(self) -> None:
        """Let all copies to the host end."""
        for event in self._events:
            event.is_held = False

    def find(self, *label: object) -> Mark:
        """Return the mark with a label."""
        found = [mark for mark in self.marks if mark.label == label]
        assert len(found) == 1, (label, len(found))
        return found[0]


@dataclass(frozen=True)
class Shape:
    """The model and the pools of a test."""

    layers: int = 3
    heads: int = 2
    group: int = 2
    dims: int = 16
    v_dims: int = 16
    page: int = 8
    kind: KVKind = KVKind.MHA
    dtype: KVDtype = KVDtype.F32
    start_layer: int = 0
    device_pages: int = 120
    max_requests: int = 5
    max_tokens: int = 256

    @property
    def geometry(self) -> KVGeometry:
        """What the coordinator knows of the model."""
        return KVGeometry(
            self.kind, self.layers, self.heads, self.dims, self.v_dims, self.dtype, self.page, self.start_layer
        )

    @property
    def q_heads(self) -> int:
        """Query heads."""
        return self.heads * self.group

    @property
    def sm_scale(self) -> float:
        """Scale of the scores."""
        return self.dims**-0.5


@dataclass
class Tokens:
    """The KV and queries of one request, by layer."""

    q: Tensor
    k: Tensor
    v: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)


class Members:
    """Receives clustered segments on their way to the sink, and remembers which tokens are in which cluster."""

    def __init__(self, sink: SegmentSink) -> None:
        self.sink = sink
        self.of: dict[tuple[int, int], list[list[Tensor]]] = {}  # (layer id, request): of each head the clusters

    def store(self, layer_id: int, request: int, segment: WaveSegment) -> None:
        """See `SegmentSink`."""
        heads = self.of.setdefault((layer_id, request), [[] for _ in segment.sizes])
        for known, sizes, members in zip(heads, segment.sizes, segment.members, strict=True):
            assert len(known) == segment.first_cluster
            known.extend((members + segment.start).split(sizes.tolist()))
        self.sink.store(layer_id, request, segment)

    def forget(self, request: int) -> None:
        """Forget a request."""
        for key in [key for key in self.of if key[1] == request]:
            del self.of[key]


class Traffic:
    """One coordinator, for which `build` may get more options, and the requests that go through it."""

    def __init__(self, shape: Shape, config: dict[str, Any], **options: Any) -> None:
        self.shape = shape
        self.config = SparseConfig.parse({"page_size": shape.page, "debug_checks": True, **config})
        sizes = {name: getattr(shape, name) for name in ("device_pages", "max_requests", "max_tokens")}
        self.coordinator: SparseCoordinator = build(
            self.config, shape.geometry, num_q_heads=shape.q_heads, sm_scale=shape.sm_scale, **sizes, **options
        )
        self.sequences: dict[int, Tokens] = {}
        self.checked = 0
        self._selections: list[Selection] = []
        self.members: Members | None = None
        if (sink := self.coordinator.algorithm.sink) is not None:
            self.members = self.coordinator.algorithm.sink = Members(sink)
        self._spy_on_selections()

    def _spy_on_selections(self) -> None:
        algorithm = self.coordinator.algorithm
        retrieve = algorithm.retrieve_topk

        def kept(*args: Any, **kwargs: Any) -> Any:
            selection = retrieve(*args, **kwargs)
            self._selections.append(replace(selection, indices=selection.indices.clone()))
            return selection

        algorithm.retrieve_topk = kept  # type: ignore[method-assign]

    def sequence(self, seed: int) -> Tokens:
        """Return made-up queries and KV of `max_tokens` tokens; what a request holds depends on its seed alone."""
        s = self.shape
        draw = torch.Generator().manual_seed(seed)
        n = s.max_tokens
        q = torch.randn(s.layers, n, s.q_heads, s.dims, generator=draw)
        k = torch.randn(s.layers, n, s.heads, s.dims, generator=draw)
        rows = k if s.kind is KVKind.MLA else torch.zeros(s.layers, n, s.heads, s.v_dims)
        rows[..., 0] = seed
        rows[..., 1] = torch.arange(s.layers)[:, None, None]
        rows[..., 2] = torch.arange(s.heads)
        rows[..., 3] = torch.arange(n)[:, None]
        extra = {
            "index_query": torch.randn(s.layers, n, 4, 16, generator=draw),
            "index_key": torch.randn(s.layers, n, 16, generator=draw),
            "index_weight": torch.rand(s.layers, n, 4, generator=draw),
        }
        return Tokens(q, k, rows, extra if self.config.algorithm == "dsa" else {})

    def begin(self, n_prompt: int, seed: int, prefix: Any = None) -> int:
        """Take a request in."""
        request = self.coordinator.on_request_begin(n_prompt, prefix)
        self.sequences[request] = self.sequence(seed)
        return request

    def prefill(self, requests: Sequence[int], extend_lens: Sequence[int]) -> None:
        """Run one pass over prompt tokens."""
        c = self.coordinator
        batch = c.plan_prefill(requests, extend_lens)
        c.forward_begin(batch)
        for layer in range(self.shape.layers):
            q, k, v, extra = self._inputs(batch, layer)
            layer_id = layer + self.shape.start_layer
            c.write_kv(layer_id, batch, k, v)
            assert c.attention_begin(q, k, v, layer_id, batch, **extra) == (None, [])
            c.attention_end(torch.empty(0), layer_id, batch)
        c.forward_end(batch)

    def prompt(self, requests: Sequence[int], chunk: int = 1 << 30) -> None:
        """Run the rest of some prompts, together, in chunks."""
        trackers = self.coordinator.trackers
        left = {request: trackers[request].n_prompt - trackers[request].seq_len for request in requests}
        while left:
            self.prefill(list(left), [min(chunk, n) for n in left.values()])
            left = {request: n - chunk for request, n in left.items() if n > chunk}
        for request in requests:
            self.coordinator.prompt_finished(request)

    def _inputs(self, batch: ForwardBatch, layer: int) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor]]:
        starts = [n - e for n, e in zip(batch.lengths, batch.extend_lens, strict=True)]
        spans = [
            (self.sequences[request], slice(start, stop))
            for request, start, stop in zip(batch.requests, starts, batch.lengths, strict=True)
        ]
        padding = len(batch.positions) - sum(batch.extend_lens)

        def rows(parts: list[Tensor]) -> Tensor:
            joined = torch.cat([*parts, torch.zeros(padding, *parts[0].shape[1:])])
            return joined.to(self.coordinator.runtime.device)

        q = rows([s.q[layer, span] for s, span in spans])
        k = rows([s.k[layer, span] for s, span in spans])
        v = None if self.shape.kind is KVKind.MLA else rows([s.v[layer, span] for s, span in spans])
        return q, k, v, {name: rows([s.extra[name][layer, span] for s, span in spans]) for name in spans[0][0].extra}

    def decode(self, requests: Sequence[int], pad_to: int = 0) -> Tensor:
        """Run one decode step, check what it reads, and return the attention ``[L, B, Hq, dv]``."""
        c = self.coordinator
        batch = c.plan_decode(requests, pad_to)
        c.forward_begin(batch)
        outputs = []
        for layer in range(self.shape.layers):
            q, k, v, extra = self._inputs(batch, layer)
            layer_id = layer + self.shape.start_layer
            c.write_kv(layer_id, batch, k, v)
            self._selections.clear()
            meta, partials = c.attention_begin(q, k, v, layer_id, batch, **extra)
            if self._selections and meta is not None:
                self._check_content(batch, layer, meta)
            out = c.attend(q, meta, partials, self.shape.sm_scale)
            if self._selections:
                self._check_output(batch, layer, out)
            assert not out[batch.num_real :].any()  # padding reads nothing
            c.attention_end(out, layer_id, batch)
            outputs.append(out[: batch.num_real])
        c.forward_end(batch)
        return torch.stack(outputs)

    def _is_sparse(self, request: int) -> bool:
        return self.coordinator.trackers[request].state is RequestState.SPARSE

    def _attended(self, batch: ForwardBatch, layer: int, row: int, head: int) -> Tensor:
        """Return the tokens that a row's head attends to, in the order in which it does."""
        selection, n = self._selections[-1], batch.lengths[row]
        items = self._items(selection, layer, batch.requests[row], row, head)
        items = items[items < n]
        if (zone := selection.steady) is None:
            return items
        first = zone.firsts[row]
        return torch.cat([torch.arange(min(zone.sink, n)), torch.arange(min(first, n), n), items])

    def _items(self, selection: Selection, layer: int, request: int, row: int, head: int) -> Tensor:
        head = head if selection.indices.shape[1] > 1 else 0
        ids = selection.indices[row, head]
        ids = ids[ids >= 0].long()
        if selection.unit is Unit.CLUSTER:
            assert self.members is not None
            clusters = self.members.of.get((layer + self.shape.start_layer, request), [[]] * self.shape.heads)[head]
            return torch.cat([torch.empty(0, dtype=torch.int64), *(clusters[i].long() for i in ids.tolist())])
        return (ids[:, None] * selection.unit_tokens + torch.arange(selection.unit_tokens)).flatten()

    def _check_content(self, batch: ForwardBatch, layer: int, meta: AttnMetadata) -> None:
        """I11: what attention reads are the rows of the selected tokens, of this layer, head and request."""
        selecting = self._selections[-1].indices.shape[1]
        rows = meta.kv.v or meta.kv.k
        for row, request in enumerate(batch.requests):
            if not self._is_sparse(request):
                continue
            for head in range(selecting):
                tokens = self._attended(batch, layer, row, head)
                assert 0 < len(tokens) == len(tokens.unique())
                slots = _slots(meta, row, head)
                assert len(slots) == len(tokens)
                found = rows.decode(slots)
                expected = self._stored(self.sequences[request].v[layer, tokens], rows.format)
                heads = [head] if selecting > 1 else range(self.shape.heads)
                for h in heads:
                    torch.testing.assert_close(found[:, h], expected[:, h], rtol=0, atol=0)
                self.checked += len(tokens)

    def _check_output(self, batch: ForwardBatch, layer: int, out: Tensor) -> None:
        """The output is the attention over the selected tokens, computed from the sequence alone; or an estimate.

        Rows that are dense attend to all their tokens.
        """
        group, estimates = self.shape.group, self._selections[-1].estimate is not None
        for row, request in enumerate(batch.requests):
            for head in range(self.shape.heads):
                n = batch.lengths[row]
                sparse = self._is_sparse(request)
                tokens = self._attended(batch, layer, row, head) if sparse else torch.arange(n)
                if not len(tokens):
                    continue
                sequence, parts = self.sequences[request], self.shape.geometry.parts
                k = self._stored(sequence.k[layer, tokens, head], parts[0]).double()
                v = self._stored(sequence.v[layer, tokens, head], parts[-1]).double()[:, : self.shape.v_dims]
                q = sequence.q[layer, n - 1].view(self.shape.heads, group, -1)[head].double()
                scores, exact = q @ k.T * self.shape.sm_scale, out[row].view(self.shape.heads, group, -1)[head]
                tolerance = 1e-4
                if sparse and estimates:
                    more, values = self._estimated(batch, layer, row, head, q)
                    scores, v, tolerance = torch.cat([scores, more], 1), torch.cat([v, values]), 0.02
                expected = (scores.softmax(-1) @ v).float()
                scale = max(1.0, float(v.abs().max())) if tolerance > 1e-4 else 1.0
                torch.testing.assert_close(exact, expected, rtol=tolerance, atol=tolerance * scale)

    def _estimated(self, batch: ForwardBatch, layer: int, row: int, head: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return scores ``[G, C]`` and values ``[C, dv]`` that stand for the estimated clusters."""
        selection, request = self._selections[-1].estimate, batch.requests[row]
        assert selection is not None
        sequence, parts = self.sequences[request], self.shape.geometry.parts
        ids, scores, values = selection.indices[row, head], [q[:, :0]], [q.new_empty(0, self.shape.v_dims)]
        for i in ids[ids >= 0].tolist():
            tokens = self.members.of[layer + self.shape.start_layer, request][head][i].long()  # type: ignore[union-attr]
            if len(tokens):
                k = self._stored(sequence.k[layer, tokens, head], parts[0]).double()
                v = self._stored(sequence.v[layer, tokens, head], parts[-1]).double()[:, : self.shape.v_dims]
                score = q @ k.mean(0) * self.shape.sm_scale + torch.tensor(float(len(tokens))).log()
                scores.append(score[:, None])
                values.append(v.mean(0)[None])
        return torch.cat(scores, 1), torch.cat(values)

    @staticmethod
    def _stored(numbers: Tensor, row_format: Any) -> Tensor:
        return row_format.decode(row_format.encode(numbers))

    def exact(self, request: int, token: int) -> Tensor:
        """Return full attention of a token, ``[L, Hq, dv]``, computed from the sequence alone."""
        s, seq = self.shape, self.sequences[request]
        parts = s.geometry.parts
        k = self._stored(seq.k[:, : token + 1], parts[0]).repeat_interleave(s.group, 2).double()
        v_rows = k if s.kind is KVKind.MLA else self._stored(seq.v[:, : token + 1], parts[1])
        v = v_rows[..., : s.v_dims] if s.kind is KVKind.MLA else v_rows.repeat_interleave(s.group, 2).double()
        scores = torch.einsum("lhd,lnhd->lhn", seq.q[:, token].double(), k) * s.sm_scale
        return torch.einsum("lhn,lnhd->lhd", scores.softmax(-1), v).float()

    def end(self, request: int, reason: str = "finished") -> None:
        """End a request."""
        self.coordinator.on_request_end(request, reason)
        self.sequences.pop(request, None)
        if self.members is not None:
            self.members.forget(request)

    def assert_empty(self) -> None:
        """Every allocator is at its start level."""
        c, manager = self.coordinator, self.coordinator.manager
        assert not len(c.trackers)
        assert manager.device.allocator.in_use == 0
        assert manager.host.allocator.in_use == 0
        assert manager.tables.available == self.shape.max_requests
        assert bool((manager.tables.table == -1).all())
        assert bool((manager.host_tokens.host_loc == -1).all())
        if c.resident is not None:
            assert c.resident.pool.allocator.in_use == 0
        for owner in (c.algorithm, manager.policy):
            if (pool := getattr(owner, "pool", None)) is not None:
                assert pool.allocator.in_use == 0
        if manager.blocks is not None and manager.blocks.store is not None:
            assert manager.blocks.store.allocator.in_use == 0


def _slots(meta: AttnMetadata, row: int, head: int) -> Tensor:
    if isinstance(meta, TokenMeta):
        return meta.token_table[row, head, : int(meta.lens[row, head])].long()
    assert isinstance(meta, PagedMeta)
    n = int(meta.cache_seqlens[row])
    pages = meta.page_table[row, : -(-n // meta.page_tokens)].long()
    return (pages[:, None] * meta.page_tokens + torch.arange(meta.page_tokens)).flatten()[:n]


class MarkedTraffic(Traffic):
    """Traffic whose copies and attention leave marks on the streams they run on."""

    def __init__(self, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, shape: Shape | None = None) -> None:
        self.runtime = ClockRuntime()
        monkeypatch.setattr(kvcm.gpu_tier.assembly, "runtime_for", lambda _: self.runtime)
        super().__init__(shape or Shape(), config)
        self.step = self.layer = 0
        c, manager = self.coordinator, self.coordinator.manager
        transfer = manager.transfer
        for owner, names in ((transfer, "load store gather"), (manager, "commit"), (c, "attend write_kv")):
            for name in names.split():
                monkeypatch.setattr(owner, name, self._marking(name, getattr(owner, name)))

    def _marking(self, name: str, run: Any) -> Any:
        def marked(*args: Any, **kwargs: Any) -> Any:
            if name == "write_kv":
                self.layer = args[0]
            layers = kwargs.get("layers")
            self.runtime.mark(name, self.step, self.layer if layers is None else layers[0])
            return run(*args, **kwargs)

        return marked

    def decode(self, requests: Any, pad_to: int = 0) -> torch.Tensor:
        self.step += 1
        return super().decode(requests, pad_to)


def publishing(shape: Shape, config: dict[str, Any]) -> Traffic:
    """Return traffic whose requests all have a host copy."""
    return Traffic(shape, config, publishes=True)


def prefix_of(traffic: Traffic, seed: int, n_tokens: int, *, has_sidecar: bool = True) -> AttachedPrefix:
    """Compute the first tokens of a sequence, and keep their host pages when the request ends."""
    manager, algorithm = traffic.coordinator.manager, traffic.coordinator.algorithm
    request = traffic.begin(n_tokens + 5, seed)
    traffic.prompt([request], chunk=40)
    manager.wait_for_copies(request)
    pages = manager.host_tokens.pages(request)[: n_tokens // traffic.shape.page]
    manager.host.allocator.share(pages)
    sidecar = algorithm.export_sidecar(request, 0, n_tokens) if has_sidecar else None
    traffic.end(request)
    runs = () if sidecar is None else (SidecarRun(0, sidecar.data.clone()),)
    return AttachedPrefix(pages, n_tokens, runs)


def diverging(traffic: Traffic, first: int, second: int, at: int) -> Tokens:
    """Return the sequence of one seed up to a token, and of another from there on."""
    a, b = traffic.sequence(first), traffic.sequence(second)

    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :at], y[:, at:]], 1)

    extra = {name: joined(a.extra[name], b.extra[name]) for name in a.extra}
    return Tokens(joined(a.q, b.q), joined(a.k, b.k), joined(a.v, b.v), extra)


def host_rows_are_right(traffic: Traffic, request: int) -> int:
    """Check that host pages hold exactly the KV of a request; return how many tokens were compared."""
    manager, sequence = traffic.coordinator.manager, traffic.sequences[request]
    manager.wait_for_copies(request)
    n = traffic.coordinator.trackers[request].seq_len
    assert manager.host_tokens.backed_up(request) == n
    slots = manager.host_tokens.slots(request, 0, n)
    for layer_id in manager.layers:
        layer = manager.device.geometry.layer_index(layer_id)
        for part, (rows, numbers) in enumerate(
            zip(traffic.shape.geometry.parts, (sequence.k, sequence.v), strict=False)
        ):
            found = manager.host.read(layer_id, part, slots)
            assert torch.equal(found, rows.encode(numbers[layer, :n]))
    return n


T = TypeVar("T")


class _Refusals:
    """Lets the n-th allocation from now on fail, in any pool; all others succeed."""

    def __init__(self, traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.has_refused = False
        c = traffic.coordinator
        pools: list[Any] = [c.manager.tables, c.manager.device.allocator, c.manager.host.allocator]
        pools += [c.resident.pool.allocator] if c.resident is not None else []
        pools += [owner.pool.allocator for owner in (c.algorithm, c.manager.policy) if hasattr(owner, "pool")]
        if c.manager.blocks is not None and c.manager.blocks.store is not None:
            pools.append(c.manager.blocks.store.allocator)
        for pool in pools:
            monkeypatch.setattr(pool, "alloc", self._refusing(pool.alloc))
        self.pools = pools

    def _refusing(self, alloc: Callable[..., Any]) -> Callable[..., Any]:
        def refusing(*args: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.has_refused = True
                raise PoolExhaustedError("refused by the test")
            return alloc(*args)

        return refusing

    @property
    def free(self) -> list[int]:
        """What each pool has left."""
        return [pool.available for pool in self.pools]

    def twice(self, run: Callable[[], T]) -> T:
        """Return what `run` returns, the second time if it was refused."""
        try:
            return run()
        except PoolExhaustedError:
            if not self.has_refused:
                raise
            return run()


def _steps_of(traffic: Traffic, refusals: _Refusals, other: int, *, has_prefix: bool) -> Iterator[torch.Tensor]:
    """Yield the outputs of a request's decode steps, beside which another one decodes."""
    prefix = prefix_of(traffic, 1, 40) if has_prefix else None
    c = traffic.coordinator
    refusals.left = yield torch.empty(0)
    before = refusals.free
    try:
        request = traffic.begin(61, 1, prefix)
    except PoolExhaustedError:
        if prefix is not None:  # it was released
            before[2] += len(prefix.pages)
        assert refusals.free == before
        request = traffic.begin(61, 1, prefix_of(traffic, 1, 40) if has_prefix else None)
    while (left := 61 - c.trackers[request].seq_len) > 0:
        refusals.twice(lambda left=left: traffic.prefill([request], [min(13, left)]))  # type: ignore[misc]
        yield refusals.twice(lambda: traffic.decode([other]))
    refusals.twice(lambda: c.prompt_finished(request))
    for _ in range(14):
        yield refusals.twice(lambda: traffic.decode([other, request]))
    refusals.left = -1
    traffic.end(request)


def _outputs_of(
    shape: Shape, config: dict[str, Any], refused: int, monkeypatch: pytest.MonkeyPatch, *, has_prefix: bool
) -> tuple[list[torch.Tensor], bool]:
    """Return what both requests attended to, and whether an allocation was refused."""
    traffic = publishing(shape, {**config, "min_sparse_prompt_len": 16})
    refusals = _Refusals(traffic, monkeypatch)
    other = traffic.begin(45, seed=2)
    traffic.prompt([other])
    steps = _steps_of(traffic, refusals, other, has_prefix=has_prefix)
    next(steps)
    out = [steps.send(refused), *steps]
    traffic.end(other)
    traffic.assert_empty()
    return out, refusals.has_refused


def refuse_each_once(
    shape: Shape, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, has_prefix: bool
) -> None:
    """Run two requests again and again, each time with another allocation refused: the same bits every time."""
    expected, _ = _outputs_of(shape, config, -1, monkeypatch, has_prefix=has_prefix)
    for refused in range(1, 100):
        found, was_refused = _outputs_of(shape, config, refused, monkeypatch, has_prefix=has_prefix)
        if not was_refused:
            break
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), refused
    assert 8 < refused < 99
