"""Serves functions of the calling program as tools for its agent, by an MCP server on a socket during one run.

The agent starts `process/bridge.py` as the server's command; the bridge connects it to this process.
"""

from __future__ import annotations

import functools
import inspect
import os
import socket
import sys
import tempfile
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.errors import ConfigError
from backplane.process import bridge
from backplane.process.aio import LoopTask, visited
from backplane.process.jsonrpc import Pipe
from backplane.protocol.jsonrpc import INVALID_PARAMS, METHOD_NOT_FOUND, Notification, Request, RpcError
from backplane.protocol.mcp import greeting, text_result
from backplane.redact.secrets import Redactor
from backplane.runtime.hook_calls import call_function, log_raised
from backplane.runtime.orders import schema_of

SERVER: Final = "functions"
"""Name of the server in the order; agents call its tools `mcp__functions__NAME`."""

BRIDGE: Final = os.path.realpath(bridge.__file__)

CLIENTS_MAX: Final = 16
"""Limit of connected bridges; an agent starts one, and one more for each of its subagents."""

Function = Callable[..., Any]


class HandlerResult(msgspec.Struct, frozen=True):
    """A result that a tool's function may return in place of a plain value."""

    output: str
    is_error: bool = False


class Offered(typing.Protocol):
    """A tool that describes itself; `FunctionTool` makes one from a function's signature."""

    @property
    def name(self) -> str: ...
    def row(self) -> Json: ...
    async def call(self, arguments: Json, redactor: Redactor) -> Json: ...


class FunctionTool:
    """A tool that calls one function, plain or `async`; the function's signature gives the tool's schema.

    Raises:
        ConfigError: `config_invalid`, the function has no name, no signature, or parameters without names.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.name = getattr(function, "__name__", "")
        if not callable(function) or not self.name.isidentifier():
            raise _invalid(f"{function!r:.80} is no function with a name", "give a function made by `def`")
        try:
            hints = typing.get_type_hints(function, include_extras=True)
            rows: list[Any] = []
            for parameter in inspect.signature(function).parameters.values():
                if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                    raise TypeError(f"the parameter `{parameter}` has no name of its own")
                row = (parameter.name, hints.get(parameter.name, Any))
                rows.append(row if parameter.default is parameter.empty else (*row, parameter.default))
            self._input = msgspec.defstruct(f"{self.name}_input", rows, forbid_unknown_fields=True, kw_only=True)
            self.schema = {key: value for key, value in schema_of(self._input).items() if key != "title"}
        except (TypeError, ValueError, NameError, ConfigError) as error:
            raise _invalid(f"the function {self.name} cannot be a tool: {error}", "annotate its parameters") from error

    def row(self) -> Json:
        """Return the tool's entry in the result of `tools/list`."""
        return {"name": self.name, "description": inspect.getdoc(self.function) or "", "inputSchema": self.schema}

    async def call(self, arguments: Json, redactor: Redactor) -> Json:
        """Call the function with a model's arguments; wrong arguments and exceptions become results with `isError`."""
        try:
            given = msgspec.convert({} if arguments is None else arguments, self._input)
        except msgspec.ValidationError as error:
            return text_result(f"the arguments do not fit: {error}", is_error=True)
        members = {name: getattr(given, name) for name in self._input.__struct_fields__}
        return await result_of(functools.partial(call_function, self.function, **members), self.function, redactor)


async def result_of(call: Callable[[], Awaitable[Any]], function: Function, redactor: Redactor) -> Json:
    """Call a tool's function; return its text, `HandlerResult`, JSON value or exception as an MCP result."""
    try:
        value = await call()
        if isinstance(value, HandlerResult):
            return text_result(value.output, is_error=value.is_error)
        return text_result(value if isinstance(value, str) else msgspec.json.encode(value).decode())
    except Exception as error:  # The caller's own code: the agent gets the error, and the log the traceback.
        return text_result(log_raised("tool", function, error, redactor), is_error=True)


@asynccontextmanager
async def served(functions: Sequence[Function | Offered], secrets: Iterable[str] = ()) -> AsyncIterator[Json]:
    """Serve functions and tools on a socket; yield the server's row for `config.vendor.abp.mcp_servers`.

    Args:
        secrets: values to redact in the texts of exceptions.

    Raises:
        ConfigError: `config_invalid`, a function cannot be a tool, or two have the same name.
    """
    tools = {tool.name: tool for tool in map(offered, functions)}
    if len(tools) < len(functions):
        raise _invalid("two of the functions have one name", "give each a name of its own")
    redactor = Redactor(secrets)
    with (
        tempfile.TemporaryDirectory(prefix="backplane-tools-", ignore_cleanup_errors=True) as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        listener.bind(os.path.join(folder, "socket"))
        listener.listen(CLIENTS_MAX)
        listener.setblocking(False)
        talk = functools.partial(_talk, tools=tools, redactor=redactor)
        serving = LoopTask(functools.partial(visited, listener, talk, CLIENTS_MAX))
        try:
            words = ["-I", "-S", BRIDGE, os.path.join(folder, "socket")]
            yield {"name": SERVER, "command": sys.executable, "args": words}
        finally:
            serving.scope.cancel()
            await serving.wait()


def offered(tool: Function | Offered) -> Offered:
    """Return a tool unchanged, or make a tool from a function. Raises ConfigError as `FunctionTool`."""
    return typing.cast("Offered", tool) if hasattr(tool, "row") and hasattr(tool, "call") else FunctionTool(tool)


async def _talk(client: socket.socket, tools: dict[str, Offered], redactor: Redactor) -> None:
    async def answer(asked: Request) -> Json | RpcError:
        if asked.method == "initialize":
            return greeting(asked.params, name=SERVER, version="1")
        if asked.method == "ping":
            return {}
        if asked.method == "tools/list":
            return {"tools": [tool.row() for tool in tools.values()]}
        if asked.method != "tools/call":
            return RpcError(METHOD_NOT_FOUND, f"this server has no method {asked.method[:80]}")
        tool = tools.get(str(asked.params.get("name")))
        if tool is None:
            return RpcError(INVALID_PARAMS, f"no such tool; there are {', '.join(tools)}")
        return await tool.call(asked.params.get("arguments"), redactor)

    async def hear(_: Notification) -> None:
        return

    try:
        await Pipe(client.fileno(), client.fileno(), answer=answer, hear=hear, strict=True).run()
    except* OSError:  # The agent's bridge is gone.
        pass


def _invalid(fact: str, hint: str) -> ConfigError:
    return ConfigError("config_invalid", fact, hint=hint)
