"""Which parts a page has, and which of them a rank moves.

Every tensor-parallel rank saves its own heads: a page has a part `tp0`, `tp1`… per rank. MLA's latent rows are the same
on all ranks: there is one part, which the first one saves and all load. The stages of a pipeline have different layers
of different sizes, and register as instances of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo

__all__ = ["RankParts", "stage_instance"]


@dataclass(frozen=True, slots=True)
class RankParts:
    """Parts of a page as one rank sees them.

    Attributes:
        names: of all parts.
        name: of this rank's.
    """

    names: tuple[str, ...]
    name: str

    @classmethod
    def of(cls, config: Any) -> RankParts:
        """Return the parts for a rank.

        Args:
            config: SGLang's storage config of the rank.

        Raises:
            InvalidArgumentError: ranks are laid out in a way that is not supported; says which.
        """
        for name in ("attn_cp_size", "dcp_size"):
            if getattr(config, name) != 1:
                raise InvalidArgumentError(f"{name} is {getattr(config, name)}, must be 1")
        names = ("tp0",) if config.is_mla_model else tuple(f"tp{rank}" for rank in range(config.tp_size))
        return cls(names, "tp0" if config.is_mla_model else f"tp{config.tp_rank}")

    def infos(self, part_bytes: int) -> list[LocationSpecInfo]:
        """Return what is registered of the parts, which are all of one size."""
        return [LocationSpecInfo(name, part_bytes) for name in self.names]

    @property
    def groups(self) -> list[LocationSpecGroup]:
        """One group per part, so that a rank asks for leave to write its own only."""
        return [LocationSpecGroup(name, (name,)) for name in self.names] if len(self.names) > 1 else []

    def groups_of(self, pages: int) -> list[str]:
        """Return the group that is asked for, for every page."""
        return [self.name] * pages if len(self.names) > 1 else []


def stage_instance(instance_id: str, config: Any) -> str:
    """Return the instance of a pipeline stage."""
    return instance_id if config.pp_size == 1 else f"{instance_id}-pp{config.pp_rank}"
