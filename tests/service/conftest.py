"""A manager for all tests of the service, reached over both transports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from command_runner import Commands
from rest_client import RestClient
from secured import Tenants, secured
from test_transport_drivers import Api
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ci: runs in .ci/run, not in make test")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagerProcess]:
    """A manager with default settings; tests share it and use names of their own."""
    with manager(tmp_path_factory.mktemp("manager")) as process:
        yield process


@pytest.fixture(scope="session")
def apis(server: ManagerProcess) -> Iterator[dict[str, Api]]:
    """Connections to the shared manager by transport."""
    with server.api("grpc") as over_grpc, server.api("http") as over_http:
        yield {"grpc": over_grpc, "http": over_http}


@pytest.fixture
def api(apis: dict[str, Api]) -> Api:
    """The shared manager over gRPC."""
    return apis["grpc"]


@pytest.fixture(params=["grpc", "http"])
def each_api(request: pytest.FixtureRequest, apis: dict[str, Api]) -> Api:
    """The shared manager over each transport in turn, for behaviour that may differ by transport."""
    return apis[request.param]


@pytest.fixture
def site(api: Api) -> Site:
    """A place of the test's own on the shared manager."""
    return Site(api)


@pytest.fixture
def commands(server: ManagerProcess) -> Commands:
    """Commands against the shared manager."""
    return Commands(server)


@pytest.fixture(scope="session")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    """Two tenants of a manager that asks for keys; tests share it and use names of their own."""
    with secured(tmp_path_factory.mktemp("tenants")) as process:
        yield Tenants.on(process)


@pytest.fixture
def by_tenants(tenants: Tenants) -> Iterator[RestClient]:
    """The resources of the manager of the two tenants."""
    client = RestClient(tenants.server.process.address.admin_http)
    yield client
    client.connection.close()


@pytest.fixture
def rest(server: ManagerProcess) -> Iterator[RestClient]:
    """The resources of the shared manager."""
    client = RestClient(server.address.admin_http)
    yield client
    client.connection.close()
