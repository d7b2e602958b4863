"""An engine in a process of its own answers a prompt: `tier_engine_process.py ADDRESS INSTANCE MODEL ALGORITHM`.

Two more arguments: settings of the algorithm that differ from the rig's, and other parts of the instance's blocks, as
JSON.
"""

from __future__ import annotations

import json
import sys

from sharing_rig import SHORT, Rig, prompt_of

from kvcm.connectors.gpu_tier.connector import BlockParts, ManagerConnector, TierSettings
from kvcm.gpu_tier.connector import KVFormat

TOKENS = prompt_of(200)
PATIENT = TierSettings(call_seconds=20.0, register_seconds=20.0)


def main(address: str, instance: str, model: str, algorithm: str, algo: str = "{}", others: str = "{}") -> None:
    own: dict[str, int] = {}

    def connect(kv: KVFormat, kv_bytes: int, sidecars: dict[str, int]) -> ManagerConnector:
        own.update(sidecars)
        parts = BlockParts(kv_bytes, {**json.loads(others), **sidecars})
        return ManagerConnector.connect(address, "default", instance, kv, parts, settings=PATIENT)

    rig = Rig(model, algorithm, connect, algo={**SHORT[algorithm].get("algo", {}), **json.loads(algo)})
    tokens, attached, steps = rig.run(TOKENS)
    assert rig.is_empty()
    assert rig.connector is not None
    rig.connector.close()
    written = rig.store.counters.written_pages
    made = rig.coordinator.algorithm
    answer = {"tokens": tokens, "attached": attached, "steps": steps, "written": written}
    print(json.dumps({**answer, "sidecars": own, "built": made.built, "imported": made.imported}))


if __name__ == "__main__":
    main(*sys.argv[1:])
