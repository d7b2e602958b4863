"""Loads layer by layer: the same bytes as at once, a layer is there before the next, and nothing is believed early."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcm.connectors.layout.stored_format import ByteRange
from kvcm.connectors.reuse.loads import Bytes, Deliver, PartToLoad, StagingTrays, load_parts
from kvcm.connectors.transfer import Failure, TransferEngine, TransferResult
from kvcm.connectors.transfer.file import FileMover
from kvcm.connectors.transfer.mover import checksum_of
from kvcm.connectors.vllm.layerwise_load import LayerProgress, load_layers
from kvcm.model.keys import BlockKey
from kvcm.model.uri import LocationUri

_LAYERS, _LAYER_BYTES = 4, 48
_PART_BYTES = _LAYERS * _LAYER_BYTES


class Blocks:
    """Memory of an engine: blocks of layers."""

    layers = _LAYERS
    part_bytes = _PART_BYTES

    def __init__(self, blocks: int) -> None:
        self.memory = np.zeros((blocks, _LAYERS, _LAYER_BYTES), np.uint8)

    def layer_range(self, layer: int) -> ByteRange:
        return ByteRange(layer * _LAYER_BYTES, _LAYER_BYTES)

    def put(self, block_ids: Sequence[int], rows: Bytes, layer: int | None = None) -> None:
        self.memory[list(block_ids), layer] = rows


class Store:
    """Parts in files, and what loads pieces of them, with staging memory for three pieces at once."""

    def __init__(self, folder: Path, count: int) -> None:
        random = np.random.default_rng(count)
        self.bytes = [random.integers(0, 256, _PART_BYTES, np.uint8).tobytes() for _ in range(count)]
        self.parts = []
        (folder / "kv").mkdir(exist_ok=True)
        self.files = [folder / "kv" / f"{count}-{number}" for number in range(count)]
        for number, (file, content) in enumerate(zip(self.files, self.bytes, strict=True)):
            file.write_bytes(content)
            uri = LocationUri.parse(f"file://s{file}?size={_PART_BYTES}")
            self.parts.append(PartToLoad(BlockKey(number), uri, checksum_of([memoryview(content)])))
        self.engine = TransferEngine({("file", "s"): FileMover({"s": str(folder)})}, threads=2)
        self.trays = StagingTrays(3 * _LAYER_BYTES, 1)

    def load(self, parts: Sequence[PartToLoad], size_bytes: int, deliver: Deliver) -> list[TransferResult]:
        return load_parts(self.engine, self.trays, parts, size_bytes, deliver, 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


@given(count=st.integers(1, 8), data=st.data())
def test_parts_reported_as_loaded_have_the_saved_bytes(folder: Path, count: int, data: st.DataObject) -> None:
    """A part is never reported as loaded unless its own bytes arrived."""
    store, blocks = Store(folder, count), Blocks(count)
    changed = data.draw(st.sets(st.integers(0, count - 1)))
    gone = data.draw(st.sets(st.integers(0, count - 1))) - changed
    short = data.draw(st.sets(st.integers(0, count - 1))) - changed - gone
    for number in changed:
        content = bytearray(store.bytes[number])
        content[data.draw(st.integers(0, _PART_BYTES - 1))] ^= 1
        store.files[number].write_bytes(content)
    for number in gone:
        store.files[number].unlink()
    for number in short:
        store.files[number].write_bytes(store.bytes[number][: data.draw(st.integers(0, _PART_BYTES - 1))])
    seen: list[int] = []
    results = load_layers(blocks, list(range(count)), store.parts, store.load, seen.append)
    store.engine.close()
    assert seen == [1, 2, 3, 4]
    for number, result in enumerate(results):
        expected = Failure.CORRUPT if number in changed else Failure.LOST if number in gone | short else None
        assert (result.ok, result.failure) == (expected is None, expected)
        if result.ok:
            assert blocks.memory[number].tobytes() == store.bytes[number]


def test_a_part_of_another_size_is_refused_and_not_looked_at(tmp_path: Path) -> None:
    store, blocks = Store(tmp_path, 2), Blocks(2)
    longer = LocationUri.parse(f"file://s{store.files[0]}?size={_PART_BYTES + 1}")
    results = load_layers(blocks, [0, 1], [store.parts[0]._replace(uri=longer), store.parts[1]], store.load, print)
    store.engine.close()
    assert [result.failure for result in results] == [Failure.REFUSED, None]
    assert not blocks.memory[0].any()


def test_a_layer_is_there_while_the_next_one_is_still_loading(tmp_path: Path) -> None:
    store, blocks = Store(tmp_path, 5), Blocks(5)
    progress, may_go_on = LayerProgress(["a", "b", "c", "d"], 1), threading.Event()

    def load(parts: Sequence[PartToLoad], size_bytes: int, deliver: Deliver) -> list[TransferResult]:
        if parts[0].start:
            may_go_on.wait(60)
        return store.load(parts, size_bytes, deliver)

    def on_layers(layers: int) -> None:
        progress.advance(0, layers)

    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(load_layers, blocks, range(5), store.parts, load, on_layers)
        progress.wait("a")
        assert [block[0].tobytes() for block in blocks.memory] == [each[:_LAYER_BYTES] for each in store.bytes]
        assert not blocks.memory[:, 1:].any()
        may_go_on.set()
        progress.wait("d")
        assert [block.tobytes() for block in blocks.memory] == store.bytes
        assert all(result.ok for result in loading.result(60))
    store.engine.close()


def test_a_layer_waits_for_every_load_and_for_none_that_has_ended() -> None:
    progress = LayerProgress(["a", "b"], 2)
    progress.wait("of no group")
    progress.advance(0, 1)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(progress.wait, "a")
        assert not waiting.done()
        over: Future[None] = Future()
        over.add_done_callback(lambda load: progress.finish(1, load))
        over.cancel()
        waiting.result(60)
        waiting = thread.submit(progress.wait, "b")
        assert not waiting.done()
        progress.finish(0, over)
        waiting.result(60)
