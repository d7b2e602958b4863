"""Requests that the OpenAPI documents allow, and many that they do not, made by schemathesis: nothing breaks or hangs.

Some 1,200 requests in every run, 20 times as many with `make thorough`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from secured import Secured, secured

_EXAMPLES = 240 if os.environ.get("KVCM_TESTS") == "thorough" else 12
_SECONDS = 30.0
_DOCUMENTS = {
    "resources": ("admin_http", "/v1/openapi.json"),
    "admin": ("admin_http", "/openapi.json"),
    "data": ("http", "/openapi.json"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("fuzzed")
    settings_ = (f"kvcm.storage.allowed_roots={folder / 'roots'}", "kvcm.storage.allowed_hosts=127.0.0.1")
    with secured(folder, *settings_) as made:
        yield made


_REPRODUCIBLE = settings(deadline=None, database=None, derandomize=True, phases=[Phase.generate])


def tried(server: Secured, base: str, path: str) -> Counter[int]:
    """Try every operation of a document; return how often there was which status."""
    schema = schemathesis.openapi.from_url(f"{base}{path}")
    found: Counter[int] = Counter()
    for each in schema.get_all_operations():
        operation = each.ok()

        @settings(_REPRODUCIBLE, max_examples=_EXAMPLES, suppress_health_check=list(HealthCheck))
        @given(case=st.one_of([operation.as_strategy(generation_mode=mode) for mode in GenerationMode]))
        def attempt(case: schemathesis.Case) -> None:
            keys = {"authorization": f"Bearer {server.admin_key}"}
            answer = case.call(base_url=base, headers=keys, timeout=_SECONDS)
            found[answer.status_code] += 1
            assert answer.status_code < 500 or _is_excused(answer), (
                case.method,
                case.formatted_path,
                answer.text[:500],
            )

        attempt()
    return found


def _is_excused(answer: schemathesis.Response) -> bool:
    """An answer to overload has a Retry-After; other excused answers need none."""
    if answer.status_code == 503:
        return "retry-after" in answer.headers
    return answer.status_code in {501, 507}  # not in this release; no space


@pytest.mark.ci
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", _DOCUMENTS)
def test_what_the_documents_allow_and_more_does_no_harm(server: Secured, name: str) -> None:
    port, path = _DOCUMENTS[name]
    process = server.process
    found = tried(server, f"http://{getattr(process.address, port)}", path)
    assert found[200] > 0
    assert sum(found[status] for status in (400, 404, 405, 415)) > 0
    assert process.process.poll() is None
    log = process.log_text()
    assert "Traceback" not in log
    assert process.events("failed") == []
    assert not list(Path("/tmp").glob("kvcm-escaped*"))
    with server.api() as api:
        assert api.ok("AccessService.WhoAmI").key.role
