"""Plans the answer to a request: whose path it is, whether it is refused, and how a turn's answer is written.

Pure: a request goes in, a `Delivery` comes out; `wire` has the socket.
"""

from __future__ import annotations

import json
import re
from typing import Final

from backplane.contract.canonical import Json
from backplane.testing import chat, gemini, messages, responses
from backplane.testing.choose import Plot, RequestTarget, at
from backplane.testing.frames import RenderRequest, as_array, as_events, cut_bytes, json_text, shorten, with_faults
from backplane.testing.script import Turn
from backplane.testing.wire import Delivery, Head
from backplane.upstream.endpoint import ProtocolName

CHARS_A_TOKEN: Final = 4
"""Characters per token in answers to counting requests; any number does that grows with the text."""

VENDORS: Final = {
    "openai_compatible": chat,
    "openai_responses": responses,
    "anthropic": messages,
    "gemini_ai_studio": gemini,
}
ROUTES: Final[tuple[tuple[str, ProtocolName | None, str], ...]] = (
    (r"/chat/completions$", "openai_compatible", "generate"),
    (r"/responses$", "openai_responses", "generate"),
    (r"/messages$", "anthropic", "generate"),
    (r"/messages/count_tokens$", "anthropic", "count"),
    (r"/models/(?P<model>[^/:]+):generateContent$", "gemini_ai_studio", "generate"),
    (r"/models/(?P<model>[^/:]+):streamGenerateContent$", "gemini_ai_studio", "stream"),
    (r"/models/(?P<model>[^/:]+):countTokens$", "gemini_ai_studio", "count"),
    (r"/models(/(?P<model>[^/:]+))?$", None, "models"),
)
"""The end of a path, its protocol, and what it asks; headers and path tell the protocol of a list of models."""

_DOUBLED: Final = re.compile(r"/(v\d\w*)/\1/")
"""A version twice: a program added its own to an address that has one; no service has such a path."""


def route(head: Head) -> RequestTarget:
    """Find out whose path it is; the body is the JSON, other text unchanged, or None if it is empty."""
    body: Json
    try:
        body = json.loads(head.data) if head.data else None
    except ValueError:
        body = (head.data or b"").decode(errors="replace")
    members = body if isinstance(body, dict) else {}
    for pattern, protocol, asks in ROUTES:
        found = re.search(pattern, head.path)
        if found is None or (asks == "models") != (head.method in ("GET", "HEAD")):
            continue
        named = found.groupdict().get("model") or members.get("model")
        stream = asks == "stream" or members.get("stream") is True
        whose, what = protocol or _lister(head), asks.replace("stream", "generate")
        return RequestTarget(whose, what, str(named or ""), stream, body, key_of(head))
    return RequestTarget(None, "nothing", "", False, body, key_of(head))


def _lister(head: Head) -> ProtocolName:
    if "/v1beta" in head.path or "x-goog-api-key" in head.headers:
        return "gemini_ai_studio"
    return "anthropic" if "anthropic-version" in head.headers else "openai_compatible"


def key_of(head: Head) -> str | None:
    scheme, _, token = head.headers.get("authorization", "").partition(" ")
    bearer = token if scheme.lower() == "bearer" else None
    named = head.headers.get("x-api-key") or head.headers.get("x-goog-api-key")
    return bearer or named or head.query.get("key")


def wants_usage(place: RequestTarget) -> bool:
    """Return False for a chat stream whose request does not ask for its usage."""
    return place.protocol != "openai_compatible" or at(place.body, "/stream_options/include_usage") is True


def refuse(plot: Plot, head: Head, place: RequestTarget) -> tuple[int, str] | None:
    """Return status and words of a refusal before any turn, or None."""
    script = plot.script
    if "upgrade" in head.headers:
        return 426, "this server supports only HTTP/1.1"
    if head.data is None:
        return 415, f"content-encoding {head.headers['content-encoding']} is not supported; use gzip or identity"
    hidden = place.protocol not in script.protocols or not head.path.startswith(script.prefix or "")
    is_doubled = _DOUBLED.search(head.path) is not None
    if place.protocol is None or hidden or is_doubled:
        return 404, f"no such path: {head.method} {head.path}"
    if script.keys and place.key not in script.keys:
        # This vendor calls a key it does not know an invalid argument.
        status = 400 if place.protocol == "gemini_ai_studio" and place.key else 401
        return status, "the API key is not valid"
    return None


def beside(plot: Plot, place: RequestTarget, head: Head, refusal: tuple[int, str] | None) -> tuple[int, Delivery]:
    """Plan the answer to a request that no turn answers."""
    vendor = VENDORS[place.protocol or "openai_compatible"]
    if place.asks == "nothing" and head.method == "HEAD":
        return 200, plain(200, b"")
    if refusal is not None:
        value: Json = vendor.error(*refusal)
    elif place.asks == "models":
        listed = vendor.models((place.model,) if place.model else plot.script.models)
        value = next(iter(listed.get("models") or listed["data"])) if place.model else listed
    elif place.asks == "count":
        count = len(head.data or b"") // CHARS_A_TOKEN
        value = {"totalTokens": count} if place.protocol == "gemini_ai_studio" else {"input_tokens": count}
    else:
        refusal = (400, "the script has no turn left for this request")
        value = vendor.error(*refusal)
    status = refusal[0] if refusal else 200
    return status, plain(status, json_text(value).encode())


def plain(status: int, body: bytes) -> Delivery:
    return Delivery(status, {"content-type": "application/json"}, [body], len(body))


def plan(turn: Turn, place: RequestTarget, ask: RenderRequest, head: Head) -> Delivery | None:
    """Plan a turn's answer, or return None for a reset before any byte."""
    fault = turn.fault
    if fault.reset and not fault.is_endless:
        return None
    kind, pieces = _body_of(turn, place, ask, head)
    whole = sum(map(len, pieces))
    if fault.stall_after_frames is not None:
        pieces = pieces[: fault.stall_after_frames]
    if fault.split_bytes:
        pieces = cut_bytes(pieces, fault.split_bytes)
    if fault.cut_after_bytes is not None:
        pieces = shorten(pieces, fault.cut_after_bytes)
    is_stream = kind.startswith("text/event-stream") or (place.stream and fault.status == 200)
    length = None if is_stream or fault.close_delimited else whole
    return Delivery(fault.status, {"content-type": kind, **fault.headers}, pieces, length, fault)


def _body_of(turn: Turn, place: RequestTarget, ask: RenderRequest, head: Head) -> tuple[str, list[bytes]]:
    """Return content type and pieces of an answer's body, without the faults of bytes."""
    fault, failure, vendor = turn.fault, turn.fault.failure, VENDORS[place.protocol or "openai_compatible"]
    if fault.raw is not None:
        return "text/event-stream" if place.stream else "application/json", [fault.raw]
    if fault.status != 200 or (failure and not place.stream):
        status = failure.status if failure else fault.status
        message = fault.message or (failure.message if failure else f"scripted status {status}")
        return "application/json", [json_text(vendor.error(status, message)).encode()]
    if not place.stream:
        return "application/json", [json_text(vendor.whole(turn, ask)).encode()]
    failed = vendor.failed(failure, ask) if failure else None
    frames = with_faults(vendor.stream(turn, ask), fault, vendor.GROUPS, failed)
    if place.protocol == "gemini_ai_studio" and head.query.get("alt") != "sse":
        return "application/json", as_array(frames)
    return "text/event-stream; charset=utf-8", as_events(frames)
