"""A plug-in of all tests: in `make quick`, a test that starts a process is skipped at the moment when it does."""

from __future__ import annotations

import sys
from collections.abc import Generator

import pytest
from thoroughness import is_quick

__all__: list[str] = []

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
_in_a_test = False


def _refuse_processes(event: str, _arguments: tuple[object, ...]) -> None:
    if _in_a_test and event in _STARTS:
        pytest.skip("starts a process: not in `make quick`")


def pytest_configure() -> None:
    """Record the process's tests from now on."""
    if is_quick():
        sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Say when a test runs: the process that starts workers runs none."""
    global _in_a_test
    _in_a_test = True
    try:
        return (yield)
    finally:
        _in_a_test = False
