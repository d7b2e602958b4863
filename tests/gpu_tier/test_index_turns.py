"""Indexes of shared prefixes: what a storage has of them is taken over, the rest is built, and tokens are the same."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from coordinator_rig import PAGE, config_of
from memory_connector import MemoryConnector, MemoryStorage
from prefix_cases import page_keys
from sharing_rig import SHORT, Rig, continued, prompt_of

from gpu_tier.assembly import build
from gpu_tier.connector import KV_SPEC, KVFormat
from gpu_tier.engine.sharing_engine import sidecar_of
from gpu_tier.geometry import KVGeometry, KVKind, Layout
from gpu_tier.rows import KVDtype

KEYS = partial(page_keys, page=PAGE)
TOKENS = prompt_of(200)
LAYERS = 3
SEGMENTS = 5  # whole ones of RetroInfer in 200 tokens; number i lies beside pages 1 + 2i and 2 + 2i
ALGORITHMS = ["retroinfer", "pqcache"]
TURNS = ["extend", "per_turn", "rebuild"]


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def rig_of(storage: MemoryStorage, algorithm: str, **algo: Any) -> Rig:
    settings = {**SHORT[algorithm]["algo"], **algo}
    return Rig("llama", algorithm, lambda *_: MemoryConnector(storage), KEYS, algo=settings)


def counted(rig: Rig) -> tuple[int, int]:
    """Return the indexes that were built and taken over, of one layer."""
    algorithm = rig.coordinator.algorithm
    assert algorithm.built % LAYERS == algorithm.imported % LAYERS == 0
    return algorithm.built // LAYERS, algorithm.imported // LAYERS


def forget_sidecar(storage: MemoryStorage, *pages: int) -> None:
    for page in pages:
        parts = storage.blocks[KEYS(TOKENS)[page]]
        for name in parts.keys() - {KV_SPEC}:
            del parts[name]


@pytest.mark.parametrize(("algorithm", "taken_over"), [("retroinfer", SEGMENTS), ("pqcache", 1)])
def test_nothing_is_built_twice(storage: MemoryStorage, algorithm: str, taken_over: int) -> None:
    first, second = rig_of(storage, algorithm), rig_of(storage, algorithm)
    tokens = first.run(TOKENS)[0]
    assert tokens == second.run(TOKENS)[0] == continued("llama", algorithm, TOKENS)
    built, imported = counted(first)
    assert imported == 0
    assert counted(second) == (built - taken_over, taken_over)


@pytest.mark.parametrize(
    ("algorithm", "page", "taken_over"),
    [
        ("retroinfer", 0, 0),  # sidecars are those of leading pages
        ("retroinfer", 1, 0), ("retroinfer", 2, 0), ("retroinfer", 3, 1), ("retroinfer", 8, 3), ("retroinfer", 11, 5),
        ("pqcache", 0, 0), ("pqcache", 1, 1), ("pqcache", 11, 1),
    ],
)  # fmt: skip
def test_a_sidecar_that_is_missing_is_built(storage: MemoryStorage, algorithm: str, page: int, taken_over: int) -> None:
    first, second = rig_of(storage, algorithm), rig_of(storage, algorithm)
    expected = first.run(TOKENS)[0]
    forget_sidecar(storage, page)
    assert second.run(TOKENS) == (expected, 192, 1)
    assert counted(second) == (counted(first)[0] - taken_over, taken_over)
    assert second.is_empty()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_settings_that_change_the_index_are_another_index(storage: MemoryStorage, algorithm: str) -> None:
    other = {"retroinfer": {"iterations": 1}, "pqcache": {"seed": 1}}[algorithm]
    rig_of(storage, algorithm, **other).run(TOKENS)
    second = rig_of(storage, algorithm)
    assert second.run(TOKENS) == (continued("llama", algorithm, TOKENS), 192, 1)
    assert counted(second)[1] == 0


OWN: dict[str, list[dict[str, Any]]] = {
    "retroinfer": [{"control": "cpu"}, {"mode": "gpu_only"}, {"retrieval": 0.4, "cache_ratio": 0.5, "local": 9}],
    "pqcache": [{"token_budget": 40}, {"cache_tokens": 0, "kmeans_threads": 2}, {"policy": "lfu"}],
}


@pytest.mark.parametrize(("algorithm", "number"), [(name, i) for name, own in OWN.items() for i in range(len(own))])
def test_settings_that_are_an_engines_own_change_no_index(storage: MemoryStorage, algorithm: str, number: int) -> None:
    rig_of(storage, algorithm).run(TOKENS)
    second = rig_of(storage, algorithm, **OWN[algorithm][number])
    assert second.run(TOKENS)[1:] == (192, 1)
    assert counted(second)[1] == {"retroinfer": SEGMENTS, "pqcache": 1}[algorithm]
    assert second.is_empty()


@pytest.mark.parametrize("how", ["given", "automatic"])
def test_codes_of_another_quantisation_have_another_name(how: str) -> None:
    """Which of them is automatic follows from the longest request of an engine."""
    names = set()
    for max_tokens in (256, 16384, 32768):
        geometry = KVGeometry(KVKind.MHA, 1, 1, 16, 16, KVDtype.F32, PAGE)
        algo = {"m": 2, "b": 6} if how == "given" else {}
        coordinator = build(
            config_of("pqcache", {"algo": {**algo, "iterations": 3}}), geometry, num_q_heads=1, sm_scale=1.0,
            device_pages=20, max_requests=1, max_tokens=max_tokens, publishes=True,
        )  # fmt: skip
        kv = KVFormat.of(geometry, Layout.PAGE_FIRST, model="m", weights="0", rope={})
        spec = sidecar_of(coordinator, kv)
        assert spec is not None
        names.add((spec.name, spec.page_bytes))
    assert len(names) == len({name for name, _ in names}) == (1 if how == "given" else 2)


# Conversations.

QUESTIONS = (195, 45, 35)  # tokens of each turn
ANSWER = 12


def conversation(rigs: Iterator[Rig]) -> tuple[list[list[int]], list[tuple[int, int]], list[int]]:
    """Return the tokens after each turn, what the turns' engines built and took over, and what was attached."""
    tokens: list[int] = []
    found, counts, attached = [], [], []
    for seed, length in enumerate(QUESTIONS):
        rig = next(rigs)
        built, imported = counted(rig)
        tokens, cached, _ = rig.run(tokens + prompt_of(length, 20 + seed), ANSWER)
        found.append(tokens)
        now = counted(rig)
        counts.append((now[0] - built, now[1] - imported))
        attached.append(cached)
        assert rig.is_empty()
    return found, counts, attached


def always(rig: Rig) -> Iterator[Rig]:
    while True:
        yield rig


def fresh(storage: MemoryStorage, algorithm: str, **algo: Any) -> Iterator[Rig]:
    while True:
        yield rig_of(storage, algorithm, **algo)


def test_turns_of_retroinfer_are_those_of_one_prompt(storage: MemoryStorage) -> None:
    """Segments that two turns share are built by each turn, what is behind them is taken over all the same."""
    found, counts, attached = conversation(fresh(storage, "retroinfer"))
    start = 0
    for turn, length in zip(found, QUESTIONS, strict=True):
        assert turn == continued("llama", "retroinfer", turn[: start + length], ANSWER)
        start = len(turn)
    assert attached == [0, 192, 240]
    # Segment 5 ends with token 195, and turn 1 stored its first page before it was whole. Turn 3 has it between others.
    assert [imported for _, imported in counts] == [0, 5, 6]
    again = conversation(always(rig_of(storage, "retroinfer")))
    assert again[0] == found


@pytest.mark.parametrize("turns", TURNS)
def test_turns_of_pqcache(storage: MemoryStorage, turns: str) -> None:
    found, counts, attached = conversation(fresh(storage, "pqcache", turns=turns))
    assert attached == [0, 192, 240]
    # Of the codebooks of turns only that of the first comes with later prompts' leading pages.
    assert (
        counts
        == {
            "extend": [(1, 0), (0, 1), (0, 1)],
            "per_turn": [(1, 0), (1, 1), (1, 1)],
            "rebuild": [(1, 0), (1, 0), (1, 0)],
        }[turns]
    )
    if turns == "rebuild":
        assert found[-1] == continued("llama", "pqcache", found[-1][:-ANSWER], ANSWER, algo=SHORT["pqcache"]["algo"])
    # Whether pages come from a storage or lie in the pool makes no difference.
    one = rig_of(MemoryStorage(), "pqcache", turns=turns)
    assert conversation(always(one)) == (found, counts, attached)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_turns_without_any_sidecar_are_as_if_there_were_no_storage(storage: MemoryStorage, algorithm: str) -> None:
    rigs = fresh(storage, algorithm)
    tokens: list[int] = []
    for seed, length in enumerate(QUESTIONS):
        rig, prompt = next(rigs), tokens + prompt_of(length, 20 + seed)
        tokens = rig.run(prompt, ANSWER)[0]
        assert tokens == continued("llama", algorithm, prompt, ANSWER)
        assert counted(rig)[1] == 0
        for parts in storage.blocks.values():
            for name in parts.keys() - {KV_SPEC}:
                del parts[name]
