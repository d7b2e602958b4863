"""The node of this process, from environment variables.

Engines and the host agent of a node read the same variables, so that they use the same memory pools.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.uri import check_storage_name

__all__ = ["DEFAULT_POOL_DIRECTORY", "NodeSettings"]

_NODE_VARIABLE = "KVCM_NODE_ID"
DEFAULT_POOL_DIRECTORY = Path("/dev/shm")  # noqa: S108  POSIX shared memory
_DIRECTORY_VARIABLE = "KVCM_POOL_DIRECTORY"
_CLUSTER_VARIABLE = "KVCM_CLUSTER_ID"
_CREATE_VARIABLE = "KVCM_POOL_CREATE"
_FLAGS = {"1": True, "0": False}


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Settings of a node.

    Attributes:
        node_id: name of the node, that of the memory pools on it; "" when it has none that pools could be named by.
        pool_directory: where the memory of pools lies.
        cluster_id: distinguishes the pools of several deployments on one node; "" for a single one.
        creates_pools: whether an engine makes the memory of a pool that is not there.
    """

    node_id: str = ""
    pool_directory: Path = DEFAULT_POOL_DIRECTORY
    cluster_id: str = ""
    creates_pools: bool = True

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, hostname: Callable[[], str] = socket.gethostname
    ) -> NodeSettings:
        """Read KVCM_NODE_ID (else the host's name), KVCM_POOL_DIRECTORY, KVCM_CLUSTER_ID and KVCM_POOL_CREATE.

        Args:
            environment: variables; None for those of the process.
            hostname: returns the host's name; called when no node is named.

        Raises:
            InvalidArgumentError: a variable has a value that is not allowed; names it.
        """
        found = os.environ if environment is None else environment
        create = found.get(_CREATE_VARIABLE, "1")
        if create not in _FLAGS:
            raise InvalidArgumentError(f"{_CREATE_VARIABLE} is {create!r}, must be 1 or 0")
        directory = Path(found.get(_DIRECTORY_VARIABLE) or DEFAULT_POOL_DIRECTORY)
        if not directory.is_absolute():
            raise InvalidArgumentError(f"{_DIRECTORY_VARIABLE} is {str(directory)!r}, must be an absolute path")
        return cls(_node_id(found, hostname), directory, found.get(_CLUSTER_VARIABLE, ""), _FLAGS[create])


def _node_id(environment: Mapping[str, str], hostname: Callable[[], str]) -> str:
    given = environment.get(_NODE_VARIABLE, "")
    if given:
        check_storage_name(_NODE_VARIABLE, given)
        return given
    name = hostname()
    try:
        check_storage_name("hostname", name)
    except InvalidArgumentError:  # the operator did not choose it, so it is no error: there are no pools on such a host
        return ""
    return name
