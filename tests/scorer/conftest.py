"""A manager for the tests of scorers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from test_transport_drivers import Api
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site


@pytest.fixture(scope="session")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    """A manager that tests share; each uses instances of its own."""
    with manager(tmp_path_factory.mktemp("manager")) as process:
        yield process


@pytest.fixture(scope="session")
def calls(scored: ManagerProcess) -> Iterator[Api]:
    """Its calls."""
    with scored.api() as api:
        yield api


@pytest.fixture
def place(calls: Api) -> Site:
    """A test's place on it."""
    return Site(calls)


@pytest.fixture(scope="session")
def address(scored: ManagerProcess) -> str:
    """Address of its gRPC calls."""
    return scored.address.rpc
