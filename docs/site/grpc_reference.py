"""The gRPC reference: calls, messages and enums of the contract with the comments that stand in proto/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc_tools  # type: ignore[import-untyped]
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc
from markdown_text import anchor, cell, page, table
from served import ServedCall

__all__ = ["grpc_pages"]

PROTO = Path(__file__).resolve().parents[2] / "proto"
WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"
_TITLES = {
    "meta_service": "Calls of engines",
    "admin_service": "Calls of operators",
    "debug_service": "Calls that make others fail",
    "kv_meta_service": "Values of string keys",
    "kv_indexer": "The index of SGLang's router, served by kvcm scorer",
    "indexer": "The indexer of llm-d, served by kvcm scorer",
}
_NESTED, _FIELD, _VALUE, _MESSAGE, _ENUM, _SERVICE, _METHOD = 3, 2, 2, 4, 5, 6, 2
_INNER_ENUM = 4


@dataclass(slots=True)
class _File:
    """A file of the contract.

    Attributes:
        proto: its descriptor.
        name: of its page.
        comments: by the path of what they stand above.
    """

    proto: FileDescriptorProto
    name: str
    comments: dict[tuple[int, ...], str] = field(default_factory=dict)

    def said(self, *path: int) -> str:
        """Return the comment above something; inside a comment an empty line ends a paragraph."""
        return " ".join(self.comments.get(path, "").split())


def grpc_pages(calls: Mapping[tuple[str, str], ServedCall]) -> dict[str, str]:
    """Return the pages by their path below docs/reference/.

    Args:
        calls: those that are served, by service and name.
    """
    files = [_file(proto) for proto in _descriptors().file if proto.service or proto.message_type]
    where = {name: file.name for file in files for name in _names(file.proto)}
    pages = {f"grpc/{file.name}.md": _page(file, where, calls) for file in files}
    return {"grpc.md": _overview(files, calls), **pages}


def _descriptors() -> FileDescriptorSet:
    with TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        sources = sorted(str(path) for path in PROTO.rglob("*.proto"))
        arguments = [f"-I{PROTO}", f"-I{WELL_KNOWN}", "--include_source_info", f"--descriptor_set_out={out}", *sources]
        if protoc.main(["protoc", *arguments]) != 0:
            raise RuntimeError("protoc failed; its message above names the file and the line")
        return FileDescriptorSet.FromString(out.read_bytes())


def _file(proto: FileDescriptorProto) -> _File:
    comments = {
        tuple(place.path): place.leading_comments.strip()
        for place in proto.source_code_info.location
        if place.leading_comments.strip()
    }
    heads = [place.leading_detached_comments for place in proto.source_code_info.location if list(place.path) == [12]]
    top = comments.get((12,), "") or next((head[0].strip() for head in heads if head), "")
    return _File(proto, proto.name.removesuffix(".proto").replace("/", "."), {**comments, (): top})


def _names(proto: FileDescriptorProto) -> Iterator[str]:
    for message in proto.message_type:
        yield f"{proto.package}.{message.name}"
        yield from (f"{proto.package}.{message.name}.{inner.name}" for inner in message.nested_type)
        yield from (f"{proto.package}.{message.name}.{inner.name}" for inner in message.enum_type)
    yield from (f"{proto.package}.{enum.name}" for enum in proto.enum_type)


def _overview(files: list[_File], calls: Mapping[tuple[str, str], ServedCall]) -> str:
    lines = [
        "Every call of the contract, made of [proto/](../../proto/). What codes mean, and what we add to the original:",
        "[protocol.md](../protocol.md). Over HTTP a call is `POST` of its path with the request as JSON.",
        "",
    ]
    for file in files:
        for place, service in enumerate(file.proto.service):
            full = f"{file.proto.package}.{service.name}"
            lines += [f"## {full}", "", file.said(_SERVICE, place), ""]
            rows = []
            for number, method in enumerate(service.method):
                served = calls.get((full, method.name))
                link = f"[`{method.name}`](grpc/{file.name}.md#{anchor(method.name)})"
                about = cell(file.said(_SERVICE, place, _METHOD, number))
                rows.append((link, f"`{served.path}`" if served else "–", served.plane if served else "–", about))
            lines += table(("call", "HTTP", "port", "what it does"), rows)
    lines += ["A dash: no manager serves it with its default settings.", ""]
    return page("gRPC calls", lines)


def _page(file: _File, where: Mapping[str, str], calls: Mapping[tuple[str, str], ServedCall]) -> str:
    package = file.proto.package
    lines = [file.said(), "", f"Package `{package}`, [{file.proto.name}](../../../proto/{file.proto.name}).", ""]
    for place, service in enumerate(file.proto.service):
        lines += [f"## {service.name}", "", file.said(_SERVICE, place), ""]
        for number, method in enumerate(service.method):
            served = calls.get((f"{package}.{service.name}", method.name))
            asked = f"{_link(method.input_type, where, file)} → {_link(method.output_type, where, file)}"
            also = f"; HTTP `POST {served.path}`, {served.plane} port" if served else ""
            lines += [f"### {method.name}", "", file.said(_SERVICE, place, _METHOD, number), "", f"{asked}{also}.", ""]
    lines += ["## Messages", ""] if file.proto.message_type else []
    for place, message in enumerate(file.proto.message_type):
        lines += _message(file, message, (_MESSAGE, place), where)
    lines += ["## Enums", ""] if file.proto.enum_type else []
    for place, enum in enumerate(file.proto.enum_type):
        lines += _enum(file, enum, (_ENUM, place))
    return page(_TITLES.get(file.name, file.name), lines)


def _message(
    file: _File, message: DescriptorProto, path: tuple[int, ...], where: Mapping[str, str], outer: str = ""
) -> list[str]:
    name = f"{outer}{message.name}"
    lines = [f"### {name}", "", file.said(*path), ""]
    rows = []
    maps = {inner.name: inner for inner in message.nested_type if inner.options.map_entry}
    for place, each in enumerate(message.field):
        entry = maps.get(each.type_name.rpartition(".")[2])
        kind = _type(each, where, file) if entry is None else _map_type(entry, where, file)
        about = cell(file.said(*path, _FIELD, place))
        choice = f"one of `{message.oneof_decl[each.oneof_index].name}`; " if _is_choice(each) else ""
        rows.append((f"`{each.name}`", kind, str(each.number), choice + about))
    lines += table(("field", "type", "number", "meaning"), rows) or ["No fields.", ""]
    for place, enum in enumerate(message.enum_type):
        lines += _enum(file, enum, (*path, _INNER_ENUM, place), f"{name}.")
    for place, inner in enumerate(message.nested_type):
        if not inner.options.map_entry:
            lines += _message(file, inner, (*path, _NESTED, place), where, f"{name}.")
    return lines


def _is_choice(each: FieldDescriptorProto) -> bool:
    return each.HasField("oneof_index") and not each.proto3_optional


def _enum(file: _File, enum: EnumDescriptorProto, path: tuple[int, ...], outer: str = "") -> list[str]:
    rows = [
        (f"`{value.name}`", str(value.number), cell(file.said(*path, _VALUE, place)))
        for place, value in enumerate(enum.value)
    ]
    return [f"### {outer}{enum.name}", "", file.said(*path), "", *table(("value", "number", "meaning"), rows)]


def _type(each: FieldDescriptorProto, where: Mapping[str, str], file: _File) -> str:
    if each.type_name:
        name = _link(each.type_name, where, file)
    else:
        name = f"`{FieldDescriptorProto.Type.Name(each.type).removeprefix('TYPE_').lower()}`"
    repeated = "repeated " if each.label == FieldDescriptorProto.LABEL_REPEATED else ""
    return f"{repeated}{'optional ' if each.proto3_optional else ''}{name}"


def _map_type(entry: DescriptorProto, where: Mapping[str, str], file: _File) -> str:
    key, value = (_type(each, where, file) for each in entry.field)
    return f"map of {key} to {value}"


def _link(type_name: str, where: Mapping[str, str], file: _File) -> str:
    full = type_name.removeprefix(".")
    home = where.get(full)
    if home is None:
        return f"`{full}`"
    proto_package = ".".join(part for part in full.split(".") if not part[0].isupper())
    short = full.removeprefix(f"{proto_package}.")
    return f"[`{short}`]({'' if home == file.name else f'{home}.md'}#{anchor(short)})"
