"""How a deployment that asks for keys gets its first one, and what its managers tell each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis_servers import Standalone
from secured import Secured, secured
from test_transport_drivers import eventually
from test_transport_process import manager, run_kvcm
from test_transport_sites import unique

from kvcm.model.api_keys import new_key

_KEYED = ("kvcm.auth.mode=required", "kvcm.service.host=127.0.0.1")
_REQUIRED = ("-e", "kvcm.auth.mode=required", "-e", "kvcm.service.host=127.0.0.1")


def test_a_mounted_key_is_the_administrator_s(tmp_path: Path) -> None:
    file = tmp_path / "mounted"
    file.write_text(new_key().text + "\n")
    file.chmod(0o644)
    with manager(tmp_path, *_KEYED, f"kvcm.auth.admin_key_file={file}") as process:
        with process.api(key=file.read_text().strip()) as api:
            assert api.ok("AccessService.WhoAmI").key.name == "admin"
        assert process.events("admin_key_readable")
        assert not (process.data_dir / "admin.key").exists()


@pytest.mark.parametrize("text", ["", "kvcm_abc", "two\nlines", "\xff"])
def test_a_file_without_a_key_is_an_error_that_does_not_show_it(tmp_path: Path, text: str) -> None:
    file = tmp_path / "mounted"
    file.write_text(text, encoding="latin-1")
    ended = run_kvcm(tmp_path, "serve", *_REQUIRED, "-e", f"kvcm.auth.admin_key_file={file}")
    assert ended.returncode == 1
    assert "kvcm.auth.admin_key_file" in ended.stderr
    assert len(text) < 3 or text not in ended.stderr


def test_without_an_administrator_and_a_place_for_a_key_it_does_not_start(tmp_path: Path) -> None:
    ports = [f"kvcm.service.{name}=0" for name in ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")]
    options = [part for setting in ports for part in ("-e", setting)]
    ended = run_kvcm(tmp_path, "serve", *_REQUIRED, *options)
    assert ended.returncode == 1
    assert "kvcm.auth.admin_key_file" in ended.stderr


def test_keys_made_while_nobody_was_asked_count_when_everybody_is(tmp_path: Path) -> None:
    with manager(tmp_path) as process, process.api() as api:
        made = api.ok("AccessService.CreateKey", name="prepared", role="ROLE_ADMIN").secret
        assert not api.ok("AccessService.WhoAmI").is_required
    with manager(tmp_path, *_KEYED) as process, process.api(key=made) as api:
        answer = api.ok("AccessService.WhoAmI")
        assert (answer.is_required, answer.key.name) == (True, "prepared")
        assert not (process.data_dir / "admin.key").exists()


def test_an_administrator_s_key_that_was_revoked_does_not_come_back(tmp_path: Path) -> None:
    with secured(tmp_path) as server:
        made = server.key("successor", "ROLE_ADMIN")
        with server.api(key=made) as api:
            api.ok("AccessService.RevokeKey", key_id=server.admin_key.split("_")[1])
    with secured(tmp_path) as server:
        assert server.process.events("admin_key_ended")
        with server.api(key=made) as api:
            assert api.ok("AccessService.WhoAmI").key.name == "successor"
        with server.api() as api:
            assert api.attempt("AccessService.WhoAmI").status == 401


def test_what_it_risks_is_said_at_start(tmp_path: Path) -> None:
    with manager(tmp_path / "off") as process:
        assert eventually(lambda: process.events("not_authenticated"))[0]["level"] == "info"
    with manager(tmp_path / "insecure", "--insecure") as process:
        assert eventually(lambda: process.events("not_authenticated"))[0]["level"] == "warning"
    with manager(tmp_path / "required", "kvcm.auth.mode=required") as process:
        assert eventually(lambda: process.events("not_encrypted"))
        assert process.events("not_authenticated") == []


def test_a_key_that_is_revoked_at_one_manager_ends_at_all(tmp_path: Path, redis_standalone: Standalone) -> None:
    shared = f"kvcm.registry_storage.uri={redis_standalone.uri(unique('keys'))}"
    with secured(tmp_path / "a", shared) as first:
        with manager(tmp_path / "b", *_KEYED, shared) as process:
            second = Secured(process, first.admin_key)
            key = first.key("travels", "ROLE_VIEWER")
            with second.api(key=key) as api, first.api() as admin:
                eventually(lambda: api.attempt("AccessService.WhoAmI").status == 200)
                (listed,) = [each for each in admin.ok("AccessService.ListKeys").keys if each.name == "travels"]
                admin.ok("AccessService.RevokeKey", key_id=listed.key_id)
                eventually(lambda: api.attempt("AccessService.WhoAmI").status == 401)
