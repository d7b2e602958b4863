"""Who calls, and whether it may: asked before a request is read, and again before anything is looked up for it.

Nobody learns more than that it may not: a key that is not known, one with another secret and one that was revoked have
the same answer, and so has every instance of a foreign group. Only who proves a key that has ended is told so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from kvcm.model.api_keys import ApiKey, PresentedKey
from kvcm.model.principals import ALL_GROUPS, EVERYBODY, STRANGER, Principal
from kvcm.registry.keys import KeyRegistry
from kvcm.service.policies import ANYBODY, PAGE_POLICIES, POLICIES, Policy, Scope
from kvcm.service.turned_away import ForbiddenError, UnauthenticatedError

__all__ = ["NO_CREDENTIALS", "OUTCOMES", "Access", "Credentials", "KeyedAccess", "OpenAccess"]

_SCHEME: Final = "bearer "

_MOST_KNOWN: Final = 4096
_ENDED: Final = "the key has ended: ask for a new one"
_KEY_WANTED: Final = "a key is required: authorization: Bearer kvcm_<id>_<secret>"

_ACCEPTED: Final = "accepted"
_MISSING: Final = "missing"
_MALFORMED: Final = "malformed"
_UNKNOWN: Final = "unknown"
_EXPIRED: Final = "expired"
OUTCOMES: Final = (_ACCEPTED, _MISSING, _MALFORMED, _UNKNOWN, _EXPIRED)
"""What becomes of credentials, as labels of metrics."""


class Credentials(NamedTuple):
    """What a client shows of itself.

    Attributes:
        authorization: as in the header of HTTP and the metadata of gRPC, "" for none.
        certificate_names: subject alternative names of a client certificate that was verified.
    """

    authorization: str = ""
    certificate_names: tuple[str, ...] = ()


NO_CREDENTIALS: Final = Credentials()


class Access(Protocol):
    """Decides who may do what."""

    @property
    def asks(self) -> bool:
        """Whether credentials are looked at."""

    def principal(self, policy: Policy, credentials: Credentials) -> Principal:
        """Return who calls.

        Raises:
            UnauthenticatedError: nobody who is known.
            ForbiddenError: he may do nothing of the kind anywhere.
        """

    def page_principal(self, path: str, credentials: Credentials) -> Principal:
        """Return who asks for a page or a stream of its own policy.

        Raises:
            UnauthenticatedError: nobody who is known.
            ForbiddenError: he may not.
        """

    def check_page(self, path: str, principal: Principal) -> None:
        """Refuse a page of its own policy to somebody who is known and may not see it.

        Raises:
            ForbiddenError: he may not.
        """

    def holds(self, principal: Principal) -> bool:
        """Return whether the key of somebody who was let in a while ago still counts."""

    def check(self, service: str, name: str, request: Any, principal: Principal) -> None:
        """Refuse a call that its principal may not make.

        Raises:
            UnauthenticatedError: it is nobody who is known.
            ForbiddenError: it may not do such a thing, or not there.
        """


class OpenAccess:
    """Nobody is asked who he is."""

    asks = False

    def principal(self, _policy: Policy, _credentials: Credentials) -> Principal:
        """Return everybody."""
        return EVERYBODY

    def page_principal(self, _path: str, _credentials: Credentials) -> Principal:
        """Return everybody."""
        return EVERYBODY

    def check_page(self, _path: str, _principal: Principal) -> None:
        """Refuse nothing."""

    def holds(self, _principal: Principal) -> bool:
        """Return that it does."""
        return True

    def check(self, _service: str, _name: str, _request: Any, _principal: Principal) -> None:
        """Refuse nothing."""


class KeyedAccess:
    """Everybody shows a key or a certificate, but for what is open to strangers.

    Args:
        keys: those that there are.
        group_of: group of a registered instance, None for one that is not known.
    """

    asks = True

    def __init__(self, keys: KeyRegistry, group_of: Callable[[str], str | None]) -> None:
        self._keys = keys
        self._group_of = group_of
        self._known: dict[Credentials, tuple[ApiKey, Principal]] = {}  # to read and hash them takes long
        self._known_generation = -1
        self.outcomes: Counter[str] = Counter()
        self.denied: Counter[str] = Counter()

    def principal(self, policy: Policy, credentials: Credentials) -> Principal:
        """Return who calls, strangers only where they may."""
        if policy.is_open:
            return STRANGER
        principal = self._recognised(credentials)
        if not (policy.own and principal.account):  # else it is known by the request alone
            self._check_verbs(policy, principal)
        return principal

    def page_principal(self, path: str, credentials: Credentials) -> Principal:
        """Return who asks for a page."""
        has_calls = path.startswith(("/v1/", "/console/")) and path not in PAGE_POLICIES
        policy = ANYBODY if has_calls else PAGE_POLICIES[path]  # the calls of resources have their own
        if policy.is_open:
            return self._perhaps(credentials)
        principal = self.principal(policy, credentials)
        self._check_scope(policy, None, principal)
        return principal

    def check_page(self, path: str, principal: Principal) -> None:
        """Refuse a page; one without a policy of its own makes calls, which have theirs."""
        policy = PAGE_POLICIES.get(path, ANYBODY)
        if not policy.is_open:
            self._check_verbs(policy, principal)
            self._check_scope(policy, None, principal)

    def holds(self, principal: Principal) -> bool:
        """Return whether the key is there and has not ended; to go on is a use of it."""
        key = self._keys.find(principal.key_id)
        return key is not None and self._keys.use(key)

    def check(self, service: str, name: str, request: Any, principal: Principal) -> None:
        """Refuse a call that its principal may not make."""
        policy = POLICIES[service, name]
        if policy.is_open:
            return
        if principal is EVERYBODY or principal is STRANGER:  # nobody was asked, or nobody answered
            raise self._stranger(_MISSING, _KEY_WANTED)
        if self._keys.find(principal.key_id) is None or (principal.account and not self.holds(principal)):
            raise self._stranger(_EXPIRED, _ENDED)  # since its request began to come
        if policy.own and principal.account and principal.account == getattr(request, policy.own):
            return
        self._check_verbs(policy, principal)
        self._check_scope(policy, request, principal)

    def _perhaps(self, credentials: Credentials) -> Principal:
        """Return who asks for what is open to strangers: it may show more to others."""
        if credentials == NO_CREDENTIALS:
            return STRANGER
        try:
            return self._recognised(credentials)
        except UnauthenticatedError:
            return STRANGER

    def _recognised(self, credentials: Credentials) -> Principal:
        """Return who shows this; what was right is, as long as no key has changed."""
        if self._known_generation != self._keys.generation:
            self._known.clear()
            self._known_generation = self._keys.generation
        known = self._known.get(credentials)
        key, principal = known if known is not None else self._remembered(credentials)
        if not self._keys.use(key):
            raise self._stranger(_EXPIRED, _ENDED)
        self.outcomes[_ACCEPTED] += 1
        return principal

    def _remembered(self, credentials: Credentials) -> tuple[ApiKey, Principal]:
        if credentials.authorization:
            key = self._shown(credentials.authorization)
        else:
            key = self._certified(credentials.certificate_names)
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        known = self._known[credentials] = key, key.principal()
        return known

    def _shown(self, authorization: str) -> ApiKey:
        presented = None
        if authorization[: len(_SCHEME)].lower() == _SCHEME:
            presented = PresentedKey.parse(authorization[len(_SCHEME) :])
        if presented is None:
            raise self._stranger(_MALFORMED, "authorization must be: Bearer kvcm_<id>_<secret>")
        key = self._keys.shown(presented)
        if key is None:
            raise self._stranger(_UNKNOWN, "the key is not known here")
        return key

    def _certified(self, names: Sequence[str]) -> ApiKey:
        if not names:
            raise self._stranger(_MISSING, _KEY_WANTED)
        key = self._keys.of_certificate(names)
        if key is None:
            raise self._stranger(_UNKNOWN, "no name of the client certificate is known here")
        return key

    def _stranger(self, outcome: str, text: str) -> UnauthenticatedError:
        self.outcomes[outcome] += 1
        return UnauthenticatedError(text, "unauthenticated")

    def _check_verbs(self, policy: Policy, principal: Principal) -> None:
        if policy.verbs is not None and policy.verbs.isdisjoint(principal.verbs):
            raise self._denied(policy, f"{principal.name} may not {_either(policy)}")

    def _check_scope(self, policy: Policy, request: Any, principal: Principal) -> None:
        if policy.scope is Scope.NOTHING or ALL_GROUPS in principal.groups:
            return
        if policy.scope is Scope.INSTANCE:
            self._check_instance(policy, request.instance_id, principal)
        elif policy.scope is Scope.OWN_GROUPS:
            self._check_own_groups(policy, request, principal)
        elif policy.scope is Scope.DEPLOYMENT or not getattr(request, policy.field):
            raise self._denied(policy, f"{principal.name} may not do this for all instance groups")
        else:
            if getattr(request, policy.field) not in principal.groups:
                raise self._denied(policy, f"{principal.name} may not {_either(policy)} in this instance group")
            if policy.field == "instance_group" and hasattr(request, "instance_id"):
                self._check_instance(policy, request.instance_id, principal)

    def _check_own_groups(self, policy: Policy, request: Any, principal: Principal) -> None:
        group = getattr(request, policy.field)
        if group and group not in principal.groups:
            raise self._denied(policy, f"{principal.name} may not {_either(policy)} in this instance group")
        if hasattr(request, "instance_id"):
            self._check_instance(policy, request.instance_id, principal)

    def _check_instance(self, policy: Policy, instance_id: str, principal: Principal) -> None:
        group = self._group_of(instance_id)
        if group is not None and group not in principal.groups:
            raise self._denied(policy, f"{principal.name} may not {_either(policy)} on this instance")

    def _denied(self, policy: Policy, text: str) -> ForbiddenError:
        self.denied[policy.action] += 1
        return ForbiddenError(text)


def _either(policy: Policy) -> str:
    return policy.action.replace("_", " ")
