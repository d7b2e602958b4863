"""The registration of one instance with the manager, and the storages that come with it.

Registers when first needed, and again when the manager has forgotten the instance. A manager that is absent at the
start is tried again with every use, at a bounded pace; one that refused is not, since a conflict of configuration does
not go away by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from connectors.client import ManagerClient
from connectors.pool_reports import PoolReports, PoolTeller
from connectors.results import Registration, RegistrationState
from connectors.transfer import TransferEngine
from connectors.transfer.pool import PRIORITY_LOAD, WorkerPool
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo, ModelDeployment
from kvcm.model.storages import StorageConfig

__all__ = ["InstanceSpecs", "ManagerLink"]

_log = logging.getLogger(__name__)

_AGAIN_SECONDS = 1.0
_TRIES = 30  # in the background; then it is tried again when somebody asks


@dataclass(frozen=True, slots=True)
class InstanceSpecs:
    """What an instance registers as.

    Attributes:
        instance_group: existing group whose quota and storages are used.
        block_tokens: tokens per block.
        parts: of a block.
        deployment: identity of the model.
        part_groups: named sets of parts that are stored together.
    """

    instance_group: str
    block_tokens: int
    parts: Sequence[LocationSpecInfo]
    deployment: ModelDeployment
    part_groups: Sequence[LocationSpecGroup] = ()


class ManagerLink:
    """Keeps an instance registered; safe to use from several threads.

    Args:
        client: of the manager; closed with the link.
        specs: what to register.
        call_seconds: for each call to the manager.
        make_engine: makes what moves bytes, of the group's storages; None in a process that moves none.
        clock: seconds of a clock that never runs backwards.

    Attributes:
        registration: what the manager last said.
    """

    def __init__(
        self,
        client: ManagerClient,
        specs: InstanceSpecs,
        call_seconds: float,
        make_engine: Callable[[Sequence[StorageConfig]], TransferEngine] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.registration = Registration(RegistrationState.UNREACHABLE, message="not tried yet")
        self._specs = specs
        self._call_seconds = call_seconds
        self._make_engine = make_engine
        self._clock = clock
        self._engine: TransferEngine | None = None
        self._storages: tuple[StorageConfig, ...] | None = None
        self._registering = threading.Lock()
        self._not_before = clock()
        self._background = WorkerPool(1, "kvcm-register")
        self._is_queued = threading.Lock()
        self._is_closed = threading.Event()
        self._pool_teller = PoolTeller(PoolReports(client), call_seconds)

    def register(self, timeout_seconds: float | None = None) -> bool:
        """Register if need be, and return whether the instance is registered. Blocks for the timeout at most."""
        if self.registration.state is RegistrationState.UNREACHABLE:
            with self._registering:
                if self.registration.state is RegistrationState.UNREACHABLE:
                    self._register(self._call_seconds if timeout_seconds is None else timeout_seconds)
        if self.registration.ok and self._engine is not None:
            self._pool_teller.look_after(self._engine)
        return self.registration.ok

    def is_ready(self) -> bool:
        """Return whether the instance is registered, never blocking: if it is not, it is being seen to."""
        if self.registration.ok:
            if self._engine is not None:
                self._pool_teller.look_after(self._engine)
            return True
        is_due = self.registration.state is RegistrationState.UNREACHABLE and self._clock() >= self._not_before
        if is_due and self._is_queued.acquire(blocking=False):
            self._background.submit(PRIORITY_LOAD, self._register_in_background)
        return False

    def engine(self, timeout_seconds: float | None = None) -> TransferEngine | None:
        """Return what moves bytes, None while the instance is not registered. Blocks for the timeout at most."""
        return self._engine if self.register(timeout_seconds) else None

    def engine_now(self) -> TransferEngine | None:
        """The same, never blocking."""
        return self._engine if self.is_ready() else None

    def forget(self) -> None:
        """Register again at the next use: the manager does not know the instance, or we do not know its storages."""
        if self.registration.ok:
            self.registration = Registration(RegistrationState.UNREACHABLE, message="to be registered again")

    def close(self, timeout_seconds: float | None = None) -> None:
        """Close client and storages; what hangs longer than the timeout is left behind."""
        seconds = self._call_seconds if timeout_seconds is None else timeout_seconds
        deadline = self._clock() + seconds
        self._is_closed.set()
        self._background.close(seconds)
        self._pool_teller.close(deadline - self._clock())
        self.client.close()
        if self._engine is not None:
            self._engine.close(deadline - self._clock())

    def _register_in_background(self) -> None:
        """Try for a while: an engine that starts beside its manager should be registered at its first request."""
        try:
            for _ in range(_TRIES):
                self.register()
                if self.registration.state is not RegistrationState.UNREACHABLE or self._is_closed.wait(_AGAIN_SECONDS):
                    break
        finally:
            self._not_before = self._clock() + _AGAIN_SECONDS
            self._is_queued.release()

    def _register(self, timeout_seconds: float) -> None:
        specs = self._specs
        answer = self.client.register_instance(
            specs.instance_group,
            specs.block_tokens,
            specs.parts,
            specs.deployment,
            spec_groups=specs.part_groups,
            timeout_seconds=timeout_seconds,
        )
        if answer.ok and self._make_engine is not None and answer.storages != self._storages:
            try:
                before, self._engine = self._engine, self._make_engine(answer.storages)
            except Exception as error:  # a storage's client may raise anything; the engine that we serve goes on
                _log.exception("the storages of group %s cannot be used, KV is not reused", specs.instance_group)
                answer = Registration(RegistrationState.UNREACHABLE, message=f"storages cannot be used: {error!r}")
            else:
                self._storages = answer.storages
                if before is not None:
                    before.close()
        self.registration = answer
