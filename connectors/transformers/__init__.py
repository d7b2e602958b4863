"""Reuse of KV for causal language models of Hugging Face transformers (tested with 5.19)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from connectors.engine_names import engine_names

if TYPE_CHECKING:
    from connectors.transformers.reuse import KVReuse
    from connectors.transformers.settings import GenerationReport, ReuseSettings, RowReport

__all__ = ["GenerationReport", "KVReuse", "ReuseSettings", "RowReport"]

__getattr__ = engine_names(
    __name__,
    {
        "GenerationReport": "connectors.transformers.settings",
        "KVReuse": "connectors.transformers.reuse",
        "ReuseSettings": "connectors.transformers.settings",
        "RowReport": "connectors.transformers.settings",
    },
    "torch and transformers 5.19 (`pip install 'kvcm[engine]'`)",
    {"torch", "transformers"},
)
