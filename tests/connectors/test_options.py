"""What a process knows of its node."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvcm.connectors.node import NodeSettings
from kvcm.connectors.reuse.options import parse_options
from kvcm.connectors.vllm.options import VllmOptions
from kvcm.model.errors import InvalidArgumentError


def test_without_variables_it_is_the_host_and_its_shared_memory() -> None:
    assert NodeSettings.from_environment({}, lambda: "host-1.example") == NodeSettings("host-1.example")
    assert NodeSettings().pool_directory == Path("/dev/shm")


def test_variables_win() -> None:
    variables = {
        "KVCM_NODE_ID": "node-7",
        "KVCM_POOL_DIRECTORY": "/mnt/huge",
        "KVCM_CLUSTER_ID": "c0ffee",
        "KVCM_POOL_CREATE": "0",
    }
    assert NodeSettings.from_environment(variables, lambda: "host") == NodeSettings(
        "node-7", Path("/mnt/huge"), "c0ffee", creates_pools=False
    )


@pytest.mark.parametrize("hostname", ["", "name with spaces", "h" * 129, "ü"])
def test_a_host_whose_name_cannot_be_one_has_no_pools(hostname: str) -> None:
    assert NodeSettings.from_environment({}, lambda: hostname).node_id == ""


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("KVCM_NODE_ID", "a/b", "1 to 128 characters"),
        ("KVCM_NODE_ID", "n" * 129, "1 to 128 characters"),
        ("KVCM_POOL_DIRECTORY", "dev/shm", "must be an absolute path"),
        ("KVCM_POOL_CREATE", "yes", "must be 1 or 0"),
    ],
)
def test_a_wrong_variable_is_named(name: str, value: str, allowed: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{name}.*{allowed}"):
        NodeSettings.from_environment({name: value}, lambda: "host")


# ---- Options of connectors: misspelt names and wrong types are refused by name ----


@dataclass(frozen=True)
class Options:
    manager: str
    load_async: bool = True
    load_seconds: float = 10.0
    save_batch_bytes: int = 64


def test_values_are_taken_and_others_keep_their_default() -> None:
    read = parse_options(Options, {"manager": "a:1", "load_seconds": 3, "load_async": False})
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
def test_a_wrong_option_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        parse_options(Options, given)
    assert message in str(caught.value)


# ---- Options of the vLLM connector: values out of range are refused by name before an engine starts ----

_NEEDED = {"manager": "a:1", "instance_group": "g", "instance_id": "i"}


def test_the_options_that_have_to_be_given_are_enough() -> None:
    options = VllmOptions.parse(_NEEDED)
    assert (options.load_async, options.layerwise, options.decode_batch_blocks) == (True, False, 8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"instance_id": ""}, "option 'instance_id' is empty"),
        ({"layerwise": True}, "option 'layerwise' is true, which needs 'load_async' to be false"),
        ({"decode_batch_blocks": 0}, "option 'decode_batch_blocks' is 0, must be > 0"),
        ({"lookup_seconds": 0.0}, "option 'lookup_seconds' is 0.0, must be > 0"),
        ({"pinned_fraction": 1.0}, "option 'pinned_fraction' is 1.0, must be > 0 and <= 0.9"),
        ({"staging_bytes": 4096}, "option 'staging_bytes' is 4096, must be at least 1048576"),
        ({"transfer_threads": -1}, "option 'transfer_threads' is -1, must be >= 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_value_out_of_range_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        VllmOptions.parse(_NEEDED | given)
    assert str(refused.value) == message
