"""Block keys: a definition that never changes, and a dependence on everything before."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.keys import KeyChain
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.keys import BlockKey

int64 = st.integers(-(1 << 63), (1 << 63) - 1)
CHAIN = KeyChain(b"namespace", 4)

# Stored blocks are found by these numbers: a change here makes every stored block unreachable.
GOLDEN = [
    (CHAIN, list(range(1, 10)), [-3763731013869347367, -408851506889577523]),
    (CHAIN, [-5, 1 << 62, -(1 << 63), (1 << 63) - 1], [2743351089565680136]),
    (KeyChain(b"other", 4), list(range(1, 10)), [-4807881589549988460, -1397236629404889097]),
]


@pytest.mark.parametrize(("chain", "tokens", "keys"), GOLDEN)
def test_golden_vectors(chain: KeyChain, tokens: list[int], keys: list[int]) -> None:
    assert chain.keys(tokens) == keys


@given(st.lists(int64, max_size=30), st.integers(1, 7), st.binary(max_size=80))
def test_keys_are_what_the_module_defines(tokens: list[int], size: int, namespace: bytes) -> None:
    previous, expected = 0, []
    for start in range(0, len(tokens) - size + 1, size):
        data = b"".join(n.to_bytes(8, "little", signed=True) for n in [previous, *tokens[start : start + size]])
        digest = hashlib.blake2b(data, digest_size=8, key=hashlib.sha256(namespace).digest()).digest()
        previous = int.from_bytes(digest, "little", signed=True)
        expected.append(previous)
    assert KeyChain(namespace, size).keys(tokens) == expected


@given(st.lists(int64, min_size=8, max_size=40), st.integers(0, 5))
def test_a_chain_can_be_continued_from_any_key(tokens: list[int], blocks: int) -> None:
    keys = CHAIN.keys(tokens)
    blocks = min(blocks, len(keys))
    parent = keys[blocks - 1] if blocks else None
    assert keys[:blocks] + CHAIN.keys(tokens[blocks * 4 :], parent) == keys


@given(st.lists(int64, min_size=4, max_size=40), st.integers(0, 39))
def test_a_changed_token_changes_its_key_and_all_that_follow(tokens: list[int], position: int) -> None:
    position %= len(tokens) // 4 * 4
    changed = [*tokens[:position], tokens[position] ^ 1, *tokens[position + 1 :]]
    before, after = CHAIN.keys(tokens), CHAIN.keys(changed)
    assert before[: position // 4] == after[: position // 4]
    assert all(one != other for one, other in zip(before[position // 4 :], after[position // 4 :], strict=True))


def test_keys_do_not_depend_on_the_process() -> None:
    program = "from connectors.keys import KeyChain; print(KeyChain(b'namespace', 4).keys([1, 2, 3, 4]))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True
    )
    assert output.stdout.strip() == str(CHAIN.keys([1, 2, 3, 4]))


def test_block_size_is_checked() -> None:
    with pytest.raises(InvalidArgumentError, match="block_tokens is 0"):
        KeyChain(b"", 0)
    assert CHAIN.keys([1, 2, 3]) == []
    assert CHAIN.keys([1, 2, 3, 4], BlockKey(5)) != CHAIN.keys([1, 2, 3, 4])
