"""Lines of the log: their forms, what is below the level costs nothing, libraries' lines look the same."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PREAMBLE = """
import logging, structlog
from kvcm.telemetry.logs import LEVELS, configure_logs, is_logged, set_format, set_level
log = structlog.get_logger("test")
class Costly:
    def __repr__(self): raise AssertionError("formatted")
    __str__ = __repr__
"""


def lines_of(program: str) -> list[str]:
    """What a program of its own writes: logs are a matter of the whole process."""
    command = [sys.executable, "-c", PREAMBLE + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize("form", ["auto", "json"])
def test_json_is_one_object_per_line_also_of_libraries_and_exceptions(form: str) -> None:
    first, second, third = lines_of(f"""
configure_logs(LEVELS["INFO"], {form!r})
log.info("something", text="two\\nlines")
logging.getLogger("uvicorn.error").warning("trouble with %s", "it")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
""")
    assert {"event": "something", "text": "two\nlines", "level": "info"}.items() <= json.loads(first).items()
    library = json.loads(second)
    assert (library["event"], library["logger"], library["level"]) == ("trouble with it", "uvicorn.error", "warning")
    assert "ZeroDivisionError" in json.loads(third)["exception"]


def test_console_is_for_people_and_without_colours_where_there_is_no_terminal() -> None:
    (line,) = lines_of('configure_logs(LEVELS["INFO"], "console"); log.info("something", number=1)')
    assert "something" in line
    assert "number=1" in line
    assert "\x1b" not in line


def test_level_and_form_change_for_loggers_that_are_in_use() -> None:
    lines = lines_of("""
configure_logs(LEVELS["INFO"], "json")
log.info("first"); log.debug("dropped", value=Costly())
set_level(LEVELS["DEBUG"]); log.debug("second")
set_format("console"); log.debug("third")
set_level(LEVELS["ERROR"]); log.warning("dropped", value=Costly()); log.error("fourth")
assert is_logged(logging.ERROR) and not is_logged(logging.WARNING)
""")
    assert len(lines) == 4
    assert [json.loads(line)["event"] for line in lines[:2]] == ["first", "second"]
    assert "third" in lines[2]
    assert "fourth" in lines[3]


def test_metadata_that_grpc_cannot_decode_is_not_quoted() -> None:
    lines = lines_of("""
configure_logs(LEVELS["INFO"], "json")
grpc = logging.getLogger("grpc._cython.cygrpc")
grpc.error("Invalid encoding on %s", b"Bearer kvcm_a_secret\\x80")
grpc.error("something else")
""")
    assert [json.loads(line)["event"] for line in lines] == ["something else"]
