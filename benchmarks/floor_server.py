"""The lower bound of a Python gRPC server: a bare `grpc.aio` handler on uvloop that returns a prepared answer.

The method `/floor.Floor/Answer<n>` returns n bytes; the request is read and thrown away. Prints its port.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import grpc
import grpc.aio
import uvloop


@cache
def _handler(size: int) -> Any:
    answer = bytes(size)

    async def serve(_request: bytes, _context: Any) -> bytes:
        return answer

    return grpc.unary_unary_rpc_method_handler(serve)


class _AnySize(grpc.GenericRpcHandler):
    def service(self, handler_call_details: Any) -> Any:
        return _handler(int(handler_call_details.method.rpartition("Answer")[2]))


async def main() -> None:
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)))
    server.add_generic_rpc_handlers((_AnySize(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main())
