"""Tools of MCP servers for a model that has no client of its own: servers started or reached, their tools called.

A server is a command that speaks on its pipes, or an address that takes a request a POST (streamable HTTP).
Deciding whether a tool may run is the host's part.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Final, Protocol

import anyio
import anyio.abc
import httpx
import msgspec

from backplane.contract.canonical import Json
from backplane.errors import BackendError, BackplaneError
from backplane.ir import ToolSpec
from backplane.process.child import open_child
from backplane.process.jsonrpc import Pipe
from backplane.process.launch import StartCommand
from backplane.protocol.jsonrpc import METHOD_NOT_FOUND, Peer, Response, RpcError
from backplane.tools.results import CallResult, shortened
from backplane.tools.specs import NO_OBJECT
from backplane.upstream.clients import is_http, making_client

VERSION: Final = "2025-06-18"

START_S: Final = 60.0
"""For a server to start and list its tools: one that is fetched first takes half a minute."""

CALL_S: Final = 600.0
"""For one call: as long as the longest command."""

TOOLS_MAX: Final = 256
"""Tools of one server: models choose badly among more than some dozens."""

PAGES_MAX: Final = 16
"""Pages of one list of tools."""

NAME_CHARS_MAX: Final = 64
"""Of a tool's whole name, by the documented limit of the model services."""

ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
"""One answer over HTTP; on a pipe the limit of a line holds."""

GRACE_S: Final = 2.0
"""For a server to end once its input has ended."""

_ILLEGAL: Final = re.compile(r"[^A-Za-z0-9_-]")

AskServer = Callable[[str, dict[str, Any]], Awaitable[Response]]
Warn = Callable[[str], Awaitable[object]]


class Servers:
    """The tools of all servers of a run."""

    def __init__(self) -> None:
        self.specs: tuple[ToolSpec, ...] = ()
        """What a model is told of them; each is named `mcp__SERVER__TOOL`."""
        self._calls: dict[str, tuple[AskServer, str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._calls

    def add(self, server: str, rows: list[dict[str, Any]], ask: AskServer) -> None:
        """Take in a server's tools; of two with one name the first counts."""
        for row in rows:
            own = str(row.get("name", ""))
            name = _ILLEGAL.sub("_", f"mcp__{server}__{own}")[:NAME_CHARS_MAX]
            if own and name not in self._calls:
                self._calls[name] = (ask, own)
                schema = row.get("inputSchema")
                text = str(row.get("description") or row.get("title") or own)
                self.specs += (ToolSpec(name=name, description=text, schema=schema or {"type": "object"}),)

    async def call(self, name: str, input: Json) -> CallResult:
        """Call a tool; whatever goes wrong is told to the model as a result."""
        ask, own = self._calls[name]
        if not isinstance(input, dict):
            return CallResult(NO_OBJECT, is_error=True)
        try:
            reply = await ask("tools/call", {"name": own, "arguments": input})
        except BackendError as error:
            return CallResult(f"{name} failed: {error.message}", is_error=True)
        if reply.fault is not None:
            return CallResult(f"{name} failed: {reply.fault.message}", is_error=True)
        return _read_result(reply.result)


@asynccontextmanager
async def open_servers(
    rows: Mapping[str, Mapping[str, Any]], *, env: Mapping[str, str], cwd: str, warn: Warn
) -> AsyncIterator[Servers]:
    """Start and greet servers, all at once; one that does not come is warned about, and the run goes on without it.

    Args:
        rows: name → command, args and env, or url and headers.
        env: the environment of those that are started, under a row's own.
        cwd: the folder they are started in.
    """
    servers, fault = Servers(), None
    async with anyio.create_task_group() as tasks, AsyncExitStack() as opened:
        greeted: dict[str, tuple[list[dict[str, Any]], AskServer]] = {}

        async def greet(name: str, ask: AskServer, tell: Callable[[str], Awaitable[None]]) -> None:
            try:
                with anyio.fail_after(START_S):
                    greeted[name] = (await _greet(ask, tell), ask)
            except (BackendError, TimeoutError) as error:
                await warn(f"the MCP server {name!r} is not there: {getattr(error, 'message', None) or 'no answer'}")

        links: dict[str, _Link] = {}
        for name, row in rows.items():
            try:
                links[name] = await opened.enter_async_context(_open(row, env, cwd, tasks))
            except BackplaneError as error:
                await warn(f"the MCP server {name!r} is not there: {error.message}")
        async with anyio.create_task_group() as starts:
            for name, link in links.items():
                starts.start_soon(greet, name, link.ask, link.tell)
        for name in rows:
            if name in greeted:
                servers.add(name, *greeted[name])
        try:
            yield servers
        except Exception as error:
            fault = error
        tasks.cancel_scope.cancel()
    if fault is not None:
        raise fault  # Here, as the group would have put it into a group of its own.


class _Link(Protocol):
    async def ask(self, method: str, params: dict[str, Any]) -> Response: ...
    async def tell(self, method: str) -> None: ...


def _open(
    row: Mapping[str, Any], env: Mapping[str, str], cwd: str, tasks: anyio.abc.TaskGroup
) -> AbstractAsyncContextManager[_Link]:
    if row.get("url"):
        return _open_http(row)
    return _open_command(row, {"PATH": os.defpath, **env, **row.get("env", {})}, cwd, tasks)


async def _greet(ask: AskServer, tell: Callable[[str], Awaitable[None]]) -> list[dict[str, Any]]:
    """Shake hands and return the rows of the server's tools. Raises BackendError."""
    hello = {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": {"name": "backplane", "version": "1"}}
    _must(await ask("initialize", hello))
    await tell("notifications/initialized")
    rows: list[dict[str, Any]] = []
    params: dict[str, Any] = {}
    for _ in range(PAGES_MAX):
        found = _must(await ask("tools/list", params))
        rows += [row for row in found.get("tools", ()) if isinstance(row, dict)]
        if not isinstance(found.get("nextCursor"), str) or len(rows) >= TOOLS_MAX:
            break
        params = {"cursor": found["nextCursor"]}
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


# A command ------------------------------------------------------------------------------------------------------------


class _Program:
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    async def ask(self, method: str, params: dict[str, Any]) -> Response:
        return await self._pipe.call(method, params, timeout_s=CALL_S)

    async def tell(self, method: str) -> None:
        await self._pipe.notify(method, {})


@asynccontextmanager
async def _open_command(
    row: Mapping[str, Any], env: dict[str, str], cwd: str, tasks: anyio.abc.TaskGroup
) -> AsyncIterator[_Link]:
    async def refuse(_: object) -> RpcError:
        return RpcError(METHOD_NOT_FOUND, "this client answers nothing")

    async def hear(_: object) -> None:
        return

    command = StartCommand(argv=(row["command"], *row.get("args", ())), env=env, cwd=cwd)
    async with open_child(command) as child:
        pipe = Pipe(child.stdin, child.stdout, answer=refuse, hear=hear)
        tasks.start_soon(pipe.run)
        try:
            yield _Program(pipe)
        finally:
            with anyio.CancelScope(shield=True):
                await child.stop(grace_s=GRACE_S)


# An address -----------------------------------------------------------------------------------------------------------


class _Address:
    """Streamable HTTP: each request a POST, its answer a JSON body or the last document of an event stream."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http, self._url = http, url
        self._peer = Peer(ANSWER_BYTES_MAX)
        self._session: dict[str, str] = {"MCP-Protocol-Version": VERSION}

    async def ask(self, method: str, params: dict[str, Any]) -> Response:
        """Send a request and return its answer. Raises BackendError."""
        id, line = self._peer.call(method, params)
        for document in (await self._post(line)).split(b"\n"):
            data = document.removeprefix(b"data:").strip()
            received = self._peer.read(data) if data.startswith(b"{") else None
            if isinstance(received, Response) and received.id == id:
                return received
        raise BackendError("execution_tool_failed", f"no answer to {method}")

    async def tell(self, method: str) -> None:
        await self._post(self._peer.notify(method, {}))

    async def _post(self, line: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **self._session}
        try:
            async with self._http.stream("POST", self._url, content=line, headers=headers) as response:
                if "mcp-session-id" in response.headers:
                    self._session["Mcp-Session-Id"] = response.headers["mcp-session-id"]
                body = bytearray()
                async for piece in response.aiter_bytes():
                    body += piece
                    if len(body) > ANSWER_BYTES_MAX:
                        raise BackendError("execution_tool_failed", f"an answer of over {ANSWER_BYTES_MAX} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise BackendError("execution_tool_failed", str(error) or type(error).__name__) from error
        if response.status_code >= 400:
            raise BackendError("execution_tool_failed", f"HTTP {response.status_code} from {self._url}")
        # A pretty-printed body is one document, too.
        return bytes(body if b"data:" in body else body.replace(b"\r", b" ").replace(b"\n", b" "))


@asynccontextmanager
async def _open_http(row: Mapping[str, Any]) -> AsyncIterator[_Link]:
    limits = httpx.Timeout(CALL_S, connect=START_S)
    if not is_http(row["url"]):
        raise BackendError("execution_tool_failed", "its address is no http address")  # Not shown: it may hold a key.
    with making_client():
        # Certificates take 20 ms to load, and nothing without TLS looks at them.
        client = httpx.AsyncClient(
            headers=row.get("headers", {}),
            timeout=limits,
            follow_redirects=False,
            verify=row["url"].startswith("https:"),
        )
    async with client as http:
        yield _Address(http, row["url"])
