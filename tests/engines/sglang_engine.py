"""SGLang as `engine_process` starts it: tokenizer manager here, scheduler and detokenizer in processes of their own."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import sglang
from engine_loop import serve
from safetensors import safe_open
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

_OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.9,  # of the memory free now: other processes come and go; the number of tokens decides
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "page_size": 16,
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "host": "127.0.0.1",
    "random_seed": 0,
    "log_level": "info",
}
_STORAGE = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_write_policy": "write_through",
    "hicache_storage_backend": "dynamic",
    "hicache_storage_prefetch_policy": "wait_complete",  # else a test cannot know the loaded pages
}


class SglangEngine:
    """An engine; with `storage`, the extra config of a dynamic storage backend, with a hierarchical cache."""

    def __init__(self, model: str, storage: dict[str, Any] | None = None, **options: Any) -> None:
        wanted = _OPTIONS | ({} if storage is None else _with_storage(storage)) | options
        self._engine = sglang.Engine(model_path=model, **wanted)
        self.started = {"version": sglang.__version__}

    def generate(
        self, prompts: list[list[int]], max_tokens: int, adapter: str | None = None, **sampling: Any
    ) -> list[dict[str, Any]]:
        """Answer all prompts, with an adapter that the server was started with."""
        greedy = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True} | sampling
        adapters = adapter and [adapter] * len(prompts)
        outputs = self._engine.generate(input_ids=prompts, sampling_params=greedy, lora_path=adapters)
        return [_generated(output) for output in outputs]

    def abort_after(self, prompt: list[int], pause: float) -> str:
        """Ask for an answer and abort the request after a while; returns why it ended."""
        manager = self._engine.tokenizer_manager
        greedy = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}

        async def ask() -> str:
            asked = self._engine.async_generate(input_ids=prompt, sampling_params=greedy, rid="to be aborted")
            answer = asyncio.ensure_future(asked)
            await asyncio.sleep(pause)
            manager.abort_request("to be aborted")
            try:
                return str((await answer)["meta_info"]["finish_reason"]["type"])
            except ValueError as error:  # it had not begun
                return str(error)

        return self._engine.loop.run_until_complete(ask())

    def flush_cache(self) -> bool:
        """Empty the memory of the device and of the host, so that only the storage can have a prefix."""
        return bool(self._engine.flush_cache().success)

    def attach(self, extra: dict[str, Any]) -> str:
        """Attach a dynamic storage backend with this extra config; return the outcome."""
        manager = self._engine.tokenizer_manager
        attached = manager.attach_hicache_storage("dynamic", json.dumps(extra), "wait_complete")
        return str(self._engine.loop.run_until_complete(attached).message)

    def detach(self) -> str:
        """Detach the storage backend; return the outcome."""
        return str(
            self._engine.loop.run_until_complete(self._engine.tokenizer_manager.detach_hicache_storage()).message
        )

    def update_weights(self, model: str, version: str | None = None) -> bool:
        """Take other weights for the same model."""
        wanted = UpdateWeightFromDiskReqInput(model_path=model, weight_version=version)
        updated = self._engine.tokenizer_manager.update_weights_from_disk(wanted, None)
        return bool(self._engine.loop.run_until_complete(updated)[0])

    def update_tensor(self, model: str, name: str, flush_cache: bool) -> bool:
        """Take one tensor from another model's file."""
        with safe_open(f"{model}/model.safetensors", "pt") as file:
            tensor = file.get_tensor(name)
        self._engine.begin_weight_update()
        updated = self._engine.update_weights_from_tensor([(name, tensor)], flush_cache=flush_cache)
        self._engine.end_weight_update()
        return bool(updated[0])

    def prometheus(self) -> str:
        """Return the metrics of all processes, as the server shows them."""
        from prometheus_client import CollectorRegistry, generate_latest, multiprocess

        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)
        return generate_latest(registry).decode()

    def close(self) -> None:
        """Shut down."""
        self._engine.shutdown()


def _with_storage(extra: dict[str, Any]) -> dict[str, Any]:
    return _STORAGE | {"hicache_storage_backend_extra_config": json.dumps(extra)}


def _generated(output: dict[str, Any]) -> dict[str, Any]:
    about = output["meta_info"]
    return {
        "tokens": output["output_ids"],
        "finish_reason": (about.get("finish_reason") or {}).get("type"),
        "cached_tokens": about["cached_tokens"],
        "details": about.get("cached_tokens_details") or {},
    }


if __name__ == "__main__":  # the processes that SGLang starts import this file
    serve(SglangEngine)
