"""What the tier's blocks are registered as: who may share them, and which parts they have.

The identity is that of the KV alone, so engines that run different algorithms over the same KV share its blocks when
they register the same parts. Which algorithm with which parameters a sidecar belongs to is in the part's name: for an
engine with others there is no such part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from connectors.reuse.identity import KvIdentity
from connectors.reuse.link import InstanceSpecs
from gpu_tier.connector import KV_SPEC, KVFormat
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.instances import LocationSpecGroup, LocationSpecInfo

__all__ = ["BlockParts", "kv_identity"]

_ENGINE = "gpu_tier/1"
_HASHING = "kvcm-chain/2"
_KV_GROUP = "kv"


@dataclass(frozen=True, slots=True)
class BlockParts:
    """The parts of a block.

    Attributes:
        kv_bytes: of a block's KV.
        sidecars: bytes of a block's sidecar by name of its spec: of all algorithms of the instance. Empty when no
            algorithm has one.
    """

    kv_bytes: int
    sidecars: Mapping[str, int]

    def __post_init__(self) -> None:
        if self.kv_bytes <= 0:
            raise InvalidArgumentError(f"kv_bytes is {self.kv_bytes}, must be > 0")
        for name, size in self.sidecars.items():
            if size <= 0 or name == KV_SPEC:
                raise InvalidArgumentError(f"sidecar {name!r} has {size} bytes, must be > 0, and not {KV_SPEC!r}")

    def specs(self, kv: KVFormat, instance_group: str) -> InstanceSpecs:
        """Return what the instance registers as; the same for every engine that names the same parts."""
        infos = [LocationSpecInfo(KV_SPEC, self.kv_bytes)]
        infos += [LocationSpecInfo(name, size) for name, size in sorted(self.sidecars.items())]
        groups = [LocationSpecGroup(_KV_GROUP, (KV_SPEC,))] if self.sidecars else []
        groups += [LocationSpecGroup(_group(name), tuple(sorted((KV_SPEC, name)))) for name in sorted(self.sidecars)]
        return InstanceSpecs(instance_group, kv.page_tokens, infos, kv_identity(kv).deployment(), groups)

    def group_of(self, parts: Mapping[str, object]) -> str:
        """Return the name of the group of parts that are written together, "" when there are no groups.

        Raises:
            InvalidArgumentError: KV is not among them, or the instance has no such sidecar.
        """
        sidecars = [name for name in parts if name != KV_SPEC]
        if KV_SPEC not in parts or len(sidecars) > 1 or not self.sidecars.keys() >= set(sidecars):
            known = ", ".join(self.sidecars) or "none"
            raise InvalidArgumentError(f"parts are {', '.join(parts)}, must be {KV_SPEC} and at most one of {known}")
        if not self.sidecars:
            return ""
        return _group(sidecars[0]) if sidecars else _KV_GROUP


def kv_identity(kv: KVFormat) -> KvIdentity:
    """Return what the KV of given tokens depends on."""
    return KvIdentity(
        model=kv.model,
        weights=kv.weights,
        engine=_ENGINE,
        dtype=kv.kv_dtype,
        hashing=_HASHING,
        formats={KV_SPEC: f"{kv.layout}, {kv.page_tokens} tokens, {kv.shape}"},
        use_mla=kv.kind == "mla",
        extra={"rope": json.dumps(dict(kv.rope), sort_keys=True)},
    )


def _group(sidecar: str) -> str:
    return f"{_KV_GROUP}+{sidecar}"
