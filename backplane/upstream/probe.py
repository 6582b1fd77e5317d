"""A trial of a base address: one small streamed request, and what its answer shows.

It runs on demand, because it can cost some tokens. The key is sent only to the host that it was given for, and never
over http where https was asked for.
"""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime
from typing import Any, Final, Literal
from urllib.parse import urlsplit, urlunsplit

import anyio
import httpx
import msgspec

from backplane.dialects import framing
from backplane.errors import ConfigError
from backplane.upstream.baseurl import Check, cut_tails, key_doubts, path_doubts
from backplane.upstream.client import FOREIGN, causes, check_coding
from backplane.upstream.clients import making_client
from backplane.upstream.endpoint import CONNECT_S, PROTOCOLS, Endpoint, address, body_of, cut_urls, headers_of
from backplane.upstream.failure import clean, failure_of

PROBE_S: Final = 60.0
"""Seconds for the whole trial: a local server loads its model in less, and a person waits no longer."""

FIRST_BYTE_S: Final = 20.0
"""Seconds to the first byte of an answer; less than a run's limit, as one word is asked for."""

HEAD_BYTES_MAX: Final = 16 * 1024
"""Bytes read of an answer; the first event of a stream and any error are shorter."""

UNKNOWN_MODEL: Final = "unnamed"
"""Model of the request if none is named: a refusal of it shows that address and key are right."""

SAID_CHARS_MAX: Final = 200
"""Characters of a service's words that are shown."""

REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "openai_compatible": {"messages": [{"role": "user", "content": "Say ok."}]},
    "openai_responses": {"input": "Say ok.", "max_output_tokens": 16},
    "anthropic": {"messages": [{"role": "user", "content": "Say ok."}], "max_tokens": 1},
    "gemini_ai_studio": {"contents": [{"role": "user", "parts": [{"text": "Say ok."}]}]},
}
"""The smallest request of each protocol. Chat has no limit, as services differ in its name."""


Verdict = tuple[bool, Check]
"""True if the address is right, although something else may be amiss; and the check to show."""


async def probe(endpoint: Endpoint, model: str | None = None, key_env: str = "") -> list[Check]:
    """Send one request and say what is wrong with the address, and what would be right.

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
            with making_client():
                client = httpx.AsyncClient(timeout=httpx.Timeout(endpoint.timeout_s, connect=CONNECT_S))
        except ConfigError as error:
            return [Check("missing", error.message, error.hint or "")]
        async with client:
            is_right, found = await _ask(client, endpoint, model or UNKNOWN_MODEL, key_env)
        if is_right:
            return [found]  # It works as it is, whatever it looks like.
        doubts = path_doubts(endpoint.protocol, endpoint.base_url)
        others = ", ".join(name for name in PROTOCOLS if name != endpoint.protocol)
        fix = found.fix or next((check.fix for check in doubts), f"check the path, or try the protocol {others}")
        return [*doubts, msgspec.structs.replace(found, fix=fix)]
    fact = f"{cut_urls(endpoint.base_url)} took over {PROBE_S:g} s"
    return [Check("missing", fact, "try again later, or ask the service's owner")]


async def _ask(client: httpx.AsyncClient, endpoint: Endpoint, model: str, key_env: str) -> Verdict:
    url = address(endpoint, model, stream=True)
    body = msgspec.json.encode(body_of(endpoint, {"model": model, **REQUESTS[endpoint.protocol]}, stream=True))
    try:
        headers = headers_of(endpoint, stream=True)
        async with client.stream("POST", url, content=body, headers=headers) as response:
            head = await _head(response)
    except FOREIGN as error:
        return False, explain(error, endpoint)
    return _read(endpoint, cut_urls(url), response, head, key_env)


async def _head(response: httpx.Response) -> bytes:
    """Return the body's beginning: up to the first whole event, as a stream may stay open for long after it."""
    check_coding(response)
    head = b""
    async for data in response.aiter_bytes():
        head += data
        blocks = head.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
        if len(head) >= HEAD_BYTES_MAX or any(b"data:" in block for block in blocks):
            break
    return head[:HEAD_BYTES_MAX]


# What an answer shows -------------------------------------------------------------------------------------------------


def _read(endpoint: Endpoint, where: str, response: httpx.Response, head: bytes, key_env: str) -> Verdict:
    status, text = response.status_code, head.decode("utf-8", "replace").lstrip("\ufeff \r\n\t")
    media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if 300 <= status < 400:
        return _wrong(*_redirected(where, response.headers.get("location", "")))
    if status == 407:
        return _wrong("a proxy on the way asks for a login", "put name and password into HTTPS_PROXY")
    if "https port" in text.lower():
        return _wrong(f"{where} speaks https, not http", f"write https: {where.replace('http:', 'https:', 1)}")
    if media_type == "text/html" or text[:1] == "<":
        fact = f"{where} answers {status} with a web page: a proxy, a login or a site, but no API"
        return _wrong(fact, "check base_url, HTTPS_PROXY and NO_PROXY")
    if status < 300:
        return _answered(where, media_type, head, endpoint.key)
    failure = failure_of(status, response.headers, head, datetime.now(UTC), endpoint.key)
    said = failure.message[:SAID_CHARS_MAX]
    if failure.code == "backend_auth_failed":
        fix = f"put a valid key into {key_env}" if key_env else "set key_env to the variable that holds the key"
        return _wrong(f"{where} refuses the key{f' in {key_env}' if key_env else ''}: {said}", fix)
    # Some services label a path that does not exist as an unknown model; their words differ.
    is_model = failure.code == "backend_model_not_found" and "model" in said.lower()
    if text[:1] not in ("{", "[") or (status in (404, 405) and not is_model):
        return _wrong(f"nothing for {endpoint.protocol} at {where}: {said}")
    if status == 429:
        wait = f"; wait {failure.retry_after_s:g} s" if failure.retry_after_s is not None else ""
        return _right("note", f"{where} is right; limited now: {said}", f"raise the limit at the service{wait}")
    if status >= 500:
        return _right("missing", f"{where} was reached and fails: {said}", "try again later")
    return _right("note", f"{where} was reached; {said}", SET_MODEL)


SET_MODEL: Final = "set model to one that the service lists"


def _right(state: Literal["ok", "note", "missing"], fact: str, fix: str = "") -> Verdict:
    return True, Check(state, fact, fix)


def _wrong(fact: str, fix: str = "") -> Verdict:
    return False, Check("missing", fact, fix)


def _redirected(where: str, location: str) -> tuple[str, str]:
    target, parts = urlsplit(location), urlsplit(where)
    path, tails = cut_tails(target.path)
    fact = f"{where} redirects to {cut_urls(location) or 'nowhere'}; keys are not sent there"
    if not tails and path.rstrip("/") != parts.path.rstrip("/"):
        return fact, ""
    base = urlunsplit((target.scheme or parts.scheme, target.netloc or parts.netloc, path, "", ""))
    return fact, f"base_url = {base!r}"


def _answered(where: str, media_type: str, head: bytes, secret: str | None) -> Verdict:
    reader = framing.Detecting()
    documents = [*reader.feed(head), *reader.finish()]
    if not documents:
        words = clean(head.decode("utf-8", "replace"), secret)[:SAID_CHARS_MAX]
        return _wrong(f"{where} answers {media_type or 'no content type'}, but no JSON: {words!r}", "check base_url")
    if isinstance(documents[0], dict) and (error := documents[0].get("error")):
        words = clean(str(error), secret)[:SAID_CHARS_MAX]
        return _right("note", f"{where} was reached; it failed: {words}", SET_MODEL)
    if media_type == "text/event-stream" or head.lstrip()[:5] in (b"data:", b"event"):
        return _right("ok", f"{where} answers text/event-stream")
    fact = f"{where} answers {media_type} and not text/event-stream; a proxy may have removed ?alt=sse"
    return _right("note", fact, "use it without streaming: stream = false")


# No answer ------------------------------------------------------------------------------------------------------------

SYMPTOMS: Final[tuple[tuple[type[Exception] | tuple[type[Exception], ...], str, str], ...]] = (
    (socket.gaierror, "no address is known for {host} (DNS)", "check the name and the network"),
    (ssl.SSLCertVerificationError, "the certificate of {host} is not valid: {words}",
        "set SSL_CERT_FILE to the authority's certificate, or correct the name"),
    (ssl.SSLError, "{where} does not speak https on this port: {words}", "it may speak plain http: {other}"),
    (ConnectionRefusedError, "nothing listens at {where}", "start the server, or check the port"),
    (httpx.ProxyError, "the proxy refused or broke the connection", "check HTTPS_PROXY and NO_PROXY"),
    (httpx.ConnectTimeout, "no connection to {where} in time",
        "check host and port; a firewall or a missing proxy (HTTPS_PROXY) does this"),
    (httpx.TimeoutException, "{where} took the connection and sent nothing in time",
        "check that it is the API's port and that the model is loaded"),
    ((httpx.RemoteProtocolError, httpx.ReadError), "{where} took the connection and closed it without an answer",
        "check host, port and scheme: {other}"),
    (UnicodeEncodeError, "the key or a header holds letters that no header may have", "copy the key again, alone"),
    (Exception, "{where} cannot be asked: {words}", "check base_url, the headers, the network and HTTPS_PROXY"),
)  # fmt: skip
"""Exception beneath the HTTP library's → fact and fix; the first row that fits counts."""


def explain(error: Exception, endpoint: Endpoint) -> Check:
    """Say why nothing answered."""
    where = cut_urls(endpoint.base_url)
    to_https = where.startswith("http:")
    other = where.replace("http:", "https:", 1) if to_https else where.replace("https:", "http:", 1)
    found, fact, fix = next(
        (cause, fact, fix) for kind, fact, fix in SYMPTOMS for cause in reversed([*causes(error)])
        if isinstance(cause, kind)
    )  # fmt: skip
    words = clean(str(found) or type(found).__name__, endpoint.key)
    values = {"where": where, "host": urlsplit(where).hostname or "", "words": words, "other": other}
    return Check("missing", fact.format(**values), fix.format(**values))
