"""Keys from their making to their end, sessions that belong to somebody, and where secrets must never be seen."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from secured import Tenants, secured
from test_transport_drivers import eventually
from test_transport_sites import Site, group_spec, instance_fields, mask, unique

_UNKNOWN = "write_session_id is unknown, finished or expired"


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("secured")
    log = folder / "audit.jsonl"
    settings = (f"kvcm.audit.log_file={log}", "kvcm.logger.access_log_sample=1", "kvcm.logger.log_level=DEBUG")
    with secured(folder, *settings) as server:
        yield Tenants.on(server)


def entries(tenants: Tenants) -> list[dict[str, Any]]:
    """The audit log."""
    path = tenants.server.process.data_dir.parent / "audit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_engine_writes_and_reads_with_its_key(tenants: Tenants) -> None:
    with tenants.server.api(key=tenants.keys["engine"]) as api:
        site = Site(api)
        instance = unique("own")
        api.ok("RegisterInstance", **instance_fields(instance, tenants.groups["a"]))
        site.write(instance, [1, 2, 3])
        assert site.hits(instance, [1, 2, 3, 4]) == [1, 2, 3]


def test_a_session_is_finished_by_who_started_it(tenants: Tenants) -> None:
    """Nobody else: not another engine of the group, not an administrator; and whoever guesses an id learns nothing."""
    instance = tenants.instances["a"]
    key = 5000
    with tenants.server.api(key=tenants.keys["write"]) as api:
        started = Site(api).start(instance, [key])
    finish = {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": mask(1)}
    forged = {**finish, "write_session_id": "0" * len(started.write_session_id)}
    renewal = {"instance_id": instance, "write_session_id": started.write_session_id, "seconds": 60}
    for other in ("engine", "everywhere", "admin"):
        with tenants.server.api(key=tenants.keys[other]) as api:
            foreign, unknown = api.refused("FinishWriteCache", **finish), api.refused("FinishWriteCache", **forged)
            assert foreign == unknown
            assert _UNKNOWN in foreign.message
            assert api.refused("LeaseService.RenewWriteSession", **_renewal(renewal)).message == foreign.message
    with tenants.server.api(key=tenants.keys["foreign"]) as api:
        assert api.attempt("FinishWriteCache", **finish).status == 403
        in_own = {**finish, "instance_id": tenants.instances["b"]}
        assert _UNKNOWN in api.refused("FinishWriteCache", **in_own).message
    with tenants.server.api(key=tenants.keys["write"]) as api:
        api.ok("FinishWriteCache", **finish)
        api.ok("FinishWriteCache", **finish)  # repeated, since the answer may have been lost
        other_mask = {**finish, "success_blocks": mask(0)}
        assert "with other success_blocks: 1 of 1" in api.refused("FinishWriteCache", **other_mask).message
    for other in ("engine", "everywhere", "admin"):
        with tenants.server.api(key=tenants.keys[other]) as api:
            assert _UNKNOWN in api.refused("FinishWriteCache", **finish).message


def _renewal(fields: dict[str, Any]) -> dict[str, Any]:
    from kvcm.protocol.kvcm.v1 import lease_service_pb2 as pb

    known = pb.RenewWriteSessionRequest.DESCRIPTOR.fields_by_name
    return {name: value for name, value in fields.items() if name in known}


def test_a_rotated_key_goes_on_for_the_overlap_and_its_successor_finishes_its_sessions(tenants: Tenants) -> None:
    old = tenants.server.engine(unique("rotating"), tenants.groups["a"])
    with tenants.server.api(key=old) as api:
        started = Site(api).start(tenants.instances["a"], [7001])
        key_id = api.ok("AccessService.WhoAmI").key.key_id
    with tenants.server.api() as api:
        made = api.ok("AccessService.RotateKey", key_id=key_id, overlap_seconds=3600)
    assert made.secret not in {"", old}
    with tenants.server.api(key=old) as api:
        assert api.ok("AccessService.WhoAmI").key.expires_at_ms > 0
    with tenants.server.api(key=made.secret) as api:
        Site(api).finish(tenants.instances["a"], started)
        assert api.ok("AccessService.WhoAmI").key.expires_at_ms == 0


def test_a_key_that_is_rotated_without_overlap_or_revoked_ends_at_once(tenants: Tenants) -> None:
    for end in ("RotateKey", "RevokeKey"):
        key = tenants.server.engine(unique("ending"), tenants.groups["a"])
        with tenants.server.api(key=key) as api, tenants.server.api() as admin:
            key_id = api.ok("AccessService.WhoAmI").key.key_id
            admin.ok(f"AccessService.{end}", key_id=key_id)
            turn = api.attempt("AccessService.WhoAmI")
            assert (turn.status, turn.text) == (401, "the key is not known here")
            assert key_id not in [each.key_id for each in admin.ok("AccessService.ListKeys").keys]


def test_keys_survive_a_restart_and_tell_when_they_were_used(tmp_path: Path) -> None:
    with secured(tmp_path) as server:
        key = server.key("lasting", "ROLE_VIEWER")
        with server.api(key=key) as api:
            api.ok("AccessService.WhoAmI")
        with server.api() as api:
            (listed,) = [each for each in api.ok("AccessService.ListKeys").keys if each.name == "lasting"]
            assert listed.last_used_at_ms >= listed.created_at_ms
    with secured(tmp_path) as server, server.api(key=key) as api:
        assert api.ok("AccessService.WhoAmI").key.name == "lasting"


@pytest.mark.parametrize("role", ["ROLE_USER", "ROLE_OPERATOR", "ROLE_ADMIN"])
def test_a_password_becomes_a_key_of_the_account_s_role(tenants: Tenants, role: str) -> None:
    name = unique("user")
    with tenants.server.api() as admin:
        admin.ok("AdminService.AddAccount", user_name=name, password="right", role=role)
        with tenants.server.api(key="") as stranger:
            made = stranger.ok("AccessService.Login", user_name=name, password="right")
        assert 3500 < (made.key.expires_at_ms - made.key.created_at_ms) / 1000 <= 3600
        with tenants.server.api(key=made.secret) as api:
            assert api.attempt("AdminService.ListStorage").status == 200
            assert api.attempt("AdminService.ListAccount").status == (403 if role == "ROLE_USER" else 200)
            assert api.attempt("AccessService.RevokeKey").status == (200 if role == "ROLE_ADMIN" else 403)
            admin.ok("AdminService.DeleteAccount", user_name=name)
            assert api.attempt("AccessService.WhoAmI").status == 401


def test_a_wrong_password_and_a_wrong_name_look_alike(tenants: Tenants) -> None:
    name = unique("user")
    with tenants.server.api() as admin, tenants.server.api(key="") as stranger:
        admin.ok("AdminService.AddAccount", user_name=name, password="right", role="ROLE_USER")
        wrong = stranger.attempt("AccessService.Login", user_name=name, password="wrong")
        unknown = stranger.attempt("AccessService.Login", user_name=unique("user"), password="right")
    assert (wrong.status, wrong.text) == (unknown.status, unknown.text) == (401, "user name or password is wrong")


def test_whoever_tries_too_many_passwords_has_to_wait(tmp_path: Path) -> None:
    with secured(tmp_path) as server, server.api("http", key="") as stranger:
        shown = f"Bearer {server.admin_key}"
        set_password = {"user_name": "u", "password": "p", "old_password": "p"}
        changes = [stranger.attempt("AccessService.SetPassword", shown, **set_password).status for _ in range(5)]
        assert changes == [403] * 5
        turns = [stranger.attempt("AccessService.Login", user_name="u", password="p") for _ in range(7)]
        statuses = [turn.status for turn in turns]
        assert statuses[:5] == [401] * 5
        assert 429 in statuses
        assert int(turns[statuses.index(429)].headers["retry-after"]) >= 1


def test_of_logins_that_fail_only_wrong_passwords_are_audited(tmp_path: Path) -> None:
    """And little of what strangers say: they would fill the disk. The others are counted."""
    log = tmp_path / "audit.jsonl"
    with secured(tmp_path, f"kvcm.audit.log_file={log}") as server, server.api(key="") as stranger:
        for fields in ({"password": ""}, {"user_name": ""}, {"password": "p" * 2000}, {"ttl_seconds": -1}):
            stranger.refused("AccessService.Login", **{"user_name": "malformed", "password": "p", **fields})
        long = {"user_name": "u" * 500, "trace_id": "t" * 500}
        wrong = [stranger.attempt("AccessService.Login", password="p", **long).status for _ in range(12)]
        assert {*wrong} == {401, 429}
        with server.api() as admin:
            admin.ok("AdminService.UpdateLogger", log_level="INFO")  # written after all of them
        found = eventually(lambda: _calls(log, ending="UpdateLogger"))
        assert len(found) == wrong.count(401) + 1
        for entry in found[:-1]:
            assert (entry["call"], entry["code"], entry["trace_id"]) == ("Login", "UNSPECIFIED", "t" * 128)
            assert entry["after"] == {"user_name": "u" * 128, "password": "…"}
        lines = server.page("/metrics", server.admin_key)[1].splitlines()
        (counted,) = [line for line in lines if '"Login"' in line and "INVALID_ARGUMENT" in line]
        assert float(counted.split()[-1]) == 4


def _calls(log: Path, ending: str) -> list[dict[str, Any]]:
    """The calls in the audit log, nothing while the last one is not there yet."""
    found = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    calls = [entry for entry in found if entry["action"] == "call"]
    return calls if calls and calls[-1]["call"] == ending else []


def test_two_authorizations_are_none(tenants: Tenants) -> None:
    address = tenants.server.process.address.admin_http
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.putrequest("POST", "/api/whoAmI")
    for who in ("admin", "engine"):
        connection.putheader("authorization", tenants.authorization(who))
    connection.putheader("content-length", "2")
    connection.endheaders(b"{}")
    assert connection.getresponse().status == 401
    connection.close()


def test_changes_are_audited_with_what_was_before_and_after(tenants: Tenants) -> None:
    group = unique("audited")
    with tenants.server.api(key=tenants.keys["admin"]) as api:
        storage = Site(api).storage()
        api.ok("AdminService.CreateInstanceGroup", instance_group=group_spec(group, storage), trace_id="why")
        changed = group_spec(group, storage, version=2, capacity=12345)
        api.ok("AdminService.UpdateInstanceGroup", instance_group=changed, current_version=1)
        api.ok("AdminService.RemoveInstanceGroup", name=group)
    found = [entry for entry in entries(tenants) if entry["action"] != "call" and entry["name"] == group]
    assert [entry["action"] for entry in found] == ["add", "change", "remove"]
    added, changed_entry, removed = found
    assert (added["principal"], added["call"], added["trace_id"]) == ("some-admin", "CreateInstanceGroup", "why")
    assert (added["kind"], added["before"], removed["after"]) == ("group", None, None)
    assert changed_entry["before"] == added["after"]
    assert changed_entry["after"]["quota"]["capacity"] == 12345


def test_calls_that_destroy_are_audited_without_the_keys_of_blocks(tenants: Tenants) -> None:
    with tenants.server.api(key=tenants.keys["remove"]) as api:
        api.ok("RemoveCache", instance_id=tenants.instances["a"], block_keys=[987654321])

    def removal() -> dict[str, Any] | None:
        found = [entry for entry in entries(tenants) if entry.get("call") == "RemoveCache"]
        return found[-1] if found else None

    entry = eventually(removal)
    assert entry["principal"] == "remove"
    assert entry["after"] == {"instance_id": tenants.instances["a"], "block_keys_count": 1}
    assert "987654321" not in json.dumps(entry)


def test_secrets_are_seen_nowhere(tenants: Tenants) -> None:
    """Not in logs, the audit log, metrics, lists, errors, the store's answers nor the arguments of the process."""
    process = tenants.server.process
    with tenants.server.api("http") as api:
        api.ok("AdminService.AddAccount", user_name=unique("user"), password="swordfish-7", role="ROLE_USER")
        api.attempt("AccessService.Login", authorization="", user_name="nobody", password="swordfish-7")
        changes = {"password": "swordfish-7", "old_password": "swordfish-8"}
        api.attempt("AccessService.SetPassword", user_name="nobody", **changes)
        api.attempt("AccessService.WhoAmI", authorization=f"Bearer {tenants.keys['engine'][:-1]}~")
        listed = str(api.ok("AccessService.ListKeys", with_logins=True))
        accounts = str(api.ok("AdminService.ListAccount"))
    _, metrics = tenants.server.page("/metrics", tenants.keys["viewer"])
    audit = (process.data_dir.parent / "audit.jsonl").read_text()
    arguments = subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout
    stored = b"".join(
        path.read_bytes() for path in process.data_dir.rglob("*") if path.is_file() and path.suffix != ".key"
    )
    texts = (*tenants.keys.values(), tenants.server.admin_key)
    secrets = ["swordfish-7", "swordfish-8", *(text.split("_", 2)[2] for text in texts)]
    shown = {"log": process.log_text(), "audit": audit, "metrics": metrics, "keys": listed, "accounts": accounts}
    for secret in secrets:
        assert [name for name, text in {**shown, "ps": arguments}.items() if secret in text] == []
        assert secret.encode() not in stored


def test_outcomes_are_counted(tenants: Tenants) -> None:
    lines = tenants.server.page("/metrics", tenants.keys["viewer"])[1].splitlines()
    counted = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert counted['kvcm_auth_total{outcome="accepted"}'] > 0
    assert counted['kvcm_auth_total{outcome="expired"}'] > 0
    assert 'kvcm_authz_denied_total{action="write"}' in counted
