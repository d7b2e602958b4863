"""The contract of package kvcm.v1, written down a second time: a change must be made in both places."""

PACKAGE = "kvcm.v1"

META = "kv_cache_manager.proto.meta"
ADMIN = "kv_cache_manager.proto.admin"

LEASE_SERVICES: dict[str, dict[str, tuple[str, str]]] = {
    "LeaseService": {
        "RenewReadLease": ("RenewReadLeaseRequest", "RenewReadLeaseResponse"),
        "ReleaseReadLease": ("ReleaseReadLeaseRequest", f"{META}.CommonResponse"),
        "RenewWriteSession": ("RenewWriteSessionRequest", "RenewWriteSessionResponse"),
    }
}

LEASE_MESSAGES: dict[str, dict[str, str]] = {
    "RenewReadLeaseRequest": {
        "trace_id": "1 string",
        "instance_id": "2 string",
        "read_lease_id": "3 string",
        "read_lease_ms": "4 int32",
    },
    "RenewReadLeaseResponse": {"header": f"1 {META}.CommonResponseHeader", "read_lease_deadline_ms": "2 int64"},
    "ReleaseReadLeaseRequest": {"trace_id": "1 string", "instance_id": "2 string", "read_lease_id": "3 string"},
    "RenewWriteSessionRequest": {
        "trace_id": "1 string",
        "instance_id": "2 string",
        "write_session_id": "3 string",
        "write_timeout_seconds": "4 int32",
    },
    "RenewWriteSessionResponse": {"header": f"1 {META}.CommonResponseHeader", "write_session_deadline_ms": "2 int64"},
}

GROUP_SERVICES: dict[str, dict[str, tuple[str, str]]] = {
    "GroupService": {"ListInstanceGroup": ("ListInstanceGroupRequest", "ListInstanceGroupResponse")}
}

GROUP_MESSAGES: dict[str, dict[str, str]] = {
    "ListInstanceGroupRequest": {"trace_id": "1 string"},
    "ListInstanceGroupResponse": {
        "header": f"1 {ADMIN}.CommonResponseHeader",
        "instance_groups": f"2 repeated {ADMIN}.InstanceGroup",
    },
}
