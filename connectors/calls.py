"""The manager's calls: one line each with path and messages, so that both clients make them the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import lease_service_pb2 as lease
from kvcm.protocol.kvcm.v1 import pin_service_pb2 as pins
from kvcm.protocol.kvcm.v1 import pool_service_pb2 as pools
from kvcm.protocol.kvcm.v1 import unread_pb2 as unread

__all__ = [
    "FINISH_WRITE",
    "GET_CLUSTER_INFO",
    "LIST_PINS",
    "MATCH",
    "MATCH_LENGTH",
    "MATCH_UNREAD",
    "PIN_PREFIX",
    "REGISTER_INSTANCE",
    "RELEASE_READ_LEASE",
    "REMOVE",
    "RENEW_WRITE_SESSION",
    "REPORT_MISSING",
    "REPORT_POOL",
    "START_WRITE",
    "UNPIN_PREFIX",
    "Answer",
    "Call",
]

_META = "kv_cache_manager.proto.meta.MetaService"
_LEASE = "kvcm.v1.LeaseService"
_PIN = "kvcm.v1.PinService"
_POOL = "kvcm.v1.PoolService"


class Answer(Protocol):
    """Any answer: all of them begin with a header."""

    @property
    def header(self) -> meta.CommonResponseHeader:
        """Outcome of the call."""


AnswerT = TypeVar("AnswerT", bound=Answer)


@dataclass(frozen=True, slots=True)
class Call(Generic[AnswerT]):
    """One remote procedure.

    Attributes:
        name: as it is counted and logged.
        path: full gRPC method name.
        decode: makes the answer from its bytes.
    """

    name: str
    path: str
    decode: Callable[[bytes], AnswerT]


# None of these calls does harm when it is repeated, so all share one retry policy. For those that are not idempotent:
# * StartWriteCache: when an answer is lost, the blocks are reserved by a session that nobody knows. The repeated call
#   finds them being written and masks them: two writers never get the same address. They stay missing until the lost
#   session ends; without the repetition they would too.
# * FinishWriteCache: when an answer is lost, the session is already finished. The repeated call is refused (unknown
#   session) and we report failure for blocks that were in fact published; whoever matches them next finds them.
# * PinPrefix: when an answer is lost, the repeated call pins a second time. The first pin takes budget until its
#   deadline; it stands in ListPins under its owner, who can end it.
REGISTER_INSTANCE = Call("register_instance", f"/{_META}/RegisterInstance", meta.RegisterInstanceResponse.FromString)
MATCH = Call("match", f"/{_META}/GetCacheLocation", meta.GetCacheLocationResponse.FromString)
MATCH_UNREAD = Call("match", f"/{_META}/GetCacheLocation", unread.UnreadCacheLocations.FromString)
MATCH_LENGTH = Call("match_length", f"/{_META}/GetCacheLocationLen", meta.GetCacheLocationLenResponse.FromString)
START_WRITE = Call("start_write", f"/{_META}/StartWriteCache", meta.StartWriteCacheResponse.FromString)
FINISH_WRITE = Call("finish_write", f"/{_META}/FinishWriteCache", meta.CommonResponse.FromString)
REMOVE = Call("remove", f"/{_META}/RemoveCache", meta.CommonResponse.FromString)
GET_CLUSTER_INFO = Call("cluster_info", f"/{_META}/GetClusterInfo", meta.GetClusterInfoResponse.FromString)
RENEW_WRITE_SESSION = Call("renew_write", f"/{_LEASE}/RenewWriteSession", lease.RenewWriteSessionResponse.FromString)
RELEASE_READ_LEASE = Call("release_lease", f"/{_LEASE}/ReleaseReadLease", meta.CommonResponse.FromString)
PIN_PREFIX = Call("pin_prefix", f"/{_PIN}/PinPrefix", pins.PinPrefixResponse.FromString)
UNPIN_PREFIX = Call("unpin", f"/{_PIN}/UnpinPrefix", meta.CommonResponse.FromString)
LIST_PINS = Call("list_pins", f"/{_PIN}/ListPins", pins.ListPinsResponse.FromString)
REPORT_MISSING = Call("report_missing", f"/{_PIN}/ReportMissing", pins.ReportMissingResponse.FromString)
REPORT_POOL = Call("report_pool", f"/{_POOL}/ReportPool", pools.ReportPoolResponse.FromString)
