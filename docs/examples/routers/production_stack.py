"""A routing logic for the router of vLLM's production stack: requests go where most of their prompt is.

    KVCM_MANAGER_URL=http://127.0.0.1:6382 KVCM_INSTANCE=my-model KVCM_KEY_FILE=router.key \\
      python docs/examples/routers/production_stack.py --routing-logic roundrobin ...    # options of the router itself

The manager answers `POST /v1/score` with the seconds that each engine saves on the prompt. Without tokens or scores in
time, and where no engine saves anything, the engine with the fewest requests gets the request. The engine's `/tokenize`
makes the tokens, with the model's chat template.

Run here: the class, with a manager, and engines that only tokenize. Not run here: the router itself. The class is
written for its state of August 2026, which awaits a routing logic and gives it the request's body only if it is a
`SessionRouter` or one of two others.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp

try:
    from vllm_router.routers.routing_logic import SessionRouter as _Base
except ImportError:  # without the router, as in tests
    _Base = object


class Endpoint(Protocol):
    """An engine, as the router knows it."""

    url: str


class KvcmRouter(_Base):
    """Chooses engines by the manager's scores.

    Args:
        manager: URL of the manager's HTTP calls, `http://host:6382`.
        instance: id of the engines' instance in the manager.
        api_key: to show to the manager, with the verb `score`; "" for none.
        ca_file: certificates (PEM) to trust for it; "" for those of the system.
        score_seconds: for scores.
        tokenize_seconds: for tokens.
    """

    def __init__(
        self,
        manager: str,
        instance: str,
        *,
        api_key: str = "",
        ca_file: str = "",
        score_seconds: float = 0.1,
        tokenize_seconds: float = 0.2,
    ) -> None:
        self._url = f"{manager.rstrip('/')}/v1/score"
        self._instance = instance
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._tls = ssl.create_default_context(cafile=ca_file) if ca_file else True
        self._score_seconds = score_seconds
        self._tokenize_seconds = tokenize_seconds
        self._session: aiohttp.ClientSession | None = None

    async def route_request(
        self,
        endpoints: Sequence[Endpoint],
        engine_stats: Mapping[str, Any],
        request_stats: Mapping[str, Any],
        request: Any,
        request_json: Mapping[str, Any],
    ) -> str:
        """Return the URL of the engine for a request; never raises for want of tokens or scores.

        Args:
            endpoints: the candidates, one at least.
            engine_stats: by URL, with `num_running_requests` and `num_queuing_requests`.
            request_stats: by URL; unused.
            request: unused.
            request_json: body of the request.
        """

        def load(each: Endpoint) -> int:
            stats = engine_stats.get(each.url)
            return 0 if stats is None else stats.num_running_requests + stats.num_queuing_requests

        idlest = min(endpoints, key=load)
        try:
            tokens = await self._tokens(idlest.url, request_json)
            saved = await self._seconds_saved(endpoints, tokens, request_json) if tokens else {}
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
            return idlest.url  # a router serves without its manager, too
        return min(endpoints, key=lambda each: (-saved.get(_name(each.url), 0.0), load(each))).url

    async def aclose(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _tokens(self, url: str, body: Mapping[str, Any]) -> list[int]:
        asked = {name: body[name] for name in ("model", "prompt", "messages", "tools") if name in body}
        return list((await self._post(f"{url}/tokenize", asked, {}, self._tokenize_seconds))["tokens"])

    async def _seconds_saved(
        self, endpoints: Sequence[Endpoint], tokens: list[int], body: Mapping[str, Any]
    ) -> Mapping[str, float]:
        asked = {"instance_id": self._instance, "token_ids": tokens, "cache_salt": body.get("cache_salt") or ""}
        asked["engines"] = [_name(each.url) for each in endpoints]
        answer = await self._post(self._url, asked, self._headers, self._score_seconds)
        saved: dict[str, float] = {}
        for each in answer["engines"]:  # best first: of several ranks the best
            saved.setdefault(each["engine"], float(each["score"]))
        return saved

    async def _post(self, url: str, body: Any, headers: Mapping[str, str], seconds: float) -> Any:
        if self._session is None:  # made inside the router's event loop
            self._session = aiohttp.ClientSession()
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with self._session.post(url, json=body, headers=headers, timeout=timeout, ssl=self._tls) as answer:
            answer.raise_for_status()
            return await answer.json()


def _name(url: str) -> str:
    """Return `host:port`, under which the engine's blocks are reported."""
    parts = urlsplit(url)
    return parts.netloc if parts.port else f"{parts.netloc}:{443 if parts.scheme == 'https' else 80}"


def main() -> None:
    """Run the router with this routing logic in the place of the configured one."""
    import uvicorn
    from vllm_router.app import app, initialize_all
    from vllm_router.parsers.parser import parse_args

    arguments = parse_args()
    initialize_all(app, arguments)
    key_file = os.environ.get("KVCM_KEY_FILE", "")
    key = Path(key_file).read_text().strip() if key_file else ""
    app.state.router = KvcmRouter(os.environ["KVCM_MANAGER_URL"], os.environ["KVCM_INSTANCE"], api_key=key)
    uvicorn.run(app, host=arguments.host, port=arguments.port)


if __name__ == "__main__":
    main()
