"""Who may share KV: the identity of a deployment, as it is registered and as it enters every block key.

KV may be shared exactly when the same tokens give the same bytes. Whatever that depends on besides the tokens is named
here, registered with the manager, which refuses an engine that differs, and part of the namespace of the keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import ModelDeployment

__all__ = ["KvIdentity"]


@dataclass(frozen=True, slots=True)
class KvIdentity:
    """Everything that the stored KV of given tokens depends on.

    Attributes:
        model: name of the model, for people.
        weights: what tells its weights from others under that name: a revision, or a digest.
        engine: family of the engine and version of its layout: two engines' KV is not interchangeable.
        dtype: of K and V, quantisation included.
        hashing: algorithm and seed of the block keys.
        formats: how each part of a block is stored, by name of the group of layers.
        tp_size: ranks that share the heads.
        pp_size: ranks that share the layers.
        cp_size: ranks that share the tokens of a context.
        use_mla: whether KV is MLA's latent one.
        extra: what else counts for this engine.

    Raises:
        InvalidArgumentError: a text is empty, or a size is not positive; names it.
    """

    model: str
    weights: str
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
        for name in ("model", "weights", "engine", "dtype", "hashing", "formats"):
            if not getattr(self, name):
                raise InvalidArgumentError(f"{name} is empty, must say what the KV depends on")
        for name in ("tp_size", "pp_size", "cp_size"):
            if getattr(self, name) <= 0:
                raise InvalidArgumentError(f"{name} is {getattr(self, name)}, must be > 0")

    def deployment(self) -> ModelDeployment:
        """Return what is registered with the manager."""
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
                    "weights": self.weights,
                },
                sort_keys=True,
            ),
        )

    @property
    def namespace(self) -> bytes:
        """What every block key depends on."""
        deployment = self.deployment()
        sizes = f"tp{self.tp_size}.pp{self.pp_size}.mla{int(self.use_mla)}"
        return "\n".join([deployment.model_name, deployment.dtype, sizes, deployment.extra]).encode()
