"""A small engine of one tenant: answers a prompt once, and says how much of it was loaded and stored.

    KVCM_KEY_FILE=red.key python docs/examples/tenant_engine.py --group red --instance red-model

The model has random weights from a fixed seed. Exit code 1: the manager does not let it in.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcm.connectors.transformers import KVReuse

_BLOCK_TOKENS = 16
_PROMPT = "A prompt that many conversations begin with, such as a long system prompt with rules and examples. " * 4
_CONFIG = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip


def main() -> int:
    """Answer the prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--manager", default="127.0.0.1:6381", help="host:port")
    parser.add_argument("--group", required=True)
    parser.add_argument("--instance", required=True)
    parser.add_argument("--keys-file", type=Path, help="where to write the keys of the prompt's blocks")
    arguments = parser.parse_args()
    torch.manual_seed(7)
    model, tokens = LlamaForCausalLM(_CONFIG).eval(), list(_PROMPT.encode())
    with KVReuse.connect(
        model, arguments.manager, arguments.group, arguments.instance, block_tokens=_BLOCK_TOKENS
    ) as reuse:
        if not reuse.registration.ok:
            print(f"{arguments.group}: not let in: {reuse.registration.message}")
            return 1
        reuse.generate(torch.tensor([tokens]), max_new_tokens=4, do_sample=False)
        report = reuse.last_report
        if arguments.keys_file is not None:
            arguments.keys_file.write_text(",".join(map(str, reuse.block_keys(tokens))))
    assert report is not None
    print(
        f"{arguments.group}: loaded {report.loaded_tokens} of {report.prompt_tokens} tokens, "
        f"stored {report.blocks_saved} blocks"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
