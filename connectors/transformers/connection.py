"""The registration of one model with the manager, and the storages that come with it."""

from __future__ import annotations

from connectors.client import ManagerClient
from connectors.layout import BlockLayout
from connectors.results import Registration, RegistrationState
from connectors.transfer import TransferEngine
from connectors.transformers.settings import ReuseSettings
from kvcm.model.instances import LocationSpecInfo, ModelDeployment

__all__ = ["SPEC", "Connection"]

SPEC = "tp0"  # one process holds all heads: the only part of a block, named as engines name their first rank


class Connection:
    """Registers when first needed, and again when the manager has forgotten the instance.

    A manager that is absent at the start is tried again with every use; one that refused is not, since a conflict of
    configuration does not go away by itself.

    Args:
        client: of the manager; closed with the connection.
        instance_group: existing group for the instance.
        layout: of its blocks.
        deployment: identity of the model.
        settings: deadlines.
    """

    def __init__(
        self,
        client: ManagerClient,
        instance_group: str,
        layout: BlockLayout,
        deployment: ModelDeployment,
        settings: ReuseSettings,
    ) -> None:
        self.client = client
        self.registration = Registration(RegistrationState.UNREACHABLE, message="not tried yet")
        self._instance_group = instance_group
        self._layout = layout
        self._deployment = deployment
        self._settings = settings
        self._engine: TransferEngine | None = None

    def engine(self, timeout_seconds: float) -> TransferEngine | None:
        """Return what moves bytes for this instance, None while it is not registered."""
        if self.registration.state is RegistrationState.UNREACHABLE:
            self._register(timeout_seconds)
        return self._engine if self.registration.ok else None

    def forget(self) -> None:
        """Register again at the next use: the manager does not know the instance, or we do not know its storages."""
        self.registration = Registration(RegistrationState.UNREACHABLE, message="to be registered again")

    def close(self) -> None:
        """Close client and storages."""
        self.client.close()
        if self._engine is not None:
            self._engine.close()

    def _register(self, timeout_seconds: float) -> None:
        before = self._engine
        self.registration = self.client.register_instance(
            self._instance_group,
            self._layout.block_tokens,
            [LocationSpecInfo(SPEC, self._layout.block_bytes)],
            self._deployment,
            timeout_seconds=timeout_seconds,
        )
        if not self.registration.ok:
            return
        self._engine = TransferEngine.for_storages(
            self.registration.storages, self._settings.transfer_threads, checksums=self._settings.checksums
        )
        if before is not None:
            before.close()
