"""Options of connectors: what is misspelt or of the wrong type is refused by name."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from connectors.reuse.options import read_options
from kvcm.model.errors import InvalidArgumentError


@dataclass(frozen=True)
class Options:
    manager: str
    load_async: bool = True
    load_seconds: float = 10.0
    save_batch_bytes: int = 64


def test_values_are_taken_and_others_keep_their_default() -> None:
    read = read_options(Options, {"manager": "a:1", "load_seconds": 3, "load_async": False})
    assert read == Options("a:1", load_async=False, load_seconds=3.0, save_batch_bytes=64)
    assert type(read.load_seconds) is float


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"manager": "a:1", "load_asinc": True}, "option 'load_asinc' is unknown; did you mean 'load_async'?"),
        ({"manager": "a:1", "xyz": 1}, "option 'xyz' is unknown; known are load_async, load_seconds, manager"),
        ({"load_async": True}, "option 'manager' is missing"),
        ({"manager": 7}, "option 'manager' is 7, must be a text"),
        ({"manager": "a:1", "load_async": 1}, "option 'load_async' is 1, must be true or false"),
        ({"manager": "a:1", "load_seconds": "3"}, "option 'load_seconds' is '3', must be a number"),
        ({"manager": "a:1", "load_seconds": True}, "option 'load_seconds' is True, must be a number"),
        ({"manager": "a:1", "save_batch_bytes": 1.5}, "option 'save_batch_bytes' is 1.5, must be a whole number"),
        ({"manager": "a:1", "save_batch_bytes": None}, "option 'save_batch_bytes' is None, must be a whole number"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read_options(Options, given)
    assert message in str(caught.value)


def test_names_of_others_are_passed_over() -> None:
    assert read_options(Options, {"manager": "a:1", "prefetch_threshold": 16}, {"prefetch_threshold"}) == Options("a:1")
