"""Instances as pages show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvcm.registry.secrets import redacted_text

__all__ = ["InstanceView", "instance_views"]

Document = Mapping[str, Any]

_KINDS: Final = {
    "LSK_UNSPECIFIED": "not said", "LSK_FULL_ATTENTION": "full attention", "LSK_LINEAR_ATTENTION": "linear attention",
}  # fmt: skip
_UNUSED: Final = {"key_count": 0, "max_key_count": -1, "used_bytes": 0, "policy": ""}


@dataclass(frozen=True, slots=True)
class InstanceView:
    """An instance.

    Attributes:
        name: its id.
        group: that it belongs to.
        document: the resource.
        usage: what it has: blocks, bytes and the policy in force.
    """

    name: str
    group: str
    document: Document
    usage: Document

    @property
    def model(self) -> str:
        """Name of its model and what the KV is made of."""
        deployment = self.document["model_deployment"]
        return f"{deployment['model_name']}, {deployment['dtype']}"

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block."""
        return sum(part["size"] for part in self.document["location_spec_infos"])

    @property
    def parts(self) -> Sequence[tuple[str, int, str]]:
        """The parts of a block: name, bytes and what it holds."""
        return [(part["name"], part["size"], _KINDS[part["kind"]]) for part in self.document["location_spec_infos"]]

    @property
    def deployment(self) -> Sequence[tuple[str, str]]:
        """What else is known of the model: names and values."""
        found = self.document["model_deployment"]
        parallel = [(found[f"{name}_size"], label) for name, label in _PARALLEL.items() if found[f"{name}_size"]]
        told = [
            ("Parallelism", ", ".join(f"{count} {label}" for count, label in parallel)),
            ("Attention", "multi-head latent" if found["use_mla"] else ""),
            ("LoRA adapter", found["lora_name"]),
            ("Also its identity", found["extra"]),
            ("Note", found["user_data"]),
        ]
        return [(name, redacted_text(value)) for name, value in told if value]


_PARALLEL: Final = {"tp": "ways by tensor", "pp": "stages", "dp": "ways by data"}


def instance_views(instances: Sequence[Document], groups: Sequence[Document]) -> list[InstanceView]:
    """Return instances, ordered by group and then by id.

    Args:
        instances: as they were registered.
        groups: their usage.
    """
    usages = {each["instance_id"]: each for group in groups for each in group["instances"]}
    found = [
        InstanceView(
            each["instance_id"], each["instance_group_name"], each, usages.get(each["instance_id"], _UNUSED)
        )
        for each in instances
    ]  # fmt: skip
    return sorted(found, key=lambda view: (view.group, view.name))
