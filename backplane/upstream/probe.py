"""A trial of a base address: one small streamed request, and where that finds nothing, the likely other addresses.

Only on demand: it costs some tokens. The key goes to no other host than the one it was given for, and never from
https to http. What answers mean is `baseurl`'s.
"""

from __future__ import annotations

import errno
import socket
import ssl
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import httpx
import msgspec

from backplane.dialects.framing import UNREADABLE
from backplane.errors import ConfigError
from backplane.upstream.baseurl import AddressVerdict, Check, candidates, key_doubts, path_doubts, read_answer
from backplane.upstream.client import causes, check_coding
from backplane.upstream.clients import making_client
from backplane.upstream.endpoint import PROTOCOLS, Endpoint, address, body_of, cut_urls, headers_of
from backplane.upstream.failure import clean

PROBE_S: Final = 60.0
"""For all of it: a local server loads its model in less, and a person waits no longer."""

CONNECT_S: Final = 5.0
FIRST_BYTE_S: Final = 20.0
"""Shorter than a run's: this asks for one word."""

HEAD_BYTES_MAX: Final = 16 * 1024
"""Read of an answer: the first event of a stream or any error stands in it."""

LIST_BYTES_MAX: Final = 1024 * 1024
"""Read of a list of models; the longest known have some hundred."""

UNKNOWN_MODEL: Final = "unnamed"
"""Asked for when no model is named and none is listed: the refusal says as much about the address."""

REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "openai_compatible": {"messages": [{"role": "user", "content": "Say ok."}]},
    "openai_responses": {"input": "Say ok.", "max_output_tokens": 16},
    "anthropic": {"messages": [{"role": "user", "content": "Say ok."}], "max_tokens": 1},
    "gemini_ai_studio": {"contents": [{"role": "user", "parts": [{"text": "Say ok."}]}]},
}
"""The smallest request of each protocol. Chat names no limit: services differ in what they call it."""


async def probe(endpoint: Endpoint, model: str | None = None, key_env: str = "") -> list[Check]:
    """Try an endpoint and say what is wrong with it and what would be right.

    Args:
        model: None takes the first that the service lists.
        key_env: the variable that the key is from, for what is said.

    Returns:
        At least one check; none of them names a key.
    """
    unsafe = key_doubts(endpoint.base_url, has_key=endpoint.api_key is not None)
    if unsafe:
        # A trial would do what is wrong.
        return unsafe
    with anyio.move_on_after(PROBE_S) as scope:
        timeout = httpx.Timeout(endpoint.first_byte_s, connect=endpoint.connect_s)
        try:
            with making_client():
                client = httpx.AsyncClient(timeout=timeout)
        except ConfigError as error:
            return [Check("missing", error.message, error.hint or "")]
        async with client:
            trial = AddressTrial(client, model, key_env)
            first = await trial.ask(endpoint)
            if first.kind in ("works", "reached", "busy"):
                # It works as it stands, whatever it looks like.
                return [first.check]
            doubts = path_doubts(endpoint.protocol, endpoint.base_url)
            better = await trial.find(endpoint, first) if first.kind in ("elsewhere", "key") else None
            fix = better or first.check.fix or next((check.fix for check in doubts), "check the whole address")
            return [*doubts, msgspec.structs.replace(first.check, fix=fix)]
    assert scope.cancelled_caught
    fact = f"{cut_urls(endpoint.base_url)} was not done within {PROBE_S:g} s"
    return [Check("missing", fact, "try again, or ask whoever runs it")]


class AddressTrial:
    """Small requests over one client.

    Args:
        model: as for `probe`.
        key_env: as for `probe`.
    """

    def __init__(self, client: httpx.AsyncClient, model: str | None, key_env: str) -> None:
        self.client = client
        self.model = model
        self.key_env = key_env

    async def find(self, endpoint: Endpoint, first: AddressVerdict) -> str | None:
        """Return what would be right: another base, or another protocol at this one; None when nothing answers."""
        if first.kind == "elsewhere":
            for base_url in candidates(endpoint.protocol, endpoint.base_url):
                if _is_weaker(endpoint.base_url, base_url):
                    continue
                verdict = await self.ask(msgspec.structs.replace(endpoint, base_url=base_url))
                if verdict.kind in ("works", "reached", "busy", "key") and not verdict.speaks:
                    return f"base_url = {base_url!r}"
        for protocol in (*first.speaks, *(name for name in PROTOCOLS if name not in first.speaks)):
            if protocol == endpoint.protocol or (first.kind == "key" and protocol not in first.speaks):
                continue
            verdict = await self.ask(msgspec.structs.replace(endpoint, protocol=protocol))
            if verdict.kind == "works" or (verdict.kind == "key" and not verdict.speaks and first.speaks):
                return f"protocol {protocol}"
        return None

    async def ask(self, endpoint: Endpoint) -> AddressVerdict:
        """Send one request and read what it says about the address."""
        try:
            model = self.model or await self._first_model(endpoint) or UNKNOWN_MODEL
            request = {"model": model, **REQUESTS[endpoint.protocol]}
            url = address(endpoint, model, stream=True)
            async with self.client.stream(
                "POST", url, json=body_of(endpoint, request, stream=True), headers=headers_of(endpoint, stream=True)
            ) as response:
                head = await _head(response, HEAD_BYTES_MAX)
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            return AddressVerdict("down", explain(error, endpoint))
        except UnicodeEncodeError:
            fact = "the key or a header has signs that no header may have"
            return AddressVerdict("down", Check("missing", fact, "copy the key again, without what stands around it"))
        key = (self.key_env, endpoint.api_key)
        now = datetime.now(UTC)
        return read_answer(endpoint.protocol, url, response.status_code, response.headers, head, key, now)

    async def _first_model(self, endpoint: Endpoint) -> str | None:
        """The first model that the service lists, None when it lists none in a form that is known."""
        url = address(endpoint, "x", stream=False)
        base = url.partition("?")[0].removesuffix(PROTOCOLS[endpoint.protocol].path).partition("/models/")[0]
        async with self.client.stream("GET", f"{base}/models", headers=headers_of(endpoint, stream=False)) as response:
            body = await _head(response, LIST_BYTES_MAX, is_whole=True)
        try:
            listed = msgspec.json.decode(body)
        except UNREADABLE:
            return None
        entries = (listed.get("data") or listed.get("models")) if isinstance(listed, dict) else None
        for entry in entries if isinstance(entries, list) else ():
            name = (entry.get("id") or entry.get("name")) if isinstance(entry, dict) else None
            if isinstance(name, str):
                return name
        return None


def _is_weaker(before: str, after: str) -> bool:
    """Whether a key that was given for https would go out without it."""
    return before.startswith("https:") and not after.startswith("https:")


async def _head(response: httpx.Response, bytes_max: int, *, is_whole: bool = False) -> bytes:
    head = b""
    check_coding(response)
    async for data in response.aiter_bytes():
        head += data
        if len(head) >= bytes_max or (not is_whole and _has_event(head)):
            break
    return head[:bytes_max]


def _has_event(head: bytes) -> bool:
    """Whether a whole event with data has come: a stream may stay open for long after it."""
    blocks = head.replace(b"\r\n", b"\n").split(b"\n\n")[:-1]
    return any(b"data:" in block for block in blocks)


# What did not even answer ---------------------------------------------------------------------------------------------


def explain(error: Exception, endpoint: Endpoint) -> Check:
    """Say why nothing answered."""
    where = cut_urls(endpoint.base_url)
    parts = urlsplit(endpoint.base_url)
    for cause in causes(error):
        if (check := _of_the_network(cause, where, parts.hostname or "")) is not None:
            return check
    if isinstance(error, httpx.ProxyError):
        return Check("missing", "the proxy refused or broke the connection", "check HTTPS_PROXY and NO_PROXY")
    if isinstance(error, httpx.ConnectTimeout):
        fact = f"no connection to {where} within {endpoint.connect_s:g} s"
        return Check("missing", fact, "check host and port; a firewall or a missing proxy (HTTPS_PROXY) does this")
    if isinstance(error, httpx.TimeoutException):
        fact = f"{where} took the connection and said nothing for {endpoint.first_byte_s:g} s"
        return Check("missing", fact, "check that it is the API's port, and that the model is loaded")
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError):
        fact = f"{where} took the connection and broke it without an answer"
        if parts.scheme == "http":
            return Check("missing", fact, f"it may speak https: {where.replace('http:', 'https:', 1)}")
        return Check("missing", fact, "check host and port, and what stands between")
    words = clean(str(error) or type(error).__name__, endpoint.api_key)
    return Check("missing", f"{where} or a header cannot be used: {words}", "check base_url and the key for odd signs")


def _of_the_network(cause: BaseException, where: str, host: str) -> Check | None:
    if isinstance(cause, socket.gaierror):
        return Check("missing", f"no address is known for {host} (DNS)", "check the name, and that there is a network")
    if isinstance(cause, ssl.SSLCertVerificationError):
        fact = f"the certificate of {host} does not hold: {getattr(cause, 'verify_message', cause)}"
        return Check("missing", fact, "set SSL_CERT_FILE to the authority's certificate, or correct the name")
    if isinstance(cause, ssl.SSLError):
        fact = f"{where} does not speak https on this port ({cause.reason or 'TLS failed'})"
        return Check("missing", fact, f"it may speak plain http: {where.replace('https:', 'http:', 1)}")
    if isinstance(cause, ConnectionRefusedError):
        return Check("missing", f"nothing listens at {where}", "start the server, or check the port")
    if isinstance(cause, OSError) and cause.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return Check("missing", f"there is no way to {host} from here", "check the network, and HTTPS_PROXY")
    return None
