"""The options with which commands reach a manager (address, API key, certificates), and the completion of names."""

from __future__ import annotations

import dataclasses
import os
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from kvcm.commands.options import first_line
from kvcm.model.errors import InvalidArgumentError, NotReadyError
from kvcm.protocol import admin_service_pb2 as admin_pb
from kvcm.protocol.kvcm.v1 import access_service_pb2 as access_pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import group_service_pb2 as group_pb
from kvcm.terminal.admin_client import AdminClient

__all__ = [
    "ADMIN_URL",
    "Connection",
    "account_names",
    "block_store_names",
    "group_names",
    "instance_ids",
    "key_ids",
    "quota_names",
    "storage_names",
]

ADMIN_URL = "http://127.0.0.1:6492"
_KEY_VARIABLE = "KVCM_KEY"
_FILE = "FILE"
_PANEL = "Connection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Options of every command that calls a manager. A key is never one of them: other users see command lines."""

    manager: Annotated[
        str,
        typer.Option(
            "--manager",
            rich_help_panel=_PANEL,
            envvar="KVCM_MANAGER",
            metavar="URL",
            help="HTTP address of its admin port.",
        ),
    ] = ADMIN_URL
    data_manager: Annotated[
        str,
        typer.Option(
            "--data-manager",
            rich_help_panel=_PANEL,
            envvar="KVCM_DATA_MANAGER",
            metavar="URL",
            help="HTTP address of its data port, for calls of engines; by default the one that the manager advertises.",
        ),
    ] = ""
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key-file",
            rich_help_panel=_PANEL,
            envvar="KVCM_KEY_FILE",
            metavar=_FILE,
            help="File with the key to show, readable by you only; or set KVCM_KEY to the key itself.",
        ),
    ] = None
    ca_file: Annotated[
        Path | None,
        typer.Option(
            "--ca-file",
            rich_help_panel=_PANEL,
            envvar="KVCM_CA_FILE",
            metavar=_FILE,
            help="Certificates (PEM) to trust for https, instead of those of the system.",
        ),
    ] = None
    cert_file: Annotated[
        Path | None,
        typer.Option(
            "--cert-file",
            rich_help_panel=_PANEL,
            envvar="KVCM_CERT_FILE",
            metavar=_FILE,
            help="Certificate (PEM) to show.",
        ),
    ] = None
    cert_key_file: Annotated[
        Path | None,
        typer.Option(
            "--cert-key-file",
            rich_help_panel=_PANEL,
            envvar="KVCM_CERT_KEY_FILE",
            metavar=_FILE,
            help="Its private key (PEM).",
        ),
    ] = None

    def admin(self) -> AdminClient:
        """Return a client of the admin port.

        Raises:
            InvalidArgumentError: an address is malformed, other users can read the key file, or a certificate is
                unusable.
            OSError: a file cannot be read.
        """
        return self._client(self.manager)

    def data(self) -> AdminClient:
        """Return a client of the data port: that of `--data-manager`, else the one that the manager advertises.

        Raises:
            NotReadyError: the manager is unavailable, or advertises no data port.
            InvalidArgumentError, OSError: as for `admin`.
        """
        return self._client(self.data_manager or self._advertised_data_url())

    def at(self, url: str) -> AdminClient:
        """Return a client of another address, with the same key."""
        return self._client(url)

    def without_key(self) -> AdminClient:
        """Return a client of the admin port without a key, for a login."""
        return AdminClient(self.manager, tls=self._tls(self.manager))

    def _client(self, url: str) -> AdminClient:
        return AdminClient(url, self._key(), self._tls(url))

    def _key(self) -> str:
        if self.key_file is not None:
            return first_line(self.key_file, "key file").strip()
        return os.environ.get(_KEY_VARIABLE, "").strip()

    def _advertised_data_url(self) -> str:
        answer = self.admin().call(
            "GetManagerClusterInfo",
            admin_pb.GetManagerClusterInfoRequest(),
            admin_pb.GetManagerClusterInfoResponse,
        )
        endpoint = answer.leader_endpoint
        if not endpoint.meta_http_port:
            raise NotReadyError(
                f"{self.manager} does not say where its data port is, since no manager leads at the moment: "
                "give --data-manager"
            )
        parts = urlsplit(self.manager)
        # This manager is reached by the host that was given; its own name for itself may not resolve here.
        host = parts.hostname if answer.self_node_id == answer.leader_node_id else endpoint.host
        shown = f"[{host}]" if host and ":" in host else host
        return f"{parts.scheme}://{shown}:{endpoint.meta_http_port}"

    def _tls(self, url: str) -> ssl.SSLContext | None:
        if not url.startswith("https://"):
            return None
        context = ssl.create_default_context(cafile=self._existing(self.ca_file))
        if self.cert_key_file is not None and self.cert_file is None:
            raise InvalidArgumentError(f"--cert-key-file {self.cert_key_file} needs --cert-file too")
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self._existing(self.cert_key_file))
            except ssl.SSLError as error:
                raise InvalidArgumentError(
                    f"--cert-file {self.cert_file} and its key cannot be used: {error.reason or error}"
                ) from error
        return context

    @staticmethod
    def _existing(path: Path | None) -> str | None:
        if path is not None and not path.is_file():
            raise InvalidArgumentError(f"{path} is not a file")  # the TLS library does not say which one is missing
        return None if path is None else str(path)


# Names that the shell completes, from the manager. After an error there are no proposals and no message.

_SECONDS = 1.0  # the user waits with a finger on the key
_Completion = Callable[[typer.Context, str], list[str]]


def _completing(names: Callable[[AdminClient], Iterable[str]]) -> _Completion:
    def complete(context: typer.Context, incomplete: str) -> list[str]:
        try:
            found = sorted(names(_connection(context.params).admin()))
        except Exception:  # the shell cannot show errors
            return []
        return [name for name in found if name.startswith(incomplete)]

    return complete


def _connection(given: dict[str, Any]) -> Connection:
    fields = {field.name: given.get(field.name) for field in dataclasses.fields(Connection)}
    known = {name: value for name, value in fields.items() if value}
    paths = {name: Path(value) for name, value in known.items() if name.endswith("_file")}
    return Connection(**{**known, **paths})


def _groups(client: AdminClient) -> list[str]:
    return [group.name for group in client.groups(_SECONDS)]


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


def _block_stores(client: AdminClient) -> list[str]:
    request = group_pb.ListGroupStoreRequest()
    answer = client.call("ListGroupStore", request, group_pb.ListGroupStoreResponse, _SECONDS)
    return [store.name for store in answer.stores]


account_names = _completing(_accounts)
"""Names of accounts."""
block_store_names = _completing(_block_stores)
"""Names of metadata stores."""
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
