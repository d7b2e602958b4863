"""What this manager says of who leads."""

from __future__ import annotations

from kvcm.model.errors import NotLeaderError
from kvcm.registry.leadership import Leadership
from kvcm.service.calls import Plane

__all__ = ["refuse_unless_leading"]


def refuse_unless_leading(leadership: Leadership, plane: Plane) -> None:
    """Send a caller to the leader, for deployments where only that one serves.

    Args:
        leadership: who leads.
        plane: which of the leader's addresses the caller needs.

    Raises:
        NotLeaderError: this manager does not lead; the message has the leader's addresses where they are known.
    """
    if leadership.is_leader:
        return
    leader, endpoint = leadership.leader_node_id, leadership.leader_endpoint
    refusal = f"node {leadership.node_id} does not lead"
    if not leader:
        raise NotLeaderError(f"{refusal} and no other node does; retry shortly")
    if endpoint is None:
        raise NotLeaderError(f"{refusal}, {leader} does, whose address is not known yet; retry shortly")
    if plane is Plane.ADMIN:
        rpc, http = endpoint.admin_rpc_port, endpoint.admin_http_port
    else:
        rpc, http = endpoint.meta_rpc_port, endpoint.meta_http_port
    raise NotLeaderError(
        f"{refusal}, {leader} does: call it at {endpoint.host}:{rpc} (gRPC) or {endpoint.host}:{http} (HTTP)"
    )
