"""Every page of the console: where to find one like it on a site of the tests."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from console_site import HOSTILE

from kvcm.console.pages import ROUTES
from kvcm.service.rest.conversion import encode_name

__all__ = ["EXAMPLES", "PAGES"]

_OF_STORAGES: Final = ("disable", "drain", "limits", "remove")
_INSTANCES: Final = ("instance of chat", f"instance of {HOSTILE}")

_ALONE: Final = {path: (path,) for method, path, _ in ROUTES if method == "GET" and "{" not in path}

EXAMPLES: Final[dict[str, tuple[str, ...]]] = {
    # path of a route: paths to open
    **_ALONE,
    "/console/explorer": ("/console/explorer", "/console/explorer?instance=instance%20of%20chat"),
    "/console/residency": ("/console/residency", "/console/residency?instance=instance%20of%20chat"),
    "/console/sessions": ("/console/sessions", "/console/sessions?group=chat"),
    "/console/tasks/{name}/cancel": ("/console/tasks/drain:old/cancel",),
    "/console/groups/{name}/curve": ("/console/groups/team%2Fa/curve", "/console/groups/chat/curve"),
    "/console/groups/{name}": (
        "/console/groups/chat",
        "/console/groups/team%2Fa?seconds=86400",
        f"/console/groups/{quote(HOSTILE, safe='')}",
    ),
    "/console/groups/{name}/limits": ("/console/groups/chat/limits",),
    "/console/groups/{name}/remove": ("/console/groups/legacy/remove",),
    "/console/accounts/{name}/delete": ("/console/accounts/grace/delete",),
    "/console/accounts/{name}/password": ("/console/accounts/grace/password",),
    "/console/instances": ("/console/instances", "/console/instances?group=chat"),
    "/console/instances/{name}": tuple(f"/console/instances/{encode_name(name)}" for name in _INSTANCES),
    "/console/instances/{name}/remove": tuple(f"/console/instances/{encode_name(name)}/remove" for name in _INSTANCES),
    "/console/keys": ("/console/keys", "/console/keys?logins=yes"),
    "/console/keys/{name}/revoke": ("/console/keys/{key}/revoke",),
    "/console/keys/{name}/rotate": ("/console/keys/{key}/rotate",),
    "/console/storages/+add": ("/console/storages/+add", "/console/storages/+add?kind=mooncake"),
    "/console/storages/{name}": ("/console/storages/disk", "/console/storages/old", "/console/storages/node"),
    **{f"/console/storages/{{name}}/{verb}": (f"/console/storages/disk/{verb}",) for verb in _OF_STORAGES},
}
"""By the paths of the pages' routes; `{key}` is the id of some key."""

PAGES: Final = tuple(path for paths in EXAMPLES.values() for path in paths)
"""All of them."""
