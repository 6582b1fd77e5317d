"""Requests to a service: bytes go there, and its answer comes back piece by piece."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Final

import anyio
import httpx

from backplane.upstream.client import ERROR_BYTES_MAX, FOREIGN, check_coding, translated
from backplane.upstream.clients import making_client
from backplane.upstream.endpoint import CONNECT_S, Endpoint
from backplane.upstream.failure import UpstreamError, UpstreamFailure, failure_of

KEPT_MAX: Final = 64
"""Unused connections that are kept for each service."""
KEPT_S: Final = 60.0
"""Seconds that an unused connection is kept."""


class RefusedAnswer(UpstreamError):
    """A service's refusal, with its own words for a client that speaks its dialect."""

    def __init__(self, failure: UpstreamFailure, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(failure)
        self.body, self.headers = body, headers


class Services:
    """Connections to all services; `async with` closes them."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, float], httpx.AsyncClient] = {}
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Services:
        return self

    async def __aexit__(self, *error: object) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
            await self._opened.aclose()

    async def _client(self, endpoint: Endpoint) -> httpx.AsyncClient:
        key = (endpoint.base_url, endpoint.timeout_s)
        if key not in self._clients:
            with making_client():
                made = httpx.AsyncClient(
                    timeout=httpx.Timeout(endpoint.timeout_s, connect=CONNECT_S, pool=None),
                    limits=httpx.Limits(
                        max_connections=None, max_keepalive_connections=KEPT_MAX, keepalive_expiry=KEPT_S
                    ),
                    verify=endpoint.base_url.startswith("https:"),
                )
            self._clients[key] = await self._opened.enter_async_context(made)
        return self._clients[key]

    @asynccontextmanager
    async def post(
        self, endpoint: Endpoint, url: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[httpx.Response]:
        """Send a request and yield the successful answer, before its body; leaving early closes the socket.

        Raises:
            UpstreamError: the service cannot be reached, or refuses (`RefusedAnswer`).
        """
        client = await self._client(endpoint)
        try:
            response = await client.send(
                client.build_request("POST", url, content=body, headers=dict(headers)), stream=True
            )
        except FOREIGN as error:
            raise UpstreamError(translated(error, endpoint)) from error
        try:
            if response.status_code >= 300:
                raise await _refusal(response, endpoint)
            check_coding(response)
            yield response
        except FOREIGN as error:
            raise UpstreamError(translated(error, endpoint)) from error
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
                await response.aclose()


async def _refusal(response: httpx.Response, endpoint: Endpoint) -> RefusedAnswer:
    body = b""
    with suppress(*FOREIGN):  # A part of a body has words, too.
        check_coding(response)
        async for data in response.aiter_bytes():
            body += data
            if len(body) >= ERROR_BYTES_MAX:
                break
    now = datetime.fromtimestamp(time.time(), UTC)
    failure = failure_of(response.status_code, response.headers, body, now, endpoint.key)
    return RefusedAnswer(failure, body[:ERROR_BYTES_MAX], response.headers)
