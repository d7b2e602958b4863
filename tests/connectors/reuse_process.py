"""Generates in a process of its own, and prints what happened: `reuse_process.py ADDRESS INSTANCE KIND POOL_BLOCKS`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from reuse_cases import BLOCK, PATIENT, padded, prompt
from reuse_models import model_of

from kvcm.connectors.transformers import KVReuse

BATCH = padded([prompt(100), prompt(45, 2)])  # the same in every process


def main(address: str, instance: str, kind: str, pool_blocks: str) -> None:
    ids, mask = BATCH
    patience = replace(PATIENT, pool_blocks=int(pool_blocks))
    with KVReuse.connect(model_of(kind), address, "default", instance, block_tokens=BLOCK, settings=patience) as reuse:
        output = reuse.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
        report = reuse.last_report
    assert report is not None
    loaded = [row.loaded_tokens for row in report.rows]
    answer = {"tokens": output.tolist(), "loaded": loaded, "saved": report.blocks_saved, "reason": report.reason}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
