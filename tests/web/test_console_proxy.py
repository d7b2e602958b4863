"""The console behind a proxy that ends TLS: nginx, with what docs/console.md prints."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from ssl import create_default_context
from typing import TYPE_CHECKING

import pytest
from authorities import Authority, dns, ip
from console_site import PASSWORD, ConsoleSite
from ports import free_port
from waiting import until
from watched_pages import watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_DOCUMENT = Path(__file__).parents[2] / "docs/console.md"
_BLOCK = re.compile(r"^```nginx\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is missing: make nginx")


@dataclass(frozen=True)
class _Proxied(ConsoleSite):
    port: int
    authority: Authority

    @property
    def base(self) -> str:
        return f"https://127.0.0.1:{self.port}"


@pytest.fixture(scope="module", name="proxied")
def _proxied(secured: ConsoleSite, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Proxied]:
    directory, port = tmp_path_factory.mktemp("nginx"), free_port()
    authority = Authority.make(directory)
    pair = authority.issue("kvcm", [ip("127.0.0.1"), dns("kvcm.example.com")])
    (block,) = _BLOCK.findall(_DOCUMENT.read_text())
    changes = {
        "listen 443": f"listen 127.0.0.1:{port}", "/etc/nginx/kvcm.crt": f"{pair.cert}",
        "/etc/nginx/kvcm.key": f"{pair.key}", "10.0.0.5:6492": secured.process.address.admin_http,
    }  # fmt: skip
    for printed, here in changes.items():
        assert printed in block
        block = block.replace(printed, here)
    scratch = "".join(
        f"{name}_temp_path {directory}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (directory / "nginx.conf").write_text(
        f"daemon off;\nuser root;\npid {directory}/pid;\nerror_log {directory}/error.log;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{scratch}{block}}}\n"
    )
    server = subprocess.Popen(["nginx", "-p", directory, "-e", directory / "error.log", "-c", directory / "nginx.conf"])
    try:
        until(lambda: _listens(port), f"nginx listens, see {directory}/error.log")
        yield _Proxied(secured.process, secured.keys, port, authority)
    finally:
        server.terminate()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def test_people_sign_in_change_something_and_sign_out(browser: Browser, proxied: _Proxied) -> None:
    with watched(browser, proxied, ignore_https_errors=True) as watch:
        watch.go("/console/storages/slow")
        watch.page.get_by_label("User name").fill("grace")
        watch.page.get_by_label("Password").fill(PASSWORD)
        watch.press("Sign in")
        assert watch.page.url == f"{proxied.base}/console/storages/slow"
        watch.press("Disable", role="link")
        watch.press("Disable it")
        assert watch.page.locator(".badge", has_text="disabled").is_visible()
        watch.press("Enable")
        assert "read and written again" in watch.said
        watch.press_in(watch.page.locator("header").get_by_role("button", name="Sign out"))
        assert watch.page.context.cookies() == []


def test_only_the_console_is_handed_on(proxied: _Proxied) -> None:
    context = create_default_context(cafile=proxied.authority.file)
    with urllib.request.urlopen(f"{proxied.base}/", context=context) as answer:
        assert answer.url == f"{proxied.base}/console/login?next=%2Fconsole%2F"
    for path in ("/v1/whoami", "/metrics", "/api/checkHealth"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(proxied.base + path, context=context)
