"""The GPU tier's connector against a real manager and files."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from manager_process import ManagerProcess
from pool_parts import CAPACITY, NODE
from prefix_cases import MHA, MLA, PAGE, SIDECAR_BYTES, sidecars_of
from tier_cases import TierEngine, dsa_spec, tokens_of
from waiting import until

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.gpu_tier.connector import BlockParts, TierSettings
from kvcm.connectors.results import Location, MatchMode, RegistrationState
from kvcm.connectors.transfer import MOVERS, FileMover, TransferItem, TransferResult
from kvcm.gpu_tier.connector import KV_SPEC
from kvcm.gpu_tier.geometry import KVGeometry, Layout
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import StorageConfig

DSA = dsa_spec(MHA, Layout.PAGE_FIRST)
TOKENS = tokens_of(6)


def locations_of(manager: ManagerProcess, instance_id: str, engine: TierEngine) -> list[Location | None]:
    with ManagerClient(manager.address, instance_id) as client:
        keys = engine.connector.page_keys(TOKENS)
        return list(client.match(keys, MatchMode.BATCH, timeout_seconds=20).locations)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("geometry", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("algorithm", ["full", "dsa"])
def test_what_one_engine_publishes_another_attaches(
    manager: ManagerProcess, instance_id: str, geometry: KVGeometry, layout: Layout, algorithm: str
) -> None:
    sidecar = dsa_spec(geometry, layout) if algorithm == "dsa" else ""
    options: dict[str, Any] = {"geometry": geometry, "layout": layout, "sidecar": sidecar}
    with TierEngine(manager.address, instance_id, **options) as first:
        assert first.connector.registration.state is RegistrationState.OK
        first.serve(TOKENS)
        assert first.store.counters.written_pages == 6
        sizes = {KV_SPEC: geometry.page_bytes, sidecar: SIDECAR_BYTES}
        for location in locations_of(manager, instance_id, first):
            assert location is not None
            assert set(location.uris) == {KV_SPEC, sidecar} - {""}
            assert all(uri.size == sizes[name] for name, uri in location.uris.items())
            assert location.checksums.keys() == location.uris.keys()
    with TierEngine(manager.address, instance_id, **options) as second:
        prefix = second.attach(TOKENS)
        assert prefix.n_tokens == second.store.counters.storage_tokens == 6 * PAGE
        assert len(sidecars_of(prefix)) == (6 if sidecar else 0)
        second.store.release(prefix)
        assert second.host.allocator.in_use == 0


def test_blocks_without_the_sidecar_are_a_miss_until_it_is_added(manager: ManagerProcess, instance_id: str) -> None:
    """An engine with full attention and one with DSA share the KV of one instance."""
    with (
        TierEngine(manager.address, instance_id, others=[DSA]) as full,
        TierEngine(manager.address, instance_id, sidecar=DSA) as dsa,
        TierEngine(manager.address, instance_id, sidecar=DSA) as another,
    ):
        full.serve(TOKENS)
        assert dsa.attached_tokens(TOKENS) == 0
        dsa.serve(TOKENS)
        assert dsa.connector.statistics.total()["saved_bytes"] == 6 * SIDECAR_BYTES  # the KV was there already
        assert another.attached_tokens(TOKENS) == 6 * PAGE


def test_blocks_without_an_optional_sidecar_are_attached(manager: ManagerProcess, instance_id: str) -> None:
    """As of Quest, whose bounds can be computed from the keys."""
    with (
        TierEngine(manager.address, instance_id, sidecar=DSA, is_required=False) as first,
        TierEngine(manager.address, instance_id, others=[DSA]) as full,
        TierEngine(manager.address, instance_id, sidecar=DSA, is_required=False) as second,
    ):
        first.serve(TOKENS[: 2 * PAGE + 1])
        full.serve(TOKENS)
        prefix = second.attach(TOKENS)
        assert prefix.n_tokens == 6 * PAGE
        assert len(sidecars_of(prefix)) == 2
        assert second.store.counters.sidecar_misses == 4 * PAGE


def test_an_engine_with_other_parameters_is_refused_and_finds_nothing(
    manager: ManagerProcess, instance_id: str
) -> None:
    with (
        TierEngine(manager.address, instance_id, sidecar=DSA) as first,
        TierEngine(manager.address, instance_id, sidecar=dsa_spec(MHA, Layout.PAGE_FIRST, 64)) as other,
        TierEngine(manager.address, instance_id, sidecar=DSA, layout=Layout.PAGE_HEAD) as reordered,
        TierEngine(manager.address, instance_id, sidecar=DSA, first_head=4) as second_rank,
    ):
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
def test_damaged_parts_shorten_the_prefix_and_are_written_again(
    manager: ManagerProcess, instance_id: str, name: str, damage: str
) -> None:
    with TierEngine(manager.address, instance_id, sidecar=DSA) as first:
        first.serve(TOKENS)
        location = locations_of(manager, instance_id, first)[3]
        assert location is not None
        uri = location.uris[name]
        path = Path(uri.path)
        data = bytearray(path.read_bytes())
        data[uri.offset] ^= 1
        path.write_bytes(data)
        if damage == "remove":
            path.unlink()
    with TierEngine(manager.address, instance_id, sidecar=DSA) as second:
        found = second.attached_tokens(TOKENS)
        assert found == 3 * PAGE if damage == "flip" else found <= 3 * PAGE  # a file may hold several blocks
        assert second.store.counters.loads_short == 1
        until(
            lambda: None in locations_of(manager, instance_id, second) or not _has(manager, instance_id, second, name)
        )
        second.serve(TOKENS)
    with TierEngine(manager.address, instance_id, sidecar=DSA) as third:
        assert third.attached_tokens(TOKENS) == 6 * PAGE


def _has(manager: ManagerProcess, instance_id: str, engine: TierEngine, name: str) -> bool:
    return all(location and name in location.uris for location in locations_of(manager, instance_id, engine))


def test_without_a_manager_everything_is_a_miss(closed_port: int, instance_id: str) -> None:
    settings = TierSettings(register_seconds=0.2, call_seconds=0.2)
    with TierEngine(f"127.0.0.1:{closed_port}", instance_id, settings=settings) as engine:
        assert engine.attached_tokens(TOKENS) == 0
        engine.serve(TOKENS)
        assert engine.store.counters.failed_pages == 6
        assert engine.attached_tokens(TOKENS) == 6 * PAGE  # from the pool
        assert engine.host.allocator.in_use == 0


def test_a_manager_that_lost_its_state_is_told_anew(
    new_manager: Callable[..., ManagerProcess], instance_id: str
) -> None:
    before = new_manager()
    with TierEngine(before.address, instance_id, sidecar=DSA) as engine:
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


def test_no_call_waits_for_a_manager_that_says_nothing(black_hole: int, instance_id: str) -> None:
    settings = TierSettings(register_seconds=0.1, call_seconds=30.0, shutdown_seconds=0.5)
    with TierEngine(f"127.0.0.1:{black_hole}", instance_id, settings=settings) as engine:
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


def stuck(storages: Sequence[StorageConfig]) -> StuckMover | None:
    mover = FileMover.for_storages(storages)
    return None if mover is None else StuckMover(mover)


class RegisteringMover(StuckMover):
    """A storage that wants to know the memory that it moves."""

    refuses = False
    known: ClassVar[list[int]] = []

    def register(self, memory: memoryview) -> None:
        if self.refuses:
            raise InvalidArgumentError("no more memory, please")
        self.known.append(memory.nbytes)


@pytest.mark.parametrize("refuses", [False, True])
def test_a_storage_is_told_of_the_pool(
    manager: ManagerProcess, instance_id: str, monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    monkeypatch.setattr(RegisteringMover, "known", [])
    monkeypatch.setattr(RegisteringMover, "refuses", refuses)
    monkeypatch.setitem(MOVERS, "file", lambda storages: RegisteringMover(FileMover.for_storages(storages)))
    with TierEngine(manager.address, instance_id, sidecar=DSA) as engine:
        assert RegisteringMover.known == ([] if refuses else [16 * MHA.page_bytes, 16 * SIDECAR_BYTES])
        engine.serve(TOKENS)
        assert engine.store.counters.written_pages == 6


@pytest.mark.parametrize("ending", ["deadline", "abort"])
def test_pages_are_held_while_a_storage_hangs_on_to_them(
    manager: ManagerProcess, instance_id: str, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    with TierEngine(manager.address, instance_id) as first:
        first.serve(TOKENS)
    monkeypatch.setattr(StuckMover, "free", threading.Event())
    monkeypatch.setattr(StuckMover, "began", threading.Event())
    monkeypatch.setitem(MOVERS, "file", stuck)
    settings = TierSettings(
        call_seconds=20.0, register_seconds=20.0, load_seconds=0.3 if ending == "deadline" else 50.0
    )
    with TierEngine(manager.address, instance_id, settings=settings) as engine:
        attach = engine.store.begin(TOKENS)
        until(lambda: engine.store.poll(attach) is not None or StuckMover.began.is_set())
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


def test_engines_that_write_the_same_blocks_at_once(manager: ManagerProcess, instance_id: str) -> None:
    engines = [TierEngine(manager.address, instance_id, sidecar=DSA) for _ in range(3)]
    threads = [threading.Thread(target=engine.serve, args=(TOKENS,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    saved = [engine.connector.statistics.total().get("saved_blocks", 0) for engine in engines]
    for engine in engines:
        engine.close()
    assert sum(saved) == 6  # type: ignore[arg-type]
    with TierEngine(manager.address, instance_id, sidecar=DSA) as reader:
        assert reader.attached_tokens(TOKENS) == 6 * PAGE


def test_a_memory_pool_of_the_node(
    manager: ManagerProcess, instance_id: str, node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = f"pool-{instance_id}"
    manager.add_pool(pool, NODE, CAPACITY)
    with TierEngine(manager.address, instance_id, sidecar=DSA, group=pool) as first:
        until(lambda: _is_taken(first))  # the manager has yet to look at the pool that it was told of
        with TierEngine(manager.address, instance_id, sidecar=DSA, group=pool) as second:
            assert second.attached_tokens(TOKENS) == 6 * PAGE
    monkeypatch.setenv("KVCM_NODE_ID", "node-b")
    with TierEngine(manager.address, instance_id, sidecar=DSA, group=pool) as elsewhere:
        assert elsewhere.attached_tokens(TOKENS) == 0


def _is_taken(engine: TierEngine) -> bool:
    engine.serve(TOKENS)
    return engine.store.counters.written_pages > 0


def test_leases_are_given_back(manager: ManagerProcess, instance_id: str) -> None:
    with TierEngine(manager.address, instance_id) as engine:
        engine.serve(TOKENS)
        empty_pool(engine)
        assert engine.attached_tokens(TOKENS) == 6 * PAGE
        until(lambda: "release_lease" in engine.connector.counters)


def test_what_is_under_way_ends_when_the_connector_is_closed(manager: ManagerProcess, instance_id: str) -> None:
    engine = TierEngine(manager.address, instance_id, settings=TierSettings(call_seconds=20.0, threads=1))
    engine.connector._background.close(5.0)  # so that the write never begins
    keys = engine.connector.page_keys(TOKENS)
    pages = engine.host.allocator.alloc(len(keys))
    engine.store.publish(TOKENS, pages, len(TOKENS))
    engine.host.allocator.free(pages)
    engine.close()
    assert engine.store.flush(5)
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
