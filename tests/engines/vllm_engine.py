"""vLLM as `engine_process` starts it: all in this process, unless VLLM_ENABLE_V1_MULTIPROCESSING is 1."""

from __future__ import annotations

import time
from typing import Any

from engine_loop import serve
from vllm import LLM, SamplingParams, TokensPrompt, __version__

_OPTIONS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 1024,
    "block_size": 32,  # on CPUs a multiple of 32
    "disable_log_stats": False,  # else there are no metrics
    "seed": 0,
}


class VllmEngine:
    """An engine, and steps of it one by one."""

    def __init__(self, model: str, **options: Any) -> None:
        self._llm = LLM(model, **_OPTIONS | options)
        self._engine = self._llm.llm_engine
        self.started = {"version": __version__}

    def generate(self, prompts: list[list[int]], max_tokens: int, **sampling: Any) -> list[dict[str, Any]]:
        """Answer all prompts."""
        outputs = self._llm.generate(
            [_prompt(tokens) for tokens in prompts], _greedy(max_tokens, sampling), use_tqdm=False
        )
        return [_generated(output) for output in outputs]

    def add_request(self, request_id: str, prompt: list[int], max_tokens: int, **sampling: Any) -> None:
        """Add a request that only `step` and `step_until` bring forward."""
        self._engine.add_request(request_id, _prompt(prompt), _greedy(max_tokens, sampling))

    def abort(self, request_ids: list[str]) -> None:
        """Drop requests, whatever they are doing."""
        self._engine.abort_request(request_ids)

    def step(self, count: int = 1) -> dict[str, dict[str, Any]]:
        """Make steps; returns the last output of each request that had one, with `finished`."""
        found: dict[str, dict[str, Any]] = {}
        for _ in range(count):
            for output in self._engine.step():
                found[output.request_id] = _generated(output) | {"finished": output.finished}
        return found

    def step_until(self, request_ids: list[str], tokens: int = 0, seconds: float = 60.0) -> dict[str, dict[str, Any]]:
        """Make steps until each of the requests is finished, or has so many tokens where that is not 0."""
        deadline = time.monotonic() + seconds
        found: dict[str, dict[str, Any]] = {}
        while not all(_has(found.get(name), tokens) for name in request_ids):
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {seconds} s there is only {found}")
            found |= self.step()
        return found

    def unfinished(self) -> int:
        """Return how many requests are unfinished."""
        return self._engine.get_num_unfinished_requests()

    def reset_prefix_cache(self) -> bool:
        """Forget the engine's own cache, so that only an external one can have a prefix."""
        return bool(self._llm.reset_prefix_cache())

    def metrics(self) -> dict[str, Any]:
        """Return its metrics: `name` or `name{label="value",…}` to the value, of histograms the sum and count."""
        return {_named(metric): _value(metric) for metric in self._llm.get_metrics()}

    def close(self) -> None:
        """Shut down, the connector too."""
        self._engine.engine_core.shutdown()


def _prompt(tokens: list[int]) -> TokensPrompt:
    return TokensPrompt(prompt_token_ids=tokens)


def _greedy(max_tokens: int, sampling: dict[str, Any]) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **sampling)


def _generated(output: Any) -> dict[str, Any]:
    first = output.outputs[0]
    return {
        "tokens": list(first.token_ids),
        "finish_reason": first.finish_reason,
        "cached_tokens": output.num_cached_tokens or 0,
    }


def _has(found: dict[str, Any] | None, tokens: int) -> bool:
    return found is not None and (found["finished"] or 0 < tokens <= len(found["tokens"]))


def _named(metric: Any) -> str:
    labels = ",".join(f'{key}="{value}"' for key, value in sorted(metric.labels.items()) if key not in _CONSTANT_LABELS)
    return f"{metric.name}{{{labels}}}" if labels else metric.name


_CONSTANT_LABELS = {"engine", "model_name"}


def _value(metric: Any) -> Any:
    if hasattr(metric, "value"):
        return metric.value
    return {"sum": metric.sum, "count": metric.count} if hasattr(metric, "sum") else list(metric.values)


if __name__ == "__main__":  # the processes that vLLM starts import this file
    serve(VllmEngine)
