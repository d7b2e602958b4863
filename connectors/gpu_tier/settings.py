"""How patient the tier's connector is."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvcm.model.errors import InvalidArgumentError

__all__ = ["TierSettings"]

# The manager refuses longer read leases.
_MOST_LEASE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Deadlines and sizes. What takes longer is a miss: the tokens are computed, or not stored.

    Attributes:
        register_seconds: for the registration when connecting.
        call_seconds: for each call to the manager afterwards.
        load_seconds: for loading all blocks of a prompt; together with `call_seconds` at most 600.
        save_seconds: for saving the blocks of one write session.
        session_seconds: what an engine that is killed while it saves has reserved is free after this time.
        shutdown_seconds: for what is under way when the connector is closed.
        batch_bytes: blocks of so many bytes are loaded together, and become usable together; most of a write session.
        threads: prompts that are looked up, and as many that are loaded, at once.
        transfer_threads: most accesses to a storage at once; 0 = number of cores, at most 4.
        checksums: tell the checksum of every part that is saved, and do not use what was loaded with another one.

    Raises:
        InvalidArgumentError: a value is not allowed; names it.
    """

    register_seconds: float = 5.0
    call_seconds: float = 1.0
    load_seconds: float = 30.0
    save_seconds: float = 30.0
    session_seconds: int = 30
    shutdown_seconds: float = 5.0
    batch_bytes: int = 64 << 20
    threads: int = 4
    transfer_threads: int = 0
    checksums: bool = True

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value < 0 or (value == 0 and name not in ("transfer_threads", "checksums")):
                raise InvalidArgumentError(f"{name} is {value}, must be > 0")
        if self.lease_seconds > _MOST_LEASE_SECONDS:
            raise InvalidArgumentError(
                f"load_seconds is {self.load_seconds}, must be <= {_MOST_LEASE_SECONDS - self.call_seconds:g}: "
                "what was found is not kept readable for longer"
            )

    @property
    def lease_seconds(self) -> float:
        """How long what was found is kept readable."""
        return self.load_seconds + self.call_seconds
