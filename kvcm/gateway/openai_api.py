"""The OpenAI API, as far as a gateway reads it: paths, bodies of requests, errors.

Bodies are passed on as they came. They are read only for the choice of an engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

__all__ = [
    "ApiError",
    "BadRequestError",
    "RequestFacts",
    "error_body",
    "is_api_path",
    "read_facts",
    "tokenize_request",
    "tokens_of_answer",
]

_CHAT: Final = "/v1/chat/completions"
_COMPLETIONS: Final = "/v1/completions"
_PATH: Final = re.compile(r"/v1(/[A-Za-z0-9._~:@+-]+)+")
_BYTES_PER_TOKEN: Final = 4  # of English text; only loads depend on it
_MOST_TOKENS: Final = 1 << 20
_MOST_TOKEN_ID: Final = 1 << 32
# Fields of a chat that its tokens depend on. `add_generation_prompt` is never added: without it vLLM takes true, and
# SGLang renders as for a completion; with it SGLang refuses models that have no Jinja template.
_CHAT_FIELDS: Final = (
    "messages",
    "tools",
    "tool_choice",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "reasoning_effort",
)


class ApiError(Exception):
    """A request that no engine answers; becomes an error of the OpenAI API.

    Args:
        message: the reason and the remedy.
        status: of HTTP.
        code: one of few words, which metrics have, too.
        retry_after_seconds: when to try again, None for that it is of no use.
    """

    def __init__(self, message: str, *, status: int, code: str, retry_after_seconds: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    @property
    def kind(self) -> str:
        """Type of the error, in the words of the API."""
        kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


class BadRequestError(ApiError):
    """The body cannot be read."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=400, code="bad_request")


def error_body(error: ApiError) -> bytes:
    """Return the body of an error."""
    fields = {"message": str(error), "type": error.kind, "param": None, "code": error.code}
    return msgspec.json.encode({"error": fields})


def is_api_path(path: str) -> bool:
    """Return whether requests for a path are passed on: below /v1, with nothing in it that a server could read as
    another path."""
    return _PATH.fullmatch(path) is not None and not {"", ".", ".."} & set(path.split("/")[1:])


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What the choice of an engine needs of a request.

    Attributes:
        affinity: as `Prompt.affinity`.
        is_streamed: whether the answer begins with its first token.
        estimated_tokens: of the prompt, by its size.
        fields: of the body; empty where it is not JSON.
        path: of the request.
    """

    affinity: bytes
    is_streamed: bool
    estimated_tokens: int
    fields: Mapping[str, Any] = field(repr=False)
    path: str

    @property
    def is_generation(self) -> bool:
        """Whether it has a prompt whose KV can be there already."""
        return self.path in (_CHAT, _COMPLETIONS) and bool(self.fields)

    @property
    def cache_salt(self) -> str:
        """Salt that separates its blocks from those of others, "" for none."""
        salt = self.fields.get("cache_salt")
        return salt if isinstance(salt, str) else ""


def read_facts(
    path: str, content_type: str, session: str, body: bytes, *, prefix_characters: int, is_post: bool = True
) -> RequestFacts:
    """Return the facts of a request.

    Args:
        path: of the request.
        content_type: header, "" for none.
        session: id that the client gives to its session, "" for none.
        body: all of it.
        prefix_characters: how much of the prompt makes the affinity where there is no session and no user.
        is_post: whether it is a POST, which has a body.

    Raises:
        BadRequestError: the body must be JSON and is not.
    """
    must_be_json = is_post and path in (_CHAT, _COMPLETIONS)
    is_json = must_be_json or content_type.partition(";")[0].strip().lower() == "application/json"
    fields = _fields(body) if is_json and (body or must_be_json) else {}
    prompt = fields.get("messages" if path == _CHAT else "prompt")
    if must_be_json and not isinstance(prompt, (list, str) if path == _COMPLETIONS else list):
        name, kinds = ("messages", "a list") if path == _CHAT else ("prompt", "a text or a list")
        raise BadRequestError(f"{name} is {_kind(prompt)}, must be {kinds}")
    user = fields.get("user")
    if session or (isinstance(user, str) and user):
        affinity = (session or str(user)).encode("utf-8", "replace")
    else:
        # As JSON, since a prompt may be a text, tokens, or messages with parts.
        affinity = (msgspec.json.encode(prompt) if prompt else body)[:prefix_characters]
    return RequestFacts(
        affinity=affinity,
        is_streamed=fields.get("stream") is True,
        estimated_tokens=len(body) // _BYTES_PER_TOKEN,
        fields=fields,
        path=path,
    )


def _fields(body: bytes) -> Mapping[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise BadRequestError(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise BadRequestError(f"the body is {_kind(found)}, must be a JSON object")
    return found


def _kind(value: object) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), "missing")


def tokenize_request(facts: RequestFacts) -> Mapping[str, Any] | Sequence[int] | None:
    """Return the body of an engine's `POST /tokenize` for a prompt; its tokens where the client gave them; None where
    the request has no prompt. Of several prompts, the first counts."""
    fields = facts.fields
    model = {"model": fields["model"]} if isinstance(fields.get("model"), str) else {}
    if facts.path == _CHAT:
        return {**model, **{name: fields[name] for name in _CHAT_FIELDS if name in fields}}
    if facts.path != _COMPLETIONS:
        return None
    prompt = fields["prompt"]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (list, str)):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return _tokens(prompt)
    special = {"add_special_tokens": fields["add_special_tokens"]} if "add_special_tokens" in fields else {}
    return {**model, "prompt": prompt, **special}


def tokens_of_answer(body: bytes) -> Sequence[int] | None:
    """Return the tokens of an answer to `POST /tokenize`, None where it has none."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return None
    tokens = found.get("tokens") if isinstance(found, dict) else None
    if isinstance(tokens, list) and tokens and isinstance(tokens[0], list):  # SGLang, for a list of prompts
        tokens = tokens[0]
    return _tokens(tokens) if isinstance(tokens, list) else None


def _tokens(values: Sequence[object]) -> Sequence[int] | None:
    """Return token ids, None where a value is none, or there are none or too many."""
    if not 0 < len(values) <= _MOST_TOKENS:
        return None
    tokens = [each for each in values if type(each) is int and 0 <= each < _MOST_TOKEN_ID]
    return tokens if len(tokens) == len(values) else None
