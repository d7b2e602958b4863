"""Generates in a process of its own, and prints what happened: `reuse_process.py ADDRESS INSTANCE KIND POOL_BLOCKS`."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
from reuse_cases import BLOCK, MODEL, PATIENT, prompt
from reuse_models import HYBRIDS, WINDOWS

from kvcm.connectors.transformers import KVReuse

LENGTHS = (100, 45)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and attention mask of two prompts, the same in every process."""
    ids, mask = torch.zeros(2, 100, dtype=torch.long), torch.zeros(2, 100, dtype=torch.long)
    for row, tokens in enumerate(LENGTHS):
        ids[row, 100 - tokens :], mask[row, 100 - tokens :] = prompt(tokens, 1 + row)[0], 1
    return ids, mask


def model_of(kind: str) -> Any:
    return MODEL if kind == "llama" else (WINDOWS | HYBRIDS)[kind]()


def main(address: str, instance: str, kind: str, pool_blocks: str) -> None:
    ids, mask = batch()
    patience = replace(PATIENT, pool_blocks=int(pool_blocks))
    with KVReuse.connect(model_of(kind), address, "default", instance, block_tokens=BLOCK, settings=patience) as reuse:
        output = reuse.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False)
        report = reuse.last_report
    assert report is not None
    print(
        json.dumps(
            {
                "tokens": output.tolist(),
                "loaded": [row.loaded_tokens for row in report.rows],
                "saved": report.blocks_saved,
                "reason": report.reason,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
