"""The contract of debug_service.proto, written down a second time: a change must be made in both places."""

PACKAGE = "kv_cache_manager.proto.debug"

SERVICES: dict[str, dict[str, tuple[str, str]]] = {
    "DebugService": {
        "InjectFault": ("InjectFaultRequest", "CommonResponse"),
        "RemoveFault": ("RemoveFaultRequest", "CommonResponse"),
        "ClearFaults": ("ClearFaultsRequest", "CommonResponse"),
    }
}

ENUMS: dict[str, dict[str, int]] = {
    "ErrorCode": {
        "UNSPECIFIED": 0,
        "OK": 1,
        "UNSUPPORTED": 2,
        "INTERNAL_ERROR": 3,
        "SERVICE_NOT_READY": 4,
        "INVALID_ARGUMENT": 5,
        "IO_ERROR": 20,
        "UNKNOWN_ERROR": 100,
        "ERROR_MAX": 65535,
    },
    "FaultType": {"FT_INTERNAL_ERROR": 0},
    "FaultTriggerStrategy": {"ALWAYS": 0, "ONCE": 1},
}

# Field name: its number and type; members of a oneof name it.
MESSAGES: dict[str, dict[str, str]] = {
    "CommonResponseHeader": {"status": "1 Status", "request_id": "2 string"},
    "InjectFaultRequest": {
        "api_name": "1 string",
        "fault_type": "2 FaultType",
        "fault_trigger_strategy": "3 FaultTriggerStrategy",
        "trigger_at_call": "4 int32",
    },
    "RemoveFaultRequest": {"api_name": "1 string"},
    "ClearFaultsRequest": {},
    "Status": {"code": "1 ErrorCode", "message": "2 string"},
    "CommonResponse": {"header": "1 CommonResponseHeader"},
}
