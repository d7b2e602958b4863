"""Checks of a running manager by its answers: readiness, leader, limits, storages."""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from kvcm.doctor.findings import Finding, Level, check_skew, fail, ok, warn
from kvcm.doctor.host import check_directory
from kvcm.model.errors import InvalidArgumentError, KvcmError
from kvcm.model.groups import InstanceGroup
from kvcm.model.mooncake import mooncake_hosts
from kvcm.model.storages import (
    MooncakeStorageSpec,
    NfsStorageSpec,
    StorageConfig,
    ThreeFSStorageSpec,
    VcnsThreeFSStorageSpec,
)
from kvcm.protocol import admin_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import capacity_service_pb2 as capacity_pb
from kvcm.protocol.kvcm.v1 import insight_service_pb2 as insight_pb
from kvcm.registry.without_effect import group_values_without_effect, storage_values_without_effect
from kvcm.service.translate import read, storage_of
from kvcm.service.usage_values import StorageStatus, UsageReport
from kvcm.storage.file import is_missing
from kvcm.storage.health import HealthState
from kvcm.terminal.admin_client import AdminClient
from kvcm.terminal.exit_codes import NotAllowedError
from kvcm.terminal.tables import problems

__all__ = ["above_watermarks", "check_manager", "check_reachable", "check_storage", "readiness", "status_of"]

# Advice for a manager that does not answer: mostly one side speaks TLS and the other does not.

_START: Final = "start it with `kvcm serve`, or correct --manager"
_RENEW: Final = "renew the manager's certificate (kvcm.tls.cert_file): it reloads the file by itself"
_CLOCKS: Final = "look at the clocks of this host and the manager's: its certificate begins in the future"
_NAME: Final = "ask by a name that its certificate has, or have one issued with this name (SAN)"
_AUTHORITY: Final = "give --ca-file with the authority that issued the manager's certificate"
_ENCRYPT: Final = (
    "if it speaks TLS, ask https:// and give --ca-file; else see whether this is the admin port of a manager"
)
_PLAIN: Final = "it speaks no TLS: ask http://, or set kvcm.tls.cert_file for the manager"
_SHOW: Final = (
    "if it asks clients for certificates (kvcm.tls.client_auth=required), give --cert-file and --cert-key-file"
)
_OTHER: Final = "give a --cert-file that has not ended, of an authority in the manager's kvcm.tls.client_ca_file"
_OF_CERTIFICATE: Final = {9: _CLOCKS, 10: _RENEW, 62: _NAME, 64: _NAME}
"""By numbers of OpenSSL (X509_V_ERR_*)."""
_NO_TLS: Final = {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "UNKNOWN_PROTOCOL"}
_CLOSED: Final = (ConnectionError, http.client.RemoteDisconnected, ssl.SSLError)


def _advice_on(error: BaseException | None, *, is_secure: bool, shows_certificate: bool) -> str:
    """Return the advice for an error of a request.

    Args:
        error: of the connection.
        is_secure: whether the client spoke TLS.
        shows_certificate: whether the client had a certificate.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return _OF_CERTIFICATE.get(error.verify_code, _AUTHORITY)
    if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
        return _PLAIN
    if isinstance(error, ConnectionRefusedError) or not isinstance(error, _CLOSED):
        return _START
    if not is_secure:
        return _ENCRYPT
    return _OTHER if shows_certificate else _SHOW


_NO_SPACE: Final = "a write found no space a moment ago"
_FREE_SPACE: Final = (
    "its blocks are evicted until there is space. If other files fill it, free space or give it a medium of its own; "
    "a capacity_bytes below the medium's size lets blocks leave in time"
)

# The check.

_SECONDS = 2.0


def check_reachable(check: str, what: str, address: str) -> Finding:
    """Return whether a server listens at an address.

    Args:
        check: name of the check.
        what: name of the server.
        address: host:port.
    """
    parts = urlsplit(f"//{address}")
    try:
        if parts.port is None:
            return ok(check, f"{what} {address} names no port: it was not tried")
        with socket.create_connection((parts.hostname or "", parts.port), _SECONDS):
            return ok(check, f"{what} {address} can be reached")
    except (OSError, ValueError) as error:
        return fail(
            check, f"{what} {address} cannot be reached: {error}", "start it, or correct the storage's settings"
        )


_CHECK = "manager"
_STORE = "metadata store"
_OF_STORE = {"KvcmStoreUnsound", "KvcmStoreLostChanges"}
_MOUNTED = (ThreeFSStorageSpec, VcnsThreeFSStorageSpec)
_PATHS = (NfsStorageSpec, *_MOUNTED)


def check_manager(
    client: AdminClient, *, is_expected: bool, is_here: bool = True, shows_certificate: bool = False
) -> Iterator[Finding]:
    """Yield findings of a manager.

    Args:
        client: of its admin port.
        is_expected: whether it has to run.
        is_here: whether this is its host: then storages are checked from here, too.
        shows_certificate: whether the client has one.
    """
    try:
        page = client.page("/readyz?verbose")
    except KvcmError as error:
        if is_expected or not isinstance(error.__cause__, ConnectionRefusedError):
            is_secure = client.url.startswith("https:")
            advice = _advice_on(error.__cause__, is_secure=is_secure, shows_certificate=shows_certificate)
            yield fail(_CHECK, str(error), advice)
        else:
            yield ok(_CHECK, f"none runs at {client.url}; `kvcm serve` starts one")
        return
    yield from readiness(client.url, page.status, page.body.decode(errors="replace"))
    for check in (_leader, _store, _usage, partial(_storages, is_here=is_here), _without_effect):
        yield from _call(client, check)


def _call(client: AdminClient, check: Callable[[AdminClient], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check(client)
    except NotAllowedError as error:
        yield warn(_CHECK, str(error), "give a key of the role viewer at least")
    except KvcmError as error:
        yield fail(_CHECK, str(error), "look into its log")


def readiness(url: str, status: int, text: str) -> Iterator[Finding]:
    """Yield findings of the readiness page."""
    if status not in {200, 503}:
        yield fail(_CHECK, f"{url} answers /readyz with HTTP {status}", "is it the admin port of a manager?")
        return
    reasons = [line.removeprefix("[-]") for line in text.splitlines() if line.startswith("[-]")]
    if status == 200:
        yield ok(_CHECK, f"{url} is ready")
    for reason in reasons or (["it does not say why"] if status != 200 else []):
        yield fail(
            _CHECK, f"{url} is not ready: {reason}", "wait if it starts or stops; else see its log and its store"
        )


def _leader(client: AdminClient) -> Iterator[Finding]:
    before = time.time()
    answer = client.call("GetManagerClusterInfo", pb.GetManagerClusterInfoRequest(), pb.GetManagerClusterInfoResponse)
    middle = (before + time.time()) / 2
    if not answer.leader_node_id:
        yield fail(
            _CHECK,
            "no manager leads: nothing is evicted, deleted or probed for garbage",
            "look at kvcm_leader of all managers, and at the store that holds the lease",
        )
    else:
        where = "this one" if answer.leader_node_id == answer.self_node_id else answer.leader_node_id
        yield ok(_CHECK, f"{where} leads")
    answered_us = answer.header.request_id.rpartition("_")[2]
    if answered_us.isdecimal():
        yield check_skew(f"manager {client.url}", int(answered_us) / 1e6 - middle)


def _store(client: AdminClient) -> Iterator[Finding]:
    """Yield what the manager saw of a store that it shares, for a day also where that is over."""
    answer = client.call("ListAlerts", insight_pb.ListAlertsRequest(), insight_pb.ListAlertsResponse)
    for alert in answer.alerts:
        if alert.name in _OF_STORE:
            yield fail(_STORE, f"{alert.summary} {alert.reason}", alert.advice)


def _usage(client: AdminClient) -> Iterator[Finding]:
    answer = client.call("GetUsage", capacity_pb.GetUsageRequest(), capacity_pb.GetUsageResponse)
    report = read(UsageReport, answer)
    found = [_problem_finding(bad, text) for bad, text in problems(report)]
    found += above_watermarks(report)
    yield from found or [ok("capacity", "no group, storage or global quota is full")]


def above_watermarks(report: UsageReport) -> list[Finding]:
    """Return the groups above their watermarks; if that lasts, eviction does not keep up."""
    above = (each for each in report.groups if each.total.is_above_mark and not each.total.is_full)
    advice = "if that lasts, see `kvcm storage list` and kvcm_reclaim_* metrics: deletions may fail or be slow"
    return [warn("capacity", f"group {each.name} is above its watermark and evicts", advice) for each in above]


def _problem_finding(is_bad: bool, text: str) -> Finding:
    advice = "raise a limit, remove blocks that nothing needs, or set marks below the limits: `kvcm usage` shows all"
    return Finding(Level.FAIL if is_bad else Level.WARN, "capacity", text, advice)


def _storages(client: AdminClient, *, is_here: bool) -> Iterator[Finding]:
    answer = client.call("ListStorage", pb.ListStorageRequest(), pb.ListStorageResponse)
    known = {each.storage_unique_name: read(StorageStatus, each) for each in answer.storage_status}
    if not answer.storage:
        yield fail("storages", "there is none: nothing can be stored", "`kvcm storage add`")
    for config in map(storage_of, answer.storage):
        status = known.get(config.global_unique_name)
        if status is not None:
            yield status_of(status)
        if is_here:
            yield from check_storage(config)


def _without_effect(client: AdminClient) -> Iterator[Finding]:
    """Yield the stored values that have no effect."""
    storages = client.call("ListStorage", pb.ListStorageRequest(), pb.ListStorageResponse)
    sentences = [
        f"storage {config.global_unique_name}: {text}"
        for config in map(storage_of, storages.storage)
        for text in storage_values_without_effect(config)
    ]
    sentences += [
        f"group {message.name}: {text}"
        for message in client.groups()
        for text in group_values_without_effect(read(InstanceGroup, message))
    ]
    for sentence in sentences:
        yield warn("settings", sentence, "leave it out, or set what the sentence names")


def status_of(status: StorageStatus) -> Finding:
    """Return the health of a storage as the manager that answered sees it."""
    name = f"storage {status.storage_unique_name}"
    if not status.is_enabled:
        return warn(
            "storages", f"{name} is disabled: its blocks count as missing", "`kvcm storage enable` uses it again"
        )
    if status.health is HealthState.SH_DOWN:
        return fail(
            "storages", f"{name} is down for the manager: {status.reason}", "repair it; it comes back by itself"
        )
    if status.is_full:
        return warn("storages", f"{name} is full: {status.reason or _NO_SPACE}", _FREE_SPACE)
    if status.health is HealthState.SH_DEGRADED:
        return warn("storages", f"{name} is degraded: {status.reason}", "look at its medium and at its network")
    if status.is_draining:
        return warn("storages", f"{name} is being drained", "`kvcm storage drains` shows what is left")
    return ok("storages", f"{name} is up for the manager")


def check_storage(config: StorageConfig) -> Iterator[Finding]:
    """Yield findings of a storage as this host sees it."""
    spec, check = config.spec, f"storage {config.global_unique_name}"
    if isinstance(spec, _MOUNTED) and not config.check_storage_available_when_open and is_missing(spec.mountpoint):
        found = f"{spec.mountpoint} does not exist on this host, and need not: the storage's check is off"
        yield warn(
            check, found, "a manager without it neither probes it nor deletes there: mount it where a manager leads"
        )
    elif isinstance(spec, _PATHS):
        yield from check_directory(check, Path(spec.root), is_made=isinstance(spec, NfsStorageSpec))
    elif isinstance(spec, MooncakeStorageSpec):
        yield from _mooncake(check, spec)


def _mooncake(check: str, spec: MooncakeStorageSpec) -> Iterator[Finding]:
    try:
        hosts: Sequence[tuple[str, object]] = mooncake_hosts(spec)
    except InvalidArgumentError as error:
        yield fail(check, str(error), "`kvcm storage update` with --set corrects it")
        return
    for name, host in hosts:
        yield check_reachable(check, name, str(host))
