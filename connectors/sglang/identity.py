"""Identity of a rank's pages, from SGLang's storage config and server settings: equal identities share pages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvcm.connectors.reuse.registration import KvIdentity
from kvcm.connectors.reuse.weight_files import weights_digest
from kvcm.connectors.sglang.host_pool import PageFormat
from kvcm.connectors.sglang.options import SglangOptions
from kvcm.model.errors import InvalidArgumentError

__all__ = ["adapters_of", "page_identity", "weights_of"]

_COMMIT = re.compile("[0-9a-f]{40}")
_LAYOUT_VERSION = "sglang/1"


def page_identity(
    options: SglangOptions,
    config: Any,
    page_format: PageFormat,
    hashing: str,
    model_path: str,
    extra: Mapping[str, str],
) -> KvIdentity:
    """Return the identity of a rank's pages, besides the weights.

    Args:
        options: of the connector.
        config: SGLang's storage config of the rank.
        page_format: how a page is stored.
        hashing: identifies the algorithm of page hashes: the hash of known tokens.
        model_path: of SGLang's server.
        extra: other settings that KV depends on.

    Raises:
        InvalidArgumentError: the model has no name.
    """
    return KvIdentity(
        model=options.model_name or Path(config.model_name or model_path).name,
        engine=_LAYOUT_VERSION,
        dtype=page_format.dtype,
        hashing=hashing,
        formats={"kv": page_format.text},
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        use_mla=config.is_mla_model,
        extra=extra,
    )


def adapters_of(references: Iterable[Any]) -> str:
    """Return a text that identifies the adapters (LoRA) that a server starts with, "" for none.

    SGLang's page hashes have the id of an adapter, which for these follows from name and path alone: trained again, it
    keeps its id. Adapters that are loaded later get ids that no other one has.

    Args:
        references: SGLang's `LoRARef`s.

    Raises:
        InvalidArgumentError: the files of an adapter are not on this node.
    """
    digests = {}
    for each in references:
        try:
            digests[each.lora_id] = weights_digest(_directory(each.lora_path, None))
        except (OSError, ValueError, ImportError) as error:
            raise InvalidArgumentError(
                f"adapter {each.lora_name!r} at {each.lora_path!r} cannot be identified ({error!r}): give a"
                " directory as its path"
            ) from error
    return json.dumps(digests, sort_keys=True) if digests else ""


def weights_of(model_path: str, revision: str | None) -> str:
    """Return a text that identifies the weights of a model's files: their digest, or a commit.

    Args:
        model_path: of SGLang's server: a directory, or a name on the hub.
        revision: of the name, if any.

    Raises:
        InvalidArgumentError: nothing does: a name, a branch or a tag may stand for other weights tomorrow.
    """
    try:
        return weights_digest(_directory(model_path, revision))
    except (OSError, ValueError, ImportError) as error:
        if revision and _COMMIT.fullmatch(revision):
            return f"commit={revision}"
        raise InvalidArgumentError(
            f"the weights of {model_path!r} at revision {revision or 'main'!r} cannot be told from others ({error!r}):"
            " set option 'weights', or give a commit as revision"
        ) from error


def _directory(model_path: str, revision: str | None) -> Path:
    """Return the local directory of a model's files; nothing is downloaded."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download  # SGLang brings it along

    return Path(snapshot_download(model_path, revision=revision, local_files_only=True))
