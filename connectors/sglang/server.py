"""What a storage backend has to know of the SGLang server that it is part of."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt import runtime_context

__all__ = ["ServerState"]

_log = logging.getLogger(__name__)

# Settings that KV depends on besides the files of the model, and values that say nothing: the dtype of a pool whose
# elements are what they are called is registered anyway, and how files are read does not matter as long as they are.
_COUNTING = ("json_model_override_args", "kv_cache_dtype", "load_format", "quantization")
_USUAL = frozenset({"", "None", "auto", "default", "{}", "bfloat16", "bf16", "float16", "half", "float32", "float"})
_USUAL_FORMATS = frozenset({"safetensors", "fastsafetensors", "pt", "npcache", "mistral", "gguf", "sharded_state"})
_MISSING = ""


@dataclass(frozen=True, slots=True)
class ServerState:
    """The model as the server has it now.

    Attributes:
        model_path: a directory, or a name on the hub.
        revision: of the name.
        weight_version: as whoever updates weights tells it.
        settings: what else KV depends on.
    """

    model_path: str
    revision: str | None
    weight_version: str
    settings: Mapping[str, str]

    @classmethod
    def now(cls) -> ServerState:
        """Return the state of this process."""
        model, serving = runtime_context.get_model(), runtime_context.get_serving()
        read = {name: str(_read(model, name)) for name in _COUNTING}
        settings = {name: value for name, value in read.items() if value not in _USUAL}
        if settings.get("load_format") in _USUAL_FORMATS:
            del settings["load_format"]
        version = str(_read(serving, "weight_version"))
        if version not in _USUAL:
            settings["weight_version"] = version
        return cls(str(_read(model, "model_path")), _read(model, "revision") or None, version, settings)

    def has_changed(self) -> bool:
        """Return whether the server has other weights than when this was noted, as far as it says so."""
        model, serving = runtime_context.get_model(), runtime_context.get_serving()
        return (
            str(_read(model, "model_path")) != self.model_path
            or str(_read(serving, "weight_version")) != self.weight_version
        )


def _read(settings: Any, name: str) -> Any:
    return getattr(settings, name, _MISSING)
