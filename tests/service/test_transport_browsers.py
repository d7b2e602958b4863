"""Nobody is authenticated, so a web page that somebody on this host looks at must not reach the manager."""

import http.client

import pytest
from test_transport_process import ManagerProcess


def _post(address: str, path: str, headers: dict[str, str]) -> tuple[int, bytes, str]:
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.request("POST", path, b"{}", headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.getheader("x-kvcm-error", "")
    finally:
        connection.close()


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:6492"])
def test_a_request_of_a_web_page_is_refused(server: ManagerProcess, origin: str) -> None:
    for address, path in ((server.address.admin_http, "/api/listStorage"), (server.address.http, "/api/trimCache")):
        assert _post(address, path, {"Origin": origin, "Content-Type": "text/plain"}) == (
            403,
            b"{}",
            "requests from web pages are not served",
        )


def test_the_same_request_of_a_program_is_served(server: ManagerProcess) -> None:
    assert _post(server.address.admin_http, "/api/listStorage", {})[0] == 200
