"""The manager's calls: one line each with path and messages, so that both clients make them the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import lease_service_pb2 as lease

__all__ = [
    "FINISH_WRITE",
    "GET_CLUSTER_INFO",
    "MATCH",
    "MATCH_LENGTH",
    "REGISTER_INSTANCE",
    "RELEASE_READ_LEASE",
    "REMOVE",
    "RENEW_WRITE_SESSION",
    "START_WRITE",
    "Answer",
    "Call",
]

_META = "kv_cache_manager.proto.meta.MetaService"
_LEASE = "kvcm.v1.LeaseService"


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


# None of these calls does harm when it is repeated, so all share one retry policy. For the two that are not idempotent:
# * StartWriteCache: when an answer is lost, the blocks are reserved by a session that nobody knows. The repeated call
#   finds them being written and masks them: two writers never get the same address. They stay missing until the lost
#   session ends; without the repetition they would too.
# * FinishWriteCache: when an answer is lost, the session is already finished. The repeated call is refused (unknown
#   session) and we report failure for blocks that were in fact published; whoever matches them next finds them.
REGISTER_INSTANCE = Call("register_instance", f"/{_META}/RegisterInstance", meta.RegisterInstanceResponse.FromString)
MATCH = Call("match", f"/{_META}/GetCacheLocation", meta.GetCacheLocationResponse.FromString)
MATCH_LENGTH = Call("match_length", f"/{_META}/GetCacheLocationLen", meta.GetCacheLocationLenResponse.FromString)
START_WRITE = Call("start_write", f"/{_META}/StartWriteCache", meta.StartWriteCacheResponse.FromString)
FINISH_WRITE = Call("finish_write", f"/{_META}/FinishWriteCache", meta.CommonResponse.FromString)
REMOVE = Call("remove", f"/{_META}/RemoveCache", meta.CommonResponse.FromString)
GET_CLUSTER_INFO = Call("cluster_info", f"/{_META}/GetClusterInfo", meta.GetClusterInfoResponse.FromString)
RENEW_WRITE_SESSION = Call("renew_write", f"/{_LEASE}/RenewWriteSession", lease.RenewWriteSessionResponse.FromString)
RELEASE_READ_LEASE = Call("release_lease", f"/{_LEASE}/ReleaseReadLease", meta.CommonResponse.FromString)
