"""Managers as others see them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Endpoint"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a manager can be reached."""

    node_id: str
    host: str
    meta_rpc_port: int
    meta_http_port: int
    admin_rpc_port: int
    admin_http_port: int
