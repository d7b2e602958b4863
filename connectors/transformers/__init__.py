"""Reuse of KV for causal language models of Hugging Face transformers (tested with 5.19)."""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ImportError(
        "connectors.transformers runs beside a model: install torch and transformers (tested with 5.19), for instance"
        " with `pip install 'kvcm[engine]'`"
    ) from error

from connectors.transformers.report import GenerationReport, RowReport
from connectors.transformers.reuse import KVReuse
from connectors.transformers.settings import ReuseSettings

__all__ = ["GenerationReport", "KVReuse", "ReuseSettings", "RowReport"]
