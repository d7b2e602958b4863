"""Options of the storage backend: `--hicache-storage-backend-extra-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvcm.connectors.reuse.options import parse_options
from kvcm.model.errors import InvalidArgumentError

__all__ = ["SglangOptions"]

# Options that SGLang reads itself: most of them it takes out before a backend sees them, not all in all versions.
_OF_SGLANG = frozenset(
    {
        "backend_name",
        "class_name",
        "file_storage_path",
        "hicache_storage_pass_prefix_keys",
        "interface_v1",
        "module_path",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "tp_lcm_size",
    }
)
# The manager gives no longer lease.
_MAX_LEASE_SECONDS = 600.0
_MAX_SESSION_SECONDS = 3600
# When the cache is flushed SGLang waits so long for its storage threads; if that is too short, the server ends.
_THREAD_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """Manager, identity, deadlines and sizes. After a deadline a page is a miss.

    Attributes:
        manager: `host:port` of each manager, separated by commas.
        instance_id: shared by all engines that run this model in this way; a pipeline stage appends its number.
        instance_group: existing group whose quota and storages are used.
        model_name: for people; "" for the name that SGLang serves it under.
        weights: identifies its weights, a revision for example; "" for a fingerprint of the files.
        trust_weight_version: SGLang's `weight_version` names the weights, unless it is "default". One that others
            have had makes tokens wrong.
        publish: store new KV; false only loads.
        checksums: report the checksum of every saved page, and compute pages again that load with another one.
        register_seconds: for the registration at the start; without an answer the engine starts all the same.
        call_seconds: for each call to the manager.
        load_seconds: for loading up to 128 pages, which is what SGLang asks for at once.
        save_seconds: for saving as many.
        lease_seconds: how long pages that were found are kept readable for the load that follows.
        session_seconds: the pages that a killed engine reserved for its saves are free after this time.
        shutdown_seconds: for loads and saves in flight when the engine ends.
        staging_bytes: memory that pages are loaded into before they reach the host pool.
        transfer_threads: most accesses to a storage at once; 0 = number of cores, at most 4.
        follow_assignment: call the manager that managers announce for the instance, and `manager` when it does not
            serve; false: `manager` alone.

    Raises:
        InvalidArgumentError: a value is not allowed; names it.
    """

    manager: str
    instance_id: str
    instance_group: str = "default"
    model_name: str = ""
    weights: str = ""
    trust_weight_version: bool = False
    publish: bool = True
    checksums: bool = True
    register_seconds: float = 5.0
    call_seconds: float = 1.0
    load_seconds: float = 5.0
    save_seconds: float = 7.0
    lease_seconds: float = 30.0
    session_seconds: int = 30
    shutdown_seconds: float = 5.0
    staging_bytes: int = 64 << 20
    transfer_threads: int = 0
    follow_assignment: bool = True

    def __post_init__(self) -> None:
        for name in ("manager", "instance_id", "instance_group"):
            if not getattr(self, name):
                raise InvalidArgumentError(f"option {name!r} is empty")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in ("float", "int") and (value < 0 or (value == 0 and field.name != "transfer_threads")):
                raise InvalidArgumentError(f"option {field.name!r} is {value}, must be > 0")
        if self.lease_seconds > _MAX_LEASE_SECONDS:
            raise InvalidArgumentError(
                f"option 'lease_seconds' is {self.lease_seconds}, must be <= {_MAX_LEASE_SECONDS}"
            )
        for name in ("load_seconds", "save_seconds"):
            most = _THREAD_SECONDS - 2 * self.call_seconds  # a save begins and ends with a call
            if getattr(self, name) > most:
                given = f"option {name!r} is {getattr(self, name)}"
                raise InvalidArgumentError(
                    f"{given}, must be <= {most:g} with call_seconds {self.call_seconds}: SGLang fails when a storage "
                    f"is busy for {_THREAD_SECONDS:g} s while the cache is flushed"
                )
        if self.session_seconds > _MAX_SESSION_SECONDS:
            raise InvalidArgumentError(
                f"option 'session_seconds' is {self.session_seconds}, must be <= {_MAX_SESSION_SECONDS}"
            )

    @classmethod
    def parse(cls, extra_config: Mapping[str, object] | None) -> SglangOptions:
        """Return the options in SGLang's extra config.

        Args:
            extra_config: as SGLang hands it over.

        Raises:
            InvalidArgumentError: an option is unknown, missing, of the wrong type or not allowed; names it.
        """
        given = dict(extra_config or {})
        if given.get("interface_v1") not in (1, True):
            raise InvalidArgumentError("option 'interface_v1' must be 1: without it SGLang hands over no pages")
        return parse_options(cls, given, _OF_SGLANG)
