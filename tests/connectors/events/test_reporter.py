"""Reports to one manager: batches, heartbeats, repetitions, snapshots in parts, overflow, and the end."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from engine_model import BLOCK_TOKENS, VLLM, ModelManager, stored
from fake_clock import FakeClock

from kvcm.connectors.events.blocks import HeldBlocks, MappingSettings
from kvcm.connectors.events.decoding import decode_batch
from kvcm.connectors.events.reporter import Reporter, ReporterIdentity, ReporterSettings
from kvcm.model.errors import ErrorCode
from kvcm.model.key_schemes import block_keys
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

CLEARED = {"type": "AllBlocksCleared"}


class Rig:
    """A reporter, its blocks, a clock and a manager."""

    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        self.manager = ModelManager()
        self.blocks = HeldBlocks(MappingSettings("vllm", VLLM, {}), lambda changes: self.reporter.on_changes(changes))
        streams = map(str, itertools.count())
        self.reporter = Reporter(
            ReporterIdentity("instance", "engine:1", 0, VLLM),
            self.blocks,
            ReporterSettings(**settings),
            lambda: next(streams),
            self.clock.now,
        )

    def feed(self, *events: dict[str, Any]) -> None:
        self.blocks.apply(decode_batch(msgspec.msgpack.encode([0.0, list(events), 0])).events)

    def take(self) -> pb.ReportResidencyRequest:
        request = self.reporter.next_report()
        assert request is not None
        return request

    def send(self) -> pb.ReportResidencyRequest:
        request = self.take()
        self.reporter.on_answer(request, self.manager.report(request))
        return request

    def send_all(self, seconds: float = 0.05) -> list[pb.ReportResidencyRequest]:
        """Send what there is to send after a while."""
        self.clock.time += seconds
        found = []
        while self.reporter.seconds_to_next() == 0:
            found.append(self.send())
        return found


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.send()
    return rig


def prompt(number: int, blocks: int = 4) -> list[int]:
    return [number] * BLOCK_TOKENS * blocks


def keys_in(packed: bytes) -> list[int]:
    return [int(key) for key in np.frombuffer(packed, "<i8")]


def test_a_stream_begins_with_an_empty_snapshot_and_the_scheme() -> None:
    rig = Rig()
    first = rig.send()
    assert (first.sequence, first.stream, first.engine, first.rank) == (1, "0", "engine:1", 0)
    assert (first.snapshot.first, first.snapshot.last, len(first.changes)) == (True, True, 0)
    assert first.key_scheme == pb.KeyScheme(
        algorithm=VLLM.algorithm, root=VLLM.root, mask=VLLM.mask, block_tokens=BLOCK_TOKENS
    )
    rig.feed(stored(VLLM, prompt(1)))
    (second,) = rig.send_all()
    assert second.sequence == 2
    assert not second.HasField("key_scheme")
    assert not second.HasField("snapshot")


def test_every_snapshot_names_the_scheme_since_a_manager_may_have_forgotten_it(rig: Rig) -> None:
    rig.manager.restart()
    rig.feed(stored(VLLM, prompt(1)))
    reports = rig.send_all()
    rig.clock.time += 1.0  # as long as it takes from one snapshot to the next
    reports += rig.send_all()
    named = [report.HasField("key_scheme") for report in reports]
    assert named == [report.snapshot.first for report in reports]
    assert any(named)


def test_changes_wait_for_more_until_a_batch_is_full(rig: Rig) -> None:
    rig.feed(stored(VLLM, prompt(1), 0, 1))
    assert rig.reporter.next_report() is None
    assert rig.reporter.seconds_to_next() == pytest.approx(0.05)
    rig.clock.time += 0.05
    assert keys_in(rig.send().changes[0].added_keys) == block_keys(VLLM, prompt(1, 1))
    small = Rig(batch_keys=3)
    small.send()
    small.feed(stored(VLLM, prompt(1)))
    assert len(keys_in(small.send().changes[0].added_keys)) == 3
    assert small.reporter.next_report() is None
    assert small.reporter.pending == 1


def test_the_last_change_of_a_block_counts(rig: Rig) -> None:
    event = stored(VLLM, prompt(1), 0, 1)
    gone = {"type": "BlockRemoved", "block_hashes": event["block_hashes"], "medium": "GPU"}
    rig.feed(event, gone, event, gone)
    (report,) = rig.send_all()
    assert keys_in(report.changes[0].removed_keys) == block_keys(VLLM, prompt(1, 1))
    assert not report.changes[0].added_keys


def test_a_clear_comes_before_what_follows_it(rig: Rig) -> None:
    rig.feed(stored(VLLM, prompt(1)))
    rig.send_all()
    rig.feed(stored(VLLM, prompt(2)), CLEARED, stored(VLLM, prompt(3)))
    (report,) = rig.send_all()
    assert [change.cleared for change in report.changes] == [True, True, True, False]
    assert {key for _, key in rig.manager.pairs()} == set(block_keys(VLLM, prompt(3)))


def test_heartbeats_come_three_times_within_the_managers_timeout(rig: Rig) -> None:
    assert rig.reporter.seconds_to_next() == pytest.approx(10.0)
    rig.clock.time += 10.0
    heartbeat = rig.send()
    assert not heartbeat.changes
    assert not heartbeat.HasField("snapshot")
    rig.manager.timeout_ms = 600
    rig.clock.time += 10.0
    rig.send()
    assert rig.reporter.seconds_to_next() == pytest.approx(0.2)


def test_a_busy_stream_has_reports_without_changes_too(rig: Rig) -> None:
    rig.manager.node_id = "m"
    without = []
    for number in range(250):  # changes all the time, for 25 s
        rig.feed(stored(VLLM, prompt(number)))
        without += [report for report in rig.send_all(0.1) if not report.changes]
    assert len(without) == 2
    assert rig.manager.report(without[-1]).node_id == "m"
    assert len(rig.manager.pairs()) == 250 * 4


def test_after_a_failure_the_manager_is_asked_which_one_it_is(rig: Rig) -> None:
    rig.feed(stored(VLLM, prompt(1)))
    rig.clock.time += 1
    report = rig.take()
    rig.reporter.on_failure(report, "the connection broke")
    rig.feed(stored(VLLM, prompt(2)))
    sent = rig.send_all(1)
    assert sent[0] == report
    assert [bool(each.changes) for each in sent] == [True, False, True]


def test_a_report_without_an_answer_is_repeated_as_it_was(rig: Rig) -> None:
    rig.feed(stored(VLLM, prompt(1)))
    rig.clock.time += 1
    report = rig.take()
    rig.manager.report(report)  # it comes, but the answer does not
    rig.reporter.on_failure(report, "away")
    assert rig.reporter.next_report() is None
    rig.feed(CLEARED)
    pauses = []
    for _ in range(3):
        pauses.append(round(rig.reporter.seconds_to_next(), 3))
        rig.clock.time += pauses[-1]
        assert rig.take() == report
        rig.reporter.on_failure(report, "away")
    assert pauses == [0.1, 0.2, 0.4]
    assert (rig.reporter.error, rig.reporter.counters.failures) == ("away", 4)
    rig.send_all(60)
    assert rig.reporter.error == ""
    assert rig.manager.pairs() == set()
    assert rig.reporter.is_settled


def test_a_refused_report_is_a_failure(rig: Rig) -> None:
    rig.clock.time += 10
    answer = pb.ReportResidencyResponse()
    answer.header.status.code = int(ErrorCode.INSTANCE_NOT_EXIST)  # type: ignore[assignment]
    answer.header.status.message = "not registered"
    rig.reporter.on_answer(rig.take(), answer)
    assert "not registered" in rig.reporter.error
    assert not rig.reporter.is_settled


def test_a_snapshot_goes_in_parts_while_changes_go_on() -> None:
    rig = Rig(snapshot_keys=3, batch_keys=2)
    rig.send()
    rig.feed(*[stored(VLLM, prompt(number)) for number in range(1, 4)])  # 12 blocks
    rig.send_all()
    rig.manager.restart()
    rig.clock.time += 10
    rig.send()  # a heartbeat, whose answer asks for a snapshot
    rig.clock.time += 1
    first = rig.send()
    assert (first.snapshot.first, first.snapshot.last) == (True, False)
    gone = stored(VLLM, prompt(1))["block_hashes"]
    rig.feed({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU"}, stored(VLLM, prompt(9)))
    rest = rig.send_all()
    kinds = ["part" if each.HasField("snapshot") else "changes" for each in rest]
    assert kinds[:6] == ["changes", "part", "changes", "part", "changes", "part"]
    assert sum(each.snapshot.last for each in rest) == 1
    expected = {key for number in (2, 3, 9) for key in block_keys(VLLM, prompt(number))}
    assert {key for _, key in rig.manager.pairs()} == expected
    assert rig.reporter.is_settled
    assert rig.manager.known["engine:1", 0].is_complete


def test_a_snapshot_in_parts_has_reports_without_changes_too() -> None:
    rig = Rig(snapshot_keys=3)
    rig.manager.node_id = "m"
    rig.send()
    rig.feed(*[stored(VLLM, prompt(number)) for number in range(1, 40)])
    rig.send_all()
    rig.manager.restart()
    rig.clock.time += 10
    rig.send()  # a heartbeat, whose answer asks for a snapshot
    sent = []
    while not rig.reporter.is_settled:  # a part takes a second
        rig.clock.time += 1
        sent.append(rig.send())
    asked_at = [number for number, report in enumerate(sent) if not report.changes]
    assert len(asked_at) >= 4
    assert all(later - earlier <= 11 for earlier, later in zip([-1, *asked_at], asked_at, strict=False))
    assert not any(sent[number].HasField("snapshot") for number in asked_at[:-1])
    assert rig.manager.report(sent[asked_at[0]]).node_id == "m"
    assert len(rig.manager.pairs()) == 39 * 4
    assert rig.manager.known["engine:1", 0].is_complete


def test_snapshots_keep_a_distance(rig: Rig) -> None:
    for _ in range(3):
        rig.manager.restart()
        rig.clock.time += 10
        heartbeat = rig.take()
        answer = rig.manager.report(heartbeat)
        rig.reporter.on_answer(heartbeat, answer)
        assert answer.snapshot_required
        rig.send_all(0)
    rig.manager.restart()
    rig.feed(stored(VLLM, prompt(1)))
    rig.send_all()
    assert rig.reporter.seconds_to_next() == pytest.approx(0.95)  # a second after the last one


def test_too_many_changes_are_dropped_for_a_snapshot() -> None:
    rig = Rig(most_pending=6)
    rig.send()
    rig.clock.time += 10
    report = rig.take()
    rig.reporter.on_failure(report, "away")
    rig.feed(*[stored(VLLM, prompt(number)) for number in range(1, 4)])
    assert (rig.reporter.pending, rig.reporter.counters.overflows) == (0, 1)
    rig.feed(CLEARED, stored(VLLM, prompt(7)))
    assert rig.reporter.pending == 0
    rig.send_all(60)
    assert {key for _, key in rig.manager.pairs()} == set(block_keys(VLLM, prompt(7)))
    assert rig.reporter.counters.snapshots == 2


def test_a_new_stream_leaves_nothing_of_the_old_one(rig: Rig) -> None:
    rig.feed(stored(VLLM, prompt(1)))
    rig.send_all()
    rig.feed(stored(VLLM, prompt(2)))
    rig.clock.time += 1
    late = rig.take()
    rig.blocks.clear()
    rig.reporter.reset()
    rig.reporter.on_answer(late, rig.manager.report(late))  # of a stream that is over
    first = rig.send()
    assert (first.stream, first.sequence) == ("1", 1)
    assert first.HasField("key_scheme")
    assert rig.manager.pairs() == set()


def test_a_stop_is_the_last_report_until_a_new_stream(rig: Rig) -> None:
    rig.feed(stored(VLLM, prompt(1)))
    rig.send_all()
    rig.reporter.stop()
    rig.feed(stored(VLLM, prompt(2)))
    (last,) = rig.send_all()
    assert last.stopped
    assert ("engine:1", 0) not in rig.manager.known
    assert rig.send_all(100) == []
    rig.reporter.stop()
    assert rig.send_all() == []
    rig.reporter.reset()
    rig.send_all()
    assert {key for _, key in rig.manager.pairs()} == {
        key for number in (1, 2) for key in block_keys(VLLM, prompt(number))
    }
