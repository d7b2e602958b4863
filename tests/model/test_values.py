"""Values that are registered, errors, hashes of passwords and the end of background tasks."""

from __future__ import annotations

import asyncio
import inspect
import re
from contextlib import suppress
from dataclasses import replace
from hashlib import scrypt
from typing import Any

import pytest

from kvcm.model import errors, tasks
from kvcm.model.errors import ErrorCode, KvcmError
from kvcm.model.groups import CachePreferStrategy, InstanceGroupQuota, QuotaConfig
from kvcm.model.instances import Instance, LocationSpecGroup, LocationSpecInfo, LocationSpecKind, ModelDeployment
from kvcm.model.principals import Account, AccountRole, PasswordHash
from kvcm.model.storages import StorageType
from kvcm.model.tasks import end_tasks
from kvcm.protocol import admin_service_pb2, meta_service_pb2

# ── Error tree ──


ROW = re.compile(r"^\s*(?:[├└]── )?(\w+Error)\s+([A-Z_]+)\s+(\d{3})", re.MULTILINE)
TABLE = {name: (code, int(status)) for name, code, status in ROW.findall(errors.__doc__ or "")}
CLASSES = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)
}


def test_the_table_in_the_docstring_is_that_of_the_classes() -> None:
    assert {name: (cls.code.name, cls.http_status) for name, cls in CLASSES.items()} == TABLE


def test_errors_are_derived_from_one_class() -> None:
    assert {cls.__bases__ for name, cls in CLASSES.items() if cls is not KvcmError} == {(KvcmError,)}


def test_every_code_but_success_has_one_error() -> None:
    codes = sorted(cls.code for cls in CLASSES.values())
    assert codes == sorted(set(ErrorCode) - {ErrorCode.OK, ErrorCode.UNSPECIFIED})


@pytest.mark.parametrize("code", ErrorCode)
def test_codes_are_those_of_the_protocol(code: ErrorCode) -> None:
    assert meta_service_pb2.ErrorCode.Value(code.name) == code


# ── Registered values ──


FULL, LINEAR, UNKNOWN = (
    LocationSpecKind.LSK_FULL_ATTENTION,
    LocationSpecKind.LSK_LINEAR_ATTENTION,
    LocationSpecKind.LSK_UNSPECIFIED,
)


def instance(specs: dict[str, LocationSpecKind], groups: dict[str, tuple[str, ...]] | None = None) -> Instance:
    return Instance(
        "quota",
        "group",
        "i",
        16,
        tuple(LocationSpecInfo(name, 64, kind) for name, kind in specs.items()),
        ModelDeployment("m", "bf16", extra='{"engine": "e", "weights": "a"}', user_data="first"),
        tuple(LocationSpecGroup(name, names) for name, names in (groups or {}).items()),
    )


BASE = instance({"a": UNKNOWN, "b": UNKNOWN}, {"g": ("a",)})


def deployed(**changes: str) -> dict[str, Any]:
    return {"model_deployment": replace(BASE.model_deployment, **changes)}


def test_a_registration_does_not_differ_from_itself() -> None:
    assert BASE.difference(BASE) is None


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("instance_group_name", {"instance_group_name": "other"}),
        ("block_size", {"block_size": 17}),
        ("location_spec_infos", {"location_spec_infos": tuple(reversed(BASE.location_spec_infos))}),
        ("location_spec_infos", {"location_spec_infos": BASE.location_spec_infos[:1]}),
        (
            "location_spec_infos[0].size",
            {"location_spec_infos": (LocationSpecInfo("a", 65), BASE.location_spec_infos[1])},
        ),
        (
            "location_spec_infos[0].kind",
            {"location_spec_infos": (LocationSpecInfo("a", 64, FULL), BASE.location_spec_infos[1])},
        ),
        ("location_spec_groups", {"location_spec_groups": ()}),
        ("location_spec_groups", {"location_spec_groups": (LocationSpecGroup("g", ("b",)),)}),
        ("model_deployment.tp_size", {"model_deployment": replace(BASE.model_deployment, tp_size=2)}),
        ("model_deployment.lora_name", deployed(lora_name="l", user_data="x")),
        ("model_deployment.extra", deployed(extra="no JSON")),
        ("model_deployment.extra", deployed(extra="[" * 100_000)),
        ("model_deployment.extra.weights", deployed(extra='{"engine": "e", "weights": "b"}')),
        ("model_deployment.extra.engine", deployed(extra='{"weights": "a"}')),
    ],
)
def test_a_difference_is_named(field: str, change: dict[str, Any]) -> None:
    changed = replace(BASE, **change)
    there, back = BASE.difference(changed), changed.difference(BASE)
    assert there is not None
    assert back == (field, there.second, there.first)
    assert there.field == field
    assert there.first != there.second


def test_user_data_and_the_quota_group_are_no_difference() -> None:
    deployment = replace(BASE.model_deployment, user_data="second")
    assert BASE.difference(replace(BASE, model_deployment=deployment, quota_group_name="elsewhere")) is None


@pytest.mark.parametrize(
    ("specs", "groups", "linear"),
    [
        ({"a": UNKNOWN, "b": UNKNOWN}, {}, set()),
        ({"a": FULL, "b": LINEAR}, {}, {"b"}),
        ({"a": FULL, "b": FULL}, {}, set()),
        # Declared ones win over what the groups suggest.
        ({"a": UNKNOWN, "b": UNKNOWN, "c": LINEAR}, {"x": ("a",), "y": ("a", "b")}, {"c"}),
        # Undeclared: what some group lacks.
        ({"kv": UNKNOWN, "state": UNKNOWN}, {"light": ("kv",), "full": ("kv", "state")}, {"state"}),
        ({"kv": UNKNOWN, "state": UNKNOWN}, {"light": ("kv",)}, {"state"}),
        ({"kv": UNKNOWN, "state": UNKNOWN}, {"full": ("kv", "state")}, set()),
        ({"a": UNKNOWN, "b": UNKNOWN, "c": UNKNOWN}, {"x": ("a", "b"), "y": ("a", "c")}, {"b", "c"}),
        # Disjoint groups say nothing.
        ({"a": UNKNOWN, "b": UNKNOWN}, {"x": ("a",), "y": ("b",)}, set()),
    ],
)
def test_linear_specs(specs: dict[str, LocationSpecKind], groups: dict[str, tuple[str, ...]], linear: set[str]) -> None:
    assert instance(specs, groups).linear_spec_names == linear


@pytest.mark.parametrize("strategy", CachePreferStrategy)
def test_strategies_name_a_type(strategy: CachePreferStrategy) -> None:
    verb, _, kind = strategy.name.removeprefix("CPS_").partition("_")
    preferred = StorageType[f"ST_{kind.replace('TAIR_MEMPOOL', 'TAIRMEMPOOL')}"] if kind else None
    assert (strategy.preferred_type, strategy.is_exclusive) == (preferred, verb == "ALWAYS")
    assert admin_service_pb2.CachePreferStrategy.Value(strategy.name) == strategy


def test_a_quota_of_a_type_that_is_not_listed_is_none() -> None:
    quota = InstanceGroupQuota(10, (QuotaConfig(StorageType.ST_NFS, 5), QuotaConfig(StorageType.ST_3FS, 0)))
    assert [quota.capacity_of(t) for t in (StorageType.ST_NFS, StorageType.ST_3FS, StorageType.ST_DUMMY)] == [
        5,
        0,
        None,
    ]


@pytest.mark.parametrize("storage_type", StorageType)
def test_kinds_and_numbers_of_storage_types(storage_type: StorageType) -> None:
    assert StorageType.of_kind(storage_type.kind) is storage_type
    assert meta_service_pb2.StorageType.Value(storage_type.name) == storage_type


# ── Password hashes ──


PASSWORD = "correct horse 鍵"


def test_a_hash_matches_its_password_only() -> None:
    hashed = PasswordHash.of(PASSWORD)
    assert hashed.matches(PASSWORD)
    assert not hashed.matches(PASSWORD + " ")
    assert not hashed.matches("")


def test_a_hash_is_scrypt_with_its_salt() -> None:
    salt = bytes(range(16))
    assert PasswordHash.of(PASSWORD, salt).digest == scrypt(PASSWORD.encode(), salt=salt, n=16384, r=8, p=1)


def test_every_hash_has_a_salt_of_its_own() -> None:
    first, second = PasswordHash.of(PASSWORD), PasswordHash.of(PASSWORD)
    assert first.salt != second.salt
    assert first.digest != second.digest
    assert len(first.salt) >= 16


def test_nothing_secret_is_printed() -> None:
    hashed = PasswordHash.of(PASSWORD)
    account = Account("admin", AccountRole.ROLE_ADMIN, hashed)
    for text in (repr(hashed), str(hashed), repr(account), str(account), f"{hashed}"):
        assert PASSWORD not in text
        for secret in (hashed.salt, hashed.digest):
            assert secret.hex() not in text
            assert repr(secret)[2:-1] not in text
    assert "admin" in repr(account)


# ── Ending tasks ──


async def test_a_task_that_loses_a_cancellation_is_cancelled_again(monkeypatch) -> None:
    monkeypatch.setattr(tasks, "_RETRY_SECONDS", 0.01)
    lost = 0

    async def goes_round() -> None:
        nonlocal lost
        while lost < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1
        await asyncio.Event().wait()

    task = asyncio.create_task(goes_round())
    await asyncio.sleep(0)
    await end_tasks([task])
    assert task.cancelled()
    assert lost == 3


async def test_tasks_that_fail_or_have_ended_are_no_trouble() -> None:
    async def fails() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        raise ValueError

    async def nothing() -> None:
        pass

    ended, failing = asyncio.create_task(nothing()), asyncio.create_task(fails())
    await asyncio.sleep(0)
    await end_tasks([ended, failing])
    assert isinstance(failing.exception(), ValueError)
    await end_tasks([])
