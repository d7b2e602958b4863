"""Reuse of KV for causal language models of Hugging Face transformers (tested with 5.19)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcm.connectors.engine_names import engine_names

if TYPE_CHECKING:
    from kvcm.connectors.transformers.reuse import KVReuse
    from kvcm.connectors.transformers.settings import GenerationReport, ReuseSettings, RowReport

__all__ = ["GenerationReport", "KVReuse", "ReuseSettings", "RowReport"]

__getattr__ = engine_names(
    package=__name__,
    modules={
        "GenerationReport": "kvcm.connectors.transformers.settings",
        "KVReuse": "kvcm.connectors.transformers.reuse",
        "ReuseSettings": "kvcm.connectors.transformers.settings",
        "RowReport": "kvcm.connectors.transformers.settings",
    },
    needs="torch and transformers 5.19 (`pip install 'kvcm[engine]'`)",
    engines={"torch", "transformers"},
)
