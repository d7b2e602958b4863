"""Two processes that share a model by heads or by layers compute what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_connector import MemoryStorage
from prefix_cases import Tier
from retrieval_cases import CASES
from shard_ranks import MODEL, WHOLE, Rank, all_ranks, decode_traffic, generate, heads_of, layers_of

from kvcm.gpu_tier.errors import ConfigError

pytestmark = pytest.mark.ci

TRAFFIC: dict[str, dict[str, Any]] = CASES
PAIRS = {
    "heads": (Rank(range(2), range(3)), Rank(range(2, 4), range(3))),
    "uneven heads": (Rank(range(1), range(3)), Rank(range(1, 4), range(3))),
    "layers": (Rank(range(4), range(1)), Rank(range(4), range(1, 3))),
}
Found = dict[str, np.ndarray[Any, Any]]


def found_in(path: Path) -> Found:
    with np.load(path, allow_pickle=False) as arrays:
        return dict(arrays)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process computes of the traffic."""
    return all_ranks(decode_traffic, [WHOLE], tmp_path_factory.mktemp("whole"), TRAFFIC)[0]


def without_padding(ids: np.ndarray[Any, Any]) -> list[list[int]]:
    """Return the ids of each row and head; how wide selections are depends on what other heads select."""
    return [[i for i in head if i >= 0] for row in ids.tolist() for head in row]


def same_selections(part: Found, whole: Found, rank: Rank) -> int:
    """Check that a rank selected what the whole model's process selected of its heads and layers; how often."""
    names = [name for name in whole if name.count(".") == 2 and int(name.split(".")[1]) in rank.layers]
    assert sorted(names) == sorted(name for name in part if name.count(".") == 2)
    for name in names:
        mine, theirs = part[name], heads_of(whole[name], rank, 1)
        if name.endswith(".lengths"):
            assert np.array_equal(mine, theirs), name
        else:
            assert without_padding(mine) == without_padding(theirs), name
    return len(names)


@pytest.mark.parametrize("pair", PAIRS)
def test_given_queries_and_kv(pair: str, one_process: Path, tmp_path: Path) -> None:
    ranks = PAIRS[pair]
    folders = all_ranks(decode_traffic, ranks, tmp_path, TRAFFIC)
    for name in TRAFFIC:
        whole = found_in(one_process / f"{name}.npz")
        for rank, folder in zip(ranks, folders, strict=True):
            part = found_in(folder / f"{name}.npz")
            assert same_selections(part, whole, rank) > 0
            expected = layers_of(heads_of(whole["out"], rank, 3, MODEL.group), rank, 1)
            # How wide sums are padded, and so how they round, follows from the heads that are computed together.
            np.testing.assert_allclose(part["out"], expected, rtol=1e-5, atol=1e-6, err_msg=name)
            assert rank.heads != WHOLE.heads or np.array_equal(part["out"], expected), name


@pytest.mark.parametrize("algorithm", ["retroinfer", "pqcache"])
def test_a_model_through_engines(algorithm: str, tmp_path: Path) -> None:
    """What a rank computes in its later layers and steps depends on what both computed before."""
    generate(None, tmp_path, None, algorithm)
    whole = found_in(tmp_path / f"{algorithm}.npz")
    for name, ranks in {
        "heads": (Rank(range(1), range(3)), Rank(range(1, 2), range(3))),
        "layers": (Rank(range(2), range(1)), Rank(range(2), range(1, 3))),
    }.items():
        folders = all_ranks(generate, ranks, tmp_path / name, algorithm)
        for rank, folder in zip(ranks, folders, strict=True):
            part = found_in(folder / f"{algorithm}.npz")
            assert np.array_equal(part["tokens"], whole["tokens"])
            np.testing.assert_allclose(part["logits"], whole["logits"], rtol=1e-6, atol=1e-6)
            assert same_selections(part, whole, rank) > 0


# What ranks share with others.


def test_ranks_go_on_from_the_shortest_prefix() -> None:
    storage = MemoryStorage()
    tier = Tier(storage)
    size = tier.host.geometry.page_size
    tokens = list(range(5 * size + 1))
    tier.serve(tokens)
    for n_tokens in (5 * size, 3 * size, 0):
        prefix = tier.attach(tokens)
        assert prefix.n_tokens == 5 * size
        shorter = tier.store.shorten(prefix, n_tokens)
        assert shorter.pages == prefix.pages[: n_tokens // size]
        assert shorter.n_tokens == n_tokens
        tier.check(tokens, shorter)
        assert tier.allocator.in_use == n_tokens // size
        tier.store.release(shorter)
    prefix = tier.attach(tokens)
    for n_tokens in (-size, 1, 6 * size):
        with pytest.raises(ConfigError, match="n_tokens"):
            tier.store.shorten(prefix, n_tokens)
    tier.store.release(prefix)
    tier.check_nothing_is_held()
