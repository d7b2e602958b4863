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
    "ReleaseReadLeaseRequest": {
        "trace_id": "1 string",
        "instance_id": "2 string",
        "read_lease_id": "3 string",
        "more_read_lease_ids": "4 repeated string",
    },
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

PIN_SERVICES: dict[str, dict[str, tuple[str, str]]] = {
    "PinService": {
        "PinPrefix": ("PinPrefixRequest", "PinPrefixResponse"),
        "UnpinPrefix": ("UnpinPrefixRequest", f"{META}.CommonResponse"),
        "ListPins": ("ListPinsRequest", "ListPinsResponse"),
        "ReportMissing": ("ReportMissingRequest", "ReportMissingResponse"),
    }
}

PIN_MESSAGES: dict[str, dict[str, str]] = {
    "PinPrefixRequest": {
        "trace_id": "1 string",
        "instance_id": "2 string",
        "block_keys": "3 repeated int64",
        "token_ids": "4 repeated int64",
        "owner": "5 string",
        "ttl_seconds": "6 int64",
    },
    "PinPrefixResponse": {
        "header": f"1 {META}.CommonResponseHeader",
        "pin_id": "2 string",
        "pinned_blocks": "3 int64",
        "pinned_bytes": "4 int64",
        "deadline_ms": "5 int64",
    },
    "UnpinPrefixRequest": {"trace_id": "1 string", "instance_id": "2 string", "pin_id": "3 string"},
    "ListPinsRequest": {"trace_id": "1 string", "instance_id": "2 string"},
    "ListPinsResponse": {"header": f"1 {META}.CommonResponseHeader", "pins": "2 repeated Pin"},
    "Pin": {
        "pin_id": "1 string",
        "owner": "2 string",
        "blocks": "3 int64",
        "bytes": "4 int64",
        "deadline_ms": "5 int64",
        "last_block_key": "6 int64",
    },
    "ReportMissingRequest": {"trace_id": "1 string", "instance_id": "2 string", "parts": "3 repeated MissingPart"},
    "MissingPart": {"block_key": "1 int64", "uri": "2 string", "mismatched_checksum": "3 fixed64"},
    "ReportMissingResponse": {
        "header": f"1 {META}.CommonResponseHeader",
        "removed_locations": "2 int64",
        "unconfirmed_parts": "3 int64",
    },
}

CAPACITY_SERVICES: dict[str, dict[str, tuple[str, str]]] = {
    "CapacityService": {
        "GetUsage": ("GetUsageRequest", "GetUsageResponse"),
        "SetGlobalQuota": ("SetGlobalQuotaRequest", f"{ADMIN}.CommonResponse"),
        "ListGlobalQuota": ("ListGlobalQuotaRequest", "ListGlobalQuotaResponse"),
        "RemoveGlobalQuota": ("RemoveGlobalQuotaRequest", f"{ADMIN}.CommonResponse"),
        "CollectGarbage": ("CollectGarbageRequest", "CollectGarbageResponse"),
        "ScrubStorage": ("ScrubStorageRequest", "ScrubStorageResponse"),
    }
}

CAPACITY_MESSAGES: dict[str, dict[str, str]] = {
    "GetUsageRequest": {"trace_id": "1 string", "instance_group": "2 string"},
    "GetUsageResponse": {
        "header": f"1 {ADMIN}.CommonResponseHeader",
        "groups": "2 repeated GroupUsage",
        "storages": "3 repeated StorageUsage",
        "global_quotas": "4 repeated GlobalQuotaUsage",
    },
    "Usage": {
        "used_bytes": "1 int64",
        "deleting_bytes": "2 int64",
        "capacity_bytes": "3 int64",
        "high_mark_bytes": "4 int64",
        "low_mark_bytes": "5 int64",
    },
    "GroupUsage": {
        "name": "1 string",
        "total": "2 Usage",
        "types": "3 repeated TypeUsage",
        "storages": "4 repeated GroupStorageUsage",
        "instances": "5 repeated InstanceUsage",
        "pinned_bytes": "6 int64",
        "pin_budget_bytes": "7 int64",
        "refused_writes": "8 int64",
    },
    "TypeUsage": {"storage_type": f"1 {ADMIN}.StorageType", "usage": "2 Usage"},
    "GroupStorageUsage": {"storage_unique_name": "1 string", "used_bytes": "2 int64", "guaranteed_bytes": "3 int64"},
    "InstanceUsage": {
        "instance_id": "1 string",
        "key_count": "2 int64",
        "max_key_count": "3 int64",
        "used_bytes": "4 int64",
        "policy": "5 string",
    },
    "StorageUsage": {
        "storage_unique_name": "1 string",
        "usage": "2 Usage",
        "guaranteed_bytes": "3 int64",
        "oversubscription": "4 double",
        "deletion_backlog": "5 int64",
        "deletion_failures": "6 int64",
    },
    "GlobalQuotaUsage": {"name": "1 string", "usage": "2 Usage", "groups": "3 repeated string"},
    "GlobalQuota": {"name": "1 string", "capacity_bytes": "2 int64", "used_percentage": "3 double"},
    "SetGlobalQuotaRequest": {"trace_id": "1 string", "global_quota": "2 GlobalQuota"},
    "ListGlobalQuotaRequest": {"trace_id": "1 string"},
    "ListGlobalQuotaResponse": {"header": f"1 {ADMIN}.CommonResponseHeader", "global_quotas": "2 repeated GlobalQuota"},
    "RemoveGlobalQuotaRequest": {"trace_id": "1 string", "name": "2 string"},
    "CollectGarbageRequest": {
        "trace_id": "1 string",
        "instance_id": "2 string",
        "dry_run": "3 bool",
        "check_bytes": "4 bool",
    },
    "CollectGarbageResponse": {
        "header": f"1 {ADMIN}.CommonResponseHeader",
        "blocks": "2 int64",
        "without_bytes": "3 int64",
        "without_prefix": "4 int64",
        "expired_sessions": "5 int64",
        "freed_bytes": "6 int64",
    },
    "ScrubStorageRequest": {
        "trace_id": "1 string",
        "storage_unique_name": "2 string",
        "cluster_id": "3 string",
        "dry_run": "4 bool",
        "min_age_seconds": "5 int64",
    },
    "ScrubStorageResponse": {
        "header": f"1 {ADMIN}.CommonResponseHeader",
        "objects": "2 int64",
        "bytes": "3 int64",
        "orphans": "4 int64",
        "orphan_bytes": "5 int64",
        "too_young": "6 int64",
        "deleted": "7 int64",
        "failed": "8 int64",
    },
}

STORAGE_SERVICES: dict[str, dict[str, tuple[str, str]]] = {
    "StorageService": {
        "DrainStorage": ("DrainStorageRequest", f"{ADMIN}.CommonResponse"),
        "CancelDrain": ("CancelDrainRequest", f"{ADMIN}.CommonResponse"),
        "ListDrain": ("ListDrainRequest", "ListDrainResponse"),
    }
}

STORAGE_ENUMS: dict[str, dict[str, int]] = {
    "DrainState": {"DRAIN_UNSPECIFIED": 0, "DRAIN_RUNNING": 1, "DRAIN_DONE": 2},
}

STORAGE_MESSAGES: dict[str, dict[str, str]] = {
    "DrainStorageRequest": {"trace_id": "1 string", "storage_unique_name": "2 string"},
    "CancelDrainRequest": {"trace_id": "1 string", "storage_unique_name": "2 string"},
    "ListDrainRequest": {"trace_id": "1 string"},
    "ListDrainResponse": {"header": f"1 {ADMIN}.CommonResponseHeader", "drains": "2 repeated Drain"},
    "Drain": {
        "storage_unique_name": "1 string",
        "is_removal": "2 bool",
        "state": "3 DrainState",
        "started_ms": "4 int64",
        "left_bytes": "5 int64",
        "reason": "6 string",
    },
}

POOL_SERVICES: dict[str, dict[str, tuple[str, str]]] = {
    "PoolService": {"ReportPool": ("ReportPoolRequest", "ReportPoolResponse")}
}

POOL_MESSAGES: dict[str, dict[str, str]] = {
    "ReportPoolRequest": {
        "trace_id": "1 string",
        "storage_unique_name": "2 string",
        "node_id": "3 string",
        "generation": "4 fixed64",
        "capacity_bytes": "5 int64",
        "valid_ms": "6 int32",
    },
    "ReportPoolResponse": {"header": f"1 {META}.CommonResponseHeader", "is_new_generation": "2 bool"},
}

ACCESS_SERVICES: dict[str, dict[str, tuple[str, str]]] = {
    "AccessService": {
        "CreateKey": ("CreateKeyRequest", "CreateKeyResponse"),
        "ListKeys": ("ListKeysRequest", "ListKeysResponse"),
        "RotateKey": ("RotateKeyRequest", "CreateKeyResponse"),
        "RevokeKey": ("RevokeKeyRequest", f"{ADMIN}.CommonResponse"),
        "Login": ("LoginRequest", "CreateKeyResponse"),
        "Logout": ("LogoutRequest", f"{ADMIN}.CommonResponse"),
        "SetPassword": ("SetPasswordRequest", f"{ADMIN}.CommonResponse"),
        "WhoAmI": ("WhoAmIRequest", "WhoAmIResponse"),
    }
}

ACCESS_ENUMS: dict[str, dict[str, int]] = {
    "Role": {"ROLE_UNSPECIFIED": 0, "ROLE_VIEWER": 1, "ROLE_OPERATOR": 2, "ROLE_ADMIN": 3, "ROLE_ENGINE": 4},
    "EngineVerb": {"ENGINE_VERB_UNSPECIFIED": 0, "MATCH": 1, "WRITE": 2, "REMOVE": 3, "PIN": 4},
}

ACCESS_MESSAGES: dict[str, dict[str, str]] = {
    "Key": {
        "key_id": "1 string",
        "name": "2 string",
        "role": "3 Role",
        "instance_groups": "4 repeated string",
        "verbs": "5 repeated EngineVerb",
        "created_at_ms": "6 int64",
        "expires_at_ms": "7 int64",
        "last_used_at_ms": "8 int64",
        "certificate_name": "9 string",
        "account": "10 string",
    },
    "CreateKeyRequest": {
        "trace_id": "1 string",
        "name": "2 string",
        "role": "3 Role",
        "instance_groups": "4 repeated string",
        "verbs": "5 repeated EngineVerb",
        "ttl_seconds": "6 int64",
        "certificate_name": "7 string",
    },
    "CreateKeyResponse": {"header": f"1 {ADMIN}.CommonResponseHeader", "key": "2 Key", "secret": "3 string"},
    "ListKeysRequest": {"trace_id": "1 string", "with_logins": "2 bool"},
    "ListKeysResponse": {"header": f"1 {ADMIN}.CommonResponseHeader", "keys": "2 repeated Key"},
    "RotateKeyRequest": {
        "trace_id": "1 string",
        "key_id": "2 string",
        "overlap_seconds": "3 int64",
        "ttl_seconds": "4 int64",
    },
    "RevokeKeyRequest": {"trace_id": "1 string", "key_id": "2 string"},
    "LoginRequest": {"trace_id": "1 string", "user_name": "2 string", "password": "3 string", "ttl_seconds": "4 int64"},
    "LogoutRequest": {"trace_id": "1 string"},
    "SetPasswordRequest": {
        "trace_id": "1 string",
        "user_name": "2 string",
        "password": "3 string",
        "old_password": "4 string",
    },
    "WhoAmIRequest": {"trace_id": "1 string"},
    "WhoAmIResponse": {"header": f"1 {ADMIN}.CommonResponseHeader", "is_required": "2 bool", "key": "3 Key"},
}

UNREAD_MESSAGES: dict[str, dict[str, str]] = {
    "UnreadCacheLocations": {
        "header": f"1 {META}.CommonResponseHeader",
        "locations": "2 repeated bytes",
        "read_lease_id": "1000 string",
    },
}
