"""Names that the shell completes, asked of the manager. Whatever goes wrong, there are no proposals and no words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer

from kvcm.admin_client import AdminClient
from kvcm.commands.connection import Connection
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import access_service_pb2 as access_pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import group_service_pb2 as group_pb

__all__ = ["account_names", "group_names", "instance_ids", "key_ids", "quota_names", "storage_names"]

_SECONDS = 1.0  # somebody waits with a finger on the key

Completion = Callable[[typer.Context, str], list[str]]


def _completing(names: Callable[[AdminClient], Iterable[str]]) -> Completion:
    def complete(context: typer.Context, incomplete: str) -> list[str]:
        try:
            found = sorted(names(_connection(context.params).admin()))
        except Exception:  # the shell has no place for what went wrong
            return []
        return [name for name in found if name.startswith(incomplete)]

    return complete


def _connection(given: dict[str, Any]) -> Connection:
    fields = {field.name: given.get(field.name) for field in dataclasses.fields(Connection)}
    known = {name: value for name, value in fields.items() if value}
    paths = {name: Path(value) for name, value in known.items() if name.endswith("_file")}
    return Connection(**{**known, **paths})


def _groups(client: AdminClient) -> list[str]:
    request = group_pb.ListInstanceGroupRequest()
    answer = client.call("ListInstanceGroup", request, group_pb.ListInstanceGroupResponse, _SECONDS)
    return [group.name for group in answer.instance_groups]


def _storages(client: AdminClient) -> list[str]:
    answer = client.call("ListStorage", admin_pb.ListStorageRequest(), admin_pb.ListStorageResponse, _SECONDS)
    return [storage.global_unique_name for storage in answer.storage]


def _instances(client: AdminClient) -> list[str]:
    request = admin_pb.ListInstanceInfoRequest()
    answer = client.call("ListInstanceInfo", request, admin_pb.ListInstanceInfoResponse, _SECONDS)
    return [instance.instance_id for instance in answer.instance_info]


def _accounts(client: AdminClient) -> list[str]:
    answer = client.call("ListAccount", admin_pb.ListAccountRequest(), admin_pb.ListAccountResponse, _SECONDS)
    return [account.user_name for account in answer.accounts]


def _quotas(client: AdminClient) -> list[str]:
    request = capacity_pb.ListGlobalQuotaRequest()
    answer = client.call("ListGlobalQuota", request, capacity_pb.ListGlobalQuotaResponse, _SECONDS)
    return [quota.name for quota in answer.global_quotas]


def _keys(client: AdminClient) -> list[str]:
    answer = client.call("ListKeys", access_pb.ListKeysRequest(), access_pb.ListKeysResponse, _SECONDS)
    return [key.key_id for key in answer.keys]


account_names = _completing(_accounts)
"""Names of accounts."""

group_names = _completing(_groups)
"""Names of instance groups."""

instance_ids = _completing(_instances)
"""Ids of instances."""

key_ids = _completing(_keys)
"""Ids of keys."""

quota_names = _completing(_quotas)
"""Names of global quotas."""

storage_names = _completing(_storages)
"""Names of storages."""
