"""The contract of kvcm/v1/insight_service.proto, written down a second time: a change must be made in both places."""

ADMIN = "kv_cache_manager.proto.admin"

INSIGHT_SERVICES: dict[str, dict[str, tuple[str, str]]] = {
    "InsightService": {
        "ListSessions": ("ListSessionsRequest", "ListSessionsResponse"),
        "ExploreBlocks": ("ExploreBlocksRequest", "ExploreBlocksResponse"),
        "GetCurve": ("GetCurveRequest", "GetCurveResponse"),
        "ListAlerts": ("ListAlertsRequest", "ListAlertsResponse"),
    }
}

INSIGHT_ENUMS: dict[str, dict[str, int]] = {
    "ChainEnd": {
        "CHAIN_END_UNSPECIFIED": 0,
        "CHAIN_END_NONE": 1,
        "CHAIN_END_ABSENT": 2,
        "CHAIN_END_WRITING": 3,
        "CHAIN_END_DELETING": 4,
        "CHAIN_END_STORAGE": 5,
    },
    "BlockState": {
        "BLOCK_UNSPECIFIED": 0,
        "BLOCK_SERVING": 1,
        "BLOCK_WRITING": 2,
        "BLOCK_DELETING": 3,
        "BLOCK_ABSENT": 4,
    },
    "AlertSeverity": {"ALERT_UNSPECIFIED": 0, "ALERT_PAGE": 1, "ALERT_TICKET": 2, "ALERT_INFO": 3},
}

INSIGHT_MESSAGES: dict[str, dict[str, str]] = {
    "ListSessionsRequest": {
        "trace_id": "1 string",
        "instance_group": "2 string",
        "instance_id": "3 string",
    },
    "ListSessionsResponse": {
        "header": f"1 {ADMIN}.CommonResponseHeader",
        "sessions": "2 repeated OpenSession",
    },
    "OpenSession": {
        "short_id": "1 string",
        "instance_id": "2 string",
        "instance_group": "3 string",
        "blocks": "4 int64",
        "bytes": "5 int64",
        "begun_at_ms": "6 int64",
        "deadline_ms": "7 int64",
        "starter": "8 string",
        "is_overdue": "9 bool",
        "is_ending": "10 bool",
    },
    "ExploreBlocksRequest": {
        "trace_id": "1 string",
        "instance_id": "2 string",
        "block_keys": "3 repeated int64",
        "token_ids": "4 repeated int64",
    },
    "ExploreBlocksResponse": {
        "header": f"1 {ADMIN}.CommonResponseHeader",
        "summary": "2 ChainSummary",
        "blocks": "3 repeated ExploredBlock",
    },
    "ChainSummary": {
        "blocks": "1 int64",
        "tokens_per_block": "2 int64",
        "matched_blocks": "3 int64",
        "matched_tokens": "4 int64",
        "complete_blocks": "5 int64",
        "end": "6 ChainEnd",
        "end_reason": "7 string",
    },
    "ExploredBlock": {
        "position": "1 int64",
        "block_key": "2 int64",
        "state": "3 BlockState",
        "is_readable": "4 bool",
        "why_not": "5 string",
        "locations": "6 repeated ExploredLocation",
        "last_access_at_ms": "7 int64",
        "accesses": "8 int64",
        "age_seconds": "9 double",
        "is_pinned": "10 bool",
        "parent_is_present": "11 bool",
    },
    "ExploredLocation": {
        "storage": "1 string",
        "storage_type": "2 string",
        "status": "3 string",
        "specs": "4 repeated string",
        "size_bytes": "5 int64",
        "began_at_ms": "6 int64",
    },
    "GetCurveRequest": {
        "trace_id": "1 string",
        "instance_group": "2 string",
    },
    "GetCurveResponse": {
        "header": f"1 {ADMIN}.CommonResponseHeader",
        "is_known": "2 bool",
        "why_not": "3 string",
        "since_ms": "4 int64",
        "lookups": "5 int64",
        "sampled_keys": "6 int64",
        "attainable_ratio": "7 double",
        "points": "8 repeated CurvePoint",
        "targets": "9 repeated CurveTarget",
        "present": "10 CurvePresent",
    },
    "CurvePoint": {
        "bytes": "1 int64",
        "hit_ratio": "2 double",
    },
    "CurveTarget": {
        "part": "1 double",
        "hit_ratio": "2 double",
        "bytes": "3 int64",
    },
    "CurvePresent": {
        "quota_bytes": "1 int64",
        "kept_bytes": "2 int64",
        "used_bytes": "3 int64",
        "predicted_ratio": "4 double",
    },
    "ListAlertsRequest": {
        "trace_id": "1 string",
        "instance_group": "2 string",
    },
    "ListAlertsResponse": {
        "header": f"1 {ADMIN}.CommonResponseHeader",
        "alerts": "2 repeated Alert",
    },
    "Alert": {
        "name": "1 string",
        "severity": "2 AlertSeverity",
        "subject_kind": "3 string",
        "subject_name": "4 string",
        "summary": "5 string",
        "reason": "6 string",
        "advice": "7 string",
        "since_ms": "8 int64",
    },
}
