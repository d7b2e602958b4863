"""The registered instances. An instance's config never changes."""

from __future__ import annotations

from dataclasses import replace

from kvcm.model.errors import CapacityError, DuplicateEntityError, UnknownInstanceError
from kvcm.model.instances import Instance, LocationSpecGroup
from kvcm.registry.groups import GroupRegistry
from kvcm.registry.validation import check_instance

__all__ = ["InstanceRegistry"]


class InstanceRegistry:
    """Instances by id.

    Args:
        groups: the groups that instances belong to.
    """

    def __init__(self, groups: GroupRegistry) -> None:
        self._groups = groups
        self._instances: dict[str, Instance] = {}

    def register(self, instance: Instance) -> Instance:
        """Register an instance, or confirm that it is registered just so.

        Returns:
            The stored instance: spec groups sorted, quota group as of its first registration.

        Raises:
            InvalidArgumentError: a field is missing or malformed, or the group does not exist.
            DuplicateEntityError: the id is registered with another config; the message names the field.
            CapacityError: the group has its max_instance_count.
        """
        check_instance(instance)
        instance = _sorted_groups(instance)
        known = self._instances.get(instance.instance_id)
        if known is not None:
            return _same(known, instance)
        group = self._groups.get(instance.instance_group_name)
        limit = group.max_instance_count
        if limit and len(self.all(group.name)) >= limit:
            raise CapacityError(f"instance group {group.name!r} has its max_instance_count of {limit} instances")
        instance = replace(instance, quota_group_name=group.global_quota_group_name)
        self._instances[instance.instance_id] = instance
        return instance

    def remove(self, instance_id: str) -> Instance:
        """Forget an instance and return it.

        Raises:
            UnknownInstanceError: there is no such instance.
        """
        instance = self.get(instance_id)
        del self._instances[instance_id]
        return instance

    def get(self, instance_id: str) -> Instance:
        """Return an instance.

        Raises:
            UnknownInstanceError: there is no such instance.
        """
        try:
            return self._instances[instance_id]
        except KeyError:
            raise UnknownInstanceError(
                f"instance {instance_id!r} is not registered: call RegisterInstance first"
            ) from None

    def all(self, group_name: str = "") -> list[Instance]:
        """Return the instances of a group, of all groups when no name is given, ordered by id."""
        instances = (self._instances[instance_id] for instance_id in sorted(self._instances))
        return [i for i in instances if not group_name or i.instance_group_name == group_name]


def _sorted_groups(instance: Instance) -> Instance:
    groups = (
        LocationSpecGroup(group.name, tuple(sorted(set(group.spec_names)))) for group in instance.location_spec_groups
    )
    return replace(instance, location_spec_groups=tuple(sorted(groups, key=lambda group: group.name)))


def _same(known: Instance, again: Instance) -> Instance:
    field = known.difference(again)
    if field is not None:
        raise DuplicateEntityError(
            f"instance {known.instance_id!r} is registered with another {field.removesuffix('_name')}: "
            "a different layout needs an instance_id of its own"
        )
    return known
