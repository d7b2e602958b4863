"""The host agent: creates the memory of one pool, checks it and reports it to the managers. Command `kvcm-pool-agent`.

Engines share the memory without it too, but then they have to create it, and managers do not notice when the node is
gone. The agent never touches the bytes of blocks; when it ends, the memory stays.

Exit codes: 0 after SIGTERM or SIGINT; 1 when the memory can be neither used nor created at the start; 2 for arguments.
Later failures do not end it: the agent stops reporting the pool, so it takes no writes until its check passes again.
"""

from __future__ import annotations

import argparse
import logging
import re
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvcm.connectors.client import ManagerClient, parse_addresses
from kvcm.connectors.credentials import ClientCredentials, add_options, credentials_of
from kvcm.connectors.exchanges import ClientSettings
from kvcm.connectors.node import NodeSettings
from kvcm.connectors.results import PoolReport
from kvcm.connectors.transfer.pool_segment import PoolAccess, PoolSegment, segment_path
from kvcm.model.errors import InvalidArgumentError, StorageIOError
from kvcm.model.storages import MIN_POOL_BYTES
from kvcm.model.uri import check_storage_name

__all__ = ["AgentSettings", "PoolAgent", "main", "parse_arguments"]

_SIZE = re.compile(r"([0-9]{1,18})([KMGT]?)")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MIN_INTERVAL_SECONDS, _MAX_INTERVAL_SECONDS = 0.1, 3600.0
_VALID_INTERVALS = 3  # so many reports in a row may fail
_TOKEN_BYTES = 64
_log = logging.getLogger("kvcm.pool_agent")


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of the agent.

    Attributes:
        storage: name of the pool.
        capacity_bytes: of its data.
        managers: `host:port` of each manager, separated by commas.
        node: where it runs.
        interval_seconds: between two reports.
        touches: have all memory mapped before the first report.
        removes_on_exit: take the memory away at the end.
        credentials: for authentication and TLS.
    """

    storage: str
    capacity_bytes: int
    managers: str
    node: NodeSettings
    interval_seconds: float = 5.0
    touches: bool = False
    removes_on_exit: bool = False
    credentials: ClientCredentials = field(default_factory=ClientCredentials)

    @property
    def valid_ms(self) -> int:
        """How long a report holds."""
        return int(self.interval_seconds * _VALID_INTERVALS * 1000)


class PoolAgent:
    """Keeps one pool.

    Args:
        settings: what to do.
        access: to the segment.
        report: reports to the managers: storage, node, generation, capacity; None on error.
    """

    def __init__(
        self,
        settings: AgentSettings,
        access: PoolAccess,
        report: Callable[[str, str, int, int], PoolReport | None],
    ) -> None:
        self._settings = settings
        self._access = access
        self._report = report
        self._confirmed_generation: int | None = None  # the last one that a manager confirmed
        self._trouble = ""

    def start(self) -> None:
        """Attach to the memory, or make it.

        Raises:
            StorageIOError: it can neither be used nor made.
        """
        segment = self._access.find_or_create()
        if self._settings.touches:
            try:
                segment.touch()
            except OSError as error:
                _log.warning("the memory cannot be touched in advance: %s", error.strerror)
        _log.info(
            "memory pool %s: %d bytes, generation %016x",
            self._access.path,
            segment.header.capacity_bytes,
            segment.header.generation,
        )

    def tick(self) -> bool:
        """Check the memory once and report it; return whether a manager has confirmed it."""
        try:
            segment = self._access.find_or_create()
            is_well = segment.passes_check(secrets.token_bytes(_TOKEN_BYTES))
        except (StorageIOError, OSError) as error:
            return self._log_failure(str(error))
        if not is_well:
            return self._log_failure(f"memory pool {self._access.path}: what is written is not read back")
        return self._send_report(segment)

    def run(self, stop: threading.Event) -> None:
        """Tick until `stop` is set."""
        while True:
            self.tick()
            if stop.wait(self._settings.interval_seconds):
                break
        if self._settings.removes_on_exit:
            with suppress(FileNotFoundError):
                self._access.path.unlink()
            _log.info("memory pool %s is removed", self._access.path)

    def _send_report(self, segment: PoolSegment) -> bool:
        header = segment.header
        settings = self._settings
        answer = self._report(settings.storage, settings.node.node_id, header.generation, header.capacity_bytes)
        if answer is None:
            return self._log_failure("no manager took the report")
        if self._confirmed_generation != header.generation or self._trouble:
            news = ", blocks of before are forgotten" if answer.is_new_generation else ""
            _log.info("the managers know of generation %016x%s", header.generation, news)
        self._confirmed_generation, self._trouble = header.generation, ""
        return True

    def _log_failure(self, trouble: str) -> bool:
        if trouble != self._trouble:
            _log.error("the pool takes no writes until this is resolved: %s", trouble)
        self._trouble = trouble
        return False


def parse_arguments(arguments: Sequence[str]) -> AgentSettings:
    """Return what the command line and the environment say.

    Raises:
        SystemExit: an argument is missing or malformed; says which.
    """
    parser = _parser()
    found = parser.parse_args(arguments)
    try:
        check_storage_name("--storage", found.storage)
        node, credentials = _node(found), credentials_of(found)
    except InvalidArgumentError as error:
        parser.error(str(error))
    if not node.node_id:
        parser.error("--node-id is not given, and the host's name cannot be one: 1 to 128 characters A-Z a-z 0-9 . _ -")
    return AgentSettings(
        storage=found.storage,
        capacity_bytes=found.capacity,
        managers=found.manager,
        node=node,
        interval_seconds=found.interval,
        touches=found.prefault,
        removes_on_exit=found.remove_on_exit,
        credentials=credentials,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the agent until a signal ends it; return its exit code."""
    settings = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    node = settings.node
    path = segment_path(node.pool_directory, node.cluster_id, settings.storage)
    # No call of the agent is about an instance.
    client_settings = ClientSettings(credentials=settings.credentials)
    with ManagerClient(settings.managers, "kvcm-pool-agent", client_settings) as client:

        def report(storage: str, node_id: str, generation: int, capacity_bytes: int) -> PoolReport | None:
            timeout = min(settings.interval_seconds, 5.0)
            return client.report_pool(
                storage, node_id, generation, capacity_bytes, valid_ms=settings.valid_ms, timeout_seconds=timeout
            )

        agent = PoolAgent(settings, PoolAccess(path, settings.capacity_bytes), report)
        try:
            agent.start()
        except StorageIOError as error:
            _log.critical("%s", error)
            return 1
        agent.run(stop)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvcm-pool-agent", description="Keep the memory of a pool on this node and tell the managers of it."
    )
    parser.add_argument("--storage", required=True, help="name of the storage")
    parser.add_argument("--capacity", required=True, type=_size, help="bytes, with K, M, G or T: 64G")
    parser.add_argument("--manager", required=True, type=_addresses, help="host:port of each manager, by commas")
    parser.add_argument("--node-id", default="", help="default: KVCM_NODE_ID, else the host's name")
    parser.add_argument("--directory", type=Path, help="default: KVCM_POOL_DIRECTORY, else /dev/shm")
    parser.add_argument("--cluster-id", help="default: KVCM_CLUSTER_ID, else none")
    parser.add_argument("--interval", type=_interval, default=5.0, help="seconds between two reports, default 5")
    parser.add_argument("--prefault", action="store_true", help="have all memory mapped before the first report")
    parser.add_argument("--remove-on-exit", action="store_true", help="take the memory away at the end")
    add_options(parser)
    return parser


def _node(found: argparse.Namespace) -> NodeSettings:
    node = NodeSettings.from_environment()
    if found.node_id:
        check_storage_name("--node-id", found.node_id)
        node = replace(node, node_id=found.node_id)
    if found.directory is not None:
        node = replace(node, pool_directory=found.directory.absolute())
    if found.cluster_id is not None:
        node = replace(node, cluster_id=found.cluster_id)
    return node


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text.upper().removesuffix("IB"))
    size_bytes = int(match[1]) * _UNITS[match[2]] if match else 0
    if size_bytes < MIN_POOL_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} must be bytes, with K, M, G or T behind, at least 1M")
    return size_bytes


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _MIN_INTERVAL_SECONDS <= seconds <= _MAX_INTERVAL_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be {_MIN_INTERVAL_SECONDS:g} to {_MAX_INTERVAL_SECONDS:g} seconds"
        )
    return seconds


def _addresses(text: str) -> str:
    try:
        return ",".join(parse_addresses(text))
    except InvalidArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
