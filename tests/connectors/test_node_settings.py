"""What a process knows of its node."""

from __future__ import annotations

from pathlib import Path

import pytest

from connectors.node import NodeSettings
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
