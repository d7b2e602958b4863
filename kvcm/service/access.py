"""Authentication and permissions: checked before a request is read, and again before its handler runs.

A rejected client learns only that it lacks permission: an unknown key, a wrong secret and a revoked key have the same
answer, and so has every instance of a foreign group. Only a client that proves an expired key learns of the expiry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from kvcm.model.errors import UnknownInstanceError
from kvcm.model.principals import (
    ALL_GROUPS,
    ANONYMOUS,
    UNRESTRICTED,
    ApiKey,
    PresentedKey,
    Principal,
    Verb,
    call_context,
)
from kvcm.registry.api_keys import KeyRegistry
from kvcm.registry.secrets import redacted
from kvcm.service.rejections import ForbiddenError, UnauthenticatedError
from kvcm.telemetry import metrics as catalog
from kvcm.telemetry.metrics import Reading

__all__ = [
    "ACTIONS",
    "CERTIFICATE_NAMES",
    "INDEX_PATHS",
    "OUTCOMES",
    "PAGE_POLICIES",
    "POLICIES",
    "Access",
    "AccessMetrics",
    "Credentials",
    "KeyedAccess",
    "OpenAccess",
    "Policy",
    "Scope",
    "credentials_of",
    "policy_of",
    "redacted_for_principal",
]

# The permissions of calls: every call, page and stream has its row here; one without a row is not served.
#
# A test compares the table with the served calls.


class Scope(Enum):
    """What a call is about."""

    DEPLOYMENT = "deployment"  # or several groups at a time
    GROUP = "group"
    INSTANCE = "instance"
    OWN_GROUPS = "own groups"  # those that the principal covers; the one alone that the request names, if it does
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Policy:
    """The permission that a call needs.

    Attributes:
        verbs: of which the principal needs one; None for that any principal will do.
        scope: what it has to cover.
        field: of the request that names the group; where it is empty, the call is about all groups.
        is_open: whether it needs no authentication.
        own: of the request that names an account: a login of that account has the permission, too.
    """

    verbs: frozenset[Verb] | None
    scope: Scope
    field: str = ""
    is_open: bool = False
    own: str = ""

    @property
    def action(self) -> str:
        """The denied action, as a label of metrics."""
        return "any" if self.verbs is None else "_or_".join(sorted(verb.value for verb in self.verbs))


def _everywhere(*verbs: Verb) -> Policy:
    return Policy(frozenset(verbs), Scope.DEPLOYMENT)


def _on_instance(*verbs: Verb) -> Policy:
    return Policy(frozenset(verbs), Scope.INSTANCE)


def _on_own_groups(field: str, *verbs: Verb) -> Policy:
    return Policy(frozenset(verbs), Scope.OWN_GROUPS, field)


def _on_group(field: str, *verbs: Verb) -> Policy:
    return Policy(frozenset(verbs), Scope.GROUP, field)


_OF_INSTANCES: Final = (Scope.INSTANCE, Scope.OWN_GROUPS)
_OPEN: Final = Policy(None, Scope.NOTHING, is_open=True)
_ANY_PRINCIPAL: Final = Policy(None, Scope.NOTHING)
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
        "GetClusterInfo": _ANY_PRINCIPAL,
        "ReportEvent": _on_instance(Verb.WRITE, Verb.REPORT),
        "GetHostCacheState": _on_instance(Verb.MATCH, Verb.SCORE),
        "GetCacheLocationsByBackend": _on_instance(Verb.MATCH, Verb.SCORE),
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
        "ReportMissing": _on_instance(Verb.MATCH, Verb.REPORT),  # it is readers that find out
    },
    "kvcm.v1.ResidencyService": {
        "ReportResidency": _on_instance(Verb.WRITE, Verb.REPORT),
        "Score": _on_instance(Verb.SCORE),
        "ListReporters": _on_instance(Verb.SCORE, Verb.VIEW),
        # Of the instances and publishers of the groups that the principal covers.
        "MatchModel": _on_own_groups("instance_group", Verb.SCORE),
        "RegisterPublisher": _on_own_groups("instance_group", Verb.WRITE, Verb.REPORT),
        "UnregisterPublisher": _on_own_groups("instance_group", Verb.WRITE, Verb.REPORT),
        "DescribeIndex": _on_own_groups("instance_group", Verb.WRITE, Verb.REPORT, Verb.SCORE, Verb.VIEW),
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
        # A principal that is limited to a group does not set its quotas.
        "CreateInstanceGroup": _ADMINISTER,
        "UpdateInstanceGroup": _ADMINISTER,
        "RemoveInstanceGroup": _ADMINISTER,
        "GetInstanceGroup": _on_group("name", Verb.VIEW),
        "ListInstanceGroup": _VIEW,
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
        "GetManagerClusterInfo": _ANY_PRINCIPAL,
        "LeaderDemote": _OPERATE,
        "GetLeaderElectorConfig": _VIEW,
        "UpdateLeaderElectorConfig": _OPERATE,
        "UpdateLogger": _OPERATE,
    },
    "kvcm.v1.GroupService": {
        "ListInstanceGroup": _VIEW,
        "MoveInstanceGroup": _ADMINISTER,
        "ListGroupStore": _VIEW,
    },
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
        "Logout": _ANY_PRINCIPAL,
        "SetPassword": replace(_ADMINISTER, own="user_name"),
        "WhoAmI": _ANY_PRINCIPAL,
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
INDEX_PATHS: Final = frozenset(
    {"/register", "/unregister", "/query", "/query_by_hash", "/services", "/workers", "/global_view"}
)
"""Paths of the index API. They want a principal, and the calls that they make want what they want."""
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
    "/v1/history": Policy(frozenset({Verb.VIEW}), Scope.NOTHING),  # of the groups that the principal covers
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


_SCHEME: Final = "bearer "
_MAX_CACHED_PRINCIPALS: Final = 4096
_ENDED: Final = "the key has ended: ask for a new one"
_KEY_WANTED: Final = "a key is required: authorization: Bearer kvcm_<id>_<secret>"
_ACCEPTED: Final = "accepted"
_MISSING: Final = "missing"
_MALFORMED: Final = "malformed"
_UNKNOWN: Final = "unknown"
_EXPIRED: Final = "expired"
OUTCOMES: Final = (_ACCEPTED, _MISSING, _MALFORMED, _UNKNOWN, _EXPIRED)
"""Outcomes of authentication, as labels of metrics."""


class Credentials(NamedTuple):
    """The credentials of a request.

    Attributes:
        authorization: as in the header of HTTP and the metadata of gRPC, "" for none.
        certificate_names: subject alternative names of a client certificate that was verified.
    """

    authorization: str = ""
    certificate_names: tuple[str, ...] = ()


_NO_CREDENTIALS: Final = Credentials()


class Access(Protocol):
    """Checks credentials and permissions."""

    @property
    def requires_credentials(self) -> bool:
        """Whether requests need credentials."""

    def principal(self, policy: Policy, credentials: Credentials) -> Principal:
        """Return the principal of credentials.

        Raises:
            UnauthenticatedError: they are of no principal.
            ForbiddenError: the principal has the permission nowhere.
        """

    def page_principal(self, path: str, credentials: Credentials) -> Principal:
        """Return the principal that asks for a page or a stream.

        Raises:
            UnauthenticatedError: the credentials are of no principal.
            ForbiddenError: the principal lacks the permission.
        """

    def check_page(self, path: str, principal: Principal) -> None:
        """Check the permission of an authenticated principal for a page.

        Raises:
            ForbiddenError: the principal lacks it.
        """

    def is_key_valid(self, principal: Principal) -> bool:
        """Return whether the key of a principal that was authenticated earlier is still valid."""

    def check(self, service: str, name: str, request: Any, principal: Principal) -> None:
        """Check the permission of a principal for a call.

        Raises:
            UnauthenticatedError: the principal is not authenticated, or its key ended meanwhile.
            ForbiddenError: it lacks the permission, or has it for other groups only.
        """

    def check_instance(self, service: str, name: str, request: Any, principal: Principal) -> None:
        """Check that a principal covers the instance that a request is about; `check` admitted the call.

        Raises:
            UnknownInstanceError: it does not, or there is no such instance. Whether there is one is not said.
        """


class OpenAccess:
    """Authentication is disabled."""

    requires_credentials = False

    def principal(self, _policy: Policy, _credentials: Credentials) -> Principal:
        """Return the principal without restrictions."""
        return UNRESTRICTED

    def page_principal(self, _path: str, _credentials: Credentials) -> Principal:
        """Return the principal without restrictions."""
        return UNRESTRICTED

    def check_page(self, _path: str, _principal: Principal) -> None:
        """Reject nothing."""

    def is_key_valid(self, _principal: Principal) -> bool:
        """Return True."""
        return True

    def check(self, _service: str, _name: str, _request: Any, _principal: Principal) -> None:
        """Reject nothing."""

    def check_instance(self, _service: str, _name: str, _request: Any, _principal: Principal) -> None:
        """Reject nothing."""


class KeyedAccess:
    """Every client presents a key or a certificate, except for open calls and pages.

    Args:
        keys: all API keys.
        group_of: group of a registered instance, None for an unknown one.
    """

    requires_credentials = True

    def __init__(self, keys: KeyRegistry, group_of: Callable[[str], str | None]) -> None:
        self._keys = keys
        self._group_of = group_of
        self._known: dict[Credentials, tuple[ApiKey, Principal]] = {}  # parsing and hashing is slow
        self._known_generation = -1
        self.outcomes: Counter[str] = Counter()
        self.denied: Counter[str] = Counter()

    def principal(self, policy: Policy, credentials: Credentials) -> Principal:
        """Return the principal; the anonymous one for an open call."""
        if policy.is_open:
            return ANONYMOUS
        principal = self._authenticated(credentials)
        if not (policy.own and principal.account):  # else it is known by the request alone
            self._check_verbs(policy, principal)
        return principal

    def page_principal(self, path: str, credentials: Credentials) -> Principal:
        """Return the principal that asks for a page."""
        is_resource = path in INDEX_PATHS or path.startswith(("/v1/", "/console/"))
        has_calls = is_resource and path not in PAGE_POLICIES
        policy = _ANY_PRINCIPAL if has_calls else PAGE_POLICIES[path]  # the calls of resources have their own
        if policy.is_open:
            return self._optional_principal(credentials)
        principal = self.principal(policy, credentials)
        self._check_scope(policy, None, principal)
        return principal

    def check_page(self, path: str, principal: Principal) -> None:
        """Check the permission for a page; one without a policy makes calls, which have theirs."""
        policy = PAGE_POLICIES.get(path, _ANY_PRINCIPAL)
        if not policy.is_open:
            self._check_verbs(policy, principal)
            self._check_scope(policy, None, principal)

    def is_key_valid(self, principal: Principal) -> bool:
        """Return whether the key exists and has not expired; this counts as a use of it."""
        key = self._keys.find(principal.key_id)
        return key is not None and self._keys.use(key)

    def check(self, service: str, name: str, request: Any, principal: Principal) -> None:
        """Check the permission of a principal for a call."""
        policy = POLICIES[service, name]
        if policy.is_open:
            return
        if principal is UNRESTRICTED or principal is ANONYMOUS:  # not authenticated
            raise self._unauthenticated(_MISSING, _KEY_WANTED)
        if self._keys.find(principal.key_id) is None or (principal.account and not self.is_key_valid(principal)):
            raise self._unauthenticated(_EXPIRED, _ENDED)  # since its request began to come
        if policy.own and principal.account and principal.account == getattr(request, policy.own):
            return
        self._check_verbs(policy, principal)
        self._check_scope(policy, request, principal)

    def check_instance(self, service: str, name: str, request: Any, principal: Principal) -> None:
        """Refuse an instance of another group like one that does not exist."""
        policy = POLICIES[service, name]
        if policy.scope not in _OF_INSTANCES or ALL_GROUPS in principal.groups:
            return
        instance_id = getattr(request, "instance_id", "")
        if policy.scope is Scope.OWN_GROUPS and not instance_id:  # of all instances that the principal covers
            return
        group = self._group_of(instance_id)
        if group is None or group not in principal.groups:
            self.denied[policy.action] += group is not None
            raise UnknownInstanceError(f"instance {instance_id!r} is not registered: call RegisterInstance first")

    def _optional_principal(self, credentials: Credentials) -> Principal:
        """Return the principal of an open page, which may show more to authenticated clients."""
        if credentials == _NO_CREDENTIALS:
            return ANONYMOUS
        try:
            return self._authenticated(credentials)
        except UnauthenticatedError:
            return ANONYMOUS

    def _authenticated(self, credentials: Credentials) -> Principal:
        """Return the principal of credentials; cached until a key changes."""
        if self._known_generation != self._keys.generation:
            self._known.clear()
            self._known_generation = self._keys.generation
        known = self._known.get(credentials)
        key, principal = known if known is not None else self._resolve_key(credentials)
        if not self._keys.use(key):
            raise self._unauthenticated(_EXPIRED, _ENDED)
        self.outcomes[_ACCEPTED] += 1
        return principal

    def _resolve_key(self, credentials: Credentials) -> tuple[ApiKey, Principal]:
        if credentials.authorization:
            key = self._key_of_header(credentials.authorization)
        else:
            key = self._key_of_certificate(credentials.certificate_names)
        if len(self._known) >= _MAX_CACHED_PRINCIPALS:
            self._known.clear()
        known = self._known[credentials] = key, key.principal()
        return known

    def _key_of_header(self, authorization: str) -> ApiKey:
        presented = None
        if authorization[: len(_SCHEME)].lower() == _SCHEME:
            presented = PresentedKey.parse(authorization[len(_SCHEME) :])
        if presented is None:
            raise self._unauthenticated(_MALFORMED, "authorization must be: Bearer kvcm_<id>_<secret>")
        key = self._keys.authenticate(presented)
        if key is None:
            raise self._unauthenticated(_UNKNOWN, "the key is not known here")
        return key

    def _key_of_certificate(self, names: Sequence[str]) -> ApiKey:
        if not names:
            raise self._unauthenticated(_MISSING, _KEY_WANTED)
        key = self._keys.of_certificate(names)
        if key is None:
            raise self._unauthenticated(_UNKNOWN, "no name of the client certificate is known here")
        return key

    def _unauthenticated(self, outcome: str, text: str) -> UnauthenticatedError:
        self.outcomes[outcome] += 1
        return UnauthenticatedError(text, "unauthenticated")

    def _check_verbs(self, policy: Policy, principal: Principal) -> None:
        if policy.verbs is not None and policy.verbs.isdisjoint(principal.verbs):
            raise self._denied(policy, f"{principal.name} may not {_action_text(policy)}")

    def _check_scope(self, policy: Policy, request: Any, principal: Principal) -> None:
        if policy.scope is Scope.NOTHING or ALL_GROUPS in principal.groups:
            return
        if policy.scope is Scope.INSTANCE:
            return  # see `check_instance`
        if policy.scope is Scope.OWN_GROUPS:
            self._check_own_groups(policy, request, principal)
        elif policy.scope is Scope.DEPLOYMENT or not getattr(request, policy.field):
            raise self._denied(policy, f"{principal.name} may not do this for all instance groups")
        else:
            if getattr(request, policy.field) not in principal.groups:
                raise self._denied(policy, f"{principal.name} may not {_action_text(policy)} in this instance group")
            if policy.field == "instance_group" and hasattr(request, "instance_id"):
                self._check_id_is_free(policy, request.instance_id, principal)

    def _check_own_groups(self, policy: Policy, request: Any, principal: Principal) -> None:
        group = getattr(request, policy.field)
        if group and group not in principal.groups:
            raise self._denied(policy, f"{principal.name} may not {_action_text(policy)} in this instance group")

    def _check_id_is_free(self, policy: Policy, instance_id: str, principal: Principal) -> None:
        group = self._group_of(instance_id)
        if group is not None and group not in principal.groups:
            raise self._denied(policy, f"{principal.name} may not {_action_text(policy)} on this instance")

    def _denied(self, policy: Policy, text: str) -> ForbiddenError:
        self.denied[policy.action] += 1
        return ForbiddenError(text)


def _action_text(policy: Policy) -> str:
    return policy.action.replace("_", " ")


# Metrics of authentication and permissions.


class AccessMetrics:
    """Counters of one manager; all zero while authentication is disabled.

    Args:
        access: has the counters.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics."""
        keyed = self._access if isinstance(self._access, KeyedAccess) else None
        for outcome in OUTCOMES:
            yield Reading(catalog.AUTH, keyed.outcomes[outcome] if keyed else 0, (outcome,))
        for action in ACTIONS:
            yield Reading(catalog.AUTHZ_DENIED, keyed.denied[action] if keyed else 0, (action,))


# Credentials in an HTTP request.

CERTIFICATE_NAMES: Final = "kvcm.certificate_names"
"""Key of a scope: subject alternative names of the client's certificate, if it was verified."""


def credentials_of(scope: Mapping[str, Any]) -> Credentials:
    """Return the credentials in the scope of a request. Two authorizations are ambiguous: neither counts."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    authorization = given[0].decode("latin-1") if len(given) == 1 else "twice" if given else ""
    return Credentials(authorization, scope.get(CERTIFICATE_NAMES, ()))


# Secrets in configured values: only principals that may change them see them.

Value = TypeVar("Value")


def redacted_for_principal(value: Value) -> Value:
    """Return a configured value as the present principal sees it; `kvcm.registry.secrets.restored` completes it when it
    is sent back."""
    return value if Verb.ADMINISTER in call_context.get().principal.verbs else redacted(value)
