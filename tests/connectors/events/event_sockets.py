"""Real sockets for tests: an engine's publisher as vLLM and SGLang have it, and a manager's gRPC server."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import msgspec
import zmq
from engine_model import ModelManager
from ports import free_port

from kvcm.model.errors import ErrorCode
from kvcm.protocol import meta_service_pb2 as meta
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb
from kvcm.protocol.kvcm.v1 import residency_service_pb2_grpc as rpc

__all__ = ["Publisher", "ServedManager", "served_manager"]

_END = b"\xff" * 8


class Publisher:
    """PUB and ROUTER of one rank, served by a thread.

    Args:
        port: of PUB.
        replay_port: of ROUTER; None for none.
        kept: messages that are replayed.
        topic: of all messages.
    """

    def __init__(self, port: int, replay_port: int | None, kept: int = 100, topic: str = "kv@pod@model") -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(f"tcp://127.0.0.1:{port}")
        self._replay = None
        if replay_port is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.bind(f"tcp://127.0.0.1:{replay_port}")
        self._topic = topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._number = 0
        self._todo: deque[tuple[bytes, bool]] = deque()
        self._stop = threading.Event()
        self.replays: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def publish(self, *events: dict[str, Any] | list[Any], loses: bool = False) -> None:
        """Publish a message; a lost one is only replayed."""
        self.publish_payload(msgspec.msgpack.encode([1.5, list(events), 0]), loses=loses)

    def publish_payload(self, payload: bytes, *, loses: bool = False) -> None:
        """Publish whatever bytes."""
        self._todo.append((payload, loses))

    @property
    def published(self) -> int:
        """Number of the next message, when all that is to be published is."""
        return self._number + len(self._todo)

    def close(self) -> None:
        """End, as a killed engine does."""
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._replay is not None and self._replay.poll(0):
                self._answer(*self._replay.recv_multipart())
            if not self._todo:
                self._stop.wait(0.005)
                continue
            payload, loses = self._todo.popleft()
            if not loses:
                self._pub.send_multipart([self._topic, self._number.to_bytes(8, "big"), payload])
            self._kept.append((self._number, payload))
            self._number += 1

    def _answer(self, client: bytes, empty: bytes, first: bytes) -> None:
        assert empty == b""
        assert self._replay is not None
        start = int.from_bytes(first, "big")
        self.replays.append(start)
        for number, payload in self._kept:
            if number >= start:
                self._replay.send_multipart([client, b"", self._topic, number.to_bytes(8, "big"), payload])
        self._replay.send_multipart([client, b"", b"", _END, b""])


@dataclass
class ServedManager(rpc.ResidencyServiceServicer):
    """A manager that takes reports over gRPC, and says which one it is.

    Attributes:
        address: `host:port`.
        block_tokens: of each instance that is registered.
        model: what it knows.
    """

    address: str = ""
    block_tokens: dict[str, int] = field(default_factory=dict)
    model: ModelManager = field(default_factory=ModelManager)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ReportResidency(  # noqa: N802 - the name of the call
        self, request: pb.ReportResidencyRequest, context: Any
    ) -> pb.ReportResidencyResponse:
        """See the service."""
        with self.lock:
            return self.model.report(request)

    def GetClusterInfo(  # noqa: N802 - the name of the call
        self, request: meta.GetClusterInfoRequest, context: Any
    ) -> meta.GetClusterInfoResponse:
        """See MetaService."""
        answer = meta.GetClusterInfoResponse(self_node_id=self.model.node_id)
        answer.header.status.code = int(ErrorCode.OK)  # type: ignore[assignment]
        return answer

    def GetInstanceInfo(  # noqa: N802 - the name of the call
        self, request: meta.GetInstanceInfoRequest, context: Any
    ) -> meta.GetInstanceInfoResponse:
        """See MetaService."""
        answer = meta.GetInstanceInfoResponse()
        is_known = request.instance_id in self.block_tokens
        answer.header.status.code = int(ErrorCode.OK if is_known else ErrorCode.INSTANCE_NOT_EXIST)  # type: ignore[assignment]
        answer.instance_info.block_size = self.block_tokens.get(request.instance_id, 0)
        return answer

    def keys(self, engine: str, rank: int = 0, medium: pb.Medium = pb.MEDIUM_GPU) -> set[int]:
        """Return the keys that a rank is known to hold."""
        with self.lock:
            return {key for memory, key in self.model.pairs(engine, rank) if memory.medium == medium}

    def restart(self) -> None:
        """Forget everything."""
        with self.lock:
            self.model.restart()


@contextmanager
def served_manager(port: int | None = None) -> Iterator[ServedManager]:
    """Serve a manager on a port."""
    port = free_port() if port is None else port
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        manager = ServedManager(f"127.0.0.1:{port}")
        rpc.add_ResidencyServiceServicer_to_server(manager, server)  # type: ignore[no-untyped-call]
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                getattr(manager, name),
                request_deserializer=getattr(meta, f"{name}Request").FromString,
                response_serializer=getattr(meta, f"{name}Response").SerializeToString,
            )
            for name in ("GetClusterInfo", "GetInstanceInfo")
        }
        service = "kv_cache_manager.proto.meta.MetaService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        assert server.add_insecure_port(manager.address) == port
        server.start()
        try:
            yield manager
        finally:
            server.stop(0).wait()
