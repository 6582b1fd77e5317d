"""Tests a base address by one small streamed request, and reports findings from the answer.

It runs on demand, because it can cost some tokens. The key is sent only to the host that it was given for, and never
over http where https was asked for.
"""

from __future__ import annotations

from typing import Any, Final

import anyio
import msgspec

from backplane.contract.canonical import Json
from backplane.errors import ConfigError
from backplane.upstream.baseurl import Check, key_doubts, path_doubts
from backplane.upstream.client import ReplyStream, Upstream
from backplane.upstream.endpoint import PROTOCOLS, Endpoint, address, cut_urls
from backplane.upstream.failure import UpstreamError, UpstreamFailure, clean

PROBE_S: Final = 60.0
"""Seconds for the whole trial: a local server loads its model in less, and a person waits no longer."""

FIRST_BYTE_S: Final = 20.0
"""Most seconds to the first byte of an answer; less than in a run, as the request asks for one word."""

UNKNOWN_MODEL: Final = "unnamed"
"""Model of the request if none is named: a refusal of it shows that address and key are right."""

SAID_CHARS_MAX: Final = 200
"""Most characters of a service's message that are shown."""

REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "openai_compatible": {"messages": [{"role": "user", "content": "Say ok."}]},
    "openai_responses": {"input": "Say ok.", "max_output_tokens": 16},
    "anthropic": {"messages": [{"role": "user", "content": "Say ok."}], "max_tokens": 1},
    "gemini_ai_studio": {"contents": [{"role": "user", "parts": [{"text": "Say ok."}]}]},
}
"""The smallest request of each protocol. Chat has no limit, as services differ in its name."""


Verdict = tuple[bool, Check]
"""True if the address is right, even if something else is wrong; and the check to show."""


async def probe(endpoint: Endpoint, model: str | None = None, key_env: str = "") -> list[Check]:
    """Send one request, and return what is wrong with the address and what would be right.

    Args:
        model: model to ask (default: `UNKNOWN_MODEL`).
        key_env: name of the key's variable, for the texts.

    Returns:
        At least one check; no check shows a key.
    """
    if unsafe := key_doubts(endpoint.base_url, has_key=endpoint.api_key is not None):
        return unsafe  # A request would do what is wrong.
    with anyio.move_on_after(PROBE_S):
        try:
            is_right, found = await _ask(endpoint, model or UNKNOWN_MODEL, key_env)
        except ConfigError as error:
            return [Check("missing", error.message, error.hint or "")]
        if is_right:
            return [found]  # It works as it is, whatever it looks like.
        doubts = path_doubts(endpoint.protocol, endpoint.base_url)
        others = ", ".join(name for name in PROTOCOLS if name != endpoint.protocol)
        fix = found.fix or next((check.fix for check in doubts), f"check the path, or try the protocol {others}")
        return [*doubts, msgspec.structs.replace(found, fix=fix)]
    fact = f"{cut_urls(endpoint.base_url)} took over {PROBE_S:g} s"
    return [Check("missing", fact, "try again later, or ask the service's owner")]


async def _ask(endpoint: Endpoint, model: str, key_env: str) -> Verdict:
    where = cut_urls(address(endpoint, model, stream=True))
    try:
        async with (
            Upstream(endpoint) as upstream,
            upstream.stream({"model": model, **REQUESTS[endpoint.protocol]}) as reply,
        ):
            document = await anext(aiter(reply))
    except UpstreamError as error:
        return _failed(endpoint, where, error.failure, key_env)
    return _answered(where, reply, document, endpoint.key)


def _failed(endpoint: Endpoint, where: str, failure: UpstreamFailure, key_env: str) -> Verdict:
    """Return the verdict after a failure; the address is right if a service of the protocol answered."""
    status, said = failure.status, failure.message[:SAID_CHARS_MAX]
    if status == 407:
        return False, Check("missing", "a proxy on the way asks for a login", "put name and password into HTTPS_PROXY")
    if "https port" in said.lower():
        return False, Check("missing", f"{where} speaks https, not http: {said}", "write https in base_url")
    if failure.hint is not None or status is None:
        return False, Check("missing", f"{where}: {said}", failure.hint or "")
    if failure.code == "backend_auth_failed":
        fix = f"put a valid key into {key_env}" if key_env else "set key_env to the variable that holds the key"
        return False, Check("missing", f"{where} refuses the key{f' in {key_env}' if key_env else ''}: {said}", fix)
    # Some services label a path that does not exist as an unknown model; their words differ.
    is_model = failure.code == "backend_model_not_found" and "model" in said.lower()
    if status < 400 or (status in (404, 405) and not is_model):
        return False, Check("missing", f"nothing for {endpoint.protocol} at {where}: {said}")
    if status == 429:
        wait = f"; wait {failure.retry_after_s:g} s" if failure.retry_after_s is not None else ""
        return True, Check("note", f"{where} is right; limited now: {said}", f"raise the limit at the service{wait}")
    if status >= 500:
        return True, Check("missing", f"{where} was reached and fails: {said}", "try again later")
    return True, Check("note", f"{where} was reached; {said}", SET_MODEL)


SET_MODEL: Final = "set model to one that the service lists"


def _answered(where: str, reply: ReplyStream, document: Json, secret: str | None) -> Verdict:
    if isinstance(document, dict) and document.get("error"):
        said = clean(str(document["error"]), secret)[:SAID_CHARS_MAX]
        return True, Check("note", f"{where} was reached; it failed: {said}", SET_MODEL)
    if reply.media_type == "text/event-stream" or reply.head.lstrip()[:5] in (b"data:", b"event"):
        return True, Check("ok", f"{where} answers text/event-stream")
    fact = f"{where} answers {reply.media_type} and not text/event-stream; a proxy may have removed ?alt=sse"
    return True, Check("note", fact, "use it without streaming: stream = false")
