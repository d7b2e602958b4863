"""The subscriber on real sockets: events of a publisher come to a manager's server as blocks."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from engine_model import BLOCK_TOKENS, SGLANG, VLLM, stored
from event_sockets import Publisher, ServedManager, served_manager
from ports import free_port
from waiting import until

from kvcm.connectors.events.options import EngineOptions, SubscriberOptions, parse_arguments
from kvcm.connectors.events.subscriber import Subscriber
from kvcm.model.key_schemes import block_keys
from kvcm.protocol.kvcm.v1 import residency_service_pb2 as pb

ENGINE = "10.0.0.9:8000"
A, B = list(range(1, 13)), list(range(50, 62))
RESIDENCY_PAGE = Path(__file__).parents[3] / "docs" / "residency.md"
CLEARED = {"type": "AllBlocksCleared"}


def keys(tokens: list[int]) -> set[int]:
    return {int(key) for key in block_keys(VLLM, tokens)}


@pytest.fixture
def manager() -> Iterator[ServedManager]:
    with served_manager() as manager:
        yield manager


class Engine:
    """Ports of an engine, and its publisher, which may be another one later."""

    def __init__(self, has_replay: bool = True) -> None:
        self.port = free_port()
        self.replay_port = free_port() if has_replay else None
        self.publisher = Publisher(self.port, self.replay_port)

    def restart(self) -> None:
        self.publisher.close()
        self.publisher = Publisher(self.port, self.replay_port)

    def options(self, **others: Any) -> EngineOptions:
        replay = "" if self.replay_port is None else f"tcp://*:{self.replay_port}"
        values = {
            "engine": "vllm",
            "engine_address": ENGINE,
            "instance_id": "instance",
            "endpoint": f"tcp://127.0.0.1:{self.port}",
            "replay_endpoint": replay.replace("*", "127.0.0.1"),
            "topic": "kv@",
            "block_tokens": BLOCK_TOKENS,
            "mask": VLLM.mask,
            "engine_seconds": 0.5,
        }
        return EngineOptions(**values | others)


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.publisher.close()


Start = Callable[..., Subscriber]


@pytest.fixture
def start(manager: ServedManager) -> Iterator[Start]:
    """Start subscribers; all are closed at the end."""
    with ExitStack() as opened:

        def start(*engines: EngineOptions, managers: tuple[str, ...] = (), **others: Any) -> Subscriber:
            options = SubscriberOptions(managers or (manager.address,), engines, "127.0.0.1:0", batch_ms=1, **others)
            subscriber = Subscriber(options)
            opened.callback(subscriber.close)
            return subscriber

        yield start


def stream_of(subscriber: Subscriber) -> Any:
    until(lambda: subscriber.engines[0].ranks)
    return subscriber.engines[0].ranks[0].stream


def test_blocks_of_before_and_after_the_start_are_reported(
    manager: ServedManager, engine: Engine, start: Start
) -> None:
    engine.publisher.publish(stored(VLLM, A))
    subscriber = start(engine.options())
    until(lambda: manager.keys(ENGINE) == keys(A))
    engine.publisher.publish(stored(VLLM, B, 0, 2))
    until(lambda: manager.keys(ENGINE) == keys(A) | keys(B[:8]))
    first = block_event = stored(VLLM, A)["block_hashes"][2]
    engine.publisher.publish({"type": "BlockRemoved", "block_hashes": [first], "medium": "GPU"})
    until(lambda: manager.keys(ENGINE) == keys(A[:8]) | keys(B[:8]), f"without {block_event}")
    assert stream_of(subscriber).is_complete
    known = manager.model.known[ENGINE, 0]
    assert known.is_complete
    assert (known.scheme.algorithm, known.scheme.root) == (VLLM.algorithm, VLLM.root)
    assert (known.scheme.mask, known.scheme.block_tokens) == (VLLM.mask, VLLM.block_tokens)


def test_lost_messages_are_replayed(manager: ServedManager, engine: Engine, start: Start) -> None:
    subscriber = start(engine.options())
    until(lambda: stream_of(subscriber).is_complete and not stream_of(subscriber).is_waiting)
    engine.publisher.publish(stored(VLLM, A))
    until(lambda: manager.keys(ENGINE) == keys(A))
    engine.publisher.publish(CLEARED, loses=True)
    engine.publisher.publish(stored(VLLM, B))
    until(lambda: manager.keys(ENGINE) == keys(B))
    assert stream_of(subscriber).counters.gaps == 1
    assert engine.publisher.replays[-1] == 0  # the last one that was known, so that the run is known to be the same


def test_an_engine_that_starts_again_has_none_of_its_blocks(
    manager: ServedManager, engine: Engine, start: Start
) -> None:
    engine.publisher.publish(stored(VLLM, A))
    subscriber = start(engine.options())
    until(lambda: manager.keys(ENGINE) == keys(A))
    engine.restart()
    until(lambda: manager.keys(ENGINE) == set())
    engine.publisher.publish(stored(VLLM, B))
    until(lambda: manager.keys(ENGINE) == keys(B))
    assert stream_of(subscriber).is_complete


def test_an_engine_that_is_gone_is_reported_as_stopped(manager: ServedManager, engine: Engine, start: Start) -> None:
    engine.publisher.publish(stored(VLLM, A))
    subscriber = start(engine.options())
    until(lambda: manager.keys(ENGINE) == keys(A))
    engine.publisher.close()
    until(lambda: manager.model.requests[-1].stopped)
    assert manager.keys(ENGINE) == set()
    until(lambda: any("not connected" in trouble for trouble in subscriber.troubles()))
    engine.publisher = Publisher(engine.port, engine.replay_port)
    engine.publisher.publish(stored(VLLM, B))
    until(lambda: manager.keys(ENGINE) == keys(B))
    assert subscriber.troubles() == []


def test_a_manager_that_starts_again_gets_everything(manager: ServedManager, engine: Engine, start: Start) -> None:
    manager.model.timeout_ms = 300  # so that a heartbeat soon shows the loss
    engine.publisher.publish(stored(VLLM, A))
    start(engine.options())
    until(lambda: manager.keys(ENGINE) == keys(A))
    manager.restart()
    until(lambda: manager.keys(ENGINE) == keys(A))


def test_without_a_replay_a_gap_drops_what_is_not_certain(manager: ServedManager, start: Start) -> None:
    engine = Engine(has_replay=False)
    try:
        subscriber = start(engine.options())
        stream = stream_of(subscriber)

        def is_read() -> bool:
            engine.publisher.publish(stored(VLLM, A))
            return manager.keys(ENGINE) == keys(A)

        until(is_read)  # the connection takes a moment, and messages before it are lost
        engine.publisher.publish(CLEARED, loses=True)
        engine.publisher.publish(stored(VLLM, B))
        until(lambda: manager.keys(ENGINE) == keys(B))
        assert not stream.is_complete
        assert stream.counters.losses == 1
    finally:
        engine.publisher.close()


def test_two_managers_have_streams_of_their_own(manager: ServedManager, engine: Engine, start: Start) -> None:
    with served_manager() as other:
        start(engine.options(), managers=(manager.address, other.address))
        engine.publisher.publish(stored(VLLM, A))
        until(lambda: manager.keys(ENGINE) == other.keys(ENGINE) == keys(A))
        assert manager.model.known[ENGINE, 0].stream != other.model.known[ENGINE, 0].stream


def test_managers_that_answers_name_get_reports_once_each(manager: ServedManager, engine: Engine, start: Start) -> None:
    engine.publisher.publish(stored(VLLM, A))
    with served_manager() as other:
        port, other_port = (int(each.address.rpartition(":")[2]) for each in (manager, other))
        manager.model.node_id, other.model.node_id = "m1", "m2"
        names = [("m1", "127.0.0.1", port), ("m2", "127.0.0.1", other_port), ("m3", "127.0.0.1", free_port())]
        manager.model.named = other.model.named = names
        subscriber = start(engine.options(), managers=(manager.address, f"localhost:{port}"))
        until(lambda: manager.keys(ENGINE) == other.keys(ENGINE) == keys(A))
        until(lambda: len(subscriber.links.managers.streams()) == 2)  # one of the two names of m1 is enough
        engine.publisher.publish(stored(VLLM, B))
        until(lambda: manager.keys(ENGINE) == other.keys(ENGINE) == keys(A) | keys(B))
        base = f"http://127.0.0.1:{subscriber.health.port}"
        until(lambda: 'managers{state="unreached"} 1\n' in page_of(f"{base}/metrics")[1])
        assert 'managers{state="used"} 2\n' in page_of(f"{base}/metrics")[1]
        until(lambda: page_of(f"{base}/health")[0] == 200)  # m3 was never there: its address may be of another network
    subscriber.close()
    assert manager.model.requests[-1].stopped


def test_managers_are_not_followed_where_that_is_forbidden(
    manager: ServedManager, engine: Engine, start: Start
) -> None:
    engine.publisher.publish(stored(VLLM, A))
    with served_manager() as other:
        manager.model.node_id = "m1"
        manager.model.named = [("m2", "127.0.0.1", int(other.address.rpartition(":")[2]))]
        subscriber = start(engine.options(), follow_managers=False)
        until(lambda: manager.keys(ENGINE) == keys(A))
        assert sum(subscriber.links.managers.states().values()) == 1
        assert not other.model.requests


def test_ranks_and_engines_are_read_each_by_itself(manager: ServedManager, start: Start) -> None:
    ports = [free_port(), free_port()]
    while ports[1] != ports[0] + 1 or _is_used(ports[1]):
        ports = [free_port(), 0]
        ports[1] = ports[0] + 1
    replays = [free_port(), 0]
    replays[1] = replays[0] + 1
    publishers = [Publisher(*pair) for pair in zip(ports, replays, strict=True)]
    try:
        start(
            EngineOptions(
                "vllm",
                ENGINE,
                "instance",
                endpoint=f"tcp://127.0.0.1:{ports[0]}",
                replay_endpoint=f"tcp://127.0.0.1:{replays[0]}",
                ranks=2,
                block_tokens=BLOCK_TOKENS,
                mask=VLLM.mask,
            )
        )
        publishers[0].publish(stored(VLLM, A))
        publishers[1].publish(stored(VLLM, B))
        until(lambda: manager.keys(ENGINE, 0) == keys(A) and manager.keys(ENGINE, 1) == keys(B))
    finally:
        for publisher in publishers:
            publisher.close()


def _is_used(port: int) -> bool:
    import socket

    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def test_damage_is_counted_and_what_it_may_hide_is_dropped(
    manager: ServedManager, engine: Engine, start: Start
) -> None:
    engine.publisher.publish(stored(VLLM, A))
    subscriber = start(engine.options())
    until(lambda: manager.keys(ENGINE) == keys(A))
    engine.publisher.publish({"type": "Later"}, {"type": "BlockStored"}, stored(VLLM, B))
    until(lambda: manager.keys(ENGINE) == keys(A) | keys(B))
    engine.publisher.publish_payload(b"\xc1")
    until(lambda: manager.keys(ENGINE) == set())
    engine.publisher.publish(stored(VLLM, B))
    until(lambda: manager.keys(ENGINE) == keys(B))
    counters = stream_of(subscriber).counters
    assert (counters.unknown_events, counters.malformed, counters.losses) == (1, 2, 1)


def page_of(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=20) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_health_and_metrics(manager: ServedManager, engine: Engine, start: Start) -> None:
    engine.publisher.publish(stored(VLLM, A))
    subscriber = start(engine.options())
    until(lambda: manager.keys(ENGINE) == keys(A))
    base = f"http://127.0.0.1:{subscriber.health.port}"
    until(lambda: page_of(f"{base}/health") == (200, '{"status": "ok", "troubles": []}\n'))
    status, text = page_of(f"{base}/metrics")
    assert status == 200
    labels = f'engine="{ENGINE}",instance="instance",rank="0"'
    assert f'kvcm_subscriber_blocks{{{labels},medium="gpu",part=""}} 3\n' in text
    assert f"kvcm_subscriber_complete{{{labels}}} 1\n" in text
    assert f'kvcm_subscriber_events_total{{{labels},type="BlockStored"}} 1\n' in text
    assert "# TYPE kvcm_subscriber_gaps_total counter\n" in text
    assert page_of(f"{base}/other")[0] == 404


def test_an_engine_that_was_never_reached_is_not_connected(
    manager: ServedManager, engine: Engine, start: Start
) -> None:
    engine.publisher.close()
    subscriber = start(engine.options())
    base = f"http://127.0.0.1:{subscriber.health.port}"
    stream_of(subscriber)
    status, text = page_of(f"{base}/health")
    assert (status, "is not connected" in text) == (503, True)
    assert 'engine_connected{engine="10.0.0.9:8000",instance="instance",rank="0"} 0\n' in page_of(f"{base}/metrics")[1]
    assert page_of(f"{base}/livez")[0] == 200  # a restart would not help
    until(lambda: manager.model.requests and manager.model.requests[-1].stopped)
    engine.publisher = Publisher(engine.port, engine.replay_port)
    engine.publisher.publish(stored(VLLM, A))
    until(lambda: manager.keys(ENGINE) == keys(A))
    assert page_of(f"{base}/health")[0] == 200
    assert 'engine_connected{engine="10.0.0.9:8000",instance="instance",rank="0"} 1\n' in page_of(f"{base}/metrics")[1]


def test_an_engine_without_events_is_unhealthy(start: Start) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    subscriber = start(EngineOptions("vllm", ENGINE, "instance", engine_url=url, block_tokens=4))
    until(lambda: any("does not answer" in trouble for trouble in subscriber.troubles()))
    assert page_of(f"http://127.0.0.1:{subscriber.health.port}/health")[0] == 503


@pytest.fixture
def pages() -> Iterator[tuple[str, dict[str, object]]]:
    """Serve JSON documents by path."""
    documents: dict[str, object] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(documents.get(self.path)).encode()
            self.send_response(200 if self.path in documents else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", documents
    server.shutdown()
    server.server_close()


def test_vllm_says_where_it_publishes(
    manager: ServedManager, engine: Engine, start: Start, pages: tuple[str, dict[str, object]]
) -> None:
    url, documents = pages
    source = {"endpoint": f"tcp://*:{engine.port}", "replay_endpoint": f"tcp://*:{engine.replay_port}", "topic": "kv@"}
    documents["/kv_event_sources"] = {"0": source}
    engine.publisher.publish(stored(VLLM, A))
    start(engine.options(engine_url=url, endpoint="", replay_endpoint=""))
    until(lambda: manager.keys(ENGINE) == keys(A))


def test_the_documented_command_takes_the_block_size_of_the_instance(
    manager: ServedManager, engine: Engine, pages: tuple[str, dict[str, object]]
) -> None:
    url, documents = pages
    documents["/kv_event_sources"] = sources_of(engine)
    engine.publisher.publish(stored(VLLM, A))
    command = re.search(r"^kvcm-subscriber (.*\\\n.*)$", RESIDENCY_PAGE.read_text(), re.MULTILINE)
    assert command is not None
    given = command[1].replace("127.0.0.1:6381", manager.address).replace("http://10.0.0.1:8000", url)
    options = parse_arguments([*shlex.split(given.replace("\\\n", "")), "--listen", "127.0.0.1:0"])
    subscriber = Subscriber(options)
    try:
        until(lambda: any("'block_tokens' is missing" in trouble for trouble in subscriber.troubles()))
        assert any("instance 'my-model' is not registered yet" in trouble for trouble in subscriber.troubles())
        manager.block_tokens["my-model"] = BLOCK_TOKENS
        until(lambda: len(manager.keys("10.0.0.1:8000")) == len(A) // BLOCK_TOKENS)
        assert manager.model.known["10.0.0.1:8000", 0].scheme.block_tokens == BLOCK_TOKENS
    finally:
        subscriber.close()


def sources_of(*engines: Engine) -> dict[str, object]:
    """Return what vLLM says of the ports of its ranks."""
    return {
        str(rank): {
            "endpoint": f"tcp://*:{engine.port}",
            "replay_endpoint": f"tcp://*:{engine.replay_port}",
            "topic": "kv@",
        }
        for rank, engine in enumerate(engines)
    }


def test_an_engine_that_comes_back_with_other_ports_is_found(
    manager: ServedManager, engine: Engine, start: Start, pages: tuple[str, dict[str, object]]
) -> None:
    url, documents = pages
    documents["/kv_event_sources"] = sources_of(engine)
    engine.publisher.publish(stored(VLLM, A))
    subscriber = start(engine.options(engine_url=url, endpoint="", replay_endpoint=""))
    until(lambda: manager.keys(ENGINE) == keys(A))
    engine.publisher.close()
    del documents["/kv_event_sources"]  # it starts
    until(lambda: any("does not answer" in trouble for trouble in subscriber.troubles()))
    other = Engine()
    other.publisher.publish(stored(VLLM, B))
    documents["/kv_event_sources"] = sources_of(other)
    until(lambda: manager.keys(ENGINE) == keys(B))
    until(lambda: subscriber.troubles() == [])
    other.publisher.close()


def test_a_further_rank_is_found_and_the_others_are_left_alone(
    manager: ServedManager, engine: Engine, start: Start, pages: tuple[str, dict[str, object]]
) -> None:
    url, documents = pages
    documents["/kv_event_sources"] = sources_of(engine)
    engine.publisher.publish(stored(VLLM, A))
    subscriber = start(engine.options(engine_url=url, endpoint="", replay_endpoint="", discovery_seconds=0.1))
    until(lambda: manager.keys(ENGINE) == keys(A))
    (first,) = subscriber.engines[0].ranks
    second = Engine()
    second.publisher.publish(stored(VLLM, B))
    documents["/kv_event_sources"] = sources_of(engine, second)
    until(lambda: manager.keys(ENGINE, 1) == keys(B))
    documents["/kv_event_sources"] = {}  # an engine that says nothing for a moment
    until(lambda: subscriber.engines[0]._trouble)
    assert subscriber.troubles() == []  # its ranks are connected
    assert subscriber.engines[0].ranks[0] is first
    documents["/kv_event_sources"] = sources_of(second)
    until(lambda: manager.keys(ENGINE) == keys(B) and ("10.0.0.9:8000", 1) not in manager.model.known)
    second.publisher.close()


def test_an_engine_that_was_not_up_is_found_when_it_is(
    manager: ServedManager, engine: Engine, start: Start, pages: tuple[str, dict[str, object]]
) -> None:
    url, documents = pages
    engine.publisher.publish(stored(VLLM, A))
    subscriber = start(engine.options(engine_url=url, endpoint="", replay_endpoint="", discovery_seconds=0.1))
    until(lambda: any("does not answer" in trouble for trouble in subscriber.troubles()))
    documents["/kv_event_sources"] = sources_of(engine)
    until(lambda: manager.keys(ENGINE) == keys(A))
    until(lambda: subscriber.troubles() == [])


def test_sglang_says_where_it_publishes_and_what_its_blocks_are(
    manager: ServedManager, engine: Engine, start: Start, pages: tuple[str, dict[str, object]]
) -> None:
    url, documents = pages
    documents["/server_info"] = {
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": engine.port,
            "topic": "",
            "block_size": BLOCK_TOKENS,
            "dp_size": 1,
            "replay_endpoint_port_base": engine.replay_port,
        }
    }
    engine.publisher.publish(stored(SGLANG, A), stored(SGLANG, B, medium="CPU_PINNED"))
    start(EngineOptions("sglang", ENGINE, "instance", engine_url=url, mask=SGLANG.mask))
    until(lambda: manager.keys(ENGINE) == set(block_keys(SGLANG, A)))
    assert manager.keys(ENGINE, medium=pb.MEDIUM_HOST) == set(block_keys(SGLANG, B))


def test_the_command_reports_until_a_signal_ends_it(manager: ServedManager, engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "subscriber.toml"
    file.write_text(
        f"""
        manager = ["{manager.address}"]
        listen = "127.0.0.1:0"

        [[engine]]
        engine = "vllm"
        engine_address = "{ENGINE}"
        instance_id = "instance"
        endpoint = "tcp://127.0.0.1:{engine.port}"
        replay_endpoint = "tcp://127.0.0.1:{engine.replay_port}"
        block_tokens = {BLOCK_TOKENS}
        mask = {VLLM.mask}
        """
    )
    engine.publisher.publish(stored(VLLM, A))
    command = "import sys; from kvcm.connectors.events.subscriber import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "--config", str(file)], stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: manager.keys(ENGINE) == keys(A))
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, log
    assert "is read at" in log
    assert manager.model.requests[-1].stopped
    assert manager.keys(ENGINE) == set()


def test_the_command_without_its_packages_names_the_extra() -> None:
    command = (
        "import sys; sys.modules['zmq'] = None\n"
        "from kvcm.connectors.events.subscriber import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["--manager", "127.0.0.1:1", "--engine", "vllm", "--engine-address", ENGINE, "--instance-id", "i"]
    done = subprocess.run(
        [sys.executable, "-c", command, *arguments, "--endpoint", "tcp://127.0.0.1:1", "--block-tokens", "16"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install 'kvcm[subscriber]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_engine_that_cannot_be_read_is_reported_as_stopped(
    manager: ServedManager, engine: Engine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.publisher.publish(stored(VLLM, A))
    subscriber = start(engine.options())
    until(lambda: manager.keys(ENGINE) == keys(A))
    (rank,) = subscriber.engines[0].ranks
    monkeypatch.setattr(rank.source, "step", lambda: 1 / 0)
    until(lambda: manager.model.requests[-1].stopped)
    assert any("not read any more" in trouble for trouble in subscriber.troubles())
    assert page_of(f"http://127.0.0.1:{subscriber.health.port}/livez")[0] == 503  # a restart helps


def test_reports_are_woken_only_where_a_manager_is_another(
    manager: ServedManager, engine: Engine, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    subscriber = start(engine.options())
    until(lambda: subscriber.engines[0].ranks and manager.model.requests)
    (rank,) = subscriber.engines[0].ranks
    woken: list[str] = []
    notify = rank._changed.notify_all

    def notify_all() -> None:
        woken.append(threading.current_thread().name)
        notify()

    monkeypatch.setattr(rank._changed, "notify_all", notify_all)
    own = threading.current_thread().name
    rank.follow_managers()
    assert own not in woken
    streams = {address: epoch + 1 for address, epoch in subscriber.links.managers.streams().items()}
    with rank._changed:  # the thread that follows managers waits
        monkeypatch.setattr(subscriber.links.managers, "streams", lambda: streams)
        rank.follow_managers()
    assert own in woken
