"""Sends the gateway's requests to services, over connections that are kept for further requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import anyio
import httpx

from backplane.upstream.client import KEPT_S, answer_to, client_of
from backplane.upstream.endpoint import CONNECT_S, Endpoint
from backplane.upstream.lean import LeanClient, is_lean

KEPT_MAX: Final = 64
"""Maximum unused connections that are kept for each service."""


class Services:
    """Connections to all services; `async with` closes them."""

    def __init__(self) -> None:
        self._clients: dict[tuple[str, float], httpx.AsyncClient | LeanClient] = {}
        self._opened = AsyncExitStack()

    async def __aenter__(self) -> Services:
        return self

    async def __aexit__(self, *error: object) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
            await self._opened.aclose()

    async def _client(self, endpoint: Endpoint) -> httpx.AsyncClient | LeanClient:
        key = (endpoint.base_url, endpoint.timeout_s)
        if key not in self._clients:
            if is_lean(endpoint.base_url):
                lean = LeanClient(
                    endpoint.base_url, timeout_s=endpoint.timeout_s, connect_s=CONNECT_S, kept_max=KEPT_MAX,
                    kept_s=KEPT_S,
                )  # fmt: skip
                self._clients[key] = await self._opened.enter_async_context(lean)
            else:
                limits = httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_MAX, keepalive_expiry=KEPT_S)
                self._clients[key] = await self._opened.enter_async_context(client_of(endpoint, limits))
        return self._clients[key]

    @asynccontextmanager
    async def send(
        self, endpoint: Endpoint, url: str, headers: Mapping[str, str], body: bytes, method: str = "POST"
    ) -> AsyncIterator[httpx.Response]:
        """Send a request and yield the successful answer before its body is read; leaving early closes the socket.

        Raises:
            UpstreamError: the service cannot be reached, refuses (`RefusedAnswer`), or breaks the connection.
        """
        client = await self._client(endpoint)
        async with answer_to(client, endpoint, url, headers, body, method) as response:
            yield response
