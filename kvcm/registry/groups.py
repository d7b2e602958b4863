"""The configured instance groups."""

from __future__ import annotations

from kvcm.model.errors import DuplicateEntityError, InvalidArgumentError
from kvcm.model.groups import InstanceGroup
from kvcm.registry.validation import check_group

__all__ = ["GroupRegistry"]


class GroupRegistry:
    """Instance groups by name."""

    def __init__(self) -> None:
        self._groups: dict[str, InstanceGroup] = {}

    def create(self, group: InstanceGroup) -> None:
        """Add a group.

        Raises:
            InvalidArgumentError: a field is missing, malformed or out of range.
            DuplicateEntityError: the name is taken.
        """
        check_group(group)
        if group.name in self._groups:
            raise DuplicateEntityError(f"instance group {group.name!r} exists; use UpdateInstanceGroup to change it")
        self._groups[group.name] = group

    def update(self, group: InstanceGroup, current_version: int) -> None:
        """Replace a group; in force at once.

        Args:
            group: the complete group, with a version above the stored one.
            current_version: version that the caller's change is based on.

        Raises:
            InvalidArgumentError: a field is malformed, there is no such group, or a version does not fit.
        """
        check_group(group)
        stored = self.get(group.name)
        if current_version != stored.version:
            raise InvalidArgumentError(
                f"current_version is {current_version}, stored is {stored.version}: read the group again and retry"
            )
        if group.version <= stored.version:
            raise InvalidArgumentError(f"instance_group.version is {group.version}, must be above {stored.version}")
        self._groups[group.name] = group

    def remove(self, name: str) -> None:
        """Forget a group; its instances stay readable and refuse writes.

        Raises:
            InvalidArgumentError: there is no such group.
        """
        self.get(name)
        del self._groups[name]

    def get(self, name: str) -> InstanceGroup:
        """Return a group.

        Raises:
            InvalidArgumentError: there is no such group.
        """
        group = self._groups.get(name)
        if group is None:
            raise InvalidArgumentError(f"instance group {name!r} does not exist")
        return group

    def find(self, name: str) -> InstanceGroup | None:
        """Return a group, None when there is none of that name."""
        return self._groups.get(name)

    def all(self) -> list[InstanceGroup]:
        """Return all groups, ordered by name."""
        return [self._groups[name] for name in sorted(self._groups)]
