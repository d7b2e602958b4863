"""Reuse of KV for causal language models of Hugging Face transformers (tested with 5.19)."""

from connectors.transformers.report import GenerationReport, RowReport
from connectors.transformers.reuse import KVReuse
from connectors.transformers.settings import ReuseSettings

__all__ = ["GenerationReport", "KVReuse", "ReuseSettings", "RowReport"]
