"""Offers tools of the calling program: functions, definitions with a handler, and calls handed to the caller."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
import msgspec

from backplane.contract.canonical import Json
from backplane.contract.conversation import ToolResultMessage
from backplane.errors import ConfigError
from backplane.protocol.mcp import text_result
from backplane.redact.secrets import Redactor
from backplane.runtime.functions import HandlerResult, Offered, offered, result_of
from backplane.runtime.hook_calls import call_function

if TYPE_CHECKING:
    from backplane.agents.structured import AnswerSchema

__all__ = ["HandlerResult", "Tool", "ToolDefinition", "Toolset"]


class ToolDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A tool with a schema of its own; for most tools, a Python function is enough."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of the input, an object. An input that violates it is answered with the fault and reaches no handler;
    a call that the caller runs is not checked."""
    handler: Callable[[Any], Any] | None = None
    """Plain or `async` function from the input to a text, a `HandlerResult` or JSON; None: the caller runs the call."""


Tool = ToolDefinition | Callable[..., Any]


T = TypeVar("T")


class Mailbox(Generic[T]):
    """Passes values, by name, from one task to another that waits for them; the limits of the run bound the wait."""

    def __init__(self) -> None:
        self._values = defaultdict[str, list[T]](list)
        self._changed = anyio.Event()

    def send(self, name: str, value: T) -> None:
        self._values[name].append(value)
        self._changed.set()
        self._changed = anyio.Event()

    async def receive(self, name: str) -> T:
        """Wait for the oldest value of this name."""
        while not self._values[name]:
            await self._changed.wait()
        return self._values[name].pop(0)


class Toolset:
    """The tools of a session.

    Attributes:
        handed: names of the tools that the caller runs.
        results: the caller's results, by the name of the tool.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._given = tuple(tools)
        self.results = Mailbox[ToolResultMessage]()
        self.offered: list[Offered] = [
            _Defined(tool, self.results) if isinstance(tool, ToolDefinition) else offered(tool) for tool in tools
        ]
        self.names = frozenset(tool.name for tool in self.offered)
        self.handed = frozenset(tool.name for tool in tools if isinstance(tool, ToolDefinition) and not tool.handler)
        if len(self.names) < len(self.offered):
            raise ConfigError("config_invalid", "two of the tools have one name", hint="give each a name of its own")

    def with_more(self, tools: Sequence[Tool]) -> Toolset:
        """Return a set with more tools; this set if `tools` is empty. Raises ConfigError: two tools have one name."""
        return Toolset((*self._given, *tools)) if tools else self


class _Defined:
    """A `ToolDefinition` in the form that the server of functions takes."""

    def __init__(self, definition: ToolDefinition, results: Mailbox[ToolResultMessage]) -> None:
        if not definition.name.isidentifier():
            fix = "letters, digits and _"
            raise ConfigError("config_invalid", f"{definition.name[:80]!r} is no name for a tool", hint=fix)
        self._definition, self._results = definition, results

    @property
    def name(self) -> str:
        return self._definition.name

    def row(self) -> Json:
        made = self._definition
        return {"name": made.name, "description": made.description, "inputSchema": made.parameters}

    async def call(self, arguments: Json, redactor: Redactor) -> Json:
        handler = self._definition.handler
        if handler is None:
            given = await self._results.receive(self.name)
            return text_result(given.content, is_error=given.is_error)
        input = {} if arguments is None else arguments
        try:
            fault = self._schema.read(msgspec.json.encode(input).decode())[1]
        except ConfigError as error:
            fault = f"its parameters are no schema: {error.message}"
        if fault is not None:
            return text_result(f"the arguments do not fit: {fault}", is_error=True)
        return await result_of(functools.partial(call_function, handler, input), handler, redactor)

    @functools.cached_property
    def _schema(self) -> AnswerSchema:
        from backplane.agents.structured import AnswerSchema  # It takes 60 ms to load: only who is called pays.

        return AnswerSchema(self._definition.parameters)
