"""Hugging Face transformers as `engine_process` starts it, alone or with reuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from engine_loop import serve


class TransformersEngine:
    """A model; with `reuse`, the arguments of `KVReuse.connect`, with a manager."""

    def __init__(self, model: str, reuse: dict[str, Any] | None = None) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._reuse = None if reuse is None else _connect(self._model, reuse)
        self.started = {"version": transformers.__version__}

    def generate(self, prompts: list[list[int]], max_tokens: int, **arguments: Any) -> list[dict[str, Any]]:
        """Answer the prompts one by one."""
        return [self._answer(prompt, max_tokens, arguments) for prompt in prompts]

    def metrics(self) -> dict[str, Any]:
        """Return how the calls of reuse to the manager ended, by call."""
        return {} if self._reuse is None else {name: _plain(count) for name, count in self._reuse.counters.items()}

    def close(self) -> None:
        """Close the connection to the manager."""
        if self._reuse is not None:
            self._reuse.close()

    def _answer(self, prompt: list[int], max_tokens: int, arguments: dict[str, Any]) -> dict[str, Any]:
        input_ids = torch.tensor([prompt])
        wanted = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens, "do_sample": False} | arguments
        if self._reuse is None:
            output = self._model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **wanted)
            return {"tokens": output[0, len(prompt) :].tolist(), "finish_reason": "length"}
        output = self._reuse.generate(input_ids, **wanted)
        report = self._reuse.last_report
        return {
            "tokens": output[0, len(prompt) :].tolist(),
            "finish_reason": "length",
            "cached_tokens": report.loaded_tokens,
            "details": _plain(report),
        }


def _connect(model: Any, arguments: dict[str, Any]) -> Any:
    from kvcm.connectors.transformers import KVReuse, ReuseSettings

    settings = ReuseSettings(**arguments.get("settings", {}))
    return KVReuse.connect(model, **arguments | {"settings": settings})


def _plain(values: Any) -> dict[str, Any]:
    values = dataclasses.asdict(values) if dataclasses.is_dataclass(values) else values
    return {name: value for name, value in values.items() if isinstance(value, str | int | float | bool | None)}


if __name__ == "__main__":
    serve(TransformersEngine)
