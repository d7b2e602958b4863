"""The exception tree and the table in its docstring are one."""

import inspect
import re

import pytest

from kvcm.model import errors
from kvcm.model.errors import ErrorCode, KvcmError
from kvcm.protocol import meta_service_pb2

ROW = re.compile(r"^\s*(?:[├└]── )?(\w+Error)\s+([A-Z_]+)\s+(\d{3})", re.MULTILINE)
TABLE = {name: (code, int(status)) for name, code, status in ROW.findall(errors.__doc__ or "")}
CLASSES = {
    name: value for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)
}


def test_the_table_in_the_docstring_is_that_of_the_classes() -> None:
    assert {name: (cls.code.name, cls.http_status) for name, cls in CLASSES.items()} == TABLE


def test_the_tree_has_one_floor() -> None:
    assert {cls.__bases__ for name, cls in CLASSES.items() if cls is not KvcmError} == {(KvcmError,)}


def test_each_error_has_a_code_of_its_own() -> None:
    codes = [cls.code for cls in CLASSES.values()]
    assert len(set(codes)) == len(codes)
    assert {ErrorCode.OK, ErrorCode.UNSPECIFIED}.isdisjoint(codes)


def test_every_code_but_success_has_an_error() -> None:
    assert {cls.code for cls in CLASSES.values()} == set(ErrorCode) - {ErrorCode.OK, ErrorCode.UNSPECIFIED}


def test_everything_public_is_exported() -> None:
    assert set(errors.__all__) == {*CLASSES, "ErrorCode"}


@pytest.mark.parametrize("code", ErrorCode)
def test_codes_are_those_of_the_protocol(code: ErrorCode) -> None:
    assert meta_service_pb2.ErrorCode.Value(code.name) == code


@pytest.mark.parametrize("cls", CLASSES.values())
def test_statuses_are_errors_and_the_message_is_kept(cls: type[KvcmError]) -> None:
    assert 400 <= cls.http_status <= 599
    assert str(cls("do this")) == "do this"
