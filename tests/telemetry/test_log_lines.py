"""Log lines, and the stages of a request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys

import pytest

from kvcm.telemetry.tracing import Stage, open_stage, record_stage, staged

PREAMBLE = """
import logging, structlog
from kvcm.telemetry.logs import LEVELS, configure_logs, is_enabled, set_format, set_level
log = structlog.get_logger("test")
class Costly:
    def __repr__(self): raise AssertionError("formatted")
    __str__ = __repr__
"""


def lines_of(program: str) -> list[str]:
    """What a program of its own writes: logs are a matter of the whole process."""
    command = [sys.executable, "-c", PREAMBLE + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
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
assert is_enabled(logging.ERROR) and not is_enabled(logging.WARNING)
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


@staged("inner", "x.py:inner")
async def inner(count: int) -> int:
    record_stage(keys=count)
    await asyncio.sleep(0)
    return count


@staged("outer", "x.py:outer")
async def outer() -> int:
    return await inner(1) + await inner(2)


@staged("broken", "x.py:broken")
async def broken() -> None:
    raise ValueError("broken")


def names(stage: Stage) -> dict[str, object]:
    return {f"{number} {part.name} {part.notes}": names(part) for number, part in enumerate(stage.parts)}


async def test_stages_are_nested_as_they_ran() -> None:
    with open_stage("call", "x.py:call") as root:
        assert await outer() == 3
    assert names(root) == {"0 outer {}": {"0 inner {'keys': 1}": {}, "1 inner {'keys': 2}": {}}}
    assert root.parts[0].place == "x.py:outer"
    assert root.begin_ns <= root.parts[0].begin_ns <= root.parts[0].end_ns <= root.end_ns


async def test_nothing_is_kept_without_a_measurement() -> None:
    assert await outer() == 3
    with open_stage("call", "x.py:call") as root:
        pass
    assert await outer() == 3
    assert root.parts == []


async def test_requests_at_the_same_time_have_stages_of_their_own() -> None:
    async def call(count: int) -> Stage:
        with open_stage("call", "x.py:call") as root:
            await inner(count)
        return root

    first, second = await asyncio.gather(call(1), call(2))
    assert [part.notes for part in (*first.parts, *second.parts)] == [{"keys": 1}, {"keys": 2}]


async def test_a_stage_that_fails_ends() -> None:
    with open_stage("call", "x.py:call") as root:
        with contextlib.suppress(ValueError):
            await broken()
        await inner(1)
    assert [(part.name, part.end_ns > 0) for part in root.parts] == [("broken", True), ("inner", True)]
