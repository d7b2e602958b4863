"""Whether an object is one of Kubernetes: by its published schemas, for kinds of operators by the fields that we use.

The schemas of the Prometheus operator and of cert-manager are in no package of Python, so those kinds are compared with
the fields that we use; test_operator_kinds.py asks packages of npm. A field that is not
listed here is an error: look it up, and add it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import kubernetes_validate

__all__ = ["VERSIONS", "SchemaError", "check_object"]

VERSIONS = ("1.27", "1.34", "1.37")
"""Releases of Kubernetes that manifests are compared with, from the oldest allowed to the latest that is known."""


class SchemaError(Exception):
    """An object is none; says which, where, and why."""


_ANY: Mapping[str, Any] = {}
_SECRET_KEY = {"name": str, "key": str}
_METADATA = {"name": str, "namespace": str, "labels": dict, "annotations": dict}
_RULE = {
    "record": str, "alert": str, "expr": str, "for": str, "labels": dict, "annotations": dict,
}  # fmt: skip
_KINDS: Mapping[str, Any] = {
    "monitoring.coreos.com/v1 PrometheusRule": {"groups": [{"name": str, "interval": str, "rules": [_RULE]}]},
    "monitoring.coreos.com/v1 ServiceMonitor": {
        "jobLabel": str,
        "selector": {"matchLabels": dict},
        "endpoints": [
            {
                "port": str,
                "path": str,
                "interval": str,
                "scheme": str,
                "authorization": {"credentials": _SECRET_KEY},
                "tlsConfig": {
                    "ca": {"secret": _SECRET_KEY},
                    "cert": {"secret": _SECRET_KEY},
                    "keySecret": _SECRET_KEY,
                    "serverName": str,
                },
            }
        ],
    },
    "cert-manager.io/v1 Certificate": {
        "secretName": str,
        "issuerRef": {"name": str, "kind": str, "group": str},
        "duration": str,
        "renewBefore": str,
        "privateKey": {"algorithm": str, "size": int, "rotationPolicy": str},
        "usages": [str],
        "dnsNames": [str],
    },
}


def check_object(found: Mapping[str, Any], version: str) -> None:
    """Compare an object with its schema.

    Args:
        found: as it is sent to the API server.
        version: of Kubernetes, as in 1.34.

    Raises:
        SchemaError: naming the object and the field.
    """
    name = f"{found['kind']} {found['metadata']['name']}"
    known = _KINDS.get(f"{found['apiVersion']} {found['kind']}")
    if known is not None:
        faults = list(
            _faults(dict(found), {"apiVersion": str, "kind": str, "metadata": _METADATA, "spec": known}, name)
        )
        if faults:
            raise SchemaError("; ".join(faults))
        return
    try:
        kubernetes_validate.validate(dict(found), version, strict=True)
    except kubernetes_validate.ValidationError as error:
        path = ".".join(map(str, error.path))
        raise SchemaError(f"{name}, Kubernetes {version}: {path}: {error.message}") from None
    except kubernetes_validate.SchemaNotFoundError as error:
        raise SchemaError(f"{name}: {error.message}") from None


def _faults(found: Any, shape: Any, where: str) -> Iterator[str]:
    if isinstance(shape, type):
        if not isinstance(found, shape):
            yield f"{where} is {found!r}, must be {shape.__name__}"
    elif isinstance(shape, list):
        for number, each in enumerate(found if isinstance(found, list) else [found]):
            yield from _faults(each, shape[0], f"{where}[{number}]")
    elif not isinstance(found, dict):
        yield f"{where} is {found!r}, must have fields"
    else:
        for key, value in found.items():
            if key in shape:
                yield from _faults(value, shape[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is no known field"
