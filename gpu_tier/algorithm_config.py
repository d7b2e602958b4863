"""What the settings of every algorithm have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from gpu_tier.setting_checks import check_known

if TYPE_CHECKING:
    from gpu_tier.config import SparseConfig

__all__ = ["AlgorithmConfig"]


@dataclass(frozen=True, slots=True)
class AlgorithmConfig:
    """Settings of one algorithm."""

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Self:
        """Return the settings in `data`.

        Raises:
            ConfigError: a key is unknown, or a value is not allowed.
        """
        check_known(cls, data, "algo.")
        return cls(**data)

    def default_residency(self) -> str:
        """Return the residency when the settings name none."""
        return "lru"

    def selected_tokens(self, config: SparseConfig) -> int:
        """Return the tokens that a head attends to in a step; the buffer is twice that by default."""
        return config.top_k

    def min_sparse_prompt_len(self, _config: SparseConfig) -> int:
        """Return the prompt length from which requests become sparse when the settings name none."""
        return 0

    def keeps_host_copy(self) -> bool:
        """Return whether sparse requests need all of their KV in the host pool."""
        return True

    def sidecar_settings(self) -> dict[str, Any]:
        """Return the settings that side data depends on: engines in which others differ share it."""
        return asdict(self)
