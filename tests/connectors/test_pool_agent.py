"""The host agent: what it keeps, what it reports, and how it ends."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from fake_clock import FakeClock
from manager_process import ManagerProcess
from pool_parts import NODE, STORAGE, load_one, mover_at, save_one
from waiting import until

from kvcm.connectors.client import ManagerClient
from kvcm.connectors.node import NodeSettings
from kvcm.connectors.pool_agent import AgentSettings, PoolAgent, parse_arguments
from kvcm.connectors.pool_reports import PoolReporter, PoolReports
from kvcm.connectors.results import PoolReport
from kvcm.connectors.transfer import TransferEngine
from kvcm.connectors.transfer.mempool import AttachedPool
from kvcm.connectors.transfer.pool_segment import PoolAccess, create_segment, open_segment, segment_path
from kvcm.model.errors import InvalidArgumentError
from kvcm.model.storages import StorageConfig, TairMemPoolStorageSpec

MIB = 1 << 20
CAPACITY = 2 * MIB
SECONDS = 30.0
NewAgent = Callable[..., PoolAgent]
NewProcess = Callable[..., subprocess.Popen[str]]


class Managers:
    """Answers reports and remembers them."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, str, int, int]] = []
        self.answers = True

    def report(self, storage: str, node_id: str, generation: int, capacity_bytes: int) -> PoolReport | None:
        if not self.answers:
            return None
        self.reports.append((storage, node_id, generation, capacity_bytes))
        return PoolReport(is_new_generation=len(self.reports) > 1 and self.reports[-2][2] != generation)


@pytest.fixture
def managers() -> Managers:
    return Managers()


@pytest.fixture
def path(pool_directory: Path) -> Path:
    return segment_path(pool_directory, "", STORAGE)


@pytest.fixture
def new_agent(path: Path, managers: Managers) -> NewAgent:
    """Start agents that report to the managers."""

    def new(**values: bool) -> PoolAgent:
        settings = AgentSettings(STORAGE, CAPACITY, "", NodeSettings(NODE, path.parent), 0.1, **values)
        agent = PoolAgent(settings, PoolAccess(path, CAPACITY), managers.report)
        agent.start()
        return agent

    return new


def generation_at(path: Path) -> int:
    segment = open_segment(path, CAPACITY)
    assert segment is not None
    return segment.header.generation


def test_it_makes_the_memory_and_reports_it(
    path: Path, managers: Managers, new_agent: NewAgent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    agent = new_agent(touches=True)
    assert agent.tick()
    assert agent.tick()
    assert managers.reports == [(STORAGE, NODE, generation_at(path), CAPACITY)] * 2
    assert caplog.text.count("the managers know of generation") == 1


def test_it_uses_the_memory_that_is_there(path: Path, managers: Managers, new_agent: NewAgent) -> None:
    create_segment(path, CAPACITY, lambda: 77)
    agent = new_agent()
    assert agent.tick()
    assert managers.reports == [(STORAGE, NODE, 77, CAPACITY)]


def test_removed_memory_is_made_and_reported_again(
    path: Path, managers: Managers, new_agent: NewAgent, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    agent = new_agent()
    assert agent.tick()
    path.unlink()
    assert agent.tick()
    assert managers.reports[-1][2] == generation_at(path) != managers.reports[0][2]
    assert "blocks of before are forgotten" in caplog.text


def test_unusable_memory_is_not_reported(
    path: Path, managers: Managers, new_agent: NewAgent, caplog: pytest.LogCaptureFixture
) -> None:
    agent = new_agent()
    path.chmod(0o644)
    path.rename(path.with_name("kept"))
    path.write_bytes(b"something else")
    path.chmod(0o600)
    assert not agent.tick()
    assert not agent.tick()
    assert managers.reports == []
    assert caplog.text.count("does not begin as") == 1  # said once
    path.unlink()
    assert agent.tick()


def test_memory_that_loses_writes_is_not_reported(
    managers: Managers, new_agent: NewAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = new_agent()
    monkeypatch.setattr("os.pread", lambda *_: b"other bytes")
    assert not agent.tick()
    assert managers.reports == []


def test_a_report_is_repeated_until_a_manager_takes_it(
    managers: Managers, new_agent: NewAgent, caplog: pytest.LogCaptureFixture
) -> None:
    agent = new_agent()
    managers.answers = False
    assert not agent.tick()
    assert "no manager took the report" in caplog.text
    managers.answers = True
    assert agent.tick()


NEEDED = ["--storage", "pool", "--capacity", "1G", "--manager", "127.0.0.1:6381"]


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NODE_ID", "POOL_DIRECTORY", "CLUSTER_ID", "POOL_CREATE"):
        monkeypatch.delenv(f"KVCM_{name}", raising=False)


def test_arguments_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCM_NODE_ID", "node-7")
    monkeypatch.setenv("KVCM_CLUSTER_ID", "c0ffee")
    settings = parse_arguments(NEEDED)
    assert settings.node == NodeSettings("node-7", Path("/dev/shm"), "c0ffee")
    assert (settings.capacity_bytes, settings.managers, settings.valid_ms) == (1 << 30, "127.0.0.1:6381", 15_000)
    more = ["--node-id", "n", "--directory", "/mnt", "--cluster-id", "", "--interval", "0.5", "--prefault"]
    settings = parse_arguments([*NEEDED, *more, "--remove-on-exit"])
    assert settings.node == NodeSettings("n", Path("/mnt"), "")
    assert (settings.valid_ms, settings.touches, settings.removes_on_exit) == (1_500, True, True)


@pytest.mark.parametrize(
    ("size", "expected"), [("1M", MIB), ("1048576", MIB), ("8g", 8 << 30), ("2T", 2 << 40), ("64GiB", 64 << 30)]
)
def test_sizes(size: str, expected: int) -> None:
    assert parse_arguments([*NEEDED, "--capacity", size]).capacity_bytes == expected


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--capacity", "1GB"], "at least 1M"),
        (["--capacity", "100K"], "at least 1M"),
        (["--storage", "a/b"], "--storage 'a/b' is not 1 to 128"),
        (["--node-id", "a/b"], "--node-id 'a/b' is not 1 to 128"),
        (["--manager", "nowhere"], "must be host:port"),
        (["--interval", "0"], "0.1 to 3600 seconds"),
        (["--interval", "nan"], "0.1 to 3600 seconds"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        parse_arguments([*NEEDED, *arguments])
    assert exited.value.code == 2
    assert why in capsys.readouterr().err


@pytest.fixture
def new_process(pool_directory: Path, closed_port: int) -> Iterator[NewProcess]:
    processes: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        program = "import sys; from kvcm.connectors.pool_agent import main; sys.exit(main())"
        needed = ["--storage", STORAGE, "--capacity", "2M", "--manager", f"127.0.0.1:{closed_port}"]
        place = ["--node-id", NODE, "--directory", str(pool_directory), "--interval", "0.1"]
        command = [sys.executable, "-W", "error", "-c", program, *needed, *place, *arguments]
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("removes", [True, False])
def test_a_signal_ends_the_process(path: Path, new_process: NewProcess, *, removes: bool) -> None:
    process = new_process(*["--remove-on-exit"] * removes)
    until(path.exists)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert "Traceback" not in said
    assert path.exists() is not removes


def test_a_killed_agent_loses_nothing(path: Path, pool_directory: Path, new_process: NewProcess) -> None:
    process = new_process()
    until(path.exists)
    path.rename(pool_directory / "segment")
    mover = mover_at(pool_directory, CAPACITY)
    assert save_one(mover, 0, 100, 5).ok
    process.kill()
    process.wait(SECONDS)
    assert load_one(mover, 0, 100, 5).ok


def test_a_process_without_memory_fails(path: Path, new_process: NewProcess) -> None:
    path.mkdir()
    process = new_process()
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "Is a directory" in said
    assert "Traceback" not in said


# ---- Reports of memory pools: once, again when the manager may have lost them, in a background thread ----


@pytest.fixture
def pool(manager: ManagerProcess, node: None) -> str:
    """Add a pool of this node, which is returned."""
    name = f"pool-{uuid4().hex[:8]}"
    manager.add_pool(name, NODE, CAPACITY)
    return name


@pytest.fixture
def reporter(client: ManagerClient, pool_directory: Path) -> Iterator[PoolReporter]:
    """Closed before the directory is removed, in which its thread may just be making a pool."""
    reporter = PoolReporter(PoolReports(client), SECONDS)
    yield reporter
    reporter.close()


def engine_of(pool: str) -> TransferEngine:
    spec = TairMemPoolStorageSpec(node_id=NODE, capacity_bytes=CAPACITY)
    return TransferEngine.for_storages([StorageConfig(pool, spec)])


def reports_taken(client: ManagerClient) -> int:
    """Return how many reports a manager has taken."""
    counters = client.counters().get("report_pool")
    return 0 if counters is None else counters.ok


def test_a_pool_is_reported_every_minute_since_a_manager_may_forget(client: ManagerClient, pool: str) -> None:
    clock, engine = FakeClock(0.0), engine_of(pool)
    reports, pools = PoolReports(client, clock.now), engine.pools()
    assert len(pools) == 1
    reports.report(reports.due_pools(pools), SECONDS)
    for clock.time, due in ((59.9, []), (60.0, pools), (60.1, []), (119.9, []), (120.0, pools)):
        assert reports.due_pools(pools) == due
    reports.reset()
    assert reports.due_pools(pools) == pools
    engine.close()


def test_reports_that_no_manager_took_are_due_again(client: ManagerClient, pool: str) -> None:
    engine = engine_of(pool)
    (good,) = engine.pools()
    bad = AttachedPool(pool, NODE, 0, CAPACITY)
    reports = PoolReports(client)
    with pytest.raises(InvalidArgumentError, match="generation is 0"):
        reports.report(reports.due_pools([good, bad, AttachedPool("other", NODE, 1, CAPACITY)]), SECONDS)
    assert reports.due_pools([good]) == []
    assert reports.due_pools([bad, AttachedPool("other", NODE, 1, CAPACITY)])
    engine.close()


def test_pools_of_a_new_registration_are_reported(client: ManagerClient, reporter: PoolReporter, pool: str) -> None:
    """A manager that registers an instance again has lost its state, and all reports with it."""
    before, after = engine_of(pool), engine_of(pool)
    reporter.report_pools(before)
    until(lambda: reports_taken(client) == 1)
    for _ in range(3):
        reporter.report_pools(before)
    reporter.report_pools(after)
    until(lambda: reports_taken(client) == 2)
    before.close()
    after.close()


def test_a_pool_that_comes_later_is_reported(
    client: ManagerClient, reporter: PoolReporter, pool: str, pool_directory: Path
) -> None:
    path = segment_path(pool_directory, "", pool)
    path.write_bytes(b"something else")
    path.chmod(0o600)
    engine = engine_of(pool)
    reporter.report_pools(engine)
    assert reports_taken(client) == 0
    path.unlink()

    def is_reported() -> bool:
        reporter.report_pools(engine)
        return reports_taken(client) == 1

    until(is_reported)
    engine.close()
