"""The GPU tier's connector against a real manager and files."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from manager_process import ManagerProcess
from pool_parts import CAPACITY, NODE
from prefix_cases import MHA, MLA, PAGE, SIDECAR_BYTES, block_bytes, format_of, sidecars_of
from waiting import until

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.gpu_tier.connector import BlockParts, ManagerConnector, TierSettings
from kvcm.connectors.results import Location, MatchMode, RegistrationState
from kvcm.connectors.transfer import MOVERS, FileMover, TransferItem, TransferResult
from kvcm.gpu_tier.connector import KV_SPEC
from kvcm.gpu_tier.geometry import KVGeometry, Layout
from kvcm.gpu_tier.manager.prefixes import AttachedPrefix, PrefixStore, SidecarSpec
from kvcm.gpu_tier.pools.host_pool import HostKVPool
from kvcm.gpu_tier.runtime import NullRuntime
from kvcm.model.errors import InvalidArgumentError

torch.set_num_threads(1)  # for tensors this small, threads mostly wait for each other

PATIENT = TierSettings(call_seconds=20.0, register_seconds=20.0, batch_bytes=1000)
WAIT_SECONDS = 60.0
PAGES = 16


def dsa_spec(geometry: KVGeometry, layout: Layout, index_dim: int = 128) -> str:
    return format_of(geometry, layout).sidecar_spec("dsa", {"index_dim": index_dim})


class TierEngine:
    """What an engine has of the tier, without the computing.

    Args:
        manager: address.
        instance_id: shared with other engines.
        sidecar: spec of its algorithm's sidecar, "" for none.
        is_required: whether the algorithm cannot do without.
        others: specs of other algorithms that the instance has.
        first_head: of the KV heads that it holds.
    """

    def __init__(
        self,
        manager: str,
        instance_id: str,
        *,
        geometry: KVGeometry = MHA,
        layout: Layout = Layout.PAGE_FIRST,
        sidecar: str = "",
        is_required: bool = True,
        others: Sequence[str] = (),
        group: str = "default",
        first_head: int = 0,
        settings: TierSettings = PATIENT,
    ) -> None:
        self.host = HostKVPool(geometry, PAGES, layout, NullRuntime())
        self.sidecar = sidecar
        names = {*others, sidecar} - {""}
        parts = BlockParts(geometry.page_bytes, dict.fromkeys(names, SIDECAR_BYTES))
        kv = format_of(geometry, layout, first_head)
        self.connector = ManagerConnector.connect(manager, group, instance_id, kv, parts, settings=settings)
        spec = SidecarSpec(sidecar, SIDECAR_BYTES, is_required) if sidecar else None
        self.store = PrefixStore(self.host, self.connector, self.connector.page_keys, spec)

    def serve(self, tokens: Sequence[int]) -> None:
        """Compute a prompt, publish it, and wait for that."""
        keys = self.connector.page_keys(tokens)
        pages = self.host.allocator.alloc(len(keys))
        for page, key in zip(pages, keys, strict=True):
            data = block_bytes(key, KV_SPEC, self.host.geometry.page_bytes)
            for piece in self.host.page_pieces(page):
                piece.copy_(data[: piece.numel()])
                data = data[piece.numel() :]
        rows = [block_bytes(key, self.sidecar, SIDECAR_BYTES) for key in keys]
        self.store.publish(tokens, pages, len(tokens), sidecar=torch.stack(rows) if self.sidecar else None)
        self.host.allocator.free(pages)
        assert self.store.flush(WAIT_SECONDS)

    def attach(self, tokens: Sequence[int]) -> AttachedPrefix:
        """Attach the stored prefix of a prompt, and check its bytes."""
        prefix = self.store.attach(tokens, WAIT_SECONDS)
        keys = self.connector.page_keys(tokens)[: len(prefix.pages)]
        for page, key in zip(prefix.pages, keys, strict=True):
            found = torch.cat([piece.flatten() for piece in self.host.page_pieces(page)])
            assert torch.equal(found, block_bytes(key, KV_SPEC, self.host.geometry.page_bytes))
        data = sidecars_of(prefix)
        if len(data):
            wanted = torch.stack([block_bytes(key, self.sidecar, SIDECAR_BYTES) for key in keys[: len(data)]])
            assert torch.equal(data, wanted)
        return prefix

    def attached_tokens(self, tokens: Sequence[int]) -> int:
        """Attach the stored prefix of a prompt, check its bytes, and release it."""
        prefix = self.attach(tokens)
        self.store.release(prefix)
        return prefix.n_tokens

    def close(self) -> None:
        self.connector.close()


DSA = dsa_spec(MHA, Layout.PAGE_FIRST)
TOKENS = list(range(6 * PAGE + 1))  # six full pages, and the token that has to be computed


NewEngine = Callable[..., TierEngine]
Locations = Callable[[TierEngine], list[Location | None]]


@pytest.fixture
def new_engine(manager: ManagerProcess, instance_id: str) -> Iterator[NewEngine]:
    """Make engines of one instance, of the shared manager unless another is given; all are closed at the end."""
    with ExitStack() as engines:

        def new(address: str = manager.address, **options: Any) -> TierEngine:
            return engines.enter_context(closing(TierEngine(address, instance_id, **options)))

        yield new


@pytest.fixture
def locations(manager: ManagerProcess, instance_id: str) -> Iterator[Locations]:
    """Return where the blocks of the prompt are stored."""
    with ManagerClient(manager.address, instance_id) as client:

        def locations(engine: TierEngine) -> list[Location | None]:
            keys = engine.connector.page_keys(TOKENS)
            return list(client.match(keys, MatchMode.BATCH, timeout_seconds=20).locations)

        yield locations


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("algorithm", ["full", "dsa"])
def test_what_one_engine_publishes_another_attaches(
    new_engine: NewEngine, locations: Locations, geometry: KVGeometry, layout: Layout, algorithm: str
) -> None:
    sidecar = dsa_spec(geometry, layout) if algorithm == "dsa" else ""
    first, second = (new_engine(geometry=geometry, layout=layout, sidecar=sidecar) for _ in range(2))
    assert first.connector.registration.state is RegistrationState.OK
    first.serve(TOKENS)
    assert first.store.counters.written_pages == 6
    sizes = {KV_SPEC: geometry.page_bytes, sidecar: SIDECAR_BYTES}
    for location in locations(first):
        assert location is not None
        assert set(location.uris) == {KV_SPEC, sidecar} - {""}
        assert all(uri.size == sizes[name] for name, uri in location.uris.items())
        assert location.checksums.keys() == location.uris.keys()
    prefix = second.attach(TOKENS)
    assert prefix.n_tokens == second.store.counters.storage_tokens == 6 * PAGE
    assert len(sidecars_of(prefix)) == (6 if sidecar else 0)
    second.store.release(prefix)
    assert second.host.allocator.in_use == 0


def test_blocks_without_the_sidecar_are_a_miss_until_it_is_added(new_engine: NewEngine) -> None:
    """An engine with full attention and one with DSA share the KV of one instance."""
    full, dsa, another = new_engine(others=[DSA]), new_engine(sidecar=DSA), new_engine(sidecar=DSA)
    full.serve(TOKENS)
    assert dsa.attached_tokens(TOKENS) == 0
    dsa.serve(TOKENS)
    assert dsa.connector.statistics.total()["saved_bytes"] == 6 * SIDECAR_BYTES  # the KV was there already
    assert another.attached_tokens(TOKENS) == 6 * PAGE


def test_blocks_without_an_optional_sidecar_are_attached(new_engine: NewEngine) -> None:
    """As of Quest, whose bounds can be computed from the keys."""
    first, second = (new_engine(sidecar=DSA, is_required=False) for _ in range(2))
    first.serve(TOKENS[: 2 * PAGE + 1])
    new_engine(others=[DSA]).serve(TOKENS)
    prefix = second.attach(TOKENS)
    assert prefix.n_tokens == 6 * PAGE
    assert len(sidecars_of(prefix)) == 2
    assert second.store.counters.sidecar_misses == 4 * PAGE


def test_an_engine_with_other_parameters_is_refused(new_engine: NewEngine) -> None:
    first = new_engine(sidecar=DSA)
    other = new_engine(sidecar=dsa_spec(MHA, Layout.PAGE_FIRST, 64))
    reordered, second_rank = new_engine(sidecar=DSA, layout=Layout.PAGE_HEAD), new_engine(sidecar=DSA, first_head=4)
    first.serve(TOKENS)
    for engine in (other, reordered, second_rank):
        assert engine.connector.registration.state is RegistrationState.REFUSED
        assert engine.attached_tokens(TOKENS) == 0
        engine.serve(TOKENS)
        assert engine.store.counters.failed_pages == 6
    for engine in (reordered, second_rank):
        assert not set(first.connector.page_keys(TOKENS)) & set(engine.connector.page_keys(TOKENS))


@pytest.mark.parametrize("damage", ["flip", "remove"])
@pytest.mark.parametrize("name", [KV_SPEC, DSA], ids=["kv", "sidecar"])
def test_damaged_parts_are_written_again(new_engine: NewEngine, locations: Locations, name: str, damage: str) -> None:
    first, second, third = (new_engine(sidecar=DSA) for _ in range(3))
    first.serve(TOKENS)
    location = locations(first)[3]
    assert location is not None
    uri = location.uris[name]
    path = Path(uri.path)
    data = bytearray(path.read_bytes())
    data[uri.offset] ^= 1
    path.write_bytes(data)
    if damage == "remove":
        path.unlink()
    found = second.attached_tokens(TOKENS)
    assert found == 3 * PAGE if damage == "flip" else found <= 3 * PAGE  # a file may hold several blocks
    assert second.store.counters.loads_short == 1
    until(lambda: not all(location and name in location.uris for location in locations(second)))
    second.serve(TOKENS)
    assert third.attached_tokens(TOKENS) == 6 * PAGE


def test_without_a_manager_everything_is_a_miss(closed_port: int, new_engine: NewEngine) -> None:
    settings = TierSettings(register_seconds=0.2, call_seconds=0.2)
    engine = new_engine(f"127.0.0.1:{closed_port}", settings=settings)
    assert engine.attached_tokens(TOKENS) == 0
    engine.serve(TOKENS)
    assert engine.store.counters.failed_pages == 6
    assert engine.attached_tokens(TOKENS) == 6 * PAGE  # from the pool
    assert engine.host.allocator.in_use == 0


def test_a_manager_gets_its_state_again(new_manager: Callable[..., ManagerProcess], new_engine: NewEngine) -> None:
    before = new_manager()
    engine = new_engine(before.address, sidecar=DSA)
    engine.serve(TOKENS)
    before.kill()
    shutil.rmtree(before.data_dir)
    new_manager(before.ports)
    empty_pool(engine)
    assert engine.attached_tokens(TOKENS) == 0
    engine.serve(TOKENS)
    empty_pool(engine)
    assert engine.attached_tokens(TOKENS) == 6 * PAGE


def empty_pool(engine: TierEngine) -> None:
    engine.host.allocator.free(engine.host.allocator.alloc(engine.host.allocator.available))


def test_no_call_waits_for_a_manager_that_says_nothing(new_engine: NewEngine, black_hole: int) -> None:
    """The listener, requested last, ends before the engine, whose end would wait `call_seconds` for an answer."""
    settings = TierSettings(register_seconds=0.1, call_seconds=30.0, shutdown_seconds=0.5)
    engine = new_engine(f"127.0.0.1:{black_hole}", settings=settings)
    begun = time.monotonic()
    attach = engine.store.begin(TOKENS)
    assert engine.store.poll(attach) is None
    engine.store.abort(attach)
    engine.store.step()
    assert time.monotonic() - begun < 10.0
    assert engine.host.allocator.in_use == 0


class StuckMover:
    """A storage whose loads hang until they are let go, and which then writes to the memory all the same."""

    free = threading.Event()
    began = threading.Event()

    def __init__(self, mover: FileMover) -> None:
        self._mover = mover

    def load(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        StuckMover.began.set()
        StuckMover.free.wait(60)
        return self._mover.load(items, deadline_seconds + 60)

    def save(self, items: Sequence[TransferItem], deadline_seconds: float) -> list[TransferResult]:
        return self._mover.save(items, deadline_seconds)

    def close(self) -> None:
        self._mover.close()


class RegisteringMover(StuckMover):
    """A storage that wants to know the memory that it moves."""

    refuses = False
    known: ClassVar[list[int]] = []

    def register(self, memory: memoryview) -> None:
        if self.refuses:
            raise InvalidArgumentError("no more memory, please")
        self.known.append(memory.nbytes)


@pytest.mark.parametrize("refuses", [False, True])
def test_the_pool_is_registered(new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, refuses: bool) -> None:
    monkeypatch.setattr(RegisteringMover, "known", [])
    monkeypatch.setattr(RegisteringMover, "refuses", refuses)
    monkeypatch.setitem(MOVERS, "file", lambda storages: RegisteringMover(FileMover.for_storages(storages)))
    engine = new_engine(sidecar=DSA)
    assert RegisteringMover.known == ([] if refuses else [PAGES * MHA.page_bytes, PAGES * SIDECAR_BYTES])
    engine.serve(TOKENS)
    assert engine.store.counters.written_pages == 6


@pytest.mark.parametrize("ending", ["deadline", "abort"])
def test_pages_are_held_while_a_storage_uses_them(
    new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    new_engine().serve(TOKENS)
    monkeypatch.setattr(StuckMover, "free", threading.Event())
    monkeypatch.setattr(StuckMover, "began", threading.Event())
    monkeypatch.setitem(MOVERS, "file", lambda storages: StuckMover(FileMover.for_storages(storages)))
    settings = TierSettings(
        call_seconds=20.0, register_seconds=20.0, load_seconds=0.3 if ending == "deadline" else 50.0
    )
    engine = new_engine(settings=settings)
    while not StuckMover.began.is_set():  # a busy machine may begin nothing before the deadline
        attach = engine.store.begin(TOKENS)
        until(lambda attach=attach: engine.store.poll(attach) is not None or StuckMover.began.is_set())
    if ending == "abort":
        engine.store.abort(attach)
    else:
        until(lambda: engine.store.poll(attach) is not None)
        assert attach.result is not None
        assert attach.result.n_tokens == 0
    for _ in range(20):
        engine.store.step()
        assert engine.host.allocator.in_use == 6
    StuckMover.free.set()
    assert engine.store.flush(30)
    assert engine.host.allocator.in_use == 0


def test_engines_that_write_the_same_blocks_at_once(new_engine: NewEngine) -> None:
    engines = [new_engine(sidecar=DSA) for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda engine: engine.serve(TOKENS), engines))
    saved = [engine.connector.statistics.total().get("saved_blocks", 0) for engine in engines]
    assert sum(saved) == 6  # type: ignore[arg-type]
    assert new_engine(sidecar=DSA).attached_tokens(TOKENS) == 6 * PAGE


@pytest.mark.usefixtures("node")
def test_a_memory_pool_of_the_node(
    manager: ManagerProcess, new_engine: NewEngine, instance_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = f"pool-{instance_id}"
    manager.add_pool(pool, NODE, CAPACITY)
    first = new_engine(sidecar=DSA, group=pool)
    until(lambda: _is_taken(first))  # not before the manager has looked at the pool
    assert new_engine(sidecar=DSA, group=pool).attached_tokens(TOKENS) == 6 * PAGE
    monkeypatch.setenv("KVCM_NODE_ID", "node-b")
    assert new_engine(sidecar=DSA, group=pool).attached_tokens(TOKENS) == 0


def _is_taken(engine: TierEngine) -> bool:
    engine.serve(TOKENS)
    return engine.store.counters.written_pages > 0


def test_leases_are_released(new_engine: NewEngine) -> None:
    engine = new_engine()
    engine.serve(TOKENS)
    empty_pool(engine)
    assert engine.attached_tokens(TOKENS) == 6 * PAGE
    until(lambda: "release_lease" in engine.connector.counters)


def test_pending_writes_end_when_the_connector_is_closed(new_engine: NewEngine) -> None:
    engine = new_engine(settings=TierSettings(call_seconds=20.0, threads=1))
    engine.connector._background.close(5.0)  # so that the write never begins
    keys = engine.connector.page_keys(TOKENS)
    pages = engine.host.allocator.alloc(len(keys))
    engine.store.publish(TOKENS, pages, len(TOKENS))
    engine.host.allocator.free(pages)
    engine.close()
    assert engine.store.flush(WAIT_SECONDS)
    assert engine.store.counters.failed_pages == 6


@pytest.mark.parametrize(
    "make",
    [
        lambda: TierSettings(load_seconds=600.0),
        lambda: TierSettings(call_seconds=0.0),
        lambda: TierSettings(transfer_threads=-1),
        lambda: BlockParts(0, {}),
        lambda: BlockParts(1, {DSA: 0}),
        lambda: BlockParts(1, {KV_SPEC: 1}),
        lambda: BlockParts(1, {DSA: 1}).group_of({KV_SPEC: (), "index.other": ()}),
        lambda: BlockParts(1, {DSA: 1}).group_of({DSA: ()}),
    ],
)
def test_arguments_that_are_not_allowed(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgumentError):
        make()
