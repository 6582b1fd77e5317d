"""Kimi's local server, from a client's side: where it listens, calls by REST, and events by its WebSocket.

The program says its address and a token on its output; the token is kept here. What an event means is not known here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import anyio
import anyio.abc
import httpx
import msgspec
from websockets.client import ClientProtocol
from websockets.uri import parse_uri

from backplane.agents.events import mapping
from backplane.contract.canonical import Json
from backplane.errors import BackendError
from backplane.protocol.lines import EVIDENCE_BYTES, LINE_BYTES_MAX

if TYPE_CHECKING:
    from backplane.process.child import Child

START_S: Final = 60.0
"""Seconds for the program to print its address: two are usual, a cold disk needs more."""
ANSWER_S: Final = 60.0
"""Seconds for an answer to a call."""
OUTPUT_BYTES_MAX: Final = 64 * 1024
"""Most bytes of the program's output in which its address is searched."""
_ADDRESS: Final = re.compile(rb"(http://127\.0\.0\.1:\d{1,5})/\S*token=([\w.~-]+)")

Hear = Callable[[bytes, dict[str, Any]], Awaitable[None]]
"""Takes an event, as it came and as an object."""


class KimiServer:
    """The server of one run.

    Args:
        child: the program.
        hear: takes its events, in order.
    """

    def __init__(self, child: Child, hear: Hear) -> None:
        self._child, self._hear = child, hear
        self._http: httpx.AsyncClient | None = None
        self._url, self._token = "", ""
        self._stream: anyio.abc.ByteStream | None = None
        self._protocol: Any = None
        self._connected, self._gone = anyio.Event(), anyio.Event()

    # Its address ------------------------------------------------------------------------------------------------------

    async def find(self) -> None:
        """Wait until the program says where it listens. Raises BackendError."""
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
        # What is between us and another program of this machine is no proxy's affair, and has no certificates to load.
        self._http = httpx.AsyncClient(
            base_url=self._url, headers=headers, timeout=ANSWER_S, trust_env=False, verify=False
        )

    async def drain(self) -> None:
        """Read the program's output to its end: that is the program's, too."""
        while await _read(self._child.stdout):
            pass
        self._gone.set()

    # Calls ------------------------------------------------------------------------------------------------------------

    async def call(self, method: str, path: str, body: Json = None) -> tuple[int, Json, str]:
        """Ask by REST: its code, 0 for success; its data; its words. Raises BackendError: `backend_crashed`."""
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
        """Ask for something that has to be had. Raises BackendError."""
        code, data, words = await self.call(method, path, body)
        if code != 0:
            raise BackendError("backend_unavailable", f"the agent refused {path}: {words[:2000]}")
        return mapping(data)

    # Events -----------------------------------------------------------------------------------------------------------

    async def connect(self, session: str) -> None:
        """Open the WebSocket, and have the events of a session from here on. Raises BackendError."""
        seen = await self.must("GET", f"/sessions/{session}/snapshot")
        parts = urlsplit(self._url)
        self._stream = await anyio.connect_tcp(str(parts.hostname), parts.port or 80)
        protocol = ClientProtocol(parse_uri(f"ws://{parts.netloc}/api/v1/ws"), max_size=LINE_BYTES_MAX)
        request = protocol.connect()
        request.headers["Authorization"] = f"Bearer {self._token}"
        protocol.send_request(request)
        self._protocol = protocol
        cursor = {"seq": seen.get("as_of_seq", 0), "epoch": seen.get("epoch", "")}
        hello = {"client_id": "backplane", "subscriptions": [session], "cursors": {session: cursor}}
        await self._flush()
        with anyio.move_on_after(ANSWER_S):
            while not protocol.handshake_exc and protocol.state.name == "CONNECTING":
                await self._receive()
        if protocol.state.name != "OPEN":
            raise BackendError(
                "backend_unavailable", f"the agent's server opens no WebSocket: {protocol.handshake_exc}"
            )
        await self.tell("client_hello", hello)
        self._connected.set()

    async def tell(self, kind: str, payload: Json) -> None:
        """Say something by the WebSocket."""
        self._protocol.send_text(msgspec.json.encode({"type": kind, "id": kind, "payload": payload}))
        await self._flush()

    async def run(self) -> None:
        """Hand on events until there are no more."""
        await self._connected.wait()
        parts: list[bytes] = []
        while True:
            for frame in self._protocol.events_received():
                if not hasattr(frame, "opcode"):  # The answer to the handshake.
                    continue
                parts += [bytes(frame.data)] if frame.opcode in (0, 1) else []
                if frame.opcode in (0, 1) and frame.fin:
                    whole, parts = b"".join(parts), []
                    await self._take(whole)
            await self._flush()
            if not await self._receive():
                return

    async def _take(self, line: bytes) -> None:
        try:
            said = mapping(msgspec.json.decode(line))
        except msgspec.DecodeError:
            said = {"type": "malformed", "payload": {"evidence": line[:EVIDENCE_BYTES].decode("utf-8", "replace")}}
        if said.get("type") == "ping":
            await self.tell("pong", said.get("payload"))
        else:
            await self._hear(line, said)

    async def _receive(self) -> bool:
        """Take what comes; False when nothing more does."""
        assert self._stream is not None
        try:
            self._protocol.receive_data(await self._stream.receive())
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return False
        return True

    async def _flush(self) -> None:
        assert self._stream is not None
        for data in self._protocol.data_to_send():
            if data:
                await self._stream.send(data)

    async def close(self) -> None:
        """Close both connections."""
        with anyio.CancelScope(shield=True):
            if self._stream is not None:
                await anyio.aclose_forcefully(self._stream)
            if self._http is not None:
                await self._http.aclose()


async def _read(fd: int) -> bytes:
    await anyio.wait_readable(fd)
    try:
        return os.read(fd, OUTPUT_BYTES_MAX)
    except OSError:
        return b""
