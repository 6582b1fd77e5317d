"""The loop that serves one connection, and its limits; the gateway's fronts and a run's key proxy use it.

Each request goes to a function, which is cancelled if the client closes the connection. If a request is answered before
its body has come, the rest is read within bounds.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import anyio
import h11
import httpx

from backplane.gateway.frames import encode
from backplane.process.aio import beside
from backplane.sandbox.http import HttpClient, Refused

HEAD_S_MAX: Final = 10.0
"""Seconds from the first byte of a request to the end of its head; then it gets 408."""
IDLE_S_MAX: Final = 300.0
"""Seconds after which a connection without a request is closed."""
BODY_S_MAX: Final = 30.0
"""Seconds without a byte of a request's body after which it gets 408."""
BODY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes of an unpacked request; a larger one gets 413. One with several images in base64 has about 30 MB."""


async def attend(
    end: socket.socket, answer: Callable[[HttpClient, h11.Request], Awaitable[None]], kind: str,
    failed: Callable[[Exception], None],
) -> None:  # fmt: skip
    """Serve the requests of one connection in order; no exception leaves, so that other connections go on.

    Args:
        answer: answers one request; if it raises `Refused`, an error is sent.
        kind: value of `type` in such an error.
        failed: called with an unexpected exception.
    """
    client = HttpClient(end)
    try:
        while True:
            try:
                request = await _next_request(client)
                if request is None:
                    return
                await answer(client, request)
            except Refused as refusal:
                error = {"message": str(refusal), "type": kind, "code": refusal.status}
                await client.answer(refusal.status, "application/json", encode({"error": error}))
            if not await client.finish():
                return
            client.http.start_next_cycle()
    except (OSError, h11.ProtocolError, httpx.HTTPError):
        return
    except Exception as error:
        failed(error)


async def _next_request(client: HttpClient) -> h11.Request | None:
    """Return the next request; None if none comes within `IDLE_S_MAX` or the client is gone. Raises Refused."""
    if not client.http.trailing_data[0]:
        with anyio.move_on_after(IDLE_S_MAX) as idle:
            await anyio.wait_readable(client.end)
        if idle.cancelled_caught:
            return None
    try:
        with anyio.move_on_after(HEAD_S_MAX):
            return await client.request()
    except h11.RemoteProtocolError as error:
        raise Refused(error.error_status_hint, f"this is no HTTP request: {error}") from error
    raise Refused(408, f"the head of the request did not come within {HEAD_S_MAX:g} s")


async def while_connected(client: HttpClient, work: Callable[[], Awaitable[None]]) -> None:
    """Call a function, and cancel it if the client closes its connection."""

    async def end_with_client() -> None:
        await client.wait_closed()
        scope.cancel()  # Otherwise the model would go on writing, and cost money.

    with anyio.CancelScope() as scope:
        async with beside(end_with_client):
            await work()


def headers_of(request: h11.Request) -> dict[str, str]:
    """Return the headers, by names in lower case. Raises Refused (400) if two of them contradict each other."""
    found: dict[str, str] = {}
    for name, value in request.headers:
        key = name.decode("ascii").lower()
        if key in found and key in ("host", "content-length", "transfer-encoding", "authorization"):
            raise Refused(400, f"the request has two headers {key}")
        found[key] = value.decode("latin-1")
    if "content-length" in found and "transfer-encoding" in found:
        raise Refused(400, "the request has two lengths")
    return found


async def read_body(client: HttpClient, headers: Mapping[str, str]) -> bytes:
    """Return the body of a request, unpacked. Raises Refused: 400, 408, 413, 415."""
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip", "deflate", ""):
        raise Refused(415, f"bodies packed as {coding[:40]!r} are not read; send gzip, or none")
    if int(headers.get("content-length") or 0) > BODY_BYTES_MAX:
        raise Refused(413, f"the request is over {BODY_BYTES_MAX} bytes")
    parts: list[bytes] = []
    size, pieces = 0, client.body()
    while True:
        data = None
        with anyio.move_on_after(BODY_S_MAX) as late:
            data = await anext(pieces, None)
        if late.cancelled_caught:
            raise Refused(408, f"the request sent nothing for {BODY_S_MAX:g} s")
        if data is None:
            break
        size += len(data)
        if size > BODY_BYTES_MAX:
            raise Refused(413, f"the request is over {BODY_BYTES_MAX} bytes")
        parts.append(data)
    body = b"".join(parts)
    return body if coding in ("identity", "") else _unpacked(body)


def _unpacked(body: bytes) -> bytes:
    """Unpack a gzip or deflate body of at most `BODY_BYTES_MAX`. Raises Refused: 400, 413."""
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
    try:
        out = unpacker.decompress(body, BODY_BYTES_MAX + 1)
    except zlib.error as error:
        raise Refused(400, f"the body cannot be unpacked: {error}") from error
    if len(out) > BODY_BYTES_MAX:
        raise Refused(413, f"the request is over {BODY_BYTES_MAX} bytes when it is unpacked")
    if not unpacker.eof:
        raise Refused(400, "the packed body is cut")
    return out
