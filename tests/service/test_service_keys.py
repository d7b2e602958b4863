"""Keys in use: sessions, streams, requests that wait, and where secrets must never be seen."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rest_client import RestClient, component
from secured import Tenants, secured
from test_transport_drivers import DEADLINE_SECONDS, Api, eventually
from test_transport_sites import Site, group_spec, instance_fields, mask, unique

from kvcm.model.principals import Principal, Role
from kvcm.protocol import meta_service_pb2 as pb
from kvcm.registry.api_keys import NewKey
from kvcm.registry.registry import Registry
from kvcm.registry.secrets import HIDDEN
from kvcm.service.access import Credentials, KeyedAccess, policy_of
from kvcm.service.admission import AdmissionSettings, GuardedAdmission
from kvcm.service.calls import Arrival, Call, Caller, Plane, Reply
from kvcm.service.rejections import UnauthenticatedError
from kvcm.storage.directory import StorageDirectory
from kvcm.store.memory import MemoryTable

_UNKNOWN = "write_session_id is unknown, finished or expired"


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tenants]:
    folder = tmp_path_factory.mktemp("secured")
    log = folder / "audit.jsonl"
    settings = (f"kvcm.audit.log_file={log}", "kvcm.logger.access_log_sample=1", "kvcm.logger.log_level=DEBUG")
    with secured(folder, *settings) as server:
        yield Tenants.on(server)


def entries(audited: Tenants) -> list[dict[str, Any]]:
    """The audit log."""
    path = audited.server.process.data_dir.parent / "audit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_session_is_finished_by_the_key_that_started_it(audited: Tenants) -> None:
    """No other key can: no other engine of the group, no administrator; and a guessed id reveals nothing."""
    instance = audited.instances["a"]
    key = 5000
    with audited.server.api(key=audited.keys["write"]) as api:
        started = Site(api).start(instance, [key])
    finish = {"instance_id": instance, "write_session_id": started.write_session_id, "success_blocks": mask(1)}
    forged = {**finish, "write_session_id": "0" * len(started.write_session_id)}
    renewal = {"instance_id": instance, "write_session_id": started.write_session_id}
    for other in ("engine", "everywhere", "admin"):
        with audited.server.api(key=audited.keys[other]) as api:
            foreign, unknown = api.refused("FinishWriteCache", **finish), api.refused("FinishWriteCache", **forged)
            assert foreign == unknown
            assert _UNKNOWN in foreign.message
            assert api.refused("LeaseService.RenewWriteSession", **renewal).message == foreign.message
    with audited.server.api(key=audited.keys["foreign"]) as api:
        assert "is not registered" in api.refused("FinishWriteCache", **finish).message
        in_own = {**finish, "instance_id": audited.instances["b"]}
        assert _UNKNOWN in api.refused("FinishWriteCache", **in_own).message
    with audited.server.api(key=audited.keys["write"]) as api:
        api.ok("FinishWriteCache", **finish)
        api.ok("FinishWriteCache", **finish)  # repeated, since the answer may have been lost
        other_mask = {**finish, "success_blocks": mask(0)}
        assert "with other success_blocks: 1 of 1" in api.refused("FinishWriteCache", **other_mask).message
    for other in ("engine", "everywhere", "admin"):
        with audited.server.api(key=audited.keys[other]) as api:
            assert _UNKNOWN in api.refused("FinishWriteCache", **finish).message


def test_a_rotated_key_goes_on_for_the_overlap_and_its_successor_finishes_its_sessions(audited: Tenants) -> None:
    old = audited.server.engine(unique("rotating"), audited.groups["a"])
    with audited.server.api(key=old) as api:
        started = Site(api).start(audited.instances["a"], [7001])
        key_id = api.ok("AccessService.WhoAmI").key.key_id
    with audited.server.api() as api:
        made = api.ok("AccessService.RotateKey", key_id=key_id, overlap_seconds=3600)
    assert made.secret not in {"", old}
    with audited.server.api(key=old) as api:
        assert api.ok("AccessService.WhoAmI").key.expires_at_ms > 0
    with audited.server.api(key=made.secret) as api:
        Site(api).finish(audited.instances["a"], started)
        assert api.ok("AccessService.WhoAmI").key.expires_at_ms == 0


def test_a_key_that_is_rotated_without_overlap_or_revoked_ends_at_once(audited: Tenants) -> None:
    for end in ("RotateKey", "RevokeKey"):
        key = audited.server.engine(unique("ending"), audited.groups["a"])
        with audited.server.api(key=key) as api, audited.server.api() as admin:
            key_id = api.ok("AccessService.WhoAmI").key.key_id
            admin.ok(f"AccessService.{end}", key_id=key_id)
            turn = api.attempt("AccessService.WhoAmI")
            assert (turn.status, turn.text) == (401, "the key is not known here")
            assert key_id not in [each.key_id for each in admin.ok("AccessService.ListKeys").keys]


def test_keys_survive_a_restart_and_report_when_they_were_used(tmp_path: Path) -> None:
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
def test_a_password_becomes_a_key_of_the_account_s_role(audited: Tenants, role: str) -> None:
    name = unique("user")
    with audited.server.api() as admin:
        admin.ok("AdminService.AddAccount", user_name=name, password="right", role=role)
        with audited.server.api(key="") as stranger:
            made = stranger.ok("AccessService.Login", user_name=name, password="right")
        assert 3500 < (made.key.expires_at_ms - made.key.created_at_ms) / 1000 <= 3600
        with audited.server.api(key=made.secret) as api:
            assert api.attempt("AdminService.ListStorage").status == 200
            assert api.attempt("AdminService.ListAccount").status == (403 if role == "ROLE_USER" else 200)
            assert api.attempt("AccessService.RevokeKey").status == (200 if role == "ROLE_ADMIN" else 403)
            admin.ok("AdminService.DeleteAccount", user_name=name)
            assert api.attempt("AccessService.WhoAmI").status == 401


def test_a_wrong_password_and_a_wrong_name_get_the_same_answer(audited: Tenants) -> None:
    name = unique("user")
    with audited.server.api() as admin, audited.server.api(key="") as stranger:
        admin.ok("AdminService.AddAccount", user_name=name, password="right", role="ROLE_USER")
        wrong = stranger.attempt("AccessService.Login", user_name=name, password="wrong")
        unknown = stranger.attempt("AccessService.Login", user_name=unique("user"), password="right")
    assert (wrong.status, wrong.text) == (unknown.status, unknown.text) == (401, "user name or password is wrong")


def test_a_client_that_tries_too_many_passwords_has_to_wait(tmp_path: Path) -> None:
    with secured(tmp_path) as server, server.api("http", key="") as stranger:
        shown = f"Bearer {server.admin_key}"
        set_password = {"user_name": "u", "password": "p", "old_password": "p"}
        changes = [stranger.attempt("AccessService.SetPassword", shown, **set_password).status for _ in range(5)]
        assert changes == [403] * 5
        statuses: list[int] = []
        while 429 not in statuses and len(statuses) < 60:  # a turn comes back every six seconds
            turn = stranger.attempt("AccessService.Login", user_name="u", password="p")
            statuses.append(turn.status)
        assert (statuses[:5], statuses[-1]) == ([401] * 5, 429)
        assert int(turn.headers["retry-after"]) >= 1


def test_of_logins_that_fail_only_wrong_passwords_are_audited(tmp_path: Path) -> None:
    """And little of the input of strangers: they would fill the disk. The other failures are counted."""
    log = tmp_path / "audit.jsonl"
    with secured(tmp_path, f"kvcm.audit.log_file={log}") as server, server.api(key="") as stranger:
        for fields in ({"password": ""}, {"user_name": ""}, {"password": "p" * 2000}, {"ttl_seconds": -1}):
            stranger.refused("AccessService.Login", **{"user_name": "malformed", "password": "p", **fields})
        long = {"user_name": "u" * 500, "trace_id": "t" * 500}
        wrong: list[int] = []
        while 429 not in wrong and len(wrong) < 60:
            wrong.append(stranger.attempt("AccessService.Login", password="p", **long).status)
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


def test_changes_are_audited_with_the_values_before_and_after(audited: Tenants) -> None:
    group = unique("audited")
    with audited.server.api(key=audited.keys["admin"]) as api:
        storage = Site(api).storage()
        api.ok("AdminService.CreateInstanceGroup", instance_group=group_spec(group, storage), trace_id="why")
        changed = group_spec(group, storage, version=2, capacity=12345)
        api.ok("AdminService.UpdateInstanceGroup", instance_group=changed, current_version=1)
        api.ok("AdminService.RemoveInstanceGroup", name=group)
    found = [entry for entry in entries(audited) if entry["action"] != "call" and entry["name"] == group]
    assert [entry["action"] for entry in found] == ["add", "change", "remove"]
    added, changed_entry, removed = found
    assert (added["principal"], added["call"], added["trace_id"]) == ("some-admin", "CreateInstanceGroup", "why")
    assert (added["kind"], added["before"], removed["after"]) == ("group", None, None)
    assert changed_entry["before"] == added["after"]
    assert changed_entry["after"]["quota"]["capacity"] == 12345


def test_calls_that_destroy_are_audited_without_the_keys_of_blocks(audited: Tenants) -> None:
    with audited.server.api(key=audited.keys["remove"]) as api:
        api.ok("RemoveCache", instance_id=audited.instances["a"], block_keys=[987654321])

    def removal() -> dict[str, Any] | None:
        found = [entry for entry in entries(audited) if entry.get("call") == "RemoveCache"]
        return found[-1] if found else None

    entry = eventually(removal)
    assert entry["principal"] == "remove"
    assert entry["after"] == {"instance_id": audited.instances["a"], "block_keys_count": 1}
    assert "987654321" not in json.dumps(entry)


def test_secrets_are_seen_nowhere(audited: Tenants) -> None:
    """Not in logs, the audit log, metrics, lists, errors, the store's answers nor the arguments of the process."""
    process = audited.server.process
    with audited.server.api("http") as api:
        api.ok("AdminService.AddAccount", user_name=unique("user"), password="swordfish-7", role="ROLE_USER")
        api.attempt("AccessService.Login", authorization="", user_name="nobody", password="swordfish-7")
        changes = {"password": "swordfish-7", "old_password": "swordfish-8"}
        api.attempt("AccessService.SetPassword", user_name="nobody", **changes)
        api.attempt("AccessService.WhoAmI", authorization=f"Bearer {audited.keys['engine'][:-1]}~")
        listed = str(api.ok("AccessService.ListKeys", with_logins=True))
        accounts = str(api.ok("AdminService.ListAccount"))
    _, metrics = audited.server.page("/metrics", audited.keys["viewer"])
    audit = (process.data_dir.parent / "audit.jsonl").read_text()
    arguments = subprocess.run(["ps", "axww"], capture_output=True, text=True, check=True).stdout
    stored = b"".join(
        path.read_bytes() for path in process.data_dir.rglob("*") if path.is_file() and path.suffix != ".key"
    )
    texts = (*audited.keys.values(), audited.server.admin_key)
    secrets = ["swordfish-7", "swordfish-8", *(text.split("_", 2)[2] for text in texts)]
    shown = {"log": process.log_text(), "audit": audit, "metrics": metrics, "keys": listed, "accounts": accounts}
    for secret in secrets:
        assert [name for name, text in {**shown, "ps": arguments}.items() if secret in text] == []
        assert secret.encode() not in stored


def test_outcomes_are_counted(audited: Tenants) -> None:
    lines = audited.server.page("/metrics", audited.keys["viewer"])[1].splitlines()
    counted = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert counted['kvcm_auth_total{outcome="accepted"}'] > 0
    assert counted['kvcm_auth_total{outcome="expired"}'] > 0
    assert 'kvcm_authz_denied_total{action="write"}' in counted


class Stream:
    """A client that listens to events.

    Args:
        address: of the admin port.
        key: that it shows.
    """

    def __init__(self, address: str, key: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=DEADLINE_SECONDS)
        self._ask(key)

    def _ask(self, key: str) -> None:
        self._connection.request("GET", "/api/events", headers={"authorization": f"Bearer {key}"})
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def write_sessions(self) -> Iterator[str]:
        """Yield the ids of sessions that begin; ends where the body does."""
        while line := self._response.readline():
            event = json.loads(line)
            if event["type"] == "StartWriteCache":
                yield event["write_session_id"]

    def asked_again(self, key: str) -> int:
        """Return the status of another request on the same connection: the body before it ended as bodies do."""
        self._ask(key)
        return self.status

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def listen(tenants: Tenants) -> Iterator[Callable[[str], Stream]]:
    streams: list[Stream] = []

    def begin(key: str) -> Stream:
        streams.append(Stream(tenants.server.process.address.admin_http, key))
        assert streams[-1].status == 200
        return streams[-1]

    yield begin
    for stream in streams:
        stream.close()


_BLOCKS = iter(range(1_000_000))


def start(tenants: Tenants) -> str:
    """Make an event that streams report."""
    with tenants.server.api(key=tenants.keys["engine"]) as api:
        started = api.ok("StartWriteCache", instance_id=tenants.instances["a"], block_keys=[next(_BLOCKS)])
        return str(started.write_session_id)


def _revoked(tenants: Tenants) -> tuple[str, Callable[[], Any]]:
    key = tenants.server.key(unique("revoked"), "ROLE_VIEWER")
    return key, lambda: _call(tenants, "AccessService.RevokeKey", key_id=key.split("_")[1])


def _rotated(tenants: Tenants) -> tuple[str, Callable[[], Any]]:
    key = tenants.server.key(unique("rotated"), "ROLE_OPERATOR")
    return key, lambda: _call(tenants, "AccessService.RotateKey", key_id=key.split("_")[1])


def _of_a_login(tenants: Tenants) -> tuple[str, Callable[[], Any]]:
    name = unique("user")
    _call(tenants, "AdminService.AddAccount", user_name=name, password="old", role="ROLE_USER")
    key = _call(tenants, "AccessService.Login", user_name=name, password="old").secret
    return key, lambda: _call(tenants, "AccessService.SetPassword", user_name=name, password="new")


def _call(tenants: Tenants, rpc: str, **fields: Any) -> Any:
    with tenants.server.api() as api:
        return api.ok(rpc, **fields)


@pytest.mark.parametrize("of", [_revoked, _rotated, _of_a_login])
def test_a_stream_ends_with_its_key_and_others_go_on(
    of: Callable[[Tenants], tuple[str, Callable[[], Any]]], tenants: Tenants, listen: Callable[[str], Stream]
) -> None:
    """It does not report events after the end of the key."""
    key, end = of(tenants)
    ending, lasting = listen(key), listen(tenants.keys["viewer"])
    before = start(tenants)
    reported = ending.write_sessions()
    assert next(reported) == before
    end()
    after = start(tenants)
    assert list(reported) == []
    assert ending.asked_again(key) == 401
    sessions = lasting.write_sessions()
    assert [next(sessions), next(sessions)] == [before, after]
    later = start(tenants)
    assert next(sessions) == later


def test_a_silent_stream_ends_when_its_key_expires(tenants: Tenants, listen: Callable[[str], Stream]) -> None:
    lasting, stream = listen(tenants.keys["viewer"]), None
    while stream is None:  # where the key ends before the stream begins, as on a busy machine
        key = tenants.server.key(unique("expiring"), "ROLE_VIEWER", ttl_seconds=1)
        with contextlib.suppress(AssertionError):
            stream = listen(key)
    assert list(stream.write_sessions()) == []
    assert stream.asked_again(key) == 401
    session = start(tenants)
    assert next(lasting.write_sessions()) == session


_SERVICE, _NAME = "kv_cache_manager.proto.meta.MetaService", "RemoveCache"


class OneTurn:
    """A caller with one turn for long requests, and a key of the group "a"."""

    def __init__(self) -> None:
        self.registry = Registry(StorageDirectory("cluster"), MemoryTable())
        self.groups = {"i": "a"}
        self.admission = GuardedAdmission(AdmissionSettings(long_keys=1, long_slots=1, long_places=1))
        self.access = KeyedAccess(self.registry.keys, self.groups.get)
        self.caller = Caller(None, lambda _: None, lambda _: {}, admission=self.admission, access=self.access)
        self.call = Call(_SERVICE, _NAME, Plane.DATA, pb.RemoveCacheRequest, pb.CommonResponse, self._answer)
        self.answered = 0

    async def _answer(self, _request: Any) -> Reply:
        self.answered += 1
        return Reply(pb.CommonResponse())

    async def principal(self) -> Principal:
        _, key = await self.registry.keys.create(NewKey("engine", Role.ROLE_ENGINE, ("a",)))
        assert key is not None
        return self.access.principal(policy_of(_SERVICE, _NAME), Credentials(f"Bearer {key.text}"))

    def ask(self, principal: Principal) -> asyncio.Task[Reply]:
        request = pb.RemoveCacheRequest(instance_id="i", block_keys=[1])
        return asyncio.create_task(self.caller.answer(self.call, request, Arrival(principal=principal)))


@pytest.fixture
async def one_turn() -> OneTurn:
    return OneTurn()


@pytest.fixture
async def waiting(one_turn: OneTurn) -> AsyncIterator[tuple[asyncio.Task[Reply], Principal]]:
    """A request that waits for its turn, which comes after the test's own block."""
    principal = await one_turn.principal()
    turn = await one_turn.admission.enter(one_turn.call, pb.RemoveCacheRequest(block_keys=[1]), Arrival())
    request = one_turn.ask(principal)
    await asyncio.sleep(0)
    assert not request.done()
    yield request, principal
    assert turn is not None


async def _let_in(one_turn: OneTurn) -> None:
    one_turn.admission.leave(0.0)
    await asyncio.sleep(0)


async def test_a_waiting_call_with_a_valid_key_is_answered(
    one_turn: OneTurn, waiting: tuple[asyncio.Task[Reply], Principal]
) -> None:
    await _let_in(one_turn)
    await waiting[0]
    assert one_turn.answered == 1


async def test_a_key_that_is_revoked_meanwhile_does_nothing(
    one_turn: OneTurn, waiting: tuple[asyncio.Task[Reply], Principal]
) -> None:
    request, principal = waiting
    await one_turn.registry.keys.revoke(principal.key_id)
    await _let_in(one_turn)
    with pytest.raises(UnauthenticatedError):
        await request
    assert one_turn.answered == 0


async def test_an_instance_that_is_anothers_meanwhile_is_left_alone(
    one_turn: OneTurn, waiting: tuple[asyncio.Task[Reply], Principal]
) -> None:
    request, principal = waiting
    one_turn.groups["i"] = "b"
    await _let_in(one_turn)
    assert (await request).message.header.status.code == pb.INSTANCE_NOT_EXIST
    assert one_turn.answered == 0
    one_turn.groups["i"] = "a"
    await asyncio.wait_for(one_turn.ask(principal), 60)  # the turn was given back


PLANTED = "hunter2"
OTHER = "correcthorse"
_NOTE = f"see redis://u:{PLANTED}@h"


@pytest.fixture
def admin(tenants: Tenants) -> Iterator[Api]:
    with tenants.server.api() as api:
        yield api


def _storage_fields(tenants: Tenants, name: str, **spec: Any) -> dict[str, Any]:
    mountpoint = tenants.server.process.data_dir.parent / "mount"
    (mountpoint / "root").mkdir(parents=True, exist_ok=True)
    uri = f"mysql://u:{PLANTED}@meta:3306/db"
    fields = {"mountpoint": str(mountpoint), "root_dir": "root", "key_count_per_file": 1, "meta_storage_uri": uri}
    fields |= {"remote_host": "meta", "remote_port": 1, **spec}
    return {"global_unique_name": name, "vcnsthreefs": fields}


@pytest.fixture
def storage(tenants: Tenants, admin: Api) -> str:
    name = unique("secretive")
    admin.ok("AdminService.AddStorage", storage=_storage_fields(tenants, name))
    return name


@pytest.fixture
def group(admin: Api, storage: str) -> str:
    return Site(admin).group(storage, user_data=_NOTE)


@pytest.fixture
def instance(admin: Api, group: str) -> str:
    model = {"model_name": "m", "dtype": "bf16", "extra": f"token={PLANTED}", "user_data": _NOTE}
    return Site(admin).instance(group, model_deployment=model)


def _uri(api: Api, storage: str) -> str:
    listed = api.ok("AdminService.ListStorage").storage
    (found,) = [each for each in listed if each.global_unique_name == storage]
    return str(found.vcnsthreefs.meta_storage_uri)


@pytest.mark.parametrize("transport", ["grpc", "http"])
@pytest.mark.parametrize("role", ["viewer", "operator", "engine", "admin"])
def test_administrators_alone_see_secrets(
    tenants: Tenants, transport: str, role: str, storage: str, group: str, instance: str
) -> None:
    key = tenants.server.engine(unique("engine"), group) if role == "engine" else tenants.keys[role]
    calls = {rpc: {"instance_id": instance} for rpc in ("AdminService.GetInstanceInfo", "GetInstanceInfo")}
    if role != "engine":
        calls |= {"AdminService.ListStorage": {}, "GroupService.ListInstanceGroup": {}}
        calls["AdminService.GetInstanceGroup"] = {"name": group}
        calls["AdminService.ListInstanceInfo"] = {"instance_group_name": group}
    with tenants.server.api(transport, key) as api:
        for rpc, fields in calls.items():
            shown = str(api.ok(rpc, **fields))
            assert (PLANTED in shown, HIDDEN in shown) == ((True, False) if role == "admin" else (False, True)), rpc


def test_engines_get_the_storages_of_their_group_as_they_are(tenants: Tenants, group: str) -> None:
    with tenants.server.api(key=tenants.server.engine(unique("engine"), group)) as api:
        answer = api.ok("RegisterInstance", **instance_fields(unique("instance"), group))
    assert PLANTED in answer.storage_configs


def test_a_configuration_read_without_secrets_can_be_sent_back(
    tenants: Tenants, admin: Api, storage: str, group: str, instance: str
) -> None:
    with tenants.server.api(key=tenants.keys["viewer"]) as viewer:
        (read,) = [each for each in viewer.ok("AdminService.ListStorage").storage if each.global_unique_name == storage]
        read_group = viewer.ok("AdminService.GetInstanceGroup", name=group).instance_group
        read_instance = viewer.ok("AdminService.GetInstanceInfo", instance_id=instance).instance_info
    read.vcnsthreefs.cluster_name = "renamed"
    admin.ok("AdminService.UpdateStorage", storage=read)
    read_group.version, read_group.quota.capacity = 2, 12345
    admin.ok("AdminService.UpdateInstanceGroup", instance_group=read_group, current_version=1)
    again = {"block_size": 4, "model_deployment": read_instance.model_deployment}
    admin.ok("AdminService.RegisterInstance", **{**instance_fields(instance, group), **again})
    assert PLANTED in _uri(admin, storage)
    stored = admin.ok("AdminService.GetInstanceGroup", name=group).instance_group
    assert (stored.user_data, stored.quota.capacity) == (_NOTE, 12345)


def test_a_secret_that_is_nowhere_is_refused(tenants: Tenants, admin: Api, storage: str, group: str) -> None:
    uri = f"mysql://{HIDDEN}@another/db"
    for call, name in (("AddStorage", unique("new")), ("UpdateStorage", storage)):
        fields = _storage_fields(tenants, name, meta_storage_uri=uri)
        assert "lacks a secret" in admin.refused(f"AdminService.{call}", storage=fields).message
    note = f"token={HIDDEN}"
    new = group_spec(unique("new"), storage, user_data=note)
    assert "lacks a secret" in admin.refused("AdminService.CreateInstanceGroup", instance_group=new).message
    changed = group_spec(group, storage, user_data=note, version=2)
    update = admin.refused("AdminService.UpdateInstanceGroup", instance_group=changed, current_version=1)
    assert "lacks a secret" in update.message
    model = {"model_name": "m", "dtype": "bf16", "extra": note}
    fields = instance_fields(unique("instance"), group, model_deployment=model)
    assert "lacks a secret" in admin.refused("RegisterInstance", **fields).message


@pytest.mark.parametrize("kind", ["storages", "groups"])
def test_resources_keep_secrets_and_conditions(
    tenants: Tenants, by_tenants: RestClient, storage: str, group: str, kind: str
) -> None:
    """A role that sees less has tags of its own: a tag over the secret would confirm a right guess."""
    path = f"/v1/{kind}/{component(storage if kind == 'storages' else group)}"
    by_admin, by_operator = ({"authorization": tenants.authorization(role)} for role in ("admin", "operator"))
    full, read = by_tenants.get(path, **by_admin), by_tenants.get(path, **by_operator)
    assert PLANTED.encode() in full.raw
    assert PLANTED.encode() not in read.raw + by_tenants.get(f"/v1/{kind}", **by_operator).raw
    assert read.headers["etag"] != full.headers["etag"]
    assert by_tenants.get(path, **by_operator, if_none_match=read.headers["etag"]).status == 304
    assert by_tenants.put(path, read.body, **by_admin, if_match=read.headers["etag"]).status == 412
    put = by_tenants.put(path, read.body, **by_admin, if_match=full.headers["etag"])
    assert put.status == 200
    assert put.headers["etag"] == by_tenants.get(path, **by_admin).headers["etag"]
    assert PLANTED.encode() in put.raw
    secret = (
        {"vcnsthreefs": {"meta_storage_uri": f"mysql://u:{OTHER}@meta:3306/db"}}
        if kind == "storages"
        else {"user_data": f"see redis://u:{OTHER}@h"}
    )
    patched = by_tenants.patch(path, secret, **by_admin, if_match=put.headers["etag"])
    assert OTHER.encode() in patched.raw
    hidden = {name: by_tenants.get(path, **by_operator).body[name] for name in secret}
    assert by_tenants.patch(path, hidden, **by_admin, if_match=put.headers["etag"]).status == 412
    assert OTHER.encode() in by_tenants.patch(path, hidden, **by_admin).raw


def test_an_operator_switches_a_storage_whose_secrets_it_does_not_see(
    tenants: Tenants, by_tenants: RestClient, admin: Api, storage: str
) -> None:
    by_operator = {"authorization": tenants.authorization("operator")}
    path = f"/v1/storages/{storage}"
    tag = by_tenants.get(path, **by_operator).headers["etag"]
    switched = by_tenants.patch(path, {"is_available": False}, **by_operator, if_match=tag)
    assert (switched.status, switched.body["is_available"]) == (200, False)
    assert PLANTED in _uri(admin, storage)
    assert by_tenants.patch(path, {"capacity_bytes": 5}, **by_operator).status == 403


def test_usage_of_a_limited_principal_is_its_own(tenants: Tenants, by_tenants: RestClient, admin: Api) -> None:
    site = Site(admin)
    storage, quota = site.storage(), unique("quota")
    own, foreign = (site.group(storage, global_quota_group_name=quota) for _ in range(2))
    admin.ok("CapacityService.SetGlobalQuota", global_quota={"name": quota, "capacity_bytes": 1 << 30})
    site.write(site.instance(own), [1])
    site.write(site.instance(foreign), [1, 2, 3])
    viewer = tenants.server.key(unique("limited"), "ROLE_VIEWER", instance_groups=[own])

    def seen(key: str) -> tuple[list[Any], list[Any]]:
        found = by_tenants.get(f"/v1/usage?group={own}", authorization=f"Bearer {key}").body
        storages = [(each["usage"]["used_bytes"], each["oversubscription"]) for each in found["storages"]]
        return storages, [(each["usage"]["used_bytes"], each["groups"]) for each in found["global_quotas"]]

    assert seen(tenants.keys["viewer"]) == ([(256, 0.0)], [(256, [own, foreign])])
    assert seen(viewer) == ([(64, 0.0)], [(64, [own])])
