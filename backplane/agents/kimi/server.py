"""Client of Kimi's local server: finds its address, calls it by REST, and receives events by its WebSocket.

The program prints its address and a token; only this file has the token. `reader` interprets the events.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import anyio
import httpx
import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from backplane.agents.events import mapping
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.protocol.lines import EVIDENCE_BYTES, LINE_BYTES_MAX

if TYPE_CHECKING:
    from backplane.process.child import Child

START_S: Final = 60.0
"""Seconds for the program to print its address; then the run fails. Two are usual, a cold disk needs more."""
ANSWER_S: Final = 60.0
"""Seconds for an answer to a call."""
CLOSE_S: Final = 0.5
"""Seconds for the server to confirm that the WebSocket closes; then its program is ended."""
OUTPUT_BYTES_MAX: Final = 64 * 1024
"""Maximum bytes of the program's output that are searched for its address; then the run fails."""
_ADDRESS: Final = re.compile(rb"(http://127\.0\.0\.1:\d{1,5})/\S*token=([\w.~-]+)")

Hear = Callable[[bytes, dict[str, Any]], Awaitable[None]]
"""Callback that takes an event: its line, and the decoded object."""


class KimiServer:
    """The server of one run.

    Args:
        child: the server's process.
        hear: takes the server's events, in order.
    """

    def __init__(self, child: Child, hear: Hear) -> None:
        self._child, self._hear = child, hear
        self._http: httpx.AsyncClient | None = None
        self._url, self._token = "", ""
        self._socket: ClientConnection | None = None
        self._connected = anyio.Event()

    # Its address ------------------------------------------------------------------------------------------------------

    async def find(self) -> None:
        """Wait until the program prints its address. Raises BackendError."""
        said = b""
        with anyio.move_on_after(START_S):
            while (found := _ADDRESS.search(said)) is None and len(said) < OUTPUT_BYTES_MAX:
                data = await _read(self._child.stdout)
                if not data:
                    raise BackendError("backend_crashed", "the agent's program ended before it said where it listens")
                said += data
        if found is None:
            bound = f"within {START_S:g} s and {OUTPUT_BYTES_MAX} bytes"
            raise BackendError("backend_unavailable", f"the agent did not say where it listens {bound}")
        self._url, self._token = found[1].decode(), found[2].decode()
        headers = {"Authorization": f"Bearer {self._token}"}
        # The server is on loopback: no proxy, and no certificates to load.
        self._http = httpx.AsyncClient(
            base_url=self._url, headers=headers, timeout=ANSWER_S, trust_env=False, verify=False
        )

    async def drain(self) -> None:
        """Read the program's output until it ends, which it does when the program ends."""
        while await _read(self._child.stdout):
            pass

    # Calls ------------------------------------------------------------------------------------------------------------

    async def call(self, method: str, path: str, body: Json = None) -> tuple[int, Json, str]:
        """Send a request; return its code (0 is success), data and message. Raises BackendError: `backend_crashed`."""
        assert self._http is not None
        given = {} if method == "GET" else {"json": {} if body is None else body}
        try:
            answer = await self._http.request(method, f"/api/v1{path}", **given)  # type: ignore[arg-type]
            said = mapping(msgspec.json.decode(answer.content))
        except httpx.HTTPError as error:
            raise BackendError("backend_crashed", f"the agent's server does not answer {path}: {error}") from error
        except msgspec.DecodeError as error:
            fact = f"the agent's answer to {path} is no JSON (HTTP {answer.status_code})"
            raise BackendError("contract_schema_violation", fact) from error
        code = said.get("code")
        return (code if isinstance(code, int) else -1), said.get("data"), str(said.get("msg") or answer.status_code)

    async def must(self, method: str, path: str, body: Json = None) -> dict[str, Any]:
        """Send a request that must succeed; return its data. Raises BackendError."""
        code, data, words = await self.call(method, path, body)
        if code != 0:
            raise BackendError("backend_unavailable", f"the agent refused {path}: {words[:2000]}")
        return mapping(data)

    # Events -----------------------------------------------------------------------------------------------------------

    async def connect(self, session: str) -> None:
        """Open the WebSocket, and subscribe to a session's events from now on. Raises BackendError."""
        seen = await self.must("GET", f"/sessions/{session}/snapshot")
        headers = {"Authorization": f"Bearer {self._token}"}
        try:
            self._socket = await connect(
                f"{self._url.replace('http', 'ws', 1)}/api/v1/ws",
                additional_headers=headers, max_size=LINE_BYTES_MAX, open_timeout=ANSWER_S, close_timeout=CLOSE_S,
                ping_interval=None, compression=None, proxy=None,
            )  # fmt: skip
        except (OSError, WebSocketException) as error:
            raise BackendError("backend_unavailable", f"the agent's server opens no WebSocket: {error}") from error
        cursor = {"seq": seen.get("as_of_seq", 0), "epoch": seen.get("epoch", "")}
        hello = {"client_id": "backplane", "subscriptions": [session], "cursors": {session: cursor}}
        await self._send("client_hello", hello)
        self._connected.set()

    async def _send(self, kind: str, payload: Json) -> None:
        assert self._socket is not None
        message = msgspec.json.encode({"type": kind, "id": kind, "payload": payload})
        await self._socket.send(message, text=True)

    async def run(self) -> None:
        """Pass events to `hear` until the WebSocket closes."""
        await self._connected.wait()
        assert self._socket is not None
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self._take(await self._socket.recv(decode=False))

    async def _take(self, line: bytes) -> None:
        try:
            said = mapping(msgspec.json.decode(line))
        except msgspec.DecodeError:
            said = {"type": "malformed", "payload": {"evidence": line[:EVIDENCE_BYTES].decode("utf-8", "replace")}}
        if said.get("type") == "ping":
            await self._send("pong", said.get("payload"))
        else:
            await self._hear(line, said)

    async def close(self) -> None:
        """Close both connections."""
        with anyio.CancelScope(shield=True):
            if self._socket is not None:
                await self._socket.close()
            if self._http is not None:
                await self._http.aclose()


async def _read(fd: int) -> bytes:
    await anyio.wait_readable(fd)
    try:
        return os.read(fd, OUTPUT_BYTES_MAX)
    except OSError:
        return b""
