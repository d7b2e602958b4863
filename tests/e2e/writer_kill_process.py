"""One manager with one storage, and writers on it that are killed or stopped: a process of its own.

    python writer_kill_process.py <settings as JSON>

Prints its report as JSON. On its own, because it may have to run in another network than its parent.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from google.protobuf import json_format

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))

from manager_site import GroupPlan, Manager, code_of, managers_on
from writer_kills import KillReport, WriterRig

from kvcm.protocol import admin_service_pb2 as pb

GROUP = "writers"
STORAGE = f"{GROUP}-storage"
_QUOTA_BYTES = 1 << 33


@dataclass(frozen=True, slots=True)
class KillSettings:
    """Settings of the run.

    Attributes:
        storage: JSON of its configuration, named STORAGE.
        directory: for the manager and journals.
        kills: writers to kill.
        stops: writers to stop past the end of a session.
        seed: of where writers end.
    """

    storage: str
    directory: str
    kills: int
    stops: int
    seed: int


def _run(settings: KillSettings) -> KillReport:
    directory = Path(settings.directory)
    with managers_on(directory) as (manager,):
        asyncio.run(_set_up(manager, json_format.Parse(settings.storage, pb.StorageConfig())))
        rig = WriterRig(manager.address(), GROUP, directory, settings.seed)
        try:
            rig.wait_until_open()
            for _ in range(settings.kills):
                rig.kill_a_writer()
            for _ in range(settings.stops):
                rig.stop_a_writer()
        finally:
            rig.close()
    rig.report.wrong += [text[-1500:] for text in manager.failures()]
    return rig.report


async def _set_up(manager: Manager, storage: pb.StorageConfig) -> None:
    group = GroupPlan(GROUP, (), _QUOTA_BYTES, delay_ms=0).group
    async with manager.connected() as wire:
        for answer in (
            await wire.admin.AddStorage(pb.AddStorageRequest(storage=storage)),
            await wire.admin.CreateInstanceGroup(pb.CreateInstanceGroupRequest(instance_group=group)),
        ):
            assert code_of(answer) == pb.OK, answer


def command_of(settings: KillSettings) -> list[str]:
    """Return the command line of it."""
    return [sys.executable, __file__, json.dumps(asdict(settings))]


if __name__ == "__main__":
    print(json.dumps(asdict(_run(KillSettings(**json.loads(sys.argv[1]))))))
