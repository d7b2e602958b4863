from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ErrorCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNSPECIFIED: _ClassVar[ErrorCode]
    OK: _ClassVar[ErrorCode]
    UNSUPPORTED: _ClassVar[ErrorCode]
    INTERNAL_ERROR: _ClassVar[ErrorCode]
    SERVICE_NOT_READY: _ClassVar[ErrorCode]
    INVALID_ARGUMENT: _ClassVar[ErrorCode]
    IO_ERROR: _ClassVar[ErrorCode]
    UNKNOWN_ERROR: _ClassVar[ErrorCode]
    ERROR_MAX: _ClassVar[ErrorCode]

class FaultType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FT_INTERNAL_ERROR: _ClassVar[FaultType]

class FaultTriggerStrategy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ALWAYS: _ClassVar[FaultTriggerStrategy]
    ONCE: _ClassVar[FaultTriggerStrategy]
UNSPECIFIED: ErrorCode
OK: ErrorCode
UNSUPPORTED: ErrorCode
INTERNAL_ERROR: ErrorCode
SERVICE_NOT_READY: ErrorCode
INVALID_ARGUMENT: ErrorCode
IO_ERROR: ErrorCode
UNKNOWN_ERROR: ErrorCode
ERROR_MAX: ErrorCode
FT_INTERNAL_ERROR: FaultType
ALWAYS: FaultTriggerStrategy
ONCE: FaultTriggerStrategy

class Status(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: ErrorCode
    message: str
    def __init__(self, code: _Optional[_Union[ErrorCode, str]] = ..., message: _Optional[str] = ...) -> None: ...

class CommonResponseHeader(_message.Message):
    __slots__ = ("status", "request_id")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    status: Status
    request_id: str
    def __init__(self, status: _Optional[_Union[Status, _Mapping]] = ..., request_id: _Optional[str] = ...) -> None: ...

class CommonResponse(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: CommonResponseHeader
    def __init__(self, header: _Optional[_Union[CommonResponseHeader, _Mapping]] = ...) -> None: ...

class InjectFaultRequest(_message.Message):
    __slots__ = ("api_name", "fault_type", "fault_trigger_strategy", "trigger_at_call")
    API_NAME_FIELD_NUMBER: _ClassVar[int]
    FAULT_TYPE_FIELD_NUMBER: _ClassVar[int]
    FAULT_TRIGGER_STRATEGY_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_AT_CALL_FIELD_NUMBER: _ClassVar[int]
    api_name: str
    fault_type: FaultType
    fault_trigger_strategy: FaultTriggerStrategy
    trigger_at_call: int
    def __init__(self, api_name: _Optional[str] = ..., fault_type: _Optional[_Union[FaultType, str]] = ..., fault_trigger_strategy: _Optional[_Union[FaultTriggerStrategy, str]] = ..., trigger_at_call: _Optional[int] = ...) -> None: ...

class RemoveFaultRequest(_message.Message):
    __slots__ = ("api_name",)
    API_NAME_FIELD_NUMBER: _ClassVar[int]
    api_name: str
    def __init__(self, api_name: _Optional[str] = ...) -> None: ...

class ClearFaultsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
