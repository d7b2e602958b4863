from kvcm.protocol import admin_service_pb2 as _admin_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_VIEWER: _ClassVar[Role]
    ROLE_OPERATOR: _ClassVar[Role]
    ROLE_ADMIN: _ClassVar[Role]
    ROLE_ENGINE: _ClassVar[Role]

class EngineVerb(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_VERB_UNSPECIFIED: _ClassVar[EngineVerb]
    MATCH: _ClassVar[EngineVerb]
    WRITE: _ClassVar[EngineVerb]
    REMOVE: _ClassVar[EngineVerb]
    PIN: _ClassVar[EngineVerb]
    REPORT: _ClassVar[EngineVerb]
    SCORE: _ClassVar[EngineVerb]
ROLE_UNSPECIFIED: Role
ROLE_VIEWER: Role
ROLE_OPERATOR: Role
ROLE_ADMIN: Role
ROLE_ENGINE: Role
ENGINE_VERB_UNSPECIFIED: EngineVerb
MATCH: EngineVerb
WRITE: EngineVerb
REMOVE: EngineVerb
PIN: EngineVerb
REPORT: EngineVerb
SCORE: EngineVerb

class Key(_message.Message):
    __slots__ = ("key_id", "name", "role", "instance_groups", "verbs", "created_at_ms", "expires_at_ms", "last_used_at_ms", "certificate_name", "account")
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    VERBS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_NAME_FIELD_NUMBER: _ClassVar[int]
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    key_id: str
    name: str
    role: Role
    instance_groups: _containers.RepeatedScalarFieldContainer[str]
    verbs: _containers.RepeatedScalarFieldContainer[EngineVerb]
    created_at_ms: int
    expires_at_ms: int
    last_used_at_ms: int
    certificate_name: str
    account: str
    def __init__(self, key_id: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., instance_groups: _Optional[_Iterable[str]] = ..., verbs: _Optional[_Iterable[_Union[EngineVerb, str]]] = ..., created_at_ms: _Optional[int] = ..., expires_at_ms: _Optional[int] = ..., last_used_at_ms: _Optional[int] = ..., certificate_name: _Optional[str] = ..., account: _Optional[str] = ...) -> None: ...

class CreateKeyRequest(_message.Message):
    __slots__ = ("trace_id", "name", "role", "instance_groups", "verbs", "ttl_seconds", "certificate_name")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_GROUPS_FIELD_NUMBER: _ClassVar[int]
    VERBS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_NAME_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    name: str
    role: Role
    instance_groups: _containers.RepeatedScalarFieldContainer[str]
    verbs: _containers.RepeatedScalarFieldContainer[EngineVerb]
    ttl_seconds: int
    certificate_name: str
    def __init__(self, trace_id: _Optional[str] = ..., name: _Optional[str] = ..., role: _Optional[_Union[Role, str]] = ..., instance_groups: _Optional[_Iterable[str]] = ..., verbs: _Optional[_Iterable[_Union[EngineVerb, str]]] = ..., ttl_seconds: _Optional[int] = ..., certificate_name: _Optional[str] = ...) -> None: ...

class CreateKeyResponse(_message.Message):
    __slots__ = ("header", "key", "secret")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    key: Key
    secret: str
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., key: _Optional[_Union[Key, _Mapping]] = ..., secret: _Optional[str] = ...) -> None: ...

class ListKeysRequest(_message.Message):
    __slots__ = ("trace_id", "with_logins")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_LOGINS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    with_logins: bool
    def __init__(self, trace_id: _Optional[str] = ..., with_logins: _Optional[bool] = ...) -> None: ...

class ListKeysResponse(_message.Message):
    __slots__ = ("header", "keys")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    keys: _containers.RepeatedCompositeFieldContainer[Key]
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., keys: _Optional[_Iterable[_Union[Key, _Mapping]]] = ...) -> None: ...

class RotateKeyRequest(_message.Message):
    __slots__ = ("trace_id", "key_id", "overlap_seconds", "ttl_seconds")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    key_id: str
    overlap_seconds: int
    ttl_seconds: int
    def __init__(self, trace_id: _Optional[str] = ..., key_id: _Optional[str] = ..., overlap_seconds: _Optional[int] = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class RevokeKeyRequest(_message.Message):
    __slots__ = ("trace_id", "key_id")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    key_id: str
    def __init__(self, trace_id: _Optional[str] = ..., key_id: _Optional[str] = ...) -> None: ...

class LoginRequest(_message.Message):
    __slots__ = ("trace_id", "user_name", "password", "ttl_seconds")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    USER_NAME_FIELD_NUMBER: _ClassVar[int]
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    user_name: str
    password: str
    ttl_seconds: int
    def __init__(self, trace_id: _Optional[str] = ..., user_name: _Optional[str] = ..., password: _Optional[str] = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class LogoutRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class SetPasswordRequest(_message.Message):
    __slots__ = ("trace_id", "user_name", "password", "old_password")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    USER_NAME_FIELD_NUMBER: _ClassVar[int]
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    OLD_PASSWORD_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    user_name: str
    password: str
    old_password: str
    def __init__(self, trace_id: _Optional[str] = ..., user_name: _Optional[str] = ..., password: _Optional[str] = ..., old_password: _Optional[str] = ...) -> None: ...

class WhoAmIRequest(_message.Message):
    __slots__ = ("trace_id",)
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    def __init__(self, trace_id: _Optional[str] = ...) -> None: ...

class WhoAmIResponse(_message.Message):
    __slots__ = ("header", "is_required", "key")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    IS_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    header: _admin_service_pb2.CommonResponseHeader
    is_required: bool
    key: Key
    def __init__(self, header: _Optional[_Union[_admin_service_pb2.CommonResponseHeader, _Mapping]] = ..., is_required: _Optional[bool] = ..., key: _Optional[_Union[Key, _Mapping]] = ...) -> None: ...
