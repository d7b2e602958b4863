"""Claim: that keys depend on the weights costs a lookup at most 2 %, and a start with cached digests at most a second.

A lookup is what a call of `generate` does before it computes: keys, match, and load of the known prefix, from files in
the page cache and a real manager. It begins with signs that tell whether the weights are still those of the last
version, whose share is timed in each call. Their time cannot be had from two medians of lookups, which vary by more.
The model has the shape of SmolLM2-135M and random weights, in half precision as it is served.

A start is the digest of a model's files: the first one reads them, later ones look up what was kept.

    python benchmarks/weights_cost.py [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from report import Row, arguments, publish
from transformers import LlamaConfig, LlamaForCausalLM

from kvcm.connectors.reuse.model_weights import ModelWeights
from kvcm.connectors.reuse.weight_files import weights_digest
from kvcm.connectors.transformers import KVReuse, ReuseSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "store"))

from manager_process import start_manager

MOST_SHARE = 0.02
MOST_START_SECONDS = 1.0
_PROMPT_TOKENS = 2048
_PATIENT = ReuseSettings(register_seconds=30, call_seconds=30, load_seconds=60, save_seconds=60, flush_seconds=120)


def model() -> LlamaForCausalLM:
    """Return a model of the shape of SmolLM2-135M."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval().to(torch.bfloat16)


def lookups(rounds: int) -> list[Row]:
    """Return the time of signs beside that of a lookup."""
    served = model()
    ids = torch.randint(3, 49_152, (1, _PROMPT_TOKENS + 1), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as directory:
        manager = start_manager(Path(directory))
        try:
            with KVReuse.connect(served, manager.address, "default", "cost", settings=_PATIENT) as reuse:
                reuse.generate(ids, max_new_tokens=1)
                signs, rest = [], []
                reuse.weights.version = timed(reuse.weights.version, signs)
                for _ in range(rounds):
                    reuse.generate(ids, max_new_tokens=1)
                    assert reuse.last_report is not None
                    assert reuse.last_report.loaded_tokens == _PROMPT_TOKENS
                    rest.append(reuse.last_report.load_seconds - signs[-1])
        finally:
            manager.stop()
    share = statistics.median(signs) / statistics.median(rest)
    case = f"{_PROMPT_TOKENS:,} tokens known, {len(list(served.parameters()))} tensors"
    return [
        Row(case, "signs", 1000 * statistics.median(signs), "ms"),
        Row(case, "lookup and load without them", 1000 * statistics.median(rest), "ms"),
        Row(case, "signs add", share, "", target=f"<= {MOST_SHARE:g}", ok=share <= MOST_SHARE),
    ]


def timed(call: Callable[[], str], seconds: list[float]) -> Callable[[], str]:
    """Return the same function, whose times are kept."""

    def run() -> str:
        begin = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - begin)
        return result

    return run


def seconds_of(call: Callable[[], object]) -> float:
    """Return the time of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def digests() -> list[Row]:
    """Return the cost of a digest of all elements, as after a change."""
    changed = model()
    size = sum(parameter.nbytes for parameter in changed.parameters()) / 1e9
    seconds = min(seconds_of(ModelWeights(changed).version) for _ in range(5))
    case = f"{size:.2f} GB in memory"
    return [Row(case, "digest of every element", seconds, "s"), Row(case, "speed", size / seconds, "GB/s")]


def starts(megabytes: int) -> list[Row]:
    """Return the time of the first digest of a model's files, and of the next one."""
    with tempfile.TemporaryDirectory() as directory:
        files, cache = Path(directory) / "model", Path(directory) / "cache"
        files.mkdir()
        (files / "config.json").write_text("{}")
        piece = bytes(range(256)) * 4096
        for number in range(4):
            with (files / f"model-{number}.safetensors").open("wb") as file:
                for _ in range(megabytes // 4):
                    file.write(piece)
        settled = time.time() + 3600
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            weights_digest(files, cache, now=lambda: settled)
            seconds.append(time.perf_counter() - begin)
    case = f"{megabytes:,} MiB in 4 files"
    ok = seconds[1] <= MOST_START_SECONDS
    return [
        Row(case, "first start", seconds[0], "s"),
        Row(case, "start with cached digests", seconds[1], "s", target=f"<= {MOST_START_SECONDS:g} s", ok=ok),
    ]


def main() -> int:
    """Run the benchmark."""
    options = arguments(__doc__ or "").parse_args()
    rows = [*lookups(3 if options.quick else 200), *digests(), *starts(64 if options.quick else 4096)]
    return 0 if publish("What versions of weights cost", rows, options.json) or options.quick else 1


if __name__ == "__main__":
    sys.exit(main())
