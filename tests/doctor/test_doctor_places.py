"""Directories, media and ports, as the doctor sees them."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from kvcm.config import Settings
from kvcm.doctor.findings import Finding, Level
from kvcm.doctor.places import check_directory, check_metadata_directory, lock_holder, room
from kvcm.doctor.ports import check_ports
from kvcm.doctor.reachable import check_reachable
from kvcm.doctor.skew import check_skew
from kvcm.model.clock import SystemClock
from kvcm.store.rocks.log import CommitLog, Fsync

GIB = 1 << 30


def _one(found: Iterator[Finding]) -> Finding:
    (finding,) = found
    return finding


def test_a_directory_that_can_be_written_is_fine(tmp_path: Path) -> None:
    finding = _one(check_directory("place", tmp_path, is_made=False))
    assert finding.level is not Level.FAIL
    assert str(tmp_path) in finding.found


def test_a_directory_that_is_not_there_is_made_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    assert _one(check_directory("place", path, is_made=True)).level is Level.OK
    missing = _one(check_directory("place", path, is_made=False))
    assert (missing.level, missing.found) == (Level.FAIL, f"{path} does not exist on this host")


def test_a_file_in_the_place_of_a_directory_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert _one(check_directory("place", path, is_made=True)).level is Level.FAIL


@pytest.mark.parametrize(
    ("free", "whole", "level"),
    [
        (500 * GIB, 1000 * GIB, Level.OK),
        (49 * GIB, 1000 * GIB, Level.WARN),
        (GIB // 2, 1000 * GIB, Level.FAIL),
        (GIB // 2, GIB, Level.OK),  # a small medium is full at a tenth
        (GIB // 20, GIB, Level.FAIL),
    ],
)
def test_room(free: int, whole: int, level: Level) -> None:
    assert room("place", "it", free, whole).level is level


def test_who_has_the_metadata_open_is_found_without_taking_it(tmp_path: Path) -> None:
    lock = tmp_path / "metadata" / "LOCK"
    assert lock_holder(lock) == 0
    log = CommitLog(lock.parent, Fsync("never"), SystemClock())
    ask = (
        f"from pathlib import Path; from kvcm.doctor.places import lock_holder; print(lock_holder(Path({str(lock)!r})))"
    )
    try:  # a lock of the process itself is not in its own way
        asked = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    finally:
        asyncio.run(log.close())
    assert int(asked.stdout) == os.getpid()
    assert lock_holder(lock) == 0
    assert [each.level for each in check_metadata_directory(Settings(data_dir=str(tmp_path)))] != [Level.FAIL]
    assert list(check_metadata_directory(Settings())) == []


def _settings(**ports: int) -> Settings:
    unused = {"rpc_port": 0, "http_port": 0, "admin_rpc_port": 0, "admin_http_port": 0}
    return Settings(**{**unused, **ports})


def test_a_free_port_is_free_and_one_of_a_stranger_is_not() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.close()
        assert (
            _one(check_ports(_settings(http_port=port))).found == f"kvcm.service.http_port {port} is free on 127.0.0.1"
        )
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as stranger:
        thread = Thread(target=stranger.serve_forever, args=(0.01,))
        thread.start()
        try:
            for ports in ({"http_port": stranger.server_port}, {"rpc_port": stranger.server_port}):
                finding = _one(check_ports(_settings(**ports)))
                assert (finding.level, "does not answer as a manager" in finding.found) == (Level.FAIL, True)
        finally:
            stranger.shutdown()
            thread.join()


def test_one_port_for_two_things_is_a_failure_save_for_grpc() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    both = list(check_ports(_settings(http_port=port, admin_http_port=port)))
    assert [each.level for each in both] == [Level.OK, Level.FAIL]
    assert len(list(check_ports(_settings(rpc_port=port, admin_rpc_port=port)))) == 1


def test_an_address_of_another_host_cannot_be_taken() -> None:
    finding = _one(check_ports(Settings(host="192.0.2.1", insecure=True, http_port=1024, rpc_port=0, admin_rpc_port=0,
                                        admin_http_port=0)))  # fmt: skip
    assert (finding.level, "EADDRNOTAVAIL" in finding.found) == (Level.FAIL, True)


def test_who_listens_can_be_reached() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert check_reachable("s", "master", address).level is Level.OK
    assert check_reachable("s", "master", address).level is Level.FAIL
    assert check_reachable("s", "master", "nonsense:port").level is Level.FAIL
    assert "was not tried" in check_reachable("s", "master", "host").found


@pytest.mark.parametrize(
    ("ahead", "level", "found"),
    [
        (0.4, Level.OK, "agrees"),
        (-1.0, Level.OK, "agrees"),
        (90.0, Level.WARN, "1.5 m ahead of"),
        (-7200.0, Level.WARN, "2 h behind"),
    ],
)
def test_clocks(ahead: float, level: Level, found: str) -> None:
    finding = check_skew("theirs", ahead)
    assert (finding.level, found in finding.found) == (level, True)
