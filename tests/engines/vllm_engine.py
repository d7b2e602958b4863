"""vLLM as `engine_process` starts it: all in this process, unless VLLM_ENABLE_V1_MULTIPROCESSING is 1."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import engine_inspection
import vllm_blocks
from engine_loop import serve
from vllm import LLM, SamplingParams, TokensPrompt, __version__
from vllm.lora.request import LoRARequest

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
        self.started = {"version": __version__, "in_one_process": hasattr(self._engine.engine_core, "engine_core")}

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        cache_salt: str | None = None,
        adapter: str | None = None,
        *,
        load_inplace: bool = False,
        **sampling: Any,
    ) -> list[dict[str, Any]]:
        """Answer all prompts; with a salt, KV is shared only with requests of the same salt.

        An adapter is a directory.
        """
        salt = {} if cache_salt is None else {"cache_salt": cache_salt}
        lora = None if adapter is None else LoRARequest("adapter", 1, adapter, load_inplace=load_inplace)
        prompts_with_salt = [_prompt(tokens) | salt for tokens in prompts]
        outputs = self._llm.generate(
            prompts_with_salt, _greedy(max_tokens, sampling), use_tqdm=False, lora_request=lora
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

    def step_until(self, request_ids: list[str], tokens: int = 0, within_seconds: float = 60.0) -> dict[str, Any]:
        """Make steps until each of the requests is finished, or has so many tokens where that is not 0."""
        deadline = time.monotonic() + within_seconds
        found: dict[str, dict[str, Any]] = {}
        while not all(_has(found.get(name), tokens) for name in request_ids):
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {within_seconds} s there is only {found}")
            found |= self.step()
        return found

    def timed(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Answer prompts that arrive together; each answer has its `first_token_seconds`."""
        begun = time.monotonic()
        for number, prompt in enumerate(prompts):
            self.add_request(f"timed-{number}", prompt, max_tokens)
        first: dict[str, float] = {}
        last: dict[str, dict[str, Any]] = {}
        while len(last) < len(prompts):
            for request_id, output in self.step().items():
                if output["tokens"]:
                    first.setdefault(request_id, time.monotonic() - begun)
                if output["finished"]:
                    last[request_id] = output
        names = [f"timed-{number}" for number in range(len(prompts))]
        return [last[name] | {"first_token_seconds": first[name]} for name in names]

    def first_tokens(self, prompts: list[list[int]]) -> list[float]:
        """Answer prompts one by one; returns the seconds to the first token of each."""
        return [self.timed([prompt], 1)[0]["first_token_seconds"] for prompt in prompts]

    def unfinished(self) -> int:
        """Return how many requests are unfinished."""
        return self._engine.get_num_unfinished_requests()

    def reset_prefix_cache(self, **arguments: Any) -> bool:
        """Forget the engine's own cache, so that only an external one can have a prefix."""
        return bool(self._llm.reset_prefix_cache(**arguments))

    def change_weights(self, layer: str, scale: float, element: int | None = None) -> None:
        """Scale the weights of a layer in place, or one of their elements, as code that knows nothing of us does."""
        self._llm.collective_rpc(engine_inspection.change_weights, args=(layer, scale, element))

    def reload_weights(self, path: str) -> None:
        """Load all weights of a directory into the running model."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})

    def set_weights_version(self, name: str) -> None:
        """Name the weights of all ranks."""
        self._llm.collective_rpc(engine_inspection.set_weights_version, args=(name,))

    def groups(self) -> list[dict[str, Any]]:
        """Return the groups of layers that have blocks of their own; only of an engine in this process."""
        return vllm_blocks.groups(self._core())

    def cached_blocks(self, prompt: list[int], directory: str | None = None) -> list[list[dict[str, Any] | None]]:
        """Return what the engine's own cache holds of a prompt, as `vllm_blocks` does; only of one in this process."""
        return vllm_blocks.cached_blocks(self._core(), prompt, None if directory is None else Path(directory))

    def cached_hashes(self) -> list[str]:
        """Return the hash of each block that can be a hit now; only of an engine in this process."""
        return vllm_blocks.cached_hashes(self._core())

    def settle(self, seconds: float = 60.0) -> None:
        """Make steps until the connector has nothing on its way; only of an engine in this process."""
        deadline = time.monotonic() + seconds
        connector = self._core().scheduler.connector
        while connector is not None and connector.has_pending_push_work():
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {seconds} s blocks are still on their way")
            self._engine.step()

    def free_blocks(self) -> int:
        """Return how many blocks are free; only of an engine in this process."""
        return int(self._core().scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def all_blocks(self) -> int:
        """Return how many blocks there are; only of an engine in this process."""
        return int(self._core().scheduler.kv_cache_manager.block_pool.num_gpu_blocks)

    def block_keys(self, tokens: list[int], **prompt: Any) -> list[int]:
        """Return our keys of the full blocks of a prompt; needs our connector."""
        (namespace,) = set(self._llm.collective_rpc(engine_inspection.namespace))
        return engine_inspection.block_keys(
            self._llm.llm_engine.vllm_config, bytes.fromhex(namespace), tokens, **prompt
        )

    def collect_events(self) -> None:
        """Keep the KV events from now on; only of an engine in this process, which does not publish them."""
        self._batches: list[Any] = []
        self._core().scheduler.kv_event_publisher.publish = self._batches.append

    def events(self) -> list[dict[str, Any]]:
        """Return the kept events of stored blocks."""
        return [
            engine_inspection.plain(event)
            for batch in self._batches
            for event in batch.events
            if hasattr(event, "token_ids")
        ]

    def removals(self) -> list[dict[str, Any]]:
        """Return the kept events of removed blocks."""
        return [
            {"block_hashes": list(event.block_hashes), "medium": event.medium}
            for batch in self._batches
            for event in batch.events
            if hasattr(event, "block_hashes") and not hasattr(event, "token_ids")
        ]

    def kvcm_counts(self) -> dict[str, Any]:
        """Return the counters of our connector since the start; only of one in this process."""
        return engine_inspection.counts(self._core())

    def metrics(self) -> dict[str, Any]:
        """Return its metrics: `name` or `name{label="value",…}` to the value, of histograms the sum and count."""
        return {_named(metric): _value(metric) for metric in self._llm.get_metrics()}

    def close(self) -> None:
        """Shut down, the connector too."""
        self._engine.engine_core.shutdown()

    def _core(self) -> Any:
        return self._engine.engine_core.engine_core


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
