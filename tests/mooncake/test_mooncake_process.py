"""The process that holds the client, stopped: every caller gets an answer in time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from stopping import stop_process

from kvcm.model.errors import KvcmError, StorageIOError, UnsupportedError
from kvcm.model.storages import MooncakeStorageSpec
from kvcm.storage.mooncake import MooncakeProcess

SPEC = MooncakeStorageSpec("h", "P2PHANDSHAKE", "tcp", "", "127.0.0.1:1")
MORE_THAN_A_PIPE_TAKES = ["k" * 1000] * 1000


@pytest.fixture
def process() -> Iterator[MooncakeProcess]:
    process = MooncakeProcess(SPEC)
    yield process
    process.close()


def children() -> set[int]:
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for children in lists for pid in children.read_text().split()}


def test_a_question_that_is_not_taken_in_time_fails_and_the_process_is_killed(process: MooncakeProcess) -> None:
    before, failures = children(), list[KvcmError]()

    def ask() -> None:
        try:
            process.call("exists", MORE_THAN_A_PIPE_TAKES, 0.5)
        except KvcmError as error:
            failures.append(error)

    _load(process)
    [child] = children() - before
    stop_process(child)
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(30)
    is_answered = not asking.is_alive()
    if not is_answered:  # or the end of the storage would be waited for
        os.kill(child, signal.SIGKILL)
    assert is_answered
    assert [type(error) for error in failures] == [StorageIOError]
    assert "took too long" in str(failures[0])
    assert child not in children()
    _load(process)


def test_a_question_that_is_larger_than_the_pipe_is_taken(process: MooncakeProcess) -> None:
    _load(process)
    began = time.monotonic()
    with pytest.raises((StorageIOError, UnsupportedError)) as raised:  # from the client: it finds no master there
        process.call("exists", MORE_THAN_A_PIPE_TAKES, 60.0)
    assert "gave no answer" not in str(raised.value)
    assert time.monotonic() - began < 30


def _load(process: MooncakeProcess) -> None:
    with contextlib.suppress(UnsupportedError):  # where it is not installed, the process runs all the same
        process.call("load", [], 60.0)
