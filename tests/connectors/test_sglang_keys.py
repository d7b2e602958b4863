"""Block keys from SGLang's page hashes, and which page comes before which."""

from __future__ import annotations

from hashlib import sha256

import pytest

from connectors.sglang.chain_links import ChainLinks
from connectors.sglang.page_keys import PageKeys
from kvcm.model.keys import BlockKey

_HASHES = [sha256(bytes([number])).hexdigest() for number in range(100)]


def test_keys_are_the_first_64_bits_signed() -> None:
    plain = PageKeys(b"")
    mask = plain.keys(["0" * 64])[0]
    for text, key in zip(_HASHES, plain.keys(_HASHES), strict=True):
        assert (key ^ mask) & (2**64 - 1) == int(text[:16], 16)
        assert -(2**63) <= key < 2**63


def test_keys_of_different_namespaces_have_nothing_in_common() -> None:
    keys = [PageKeys(namespace).keys(_HASHES) for namespace in (b"one", b"other")]
    assert not set(keys[0]) & set(keys[1])
    assert PageKeys(b"one").keys(_HASHES) == keys[0]


def test_the_definition_does_not_change() -> None:
    """What engines have stored must be found after an update."""
    assert PageKeys(b"namespace").keys([_HASHES[0], "f" * 64]) == [7056020517215283470, -1141678836477285271]


def test_what_is_no_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        PageKeys(b"").keys(["no hash"])


def test_parents_are_those_that_were_seen() -> None:
    links = ChainLinks()
    links.note([BlockKey(1), BlockKey(2), BlockKey(3)])
    links.note([BlockKey(2), BlockKey(5)])
    links.note([])
    assert [links.parent(BlockKey(key)) for key in (1, 2, 3, 5, 6)] == [None, 1, 2, 2, None]


def test_only_the_last_parents_are_remembered() -> None:
    links = ChainLinks(most=3)
    links.note([BlockKey(key) for key in range(10)])
    assert [links.parent(BlockKey(key)) for key in (6, 7, 8, 9)] == [None, None, 7, 8]
    links.note([BlockKey(key) for key in range(20, 22)])
    assert [links.parent(BlockKey(key)) for key in (7, 8, 9, 21)] == [None, 7, 8, 20]
