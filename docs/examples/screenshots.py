"""Makes the pictures of docs/console.md: three managers on one Redis, with traffic, shown in a real browser.

    python docs/examples/screenshots.py [--seconds N] [--into DIRECTORY]

Everything is started here on free ports of the loopback and ended again. Pictures have few colours, so that they are
small. Needs redis-server, chromium, playwright and Pillow.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
WIDE, NARROW = 1280, 390
COLOURS = 64
START_SECONDS = 60.0
PORTS = ("rpc_port", "http_port", "admin_rpc_port", "admin_http_port")


class Shot(NamedTuple):
    """A picture.

    Attributes:
        name: of its file.
        path: of the page.
        width: of the window in pixels.
        height: of the part shown.
        scheme: light or dark.
    """

    name: str
    path: str
    width: int
    height: int
    scheme: str = "light"


SHOTS = (
    Shot("overview", "/console/", WIDE, 1100),
    Shot("overview-narrow", "/console/", NARROW, 1000, "dark"),
    Shot("group", "/console/groups/batch", WIDE, 1000),
    Shot("storages", "/console/storages", WIDE, 560, "dark"),
    Shot("storage-narrow", "/console/storages/old", NARROW, 1000),
    Shot("key", "/console/keys/+add", NARROW, 1000),
    Shot("explorer", "/console/explorer?instance=Qwen%2FQwen3-32B", WIDE, 1000),
)


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def running(command: Sequence[str], directory: Path) -> Iterator[None]:
    """Run a program inside the block."""
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(base: str) -> None:
    """Return when a manager serves."""
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{base}/readyz", timeout=2):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def send(base: str, path: str, document: Any, method: str = "PUT") -> Any:
    """Send a document to a resource or a call, and return the answer."""
    body, headers = json.dumps(document).encode(), {"content-type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(base + path, body, headers, method=method), timeout=30
    ) as answer:
        return json.loads(answer.read() or b"null")


def write_chain(engines: str, base: str, group: str, instance: str, blocks: int) -> None:
    """Write the blocks of one prompt, and pin them."""
    keys = [str(key) for key in range(1, blocks + 1)]
    about = {"trace_id": "pictures", "instance_id": instance}
    layout = {"block_size": 64, "location_spec_infos": [{"name": "tp0", "size": 4 << 20}]}
    model = {"model_deployment": {"model_name": instance, "dtype": "bfloat16"}}
    send(engines, "/api/registerInstance", {**about, "instance_group": group, **layout, **model}, "POST")
    begun = send(engines, "/api/startWriteCache", {**about, "block_keys": keys, "write_timeout_seconds": 60}, "POST")
    ended = {"write_session_id": begun["write_session_id"], "success_blocks": {"offset": blocks}}
    send(engines, "/api/finishWriteCache", {**about, **ended}, "POST")
    pin = {"instance_id": instance, "block_keys": keys, "owner": "pictures", "ttl_seconds": 86_400}
    send(base, "/v1/pins", pin, "POST")


def prepare(base: str, engines: str, directory: Path) -> None:
    """Create resources that the traffic lacks: a storage in a drain, one that is down, an account and a key."""
    (directory / "old").mkdir()
    send(base, "/v1/storages/old", {"nfs": {"root_path": f"{directory / 'old'}/"}, "capacity_bytes": 4 << 30})
    send(base, "/v1/storages/node-7", {"tair_mem_pool": {"node_id": "node-7", "capacity_bytes": 64 << 30}})
    send(base, "/v1/accounts/grace", {"password": "only for the picture", "role": "ROLE_OPERATOR"})
    group = {"storage_candidates": ["old"], "global_quota_group_name": "traffic", "quota": {"capacity": 2 << 30}}
    send(base, "/v1/groups/legacy", {**group, "pin_budget_bytes": 1 << 30, "max_instance_count": 1})
    write_chain(engines, base, "legacy", "Qwen/Qwen3-32B", 40)
    send(base, "/v1/storages/old/drain", {}, "POST")


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[list[dict[str, int]]]:
    """Run three managers on one Redis; yields their ports."""
    store = free_port()
    redis = ["redis-server", "--port", str(store), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    managers = [{name: free_port() for name in PORTS} for _ in range(3)]
    with contextlib.ExitStack() as stack:
        (directory / "redis").mkdir()
        stack.enter_context(running(redis, directory / "redis"))
        for number, ports in enumerate(managers):
            own = directory / f"manager-{number}"
            own.mkdir()
            settings = {f"kvcm.service.{name}": str(port) for name, port in ports.items()}
            settings["kvcm.registry_storage.uri"] = f"redis://127.0.0.1:{store}/?cluster_name=pictures"
            settings["kvcm.leader_elector.node_id"] = f"manager-{number}"
            options = [part for key, value in settings.items() for part in ("-e", f"{key}={value}")]
            stack.enter_context(running([sys.executable, "-m", "kvcm", "serve", *options], own))
        for ports in managers:
            wait_until_ready(f"http://127.0.0.1:{ports['admin_http_port']}")
        yield managers


def take(page: Page, base: str, shot: Shot, into: Path) -> None:
    """Take one picture."""
    page.set_viewport_size({"width": shot.width, "height": shot.height})
    page.emulate_media(color_scheme="dark" if shot.scheme == "dark" else "light")
    answer = page.goto(base + shot.path)
    if answer is None or not answer.ok:
        raise SystemExit(f"{shot.path} is answered with {answer and answer.status}")
    page.wait_for_load_state("networkidle")
    if shot.name == "explorer":
        page.get_by_label("block keys").check()
        page.get_by_label("Numbers").fill(" ".join(map(str, range(1, 49))))
        page.get_by_role("button", name="Explore").click()
        page.get_by_role("heading", name="Found", exact=True).scroll_into_view_if_needed()
    with Image.open(io.BytesIO(page.screenshot())) as picture:
        few = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        few.save(into / f"{shot.name}.png", optimize=True)


def main() -> None:
    """Make them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=180.0, help="of traffic before the pictures are taken")
    options.add_argument("--into", type=Path, default=HERE.parent / "console", help="where the pictures go")
    options.add_argument("--base", default="", help="a console that runs already, as in http://127.0.0.1:6492")
    asked = options.parse_args()
    asked.into.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        base = asked.base
        if not base:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            managers = stack.enter_context(cluster(directory))
            base = f"http://127.0.0.1:{managers[0]['admin_http_port']}"
            engines = [f"127.0.0.1:{ports['http_port']}" for ports in managers]
            traffic = [sys.executable, str(HERE / "traffic.py"), "--managers", ",".join(engines)]
            stack.enter_context(running([*traffic, "--admin", base.removeprefix("http://")], directory))
            prepare(base, f"http://{engines[0]}", directory)
            time.sleep(asked.seconds)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page()
            for shot in SHOTS:
                take(page, base, shot, asked.into)
            browser.close()
    print(*(f"{path.stat().st_size:>8} {path.name}" for path in sorted(asked.into.glob("*.png"))), sep="\n")


if __name__ == "__main__":
    main()
