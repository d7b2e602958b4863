"""The options of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcm.connectors.reuse.lookups import LookupSettings
from kvcm.connectors.reuse.options import parse_options
from kvcm.connectors.reuse.write_sessions import SessionSettings
from kvcm.model.errors import InvalidArgumentError

__all__ = ["VllmOptions"]


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of the connector.

    Attributes:
        manager: `host:port` of each manager, separated by commas.
        instance_group: existing group whose quota and storages are used.
        instance_id: shared by all engines that serve this model in this way.
        model_name: for people; "" for the name that vLLM serves it under.
        weights: identifies the weights among others of that name; "" for a digest of the files, or the revision.
        load_async: load between steps, while other requests are computed; otherwise a step waits for its loads.
        layerwise: of a step that waits for its loads, a layer waits for its own KV alone; only where `load_async` is
            false.
        publish: save new KV; false only loads.
        keep_on_reset: go on sharing when vLLM resets its caches, as its sleep mode does: the weights stay the same.
        checksums: report those of saved parts, and compare those of loaded ones.
        lookup_seconds: how long a request waits for the manager's answer; then it is a miss.
        call_seconds: for every other call to the manager.
        load_seconds: for loading one request's blocks.
        save_seconds: for saving one batch of blocks.
        session_seconds: for how long the manager keeps blocks for an engine that saves them and may have died.
        save_batch_bytes: most bytes of one write session, over all ranks.
        decode_batch_blocks: blocks of new tokens that are saved together, in one write session; fewer when the request
            ends. Blocks of a prompt are saved after each step.
        pinned_fraction: most blocks of the engine, as a share of all, that saves may keep from being freed.
        staging_bytes: host memory of a rank for loads.
        transfer_threads: most accesses to a storage at once; 0 = number of cores, at most 4.
        shutdown_seconds: for loads and saves in flight when the engine ends; vLLM kills the process after 5 s.
        storage_events: with KV events on, where a manager publishes those of the instance's storages
            (`kvcm.storage_events.sockets`), such as `tcp://manager:5557`: then the engine publishes removals of blocks
            that it stored; "" for none.
        storage_replay: its `replay_endpoint`.
        follow_assignment: call the manager that managers announce for the instance, and `manager` when it does not
            serve; false: `manager` alone.

    Raises:
        InvalidArgumentError: a value is not allowed; names it.
    """

    manager: str
    instance_group: str
    instance_id: str
    model_name: str = ""
    weights: str = ""
    load_async: bool = True
    layerwise: bool = False
    publish: bool = True
    keep_on_reset: bool = False
    checksums: bool = True
    lookup_seconds: float = 0.25
    call_seconds: float = 1.0
    load_seconds: float = 10.0
    save_seconds: float = 20.0
    session_seconds: int = 30
    save_batch_bytes: int = 64 << 20
    decode_batch_blocks: int = 8
    pinned_fraction: float = 0.25
    staging_bytes: int = 64 << 20
    transfer_threads: int = 0
    shutdown_seconds: float = 4.0
    storage_events: str = ""
    storage_replay: str = ""
    follow_assignment: bool = True

    def __post_init__(self) -> None:
        for name in ("manager", "instance_group", "instance_id"):
            if not getattr(self, name):
                raise InvalidArgumentError(f"option {name!r} is empty")
        times = ("lookup_seconds", "call_seconds", "load_seconds", "save_seconds", "session_seconds")
        for name in (*times, "save_batch_bytes", "decode_batch_blocks"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(f"option {name!r} is {getattr(self, name)}, must be > 0")
        if self.layerwise and self.load_async:
            raise InvalidArgumentError("option 'layerwise' is true, which needs 'load_async' to be false")
        if not 0 < self.pinned_fraction <= 0.9:
            raise InvalidArgumentError(f"option 'pinned_fraction' is {self.pinned_fraction}, must be > 0 and <= 0.9")
        if self.staging_bytes < 1 << 20:
            raise InvalidArgumentError(f"option 'staging_bytes' is {self.staging_bytes}, must be at least {1 << 20}")
        _check_endpoints(self.storage_events, self.storage_replay)
        for name in ("transfer_threads", "shutdown_seconds"):
            if getattr(self, name) < 0:
                raise InvalidArgumentError(f"option {name!r} is {getattr(self, name)}, must be >= 0")

    @classmethod
    def parse(cls, extra_config: Mapping[str, object]) -> VllmOptions:
        """Return the options in vLLM's `kv_connector_extra_config`.

        Raises:
            InvalidArgumentError: an option is unknown, missing, of the wrong type or out of range.
        """
        return parse_options(cls, extra_config)

    @property
    def lookups(self) -> LookupSettings:
        """Deadlines of lookups."""
        return LookupSettings(self.lookup_seconds, self.load_seconds)

    @property
    def sessions(self) -> SessionSettings:
        """How long write sessions live."""
        return SessionSettings(self.session_seconds, 3 * self.save_seconds, self.call_seconds)


def _check_endpoints(events: str, replay: str) -> None:
    for name, value in (("storage_events", events), ("storage_replay", replay)):
        if value and not value.startswith(("tcp://", "ipc://")):
            raise InvalidArgumentError(f"option {name!r} is {value!r}, must be an endpoint such as tcp://host:5557")
