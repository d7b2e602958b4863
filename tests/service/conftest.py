"""A manager for all tests of the service, reached over both transports."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rest_client import RestClient
from test_transport_drivers import Api
from test_transport_process import ManagerProcess, manager
from test_transport_sites import Site


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


@pytest.fixture(params=["grpc", "http"])
def api(request: pytest.FixtureRequest, apis: dict[str, Api]) -> Api:
    """The shared manager over each transport in turn."""
    return apis[request.param]


@pytest.fixture
def site(api: Api) -> Site:
    """A place of the test's own on the shared manager."""
    return Site(api)


@pytest.fixture
def rest(server: ManagerProcess) -> Iterator[RestClient]:
    """The resources of the shared manager."""
    client = RestClient(server.address.admin_http)
    yield client
    client.connection.close()
