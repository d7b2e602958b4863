"""All that is configured, in one object."""

from __future__ import annotations

from kvcm.registry.accounts import AccountRegistry
from kvcm.registry.groups import GroupRegistry
from kvcm.registry.instances import InstanceRegistry
from kvcm.registry.storages import StorageOpener, StorageRegistry

__all__ = ["Registry"]


class Registry:
    """Storages, groups, instances and accounts of a deployment.

    Args:
        opener: opens storages when they are added.
    """

    def __init__(self, opener: StorageOpener) -> None:
        self.storages = StorageRegistry(opener)
        self.groups = GroupRegistry()
        self.instances = InstanceRegistry(self.groups)
        self.accounts = AccountRegistry()
