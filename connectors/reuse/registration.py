"""Registration of one instance with the manager, the storages that come with it, and the identity of its KV.

An instance registers at its first use, and again when the manager has lost it. With an unreachable manager every use
retries, at a bounded rate. A refused registration is retried too, ever more rarely: the group may be created a moment
later, and an operator resolves a conflict without stopping the engine.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.pool_reports import PoolReporter, PoolReports
from kvcm.connectors.results import Registration, RegistrationState
from kvcm.connectors.transfer import TransferEngine
from kvcm.connectors.transfer.worker_pool import PRIORITY_LOAD, WorkerPool
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo, ModelDeployment
from kvcm.model.storages import StorageConfig

__all__ = ["InstanceSpecs", "KvIdentity", "ManagerLink"]

_log = logging.getLogger(__name__)
_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 60.0
_TRIES = 30  # in the background; then the next use tries again


@dataclass(frozen=True, slots=True)
class InstanceSpecs:
    """Registration data of an instance.

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
        specs: registration data.
        call_seconds: for each call to the manager.
        make_engine: makes the transfer engine for the group's storages; None in a process without transfers.
        clock: seconds of a clock that never runs backwards.

    Attributes:
        registration: last answer of the manager.
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
        self._next_attempt_at = clock()
        self._refusals = 0
        self._background = WorkerPool(1, "kvcm-register")
        self._is_queued = threading.Lock()
        self._is_closed = threading.Event()
        self._pool_reporter = PoolReporter(PoolReports(client), call_seconds)

    def register(self, timeout_seconds: float | None = None) -> bool:
        """Register if need be, and return whether the instance is registered. Blocks for the timeout at most."""
        if self._may_register():
            with self._registering:
                if self._may_register():
                    self._register(self._call_seconds if timeout_seconds is None else timeout_seconds)
        if self.registration.ok and self._engine is not None:
            self._pool_reporter.report_pools(self._engine)
        return self.registration.ok

    def is_ready(self) -> bool:
        """Return whether the instance is registered, without blocking; if not, register in the background."""
        if self.registration.ok:
            if self._engine is not None:
                self._pool_reporter.report_pools(self._engine)
            return True
        is_due = self._clock() >= self._next_attempt_at
        if is_due and self._is_queued.acquire(blocking=False):
            self._background.submit(PRIORITY_LOAD, self._register_in_background)
        return False

    def engine(self, timeout_seconds: float | None = None) -> TransferEngine | None:
        """Return the transfer engine, None while the instance is not registered. Blocks for the timeout at most."""
        return self._engine if self.register(timeout_seconds) else None

    def engine_if_ready(self) -> TransferEngine | None:
        """The same, never blocking."""
        return self._engine if self.is_ready() else None

    def invalidate(self) -> None:
        """Register again at the next use: the manager does not know the instance, or we do not know its storages."""
        if self.registration.ok:
            self.registration = Registration(RegistrationState.UNREACHABLE, message="to be registered again")

    def close(self, timeout_seconds: float | None = None) -> None:
        """Close client and storages; accesses that hang longer than the timeout are abandoned."""
        seconds = self._call_seconds if timeout_seconds is None else timeout_seconds
        deadline = self._clock() + seconds
        self._is_closed.set()
        self._background.close(seconds)
        self._pool_reporter.close(deadline - self._clock())
        self.client.close()
        if self._engine is not None:
            self._engine.close(deadline - self._clock())

    def _may_register(self) -> bool:
        """Return whether a caller who waits may try: always, unless the manager refused a moment ago."""
        if self.registration.state is RegistrationState.REFUSED:
            return self._clock() >= self._next_attempt_at
        return not self.registration.ok

    def _register_in_background(self) -> None:
        """Retry for a while, so that an engine that starts beside its manager is registered at its first request."""
        try:
            for _ in range(_TRIES):
                self.register()
                if self.registration.state is not RegistrationState.UNREACHABLE or self._is_closed.wait(_RETRY_SECONDS):
                    break
        finally:
            if self.registration.state is RegistrationState.UNREACHABLE:
                self._next_attempt_at = self._clock() + _RETRY_SECONDS
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
        if answer.ok:
            self._pool_reporter.reset()  # a manager that needs another registration has lost its reports
        is_refused = answer.state is RegistrationState.REFUSED
        self._refusals = self._refusals + 1 if is_refused else 0
        if is_refused:
            pause = min(_RETRY_SECONDS * 2 ** (self._refusals - 1), _MAX_RETRY_SECONDS)
            self._next_attempt_at = self._clock() + pause
        self.registration = answer


# ---- identity of the KV ----
#
# Engines may share KV exactly when the same tokens give the same bytes. Everything else that the bytes depend on is
# part of the namespace of the block keys. What stays as it is while an engine runs is also registered with the manager,
# which rejects an engine that differs. Weights may change: engines of one instance may have others, for a while or for
# good.


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """Everything that the stored KV of given tokens depends on, besides the weights.

    Attributes:
        model: name of the model, for people.
        engine: family of the engine and version of its layout: two engines' KV is not interchangeable.
        dtype: of K and V, quantisation included.
        hashing: algorithm and seed of the block keys.
        formats: how each part of a block is stored, by name of the group of layers.
        tp_size: ranks that share the heads.
        pp_size: ranks that share the layers.
        cp_size: ranks that share the tokens of a context.
        use_mla: whether KV is MLA's latent one.
        extra: other settings that this engine's KV depends on.

    Raises:
        InvalidArgumentError: a text is empty, or a size is not positive; names it.
    """

    model: str
    engine: str
    dtype: str
    hashing: str
    formats: Mapping[str, str]
    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    use_mla: bool = False
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("model", "engine", "dtype", "hashing", "formats"):
            if not getattr(self, name):
                raise InvalidArgumentError(f"{name} is empty, must say what the KV depends on")
        for name in ("tp_size", "pp_size", "cp_size"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, must be > 0")

    def deployment(self) -> ModelDeployment:
        """Return the registration data of the model."""
        return ModelDeployment(
            model_name=self.model,
            dtype=self.dtype,
            use_mla=self.use_mla,
            tp_size=self.tp_size,
            dp_size=1,  # replicas share: which of them computed a block does not matter
            pp_size=self.pp_size,
            extra=json.dumps(
                {
                    **self.extra,
                    "cp_size": self.cp_size,
                    "engine": self.engine,
                    "formats": dict(self.formats),
                    "keys": self.hashing,
                },
                sort_keys=True,
            ),
        )

    @classmethod
    def from_deployment(cls, deployment: ModelDeployment) -> KvIdentity:
        """Return the identity that was registered as `deployment()`.

        Raises:
            InvalidArgumentError: no connector of ours registered it.
        """
        try:
            extra = json.loads(deployment.extra)
            own = {name: extra.pop(name) for name in ("cp_size", "engine", "formats", "keys")}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise InvalidArgumentError(f"model_deployment.extra is not that of a connector ({error!r})") from None
        return cls(
            model=deployment.model_name,
            engine=own["engine"],
            dtype=deployment.dtype,
            hashing=own["keys"],
            formats=own["formats"],
            tp_size=deployment.tp_size,
            pp_size=deployment.pp_size,
            cp_size=own["cp_size"],
            use_mla=deployment.use_mla,
            extra=extra,
        )

    def namespace(self, weights_version: str, adapter: str = "") -> bytes:
        """Return bytes that every block key depends on.

        Args:
            weights_version: equal for engines with equal weights, and for no others.
            adapter: version of the adapter that is applied to them, "" for none.

        Raises:
            InvalidArgumentError: the version is empty.
        """
        if not weights_version:
            raise InvalidArgumentError("weights_version is empty, must say which weights the KV was computed with")
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return _encoded({**fields, "weights_version": weights_version, "adapter": adapter})


def _encoded(value: object) -> bytes:
    """Return bytes that no other value has: each part has its type and its length before it."""
    if isinstance(value, Mapping):
        parts = [_encoded(name) + _encoded(value[name]) for name in sorted(value)]
        return _part(b"m", b"".join(parts))
    if isinstance(value, bool):
        return _part(b"b", b"1" if value else b"0")
    if isinstance(value, int):
        return _part(b"i", str(value).encode())
    assert isinstance(value, str), value
    return _part(b"s", value.encode())


def _part(kind: bytes, data: bytes) -> bytes:
    return kind + len(data).to_bytes(8, "little") + data
