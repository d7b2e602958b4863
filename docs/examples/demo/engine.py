"""One engine process of the demo: answers turns with and without the manager and writes what it measured as JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from conversation import prompts
from model import BLOCK_TOKENS, NEW_TOKENS, make_model, to_tokens
from transformers import StoppingCriteria, StoppingCriteriaList
from verify import compare_store

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.transformers import KVReuse, ReuseSettings

_GROUP = "default"
_THREADS = 2
_WARM_UP_TOKENS = 2048


class FirstToken(StoppingCriteria):
    """Notes when the first token is chosen; the same hook that reuse measures with."""

    def __init__(self) -> None:
        self.at: float | None = None

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.at = self.at or time.monotonic()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    """Run one engine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="of the engine, for the table")
    parser.add_argument("--manager", required=True, help="host:port")
    parser.add_argument("--instance", required=True)
    parser.add_argument("--speaker", required=True, help="whose turns to answer")
    parser.add_argument("--turns", type=int, help="answer only the first so many")
    parser.add_argument("--repeats", type=int, default=1, help="measurements of each turn; the fastest counts")
    parser.add_argument("--read-only", action="store_true", help="store nothing")
    parser.add_argument("--no-checksums", action="store_true", help="do not verify loaded bytes")
    parser.add_argument("--verify", type=Path, help="result of the engine whose blocks are recomputed and compared")
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(_THREADS)
    arguments.result.write_text(json.dumps(run(arguments)))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answer the turns and return the result."""
    model = make_model()
    warm_up = torch.randint(1, 256, (1, _WARM_UP_TOKENS))
    without_manager(model, warm_up)
    connect = {"manager": arguments.manager, "instance_group": _GROUP, "instance_id": arguments.instance}
    options = {"block_tokens": BLOCK_TOKENS, "settings": ReuseSettings(checksums=not arguments.no_checksums)}
    with (
        KVReuse.connect(model, **connect, **options, publish=not arguments.read_only) as reuse,
        KVReuse.connect(model, **connect, **options, publish=False) as reader,
        ManagerClient(arguments.manager, arguments.instance) as client,
    ):
        if not reuse.registration.ok:
            raise SystemExit(f"not registered: {reuse.registration.message}")
        result: dict[str, Any] = {
            "name": arguments.name,
            "layers": sum(part.layout.layers for part in reuse.parts.kv),
            "block_bytes": reuse.parts.block_bytes,
            "turns": [
                answer(model, reuse, reader, text, arguments.repeats)
                for text in prompts(arguments.speaker)[: arguments.turns]
            ],
        }
        if arguments.verify:
            result["verified"] = compare_store(model, reuse, client, json.loads(arguments.verify.read_text())["turns"])
    return result


def answer(model: Any, reuse: KVReuse, reader: KVReuse, text: bytes, repeats: int) -> dict[str, Any]:
    """Answer one turn both ways.

    Repeated measurements alternate between both ways, so that other load of the machine affects both alike, and of
    each way the fastest counts. All but the last store nothing, so that each of them finds what the first one found.
    """
    input_ids = to_tokens(text)
    with_seconds, without_seconds, same = [], [], []
    for repeat in range(repeats):
        expected, seconds = without_manager(model, input_ids)
        without_seconds.append(seconds)
        engine = reuse if repeat == repeats - 1 else reader
        output = engine.generate(input_ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        report = engine.last_report
        assert report is not None
        with_seconds.append(report.first_token_seconds)
        same.append(torch.equal(output, expected))
    return {
        "prompt": list(text),
        "tokens": output[0, len(text) :].tolist(),
        "tokens_equal": all(same),
        "prompt_tokens": report.prompt_tokens,
        "loaded_tokens": report.loaded_tokens,
        "first_token_seconds": min(with_seconds),
        "first_token_seconds_alone": min(without_seconds),
        "match_and_load_seconds": report.load_seconds,
        "bytes_loaded": report.bytes_loaded,
        "bytes_saved": report.bytes_saved,
        "blocks_saved": report.blocks_saved,
        "reason": report.reason,
    }


def without_manager(model: Any, input_ids: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return tokens and seconds to the first one, everything computed here."""
    first = FirstToken()
    started = time.monotonic()
    output = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([first]),
    )
    assert first.at is not None
    return output, first.at - started


if __name__ == "__main__":
    main()
