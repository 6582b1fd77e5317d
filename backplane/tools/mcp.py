"""Starts or reaches MCP servers, and calls their tools, for a model that has no client of its own.

A server is a command that uses its pipes, or an address that takes each request as a POST (streamable HTTP).
Deciding whether a tool may run is the host's part.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Protocol

import anyio
import httpx
import msgspec

from backplane.contract.canonical import Json
from backplane.dialects import framing
from backplane.dialects.ir import ToolSpec
from backplane.errors import BackendError, BackplaneError
from backplane.process.aio import beside
from backplane.process.child import Child, open_child
from backplane.process.jsonrpc import Pipe
from backplane.process.launch import StartCommand
from backplane.protocol.jsonrpc import METHOD_NOT_FOUND, Peer, Response, RpcError
from backplane.tools.results import CallResult, shortened
from backplane.tools.specs import NO_OBJECT
from backplane.upstream.clients import is_http, making_client

VERSION: Final = "2025-06-18"

START_S: Final = 60.0
"""Seconds for a server to start and list its tools; one that is downloaded first takes 30."""

CALL_S: Final = 300.0
"""Most seconds of a call if the server's row has no `tool_ms`; a run without an event ends after as many."""

LAST_WORDS_S: Final = 0.5
"""Seconds to wait for the exit of a program whose output has ended, so that all of its stderr is read."""

LAST_WORDS_BYTES: Final = 1000
"""Most bytes of a dead program's stderr that are shown, the last ones, as these have the reason."""

TOOLS_MAX: Final = 256
"""Most tools of one server; models choose badly among more than some dozens."""

NAME_CHARS_MAX: Final = 64
"""Most characters of a tool's whole name, the documented limit of the model services."""

ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
"""Most bytes of an answer over HTTP; on a pipe the limit of a line applies."""

GRACE_S: Final = 2.0
"""Seconds for a server to end after its input has ended."""

_ILLEGAL: Final = re.compile(r"[^A-Za-z0-9_-]")

Warn = Callable[[str, str], Awaitable[object]]
"""Callback that takes the name of a server that is missing, and the reason."""


class Servers:
    """The tools of all servers of a run."""

    def __init__(self) -> None:
        self.specs: tuple[ToolSpec, ...] = ()
        """The tools as a model sees them; each is named `mcp__SERVER__TOOL`."""
        self._calls: dict[str, tuple[_Link, str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._calls

    def add(self, server: str, rows: list[dict[str, Any]], link: _Link) -> None:
        """Add a server's tools; the first of two with one name counts."""
        for row in rows:
            own = str(row.get("name", ""))
            name = _ILLEGAL.sub("_", f"mcp__{server}__{own}")[:NAME_CHARS_MAX]
            if own and name not in self._calls:
                self._calls[name] = (link, own)
                schema = row.get("inputSchema")
                text = str(row.get("description") or row.get("title") or own)
                self.specs += (ToolSpec(name=name, description=text, schema=schema or {"type": "object"}),)

    async def call(self, name: str, input: Json) -> CallResult:
        """Call a tool; a failure becomes a result for the model."""
        link, own = self._calls[name]
        if not isinstance(input, dict):
            return CallResult(NO_OBJECT, is_error=True)
        try:
            reply = await link.ask("tools/call", {"name": own, "arguments": input})
        except BackendError as error:
            return CallResult(f"{name} failed: {error.message}", is_error=True)
        if reply.fault is not None:
            words = await link.last_words() if reply.fault.gone else ""
            return CallResult(f"{name} failed: {reply.fault.message}{words}", is_error=True)
        return _read_result(reply.result)


@asynccontextmanager
async def open_servers(
    rows: Mapping[str, Mapping[str, Any]], *, env: Mapping[str, str], cwd: str, warn: Warn
) -> AsyncIterator[Servers]:
    """Start servers and list their tools, all at once; a server that fails is a warning.

    Args:
        rows: name → command, args and env, or url and headers; `tool_ms` is the longest call in milliseconds.
        env: environment of started servers; a row's own variables replace it.
        cwd: folder in which servers start.
    """
    servers = Servers()
    greeted: dict[str, tuple[list[dict[str, Any]], _Link]] = {}

    async def greet(name: str, link: _Link) -> None:
        try:
            with anyio.fail_after(START_S):
                greeted[name] = (await _greet(link), link)
        except (BackendError, TimeoutError) as error:
            why = getattr(error, "message", None) or "no answer"
            await warn(name, f"the MCP server {name!r} is not there: {why}{await link.last_words()}")

    async with AsyncExitStack() as opened:
        links: dict[str, _Link] = {}
        for name, row in rows.items():
            try:
                opening = _open_http(row) if row.get("url") else _open_command(row, env, cwd)
                links[name] = await opened.enter_async_context(opening)
            except BackplaneError as error:
                await warn(name, f"the MCP server {name!r} is not there: {error.message}")
        async with anyio.create_task_group() as starts:
            for name, link in links.items():
                starts.start_soon(greet, name, link)
        for name in rows:
            if name in greeted:
                servers.add(name, *greeted[name])
        yield servers


class _Link(Protocol):
    async def ask(self, method: str, params: dict[str, Any]) -> Response: ...
    async def tell(self, method: str) -> None: ...
    async def last_words(self) -> str:
        """Return the end of a dead program's stderr as a clause for an error; empty if there is none."""
        ...


async def _greet(link: _Link) -> list[dict[str, Any]]:
    """Shake hands and return the rows of the server's tools. Raises BackendError."""
    hello = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "backplane", "version": "1"}}
    _must(await link.ask("initialize", hello))
    await link.tell("notifications/initialized")
    rows: list[dict[str, Any]] = []
    page: dict[str, Any] = {}
    while True:  # `START_S` bounds empty pages.
        found = _must(await link.ask("tools/list", page))
        rows += [row for row in found.get("tools") or () if isinstance(row, dict)]
        page = {"cursor": found.get("nextCursor")}
        if not isinstance(page["cursor"], str) or len(rows) >= TOOLS_MAX:
            return rows[:TOOLS_MAX]


def _must(reply: Response) -> dict[str, Any]:
    if reply.fault is not None:
        raise BackendError("execution_tool_failed", reply.fault.message)
    return reply.result if isinstance(reply.result, dict) else {}


def _read_result(result: Json) -> CallResult:
    if not isinstance(result, dict):
        return CallResult("the server gave no result", is_error=True)
    parts = [part for part in result.get("content") or () if isinstance(part, dict)]
    texts = [_text_of(part) for part in parts]
    if not texts and result.get("structuredContent") is not None:
        texts = [msgspec.json.encode(result["structuredContent"]).decode()]
    return CallResult(shortened("\n".join(texts)), is_error=result.get("isError") is True)


def _text_of(part: dict[str, Any]) -> str:
    if part.get("type") == "text":
        return str(part.get("text", ""))
    resource = part.get("resource")
    if isinstance(resource, dict) and isinstance(resource.get("text"), str):
        return f"{resource.get('uri')}:\n{resource['text']}"
    return f"[{part.get('type')}, which is not shown]"


def _call_s(row: Mapping[str, Any]) -> float:
    return row["tool_ms"] / 1000 if row.get("tool_ms") else CALL_S


# A command ------------------------------------------------------------------------------------------------------------


class _Program:
    def __init__(self, pipe: Pipe, child: Child, call_s: float) -> None:
        self._pipe, self._child, self._call_s = pipe, child, call_s

    async def ask(self, method: str, params: dict[str, Any]) -> Response:
        return await self._pipe.call(method, params, timeout_s=self._call_s)

    async def tell(self, method: str) -> None:
        await self._pipe.notify(method, {})

    async def last_words(self) -> str:
        if await self._child.wait(LAST_WORDS_S) is None:
            return ""
        await self._child.stop(grace_s=0)
        words = self._child.stderr_tail[-LAST_WORDS_BYTES:].decode("utf-8", "replace").strip()
        return f"; its stderr: {words}" if words else ""


@asynccontextmanager
async def _open_command(row: Mapping[str, Any], env: Mapping[str, str], cwd: str) -> AsyncIterator[_Link]:
    async def refuse(_: object) -> RpcError:
        return RpcError(METHOD_NOT_FOUND, "this client answers nothing")

    async def hear(_: object) -> None:
        return

    whole = {"PATH": os.defpath, **env, **row.get("env", {})}
    command = StartCommand(argv=(row["command"], *row.get("args", ())), env=whole, cwd=cwd)
    async with open_child(command) as child:
        pipe = Pipe(child.stdin, child.stdout, answer=refuse, hear=hear)
        try:
            async with beside(pipe.run):
                yield _Program(pipe, child, _call_s(row))
        finally:
            with anyio.CancelScope(shield=True):
                await child.stop(grace_s=GRACE_S)


# An address -----------------------------------------------------------------------------------------------------------


class _Address:
    """Streamable HTTP: each request a POST, its answer a JSON body or a document of an event stream."""

    def __init__(self, http: httpx.AsyncClient, url: str, call_s: float) -> None:
        self._http, self._url, self._call_s = http, url, call_s
        self._peer = Peer(ANSWER_BYTES_MAX)
        self._session: dict[str, str] = {"MCP-Protocol-Version": VERSION}

    async def ask(self, method: str, params: dict[str, Any]) -> Response:
        """Send a request and return its answer. Raises BackendError."""
        id, line = self._peer.call(method, params)
        for document in await self._post(line, method):
            received = self._peer.read(document)
            if isinstance(received, Response) and received.id == id:
                return received
        raise BackendError("execution_tool_failed", f"no answer to {method}")

    async def tell(self, method: str) -> None:
        await self._post(self._peer.notify(method, {}), method)

    async def last_words(self) -> str:
        return ""

    async def _post(self, line: bytes, method: str) -> list[bytes]:
        """Send a message and return the JSON documents of the answer."""
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **self._session}
        try:
            with anyio.fail_after(self._call_s):
                async with self._http.stream("POST", self._url, content=line, headers=headers) as response:
                    if "mcp-session-id" in response.headers:
                        self._session["Mcp-Session-Id"] = response.headers["mcp-session-id"]
                    body = bytearray()
                    async for piece in response.aiter_bytes():
                        body += piece
                        if len(body) > ANSWER_BYTES_MAX:
                            raise BackendError("execution_tool_failed", f"an answer of over {ANSWER_BYTES_MAX} bytes")
        except TimeoutError as error:
            fact = f"no answer to {method} within {self._call_s:g} s"
            raise BackendError("backend_timeout", fact) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise BackendError("execution_tool_failed", str(error) or type(error).__name__) from error
        if response.status_code >= 400:
            raise BackendError("execution_tool_failed", f"HTTP {response.status_code} from {self._url}")
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "text/event-stream":
            events = framing.Sse()
            return [msgspec.json.encode(document) for document in (*events.feed(bytes(body)), *events.finish())]
        return [bytes(body)]


@asynccontextmanager
async def _open_http(row: Mapping[str, Any]) -> AsyncIterator[_Link]:
    url, call_s = row["url"], _call_s(row)
    if not is_http(url):  # The URL may hold a key, so it is not shown.
        raise BackendError("execution_tool_failed", "its address is no http address")
    with making_client():
        waits, is_https = httpx.Timeout(call_s, connect=START_S), url.startswith("https:")
        # Certificates take 20 ms to load and are used by TLS alone.
        client = httpx.AsyncClient(headers=row.get("headers", {}), timeout=waits, verify=is_https)
    async with client as http:
        yield _Address(http, url, call_s)
