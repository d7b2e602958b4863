"""Valid values to spoil one field of."""

from kvcm.model.groups import (
    CacheConfig,
    CachePreferStrategy,
    InstanceGroup,
    InstanceGroupQuota,
    MetaIndexerConfig,
    QuotaConfig,
)
from kvcm.model.instances import Instance, LocationSpecGroup, LocationSpecInfo, ModelDeployment
from kvcm.model.storages import StorageConfig, StorageType

GROUP = InstanceGroup(
    "group",
    ("nfs",),
    "quota-group",
    quota=InstanceGroupQuota(100, (QuotaConfig(StorageType.ST_NFS, 50),)),
    cache_config=CacheConfig(
        data_storage_strategy=CachePreferStrategy.CPS_PREFER_3FS, meta_indexer_config=MetaIndexerConfig()
    ),
    version=1,
)

INSTANCE = Instance(
    "",
    "group",
    "Qwen/Qwen3-8B",
    16,
    (LocationSpecInfo("tp0", 64), LocationSpecInfo("tp1", 64)),
    ModelDeployment("Qwen3-8B", "bf16"),
    (LocationSpecGroup("full", ("tp1", "tp0")), LocationSpecGroup("a", ("tp0",))),
)


class Opener:
    """Opens nothing, and says what it was asked; refuses what it is told to refuse."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.refusal: Exception | None = None

    def prepare(self, config: StorageConfig) -> StorageConfig:
        if self.refusal is not None:
            raise self.refusal
        return config

    def install(self, config: StorageConfig, prepared: StorageConfig) -> None:
        assert prepared.spec == config.spec
        self.calls.append(("open", config.global_unique_name))

    def set_enabled(self, name: str, *, enabled: bool) -> None:
        self.calls.append(("enable" if enabled else "disable", name))

    def close(self, name: str) -> None:
        self.calls.append(("close", name))
