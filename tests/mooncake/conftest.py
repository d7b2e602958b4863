"""Fixtures: one store for the tests that leave it as it was, one each for those that do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mooncake_rig import CLIENT_TTL_SECONDS, Process, Site, missing

OWNED_BYTES = 128 << 20


@pytest.fixture(scope="session")
def mooncake_is_here() -> None:
    reason = missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def site(
    request: pytest.FixtureRequest, mooncake_is_here: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """Return a store that is gone with the test. Its parameter: after how many seconds it forgets a client."""
    site = Site(tmp_path_factory.mktemp("mooncake"), client_ttl_seconds=getattr(request, "param", CLIENT_TTL_SECONDS))
    yield site
    site.close()


@pytest.fixture(scope="session")
def shared_site(mooncake_is_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("mooncake"))
    try:
        site.owner(OWNED_BYTES)
        yield site
    finally:
        site.close()


@pytest.fixture(scope="session")
def manager(shared_site: Site) -> Process:
    return shared_site.manager()


@pytest.fixture(scope="session")
def engine(shared_site: Site) -> Process:
    engine = shared_site.client()
    engine.ask("register")
    return engine


@pytest.fixture(scope="session")
def other_engine(shared_site: Site) -> Process:
    engine = shared_site.client()
    engine.ask("register")
    return engine
