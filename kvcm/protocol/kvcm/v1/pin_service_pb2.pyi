from kvcm.protocol import meta_service_pb2 as _meta_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PinPrefixRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id", "block_keys", "token_ids", "owner", "ttl_seconds")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    block_keys: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    owner: str
    ttl_seconds: int
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., block_keys: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., owner: _Optional[str] = ..., ttl_seconds: _Optional[int] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ("header", "pin_id", "pinned_blocks", "pinned_bytes", "deadline_ms")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    pin_id: str
    pinned_blocks: int
    pinned_bytes: int
    deadline_ms: int
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., pin_id: _Optional[str] = ..., pinned_blocks: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id", "pin_id")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    pin_id: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., pin_id: _Optional[str] = ...) -> None: ...

class ListPinsRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class ListPinsResponse(_message.Message):
    __slots__ = ("header", "pins")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PINS_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    pins: _containers.RepeatedCompositeFieldContainer[Pin]
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., pins: _Optional[_Iterable[_Union[Pin, _Mapping]]] = ...) -> None: ...

class Pin(_message.Message):
    __slots__ = ("pin_id", "owner", "blocks", "bytes", "deadline_ms", "last_block_key")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_BLOCK_KEY_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    owner: str
    blocks: int
    bytes: int
    deadline_ms: int
    last_block_key: int
    def __init__(self, pin_id: _Optional[str] = ..., owner: _Optional[str] = ..., blocks: _Optional[int] = ..., bytes: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., last_block_key: _Optional[int] = ...) -> None: ...

class ReportMissingRequest(_message.Message):
    __slots__ = ("trace_id", "instance_id", "parts")
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    trace_id: str
    instance_id: str
    parts: _containers.RepeatedCompositeFieldContainer[MissingPart]
    def __init__(self, trace_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[MissingPart, _Mapping]]] = ...) -> None: ...

class MissingPart(_message.Message):
    __slots__ = ("block_key", "uri", "mismatched_checksum")
    BLOCK_KEY_FIELD_NUMBER: _ClassVar[int]
    URI_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    block_key: int
    uri: str
    mismatched_checksum: int
    def __init__(self, block_key: _Optional[int] = ..., uri: _Optional[str] = ..., mismatched_checksum: _Optional[int] = ...) -> None: ...

class ReportMissingResponse(_message.Message):
    __slots__ = ("header", "removed_locations", "unconfirmed_parts")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    REMOVED_LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    UNCONFIRMED_PARTS_FIELD_NUMBER: _ClassVar[int]
    header: _meta_service_pb2.CommonResponseHeader
    removed_locations: int
    unconfirmed_parts: int
    def __init__(self, header: _Optional[_Union[_meta_service_pb2.CommonResponseHeader, _Mapping]] = ..., removed_locations: _Optional[int] = ..., unconfirmed_parts: _Optional[int] = ...) -> None: ...
