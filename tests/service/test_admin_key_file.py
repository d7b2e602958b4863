"""Who is enough to administer, and what becomes of the file with the first key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvcm.admin_key import keep_admin_key
from kvcm.config import ConfigError, Settings
from kvcm.model.accounts import AccountRole
from kvcm.model.api_keys import PresentedKey, new_key
from kvcm.model.principals import Role
from kvcm.registry.keys import NewKey
from kvcm.registry.registry import Registry
from kvcm.storage.directory import StorageDirectory


class Start:
    """Starts of managers of one deployment.

    Attributes:
        file: with the administrator's key.
        registry: what they share.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / "admin.key"
        self.registry = Registry(StorageDirectory("cluster", []))

    async def run(self, **settings: Any) -> list[str]:
        """Return what the log says."""
        given = {"auth_mode": "required", "data_dir": str(self.file.parent), **settings}
        with structlog.testing.capture_logs() as events:
            await keep_admin_key(self.registry, Settings(**given))
        return [event["event"] for event in events]

    def shown(self) -> PresentedKey:
        key = PresentedKey.parse(self.file.read_text().strip())
        assert key is not None
        return key

    def is_let_in(self, presented: PresentedKey) -> bool:
        key = self.registry.keys.shown(presented)
        return key is not None and self.registry.keys.use(key)


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(tmp_path)


async def test_without_an_administrator_a_key_is_made_and_taken_over_at_the_next_start(start: Start) -> None:
    assert await start.run() == ["admin_key_made"]
    assert await start.run() == []
    assert start.is_let_in(start.shown())
    assert len(start.registry.keys.all()) == 1


async def _viewer(registry: Registry) -> None:
    await registry.keys.create(NewKey("v", Role.ROLE_VIEWER))


async def _admin_of_a_group(registry: Registry) -> None:
    await registry.keys.create(NewKey("g", Role.ROLE_ADMIN, ("a",)))


async def _admin_with_an_end(registry: Registry) -> None:
    await registry.keys.create(NewKey("t", Role.ROLE_ADMIN, ttl_seconds=3600))


async def _admin_of_a_certificate(registry: Registry) -> None:
    await registry.keys.create(NewKey("c", Role.ROLE_ADMIN, certificate_name="spiffe://a"))


async def _login_of_an_admin(registry: Registry) -> None:
    await registry.accounts.add("eve", "password", AccountRole.ROLE_ADMIN)
    await registry.keys.log_in("eve", Role.ROLE_ADMIN, 3600)


_Maker = Callable[[Registry], Awaitable[None]]


@pytest.mark.parametrize(
    "other", [_viewer, _admin_of_a_group, _admin_with_an_end, _admin_of_a_certificate, _login_of_an_admin]
)
async def test_who_cannot_administer_for_ever_is_no_reason_to_make_no_key(start: Start, other: _Maker) -> None:
    await other(start.registry)
    assert await start.run() == ["admin_key_made"]
    assert start.is_let_in(start.shown())


async def test_who_can_administer_for_ever_is(start: Start) -> None:
    await start.registry.keys.create(NewKey("a", Role.ROLE_ADMIN))
    assert await start.run() == []
    assert not start.file.exists()


async def test_the_key_of_a_certificate_is_enough_where_certificates_are_asked_for(start: Start) -> None:
    await _admin_of_a_certificate(start.registry)
    assert await start.run(tls_client_ca_file="/ca.pem") == []
    assert not start.file.exists()


@pytest.mark.parametrize("other", [_viewer, _admin_of_a_group, _admin_of_a_certificate, _login_of_an_admin])
async def test_without_a_place_for_a_key_somebody_must_be_able_to_administer(start: Start, other: _Maker) -> None:
    await other(start.registry)
    with pytest.raises(ConfigError, match="admin_key_file"):
        await start.run(data_dir="")
    await _admin_with_an_end(start.registry)
    assert await start.run(data_dir="") == []


@pytest.mark.parametrize("is_rotated", [True, False])
async def test_a_key_that_was_rotated_or_revoked_does_not_come_back(start: Start, is_rotated: bool) -> None:
    await start.run()
    old = start.shown()
    if is_rotated:
        await start.registry.keys.rotate(old.id, 0, 0)
    else:
        await _admin_with_an_end(start.registry)
        await start.registry.keys.revoke(old.id)
    for _ in range(2):
        assert await start.run() == ["admin_key_ended"]
        assert not start.is_let_in(old)
    assert start.shown() == old  # nobody writes over what may be mounted
    start.file.write_text(new_key().text)
    start.file.chmod(0o600)
    assert await start.run() == []
    assert start.is_let_in(start.shown())


async def test_a_rotated_key_goes_on_for_the_overlap(start: Start) -> None:
    await start.run()
    await start.registry.keys.rotate(start.shown().id, 3600, 0)
    assert await start.run() == []
    assert start.is_let_in(start.shown())


async def test_whoever_revoked_the_last_administrator_s_key_is_told_to_remove_the_file(start: Start) -> None:
    await start.run()
    old = start.shown()
    await start.registry.keys.revoke(old.id)
    with pytest.raises(ConfigError, match="remove the file"):
        await start.run()
    assert start.registry.keys.all() == []
    start.file.unlink()
    assert await start.run() == ["admin_key_made"]
    assert start.is_let_in(start.shown())
    assert not start.is_let_in(old)


async def test_a_file_with_another_secret_for_a_known_key_is_refused(start: Start) -> None:
    await start.run()
    old = start.shown()
    other = PresentedKey(old.id, new_key().secret)
    start.file.write_text(other.text)
    with pytest.raises(ConfigError, match=f"{old.id}.*another secret") as refused:
        await start.run()
    assert other.secret not in str(refused.value)
    assert start.is_let_in(old)


async def test_a_file_with_somebody_else_s_key_is_no_administrator_s(start: Start) -> None:
    _, presented = await start.registry.keys.create(NewKey("v", Role.ROLE_VIEWER))
    assert presented is not None
    start.file.write_text(presented.text)
    start.file.chmod(0o600)
    with pytest.raises(ConfigError, match="no administrator's"):
        await start.run()
