"""The contract of kv_meta_service.proto, written down a second time: a change must be made in both places."""

PACKAGE = "kv_cache_manager.proto.kv_meta"

SERVICES: dict[str, dict[str, tuple[str, str]]] = {
    "MetaService": {
        "RegisterInstance": ("RegisterInstanceRequest", "RegisterInstanceResponse"),
        "GetInstanceInfo": ("GetInstanceInfoRequest", "GetInstanceInfoResponse"),
        "Get": ("GetRequest", "GetResponse"),
        "PutStart": ("PutStartRequest", "PutStartResponse"),
        "PutFinish": ("PutFinishRequest", "CommonResponse"),
        "Remove": ("RemoveRequest", "CommonResponse"),
        "Trim": ("TrimRequest", "CommonResponse"),
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
        "REACH_MAX_ENTITY_CAPACITY": 7,
        "INSTANCE_NOT_EXIST": 8,
        "IO_ERROR": 20,
        "UNKNOWN_ERROR": 100,
        "ERROR_MAX": 65535,
    },
    "StorageType": {
        "ST_UNSPECIFIED": 0,
        "ST_3FS": 1,
        "ST_MOONCAKE": 2,
        "ST_TAIRMEMPOOL": 3,
        "ST_NFS": 4,
        "ST_VCNS_3FS": 5,
    },
    "QueryType": {"QT_UNSPECIFIED": 0, "QT_BATCH_GET": 1},
    "TrimStrategy": {"TS_UNSPECIFIED": 0, "TS_REMOVE_ALL_CACHE": 1, "TS_REMOVE_ALL_META": 2, "TS_TIMESTAMP": 3},
}

# Field name: its number and type; members of a oneof name it.
MESSAGES: dict[str, dict[str, str]] = {
    "ValueLocation": {"type": "1 StorageType", "spec_size": "2 int32", "location_specs": "3 repeated LocationSpec"},
    "InstanceInfo": {"quota_group_name": "1 string", "instance_group_name": "2 string", "instance_id": "3 string"},
    "LocalStorageSpec": {},
    "TairMemPoolStorageSpec": {"domain": "1 string", "timeout": "2 int32"},
    "RegisterInstanceRequest": {
        "trace_id": "1 string",
        "instance_group": "2 string",
        "instance_id": "3 string",
        "user_data": "4 string",
    },
    "KeyMask": {"values": "1 repeated bool"},
    "Meta": {"key": "1 string", "value": "2 string"},
    "GetRequest": {
        "trace_id": "1 string",
        "instance_id": "2 string",
        "query_type": "3 QueryType",
        "keys": "4 repeated string",
        "metas": "5 repeated Meta",
    },
    "GetResponse": {"header": "1 CommonResponseHeader", "locations": "2 repeated ValueLocation"},
    "PutStartRequest": {
        "trace_id": "1 string",
        "instance_id": "2 string",
        "keys": "3 repeated string",
        "write_timeout_seconds": "4 int32",
    },
    "PutStartResponse": {
        "header": "1 CommonResponseHeader",
        "write_session_id": "2 string",
        "key_mask": "3 KeyMask",
        "locations": "4 repeated ValueLocation",
    },
    "PutFinishRequest": {
        "trace_id": "1 string",
        "instance_id": "2 string",
        "write_session_id": "3 string",
        "locations": "4 repeated ValueLocation",
    },
    "RemoveRequest": {"trace_id": "1 string", "instance_id": "2 string", "keys": "3 repeated string"},
    "TrimRequest": {
        "trace_id": "1 string",
        "instance_id": "2 string",
        "strategy": "3 TrimStrategy",
        "begin_timestamp": "4 int32",
        "end_timestamp": "5 int32",
    },
    "Status": {"code": "1 ErrorCode", "message": "2 string"},
    "CommonResponseHeader": {"status": "1 Status", "request_id": "2 string", "tracer_result": "3 string"},
    "CommonResponse": {"header": "1 CommonResponseHeader"},
    "LocationSpec": {"name": "1 string", "uri": "2 string"},
    "ThreeFSStorageSpec": {
        "cluster_name": "1 string",
        "mountpoint": "2 string",
        "root_dir": "3 string",
        "key_count_per_file": "4 int32",
        "touch_file_when_create": "5 bool",
    },
    "VcnsThreeFSStorageSpec": {
        "cluster_name": "1 string",
        "mountpoint": "2 string",
        "root_dir": "3 string",
        "key_count_per_file": "4 int32",
        "touch_file_when_create": "5 bool",
        "remote_host": "6 string",
        "remote_port": "7 int32",
        "meta_storage_uri": "8 string",
    },
    "MooncakeStorageSpec": {
        "local_hostname": "1 string",
        "metadata_connstring": "2 string",
        "protocol": "3 string",
        "rdma_device": "4 string",
        "master_service_entry": "5 string",
    },
    "NfsStorageSpec": {"root_path": "1 string", "key_count_per_file": "2 int32"},
    "StorageConfig": {
        "global_unique_name": "1 string",
        "local": "2 oneof storage_spec: LocalStorageSpec",
        "threefs": "3 oneof storage_spec: ThreeFSStorageSpec",
        "mooncake": "4 oneof storage_spec: MooncakeStorageSpec",
        "tair_mem_pool": "5 oneof storage_spec: TairMemPoolStorageSpec",
        "nfs": "6 oneof storage_spec: NfsStorageSpec",
        "vcnsthreefs": "7 oneof storage_spec: ThreeFSStorageSpec",
        "check_storage_available_when_open": "8 bool",
    },
    "RegisterInstanceResponse": {"header": "1 CommonResponseHeader", "storage_configs": "2 string"},
    "GetInstanceInfoRequest": {"trace_id": "1 string", "instance_id": "2 string"},
    "GetInstanceInfoResponse": {
        "header": "1 CommonResponseHeader",
        "instance_group": "2 string",
        "instance_info": "3 InstanceInfo",
    },
}
