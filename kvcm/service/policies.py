"""Who may call what: every call, page and stream has its row here, and what has none is not served.

A test compares the table with what is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from kvcm.model.principals import Verb

__all__ = ["ACTIONS", "ANYBODY", "PAGE_POLICIES", "POLICIES", "Policy", "Scope", "policy_of"]


class Scope(Enum):
    """What a call is about."""

    DEPLOYMENT = "deployment"  # or several groups at a time
    GROUP = "group"
    INSTANCE = "instance"
    OWN_GROUPS = "own groups"  # those that the principal covers; the one alone that the request names, if it does
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Policy:
    """Who may do something.

    Attributes:
        verbs: of which the principal needs one; None for that any principal will do.
        scope: what it has to cover.
        field: of the request that names the group; where it is empty, the call is about all groups.
        is_open: whether strangers may do it, too.
        own: of the request that names an account: whoever is logged in as that one may, too.
    """

    verbs: frozenset[Verb] | None
    scope: Scope
    field: str = ""
    is_open: bool = False
    own: str = ""

    @property
    def action(self) -> str:
        """What is denied, as a label of metrics."""
        return "any" if self.verbs is None else "_or_".join(sorted(verb.value for verb in self.verbs))


def _everywhere(*verbs: Verb) -> Policy:
    return Policy(frozenset(verbs), Scope.DEPLOYMENT)


def _on_instance(*verbs: Verb) -> Policy:
    return Policy(frozenset(verbs), Scope.INSTANCE)


def _on_own_groups(field: str, *verbs: Verb) -> Policy:
    return Policy(frozenset(verbs), Scope.OWN_GROUPS, field)


def _on_group(field: str, *verbs: Verb) -> Policy:
    return Policy(frozenset(verbs), Scope.GROUP, field)


_OPEN: Final = Policy(None, Scope.NOTHING, is_open=True)
ANYBODY: Final = Policy(None, Scope.NOTHING)
"""Of what every principal may do."""

_VIEW: Final = _everywhere(Verb.VIEW)
_OPERATE: Final = _everywhere(Verb.OPERATE)
_ADMINISTER: Final = _everywhere(Verb.ADMINISTER)
_REGISTRATION: Final = _on_instance(Verb.MATCH, Verb.WRITE, Verb.VIEW)
_REGISTER: Final = _on_group("instance_group", Verb.WRITE)

_BY_SERVICE: Final[Mapping[str, Mapping[str, Policy]]] = {
    "kv_cache_manager.proto.meta.MetaService": {
        "RegisterInstance": _REGISTER,
        "GetInstanceInfo": _REGISTRATION,
        "GetCacheMeta": _on_instance(Verb.MATCH),
        "GetCacheLocation": _on_instance(Verb.MATCH),
        "GetCacheLocationLen": _on_instance(Verb.MATCH),
        "StartWriteCache": _on_instance(Verb.WRITE),
        "FinishWriteCache": _on_instance(Verb.WRITE),
        "RemoveCache": _on_instance(Verb.REMOVE),
        "TrimCache": _on_instance(Verb.REMOVE),
        "GetClusterInfo": ANYBODY,
    },
    "kvcm.v1.LeaseService": {
        "RenewReadLease": _on_instance(Verb.MATCH),
        "ReleaseReadLease": _on_instance(Verb.MATCH),
        "RenewWriteSession": _on_instance(Verb.WRITE),
    },
    "kvcm.v1.PinService": {
        "PinPrefix": _on_instance(Verb.PIN),
        "UnpinPrefix": _on_instance(Verb.PIN),
        "ListPins": _on_instance(Verb.PIN, Verb.VIEW),
        "ReportMissing": _on_instance(Verb.MATCH),  # it is readers that find out
    },
    # A node's agent speaks for memory that all groups use.
    "kvcm.v1.PoolService": {"ReportPool": _everywhere(Verb.WRITE)},
    "kv_cache_manager.proto.admin.AdminService": {
        "AddStorage": _ADMINISTER,
        "EnableStorage": _OPERATE,
        "DisableStorage": _OPERATE,
        "RemoveStorage": _ADMINISTER,
        "UpdateStorage": _ADMINISTER,
        "ListStorage": _VIEW,
        # A group has quotas: whoever is limited to it does not set them.
        "CreateInstanceGroup": _ADMINISTER,
        "UpdateInstanceGroup": _ADMINISTER,
        "RemoveInstanceGroup": _ADMINISTER,
        "GetInstanceGroup": _on_group("name", Verb.VIEW),
        "GetCacheMeta": _on_instance(Verb.MATCH),
        "RemoveCache": _on_instance(Verb.REMOVE),
        "RegisterInstance": _REGISTER,
        "RemoveInstance": _on_instance(Verb.ADMINISTER),
        "GetInstanceInfo": _REGISTRATION,
        "ListInstanceInfo": _on_group("instance_group_name", Verb.VIEW),
        "AddAccount": _ADMINISTER,
        "DeleteAccount": _ADMINISTER,
        "ListAccount": _OPERATE,
        "GenConfigSnapshot": _OPERATE,
        "LoadConfigSnapshot": _ADMINISTER,
        "GetMetrics": _VIEW,
        "CheckHealth": _OPEN,
        "GetManagerClusterInfo": ANYBODY,
        "LeaderDemote": _OPERATE,
        "GetLeaderElectorConfig": _VIEW,
        "UpdateLeaderElectorConfig": _OPERATE,
        "UpdateLogger": _OPERATE,
    },
    "kvcm.v1.GroupService": {"ListInstanceGroup": _VIEW},
    "kvcm.v1.CapacityService": {
        "GetUsage": _on_group("instance_group", Verb.VIEW),
        "SetGlobalQuota": _ADMINISTER,
        "ListGlobalQuota": _VIEW,
        "RemoveGlobalQuota": _ADMINISTER,
        "CollectGarbage": _OPERATE,
        "ScrubStorage": _OPERATE,
    },
    "kvcm.v1.InsightService": {
        "ListSessions": _on_own_groups("instance_group", Verb.VIEW),
        "ExploreBlocks": _on_instance(Verb.VIEW, Verb.MATCH),
        "GetCurve": _on_group("instance_group", Verb.VIEW),
        "ListAlerts": _on_own_groups("instance_group", Verb.VIEW),
    },
    "kvcm.v1.StorageService": {"DrainStorage": _OPERATE, "CancelDrain": _OPERATE, "ListDrain": _VIEW},
    "kvcm.v1.ConfigService": {"ReloadConfig": _OPERATE},
    "kvcm.v1.AccessService": {
        "CreateKey": _ADMINISTER,
        "ListKeys": _OPERATE,
        "RotateKey": _ADMINISTER,
        "RevokeKey": _ADMINISTER,
        "Login": _OPEN,
        "Logout": ANYBODY,
        "SetPassword": replace(_ADMINISTER, own="user_name"),
        "WhoAmI": ANYBODY,
    },
    "kv_cache_manager.proto.debug.DebugService": {
        "InjectFault": _ADMINISTER,
        "RemoveFault": _ADMINISTER,
        "ClearFaults": _ADMINISTER,
    },
}

POLICIES: Final[Mapping[tuple[str, str], Policy]] = {
    (service, name): policy for service, policies in _BY_SERVICE.items() for name, policy in policies.items()
}
"""Of calls, by service and name."""

PAGE_POLICIES: Final[Mapping[str, Policy]] = {
    "/livez": _OPEN,
    "/readyz": _OPEN,
    "/startupz": _OPEN,
    "/openapi.json": _OPEN,
    "/v1/openapi.json": _OPEN,
    "/v1/login": _OPEN,
    "/metrics": _VIEW,
    "/api/events": _VIEW,
    "/v1/events/recent": _ADMINISTER,
    "/v1/managers": _VIEW,
    "/v1/history": Policy(frozenset({Verb.VIEW}), Scope.NOTHING),  # tells of the groups that the principal covers
}
"""Of pages, streams and resources without a call, by path. A resource below /v1 that is not here wants a principal, and
the calls that it makes want what they want."""


ACTIONS: Final = tuple(sorted({policy.action for policy in (*POLICIES.values(), *PAGE_POLICIES.values())}))
"""Everything that can be denied, as labels of metrics."""


def policy_of(service: str, name: str) -> Policy:
    """Return the policy of a call.

    Raises:
        KeyError: it has none, and is not to be served.
    """
    return POLICIES[service, name]
