"""The five interfaces that clients can speak: their paths, errors, keep-alives and lists of models. Pure.

The vendors' own clients, in their versions of November 2026, were run to see what they send and accept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal
from urllib.parse import parse_qs, unquote

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import StreamTranslation, augment, dialect, framing
from backplane.dialects.ir import Conversation, StreamEnded, StreamFailed, Translated
from backplane.gateway.customs import lifted
from backplane.gateway.frames import KINDS, Form, Frames
from backplane.sandbox.http import Refused

Action = Literal["generate", "count", "pass", "models", "hello", "read", "delete"]
"""`pass`: a request that cannot be translated, so only some services answer it. `hello`: a check that the gateway is
there. `read` and `delete`: about a kept answer."""

ErrorBody = Callable[[int, str, str, str], Json]
"""Writes an error from its HTTP status, our code, the message, and the id of the exchange."""


class ModelRow(msgspec.Struct, frozen=True):
    """One model in a list of models."""

    name: str
    context_tokens: int | None = None
    """Maximum tokens of a request and its answer together; None is unknown."""


class Front(msgspec.Struct, frozen=True, kw_only=True):
    """One interface that clients can speak."""

    name: str
    dialect: str
    """Dialect of its documents."""
    error: ErrorBody
    id_header: str
    """Header in which its clients expect the id of a request."""
    answer_id: str
    """Prefix of an answer's id if the service gives none."""
    ping: bytes
    """Bytes that keep a silent stream open; its clients skip them."""
    models: Callable[[Iterable[ModelRow]], Json]
    """Writes the list of models."""
    model: Callable[[ModelRow], Json]
    """Writes one model."""
    own_headers: tuple[str, ...] = ()
    """Prefixes of headers that belong to the interface; they are sent on to a service of the same dialect."""
    default_model: str | None = None
    """Model for a request that names none; None refuses such a request."""

    def read(self, document: dict[str, Any]) -> Translated[Conversation]:
        """Return a request as a conversation, with the losses of reading it. Raises TranslationError."""
        if self.dialect == augment.NAME:
            return augment.to_ir(document)
        found: Translated[Conversation] = dialect(self.dialect).to_ir(
            lifted(document) if self.name == "responses" else document
        )
        return found

    def translation(self, source: str, document: dict[str, Any]) -> StreamTranslation:
        """Return a translation of a service's stream into this interface.

        Args:
            source: the service's dialect.
            document: the client's request; it may have options for the form of the answer.
        """
        if self.dialect == augment.NAME:
            return augment.ChunkStream(source, augment.reply_of(document))
        made = StreamTranslation(source, self.dialect)
        made.reader.mends = True  # The service may be a gateway that writes its dialect wrongly.
        return made

    def writer(self, source: str, document: dict[str, Any]) -> Any:
        """Return a writer that turns events into chunks of this interface.

        Args:
            source: name of the events' dialect in losses.
            document: the client's request; it may have options for the form of the answer.
        """
        if self.dialect == augment.NAME:
            return augment.ChunkWriter("openai", augment.reply_of(document))
        return dialect(self.dialect).StreamWriter(source)

    def stream_error(self, code: str, message: str, body: bytes) -> bytes:
        """Return the bytes of an error inside a stream.

        Args:
            body: the same error as JSON, as a whole answer would have it.
        """
        if self.name == "responses":
            response = {"id": "resp_failed", "object": "response", "status": "failed", "output": [],
                        "error": {"code": code, "message": message}}  # fmt: skip
            event = {"type": "response.failed", "sequence_number": 0, "response": response}
            return framing.sse_bytes(event, "response.failed")
        if self.dialect == augment.NAME:
            writer = augment.ChunkWriter("openai", augment.Reply())
            chunks = [*writer.write(StreamFailed(message, code)), *writer.write(StreamEnded())]
            return Frames(None, "lines").write(chunks)
        head = b"event: error\n" if self.name == "messages" else b""
        return head + b"data: " + body + b"\n\n"


class ClientCall(msgspec.Struct, frozen=True, kw_only=True):
    """What a client's request asks for, by its method, path and headers."""

    front: Front
    action: Action
    model: str | None = None
    """The model in the path; None if the body names it, and for a list of all models."""
    stream: bool | None = None
    """True or False if the path decides whether the answer is streamed; None if the body decides."""
    form: Form = "events"
    """Form of a stream."""
    query: str = ""
    other: str = ""
    """Path after the version, or word after the colon (Gemini); the service's address gets the same."""
    response: str = ""
    """Id of a kept answer, for `read` and `delete`."""

    @property
    def kind(self) -> str:
        """Content type of a stream."""
        return KINDS[self.form]

    def frames(self) -> Frames:
        """Return a writer of the stream's bytes."""
        return Frames(None if self.front.dialect == augment.NAME else dialect(self.front.dialect), self.form)


# Errors ---------------------------------------------------------------------------------------------------------------

_OPENAI_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error", 403: "permission_error", 429: "rate_limit_error",
}  # fmt: skip
_OPENAI_CODES: Final[Mapping[str, str]] = {
    "backend_auth_failed": "invalid_api_key",
    "backend_rate_limited": "rate_limit_exceeded",
    "backend_context_length": "context_length_exceeded",
    "backend_model_not_found": "model_not_found",
    "backend_content_filtered": "content_filter",
}


def _openai_error(status: int, code: str, message: str, _id: str) -> Json:
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": _OPENAI_CODES.get(code, code) or None}}


_ANTHROPIC_TYPES: Final[Mapping[int, str]] = {
    401: "authentication_error", 402: "billing_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 504: "timeout_error", 529: "overloaded_error",
}  # fmt: skip


def _anthropic_error(status: int, code: str, message: str, id: str) -> Json:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Json] = {"type": kind, "message": message}
    if code == "mapping_unsupported_capability" and "/thread" in message:
        # The SDKs' tool runners then send the whole conversation again (lib/threads of @anthropic-ai/sdk 1.12.0).
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error, "request_id": id}


_GOOGLE_STATUS: Final[Mapping[int, str]] = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 502: "UNAVAILABLE", 503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED", 529: "UNAVAILABLE",
}  # fmt: skip


def _google_error(status: int, _code: str, message: str, _id: str) -> Json:
    word = _GOOGLE_STATUS.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
    return {"error": {"code": status, "message": message, "status": word}}


def _augment_error(_status: int, code: str, message: str, id: str) -> Json:
    return {"error": message, "code": code, "request_id": id}


# Lists of models ------------------------------------------------------------------------------------------------------

CREATED: Final = 1_700_000_000
"""Creation time of every listed model, in seconds since 1970: clients require one, and an alias has none."""
CREATED_AT: Final = "2023-11-14T22:13:20Z"


def _openai_model(row: ModelRow) -> dict[str, Json]:
    window = {} if row.context_tokens is None else {"context_window": row.context_tokens}
    return {"id": row.name, "object": "model", "created": CREATED, "owned_by": "backplane", **window}


def _openai_models(rows: Iterable[ModelRow]) -> Json:
    return {"object": "list", "data": [_openai_model(row) for row in rows]}


def _anthropic_model(row: ModelRow) -> dict[str, Json]:
    window = {} if row.context_tokens is None else {"max_input_tokens": row.context_tokens}
    return {"type": "model", "id": row.name, "display_name": row.name, "created_at": CREATED_AT, **window}


def _anthropic_models(rows: Iterable[ModelRow]) -> Json:
    data = [_anthropic_model(row) for row in rows]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"data": data, "has_more": False, **ends}


_ACTIONS: Final = ["generateContent", "streamGenerateContent", "countTokens"]


def _gemini_model(row: ModelRow) -> dict[str, Json]:
    window = {} if row.context_tokens is None else {"inputTokenLimit": row.context_tokens}
    name: dict[str, Json] = {"name": f"models/{row.name}", "displayName": row.name}
    return {**name, "supportedGenerationMethods": list(_ACTIONS), **window}


def _gemini_models(rows: Iterable[ModelRow]) -> Json:
    return {"models": [_gemini_model(row) for row in rows]}


# The five interfaces --------------------------------------------------------------------------------------------------

_COMMENT: Final = b": ping\n\n"
CHAT: Final = Front(
    name="chat", dialect="openai", error=_openai_error, id_header="x-request-id", answer_id="chatcmpl-", ping=_COMMENT,
    models=_openai_models, model=_openai_model, own_headers=("openai-", "x-session-"),
)  # fmt: skip
RESPONSES: Final = msgspec.structs.replace(CHAT, name="responses", dialect="codex", answer_id="resp_")
MESSAGES: Final = Front(
    name="messages", dialect="claude", error=_anthropic_error, id_header="request-id", answer_id="msg_",
    ping=b'event: ping\ndata: {"type": "ping"}\n\n', models=_anthropic_models, model=_anthropic_model,
    own_headers=("anthropic-",),
)  # fmt: skip
GEMINI: Final = Front(
    name="gemini", dialect="gemini", error=_google_error, id_header="x-request-id", answer_id="",
    ping=b"\r\n",  # A comment makes its Python client fail, and its JavaScript client drop the next event.
    models=_gemini_models, model=_gemini_model, own_headers=("x-goog-api-client",),
)  # fmt: skip
AUGMENT: Final = msgspec.structs.replace(
    CHAT, name="augment", dialect=augment.NAME, error=_augment_error, own_headers=(), default_model="default",
    # A chunk without content, as its clients parse each line as JSON.
    ping=Frames(None, "lines").write(augment.ChunkWriter("openai", augment.Reply()).empty()),
)  # fmt: skip
FRONTS: Final = (CHAT, RESPONSES, MESSAGES, GEMINI, AUGMENT)

_PATHS: Final[Mapping[str, tuple[Front, Action]]] = {
    "/chat/completions": (CHAT, "generate"),
    "/responses": (RESPONSES, "generate"),
    "/responses/input_tokens": (RESPONSES, "count"),
    "/messages": (MESSAGES, "generate"),
    "/messages/count_tokens": (MESSAGES, "count"),
    "/responses/compact": (RESPONSES, "pass"),
    "/embeddings": (CHAT, "pass"),
    "/chat-stream": (AUGMENT, "generate"),
}
"""Path after the version → interface and action, for `POST`."""

VERSIONS: Final = ("/v1beta", "/v1")
"""Prefixes of a path; clients differ in the one that they add, and some add none."""

_GEMINI_ACTIONS: Final[Mapping[str, Action]] = {
    "generateContent": "generate",
    "streamGenerateContent": "generate",
    "countTokens": "count",
    "embedContent": "pass",
    "batchEmbedContents": "pass",
}
"""Word after the colon → action."""


def route(method: str, target: str, headers: Mapping[str, str]) -> ClientCall:
    """Return what a request asks for.

    Args:
        target: path and query, as received.
        headers: headers by names in lower case.

    Raises:
        Refused: 404 or 405; or 426 for a WebSocket, after which the client uses POST.
    """
    path, _, query = target.partition("?")
    path = next((path.removeprefix(one) for one in VERSIONS if path.startswith(f"{one}/")), path).rstrip("/")
    front = speaker(headers)
    if method == "HEAD" or (method == "GET" and path == ""):
        return ClientCall(front=front, action="hello")
    id = path.removeprefix("/responses/")
    if method in ("GET", "DELETE") and id != path and "/" not in id:
        action: Action = "read" if method == "GET" else "delete"
        return ClientCall(front=RESPONSES, action=action, response=unquote(id), query=query)
    if method == "GET":
        return _get(path, query, headers)
    if method != "POST":
        raise Refused(405, f"{method} is not answered here")
    if path in _PATHS:
        front, action = _PATHS[path]
        lines = front is AUGMENT
        return ClientCall(
            front=front, action=action, query=query, other=path, stream=True if lines else None,
            form="lines" if lines else "events",
        )  # fmt: skip
    name, colon, word = path.rpartition(":")
    if colon and word in _GEMINI_ACTIONS:
        # A name with a slash is no path: it is looked up in our table, and never becomes part of an address.
        model = unquote(name).removeprefix("/").removeprefix("models/")
        is_sse = "sse" in parse_qs(query).get("alt", ())
        return ClientCall(
            front=GEMINI, action=_GEMINI_ACTIONS[word], model=model, stream=word == "streamGenerateContent",
            form="events" if is_sse else "array", query=query, other=word,
        )  # fmt: skip
    raise Refused(404, f"no {path[:200] or '/'} here; there are {', '.join(_PATHS)} and models/…")


def _get(path: str, query: str, headers: Mapping[str, str]) -> ClientCall:
    if path == "/responses" and "upgrade" in headers:
        raise Refused(426, "no WebSocket here; use POST")
    if path == "/models" or path.startswith("/models/"):
        name = unquote(path.removeprefix("/models").removeprefix("/"))
        return ClientCall(front=speaker(headers), action="models", model=name or None, query=query)
    raise Refused(404, f"no {path[:200]} here; there are /models, /responses/ID and POST {', '.join(_PATHS)}")


def speaker(headers: Mapping[str, str]) -> Front:
    """Return the interface that the headers show, for a path that several interfaces have."""
    if "x-goog-api-key" in headers:
        return GEMINI
    return MESSAGES if "anthropic-version" in headers else CHAT


def given_key(headers: Mapping[str, str], query: str) -> str | None:
    """Return the key of a request, from a header or the query; None if there is none."""
    scheme, _, word = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and word.strip():
        return word.strip()
    found = (
        headers.get("x-api-key") or headers.get("x-goog-api-key") or next(iter(parse_qs(query).get("key", ())), None)
    )
    return found.strip() if found else None


def stream_of(call: ClientCall, document: Mapping[str, Any]) -> bool:
    """Return True if the client wants a stream."""
    return call.stream if call.stream is not None else document.get("stream") is True
