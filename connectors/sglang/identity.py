"""Identity of a rank's pages, from SGLang's storage config and server settings: equal identities share pages."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcm.connectors.reuse.registration import KvIdentity, weights_fingerprint
from kvcm.connectors.sglang.host_pool import PageFormat
from kvcm.connectors.sglang.options import SglangOptions

__all__ = ["page_identity", "weights_of"]

_log = logging.getLogger(__name__)
_LAYOUT_VERSION = "sglang/1"


def page_identity(
    options: SglangOptions,
    config: Any,
    page_format: PageFormat,
    hashing: str,
    weights: str,
    model_path: str,
    extra: Mapping[str, str],
) -> KvIdentity:
    """Return the identity of a rank's pages.

    Args:
        options: of the connector.
        config: SGLang's storage config of the rank.
        page_format: how a page is stored.
        hashing: identifies the algorithm of page hashes: the hash of known tokens.
        weights: identifies the weights.
        model_path: of SGLang's server.
        extra: other settings that KV depends on.

    Raises:
        InvalidArgumentError: the model has no name.
    """
    return KvIdentity(
        model=options.model_name or Path(config.model_name or model_path).name,
        weights=weights,
        engine=_LAYOUT_VERSION,
        dtype=page_format.dtype,
        hashing=hashing,
        formats={"kv": page_format.text},
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        use_mla=config.is_mla_model,
        extra=extra,
    )


def weights_of(options: SglangOptions, model_path: str, revision: str | None) -> str:
    """Return a text that identifies the weights: option `weights`, or a fingerprint of the files.

    Args:
        options: of the connector.
        model_path: of SGLang's server: a directory, or a name on the hub.
        revision: of the name, if any.
    """
    if options.weights:
        return options.weights
    try:
        return weights_fingerprint(_directory(model_path, revision))
    except (OSError, ValueError, ImportError) as error:
        name = f"{model_path}@{revision or 'main'}"
        _log.warning("the weights of %s cannot be told from others (%r): set option 'weights'", name, error)
        return name


def _directory(model_path: str, revision: str | None) -> Path:
    """Return the local directory of a model's files; nothing is downloaded."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download  # SGLang brings it along

    return Path(snapshot_download(model_path, revision=revision, local_files_only=True))
