"""Functions of a program as tools: their schemas, and the server that agents reach them by."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Literal

import anyio
import anyio.from_thread
import msgspec
import pytest

import backplane
from backplane.providers import HandlerResult, ToolDefinition
from backplane.providers.tools import Toolset
from backplane.runtime.functions import FunctionTool, served
from backplane.runtime.hook_calls import call_function
from tests.peers import Child


class Place(msgspec.Struct):
    city: str
    zip: int = 0


def weather(place: Place, unit: Literal["c", "f"] = "c", days: Annotated[int, msgspec.Meta(ge=1, le=9)] = 1) -> str:
    """Say how the weather will be."""
    return f"{days} days of sun in {place.city}, 20 {unit}"


async def doubled(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


def broken() -> None:
    raise LookupError("nothing is here")


def exploding(path: str) -> bytes:
    return b"\xff" * 3


def starred(*words: str) -> None: ...


def unknown(thing: Nothing) -> None: ...  # type: ignore[name-defined]  # noqa: F821


class Client(Child):
    """An agent's end: the row's own command, spoken to over its pipes."""

    ids = 0

    def ask(self, method: str, **params: Any) -> Any:
        self.ids += 1
        self.send({"jsonrpc": "2.0", "id": self.ids, "method": method, "params": params})
        said = self.read()
        assert said["id"] == self.ids
        return said.get("result", said.get("error"))

    def call(self, name: str, **arguments: Any) -> tuple[str, bool]:
        result = self.ask("tools/call", name=name, arguments=arguments)
        return result["content"][0]["text"], result["isError"]


@contextmanager
def client(*functions: Any) -> Iterator[Client]:
    with anyio.from_thread.start_blocking_portal() as portal:
        with portal.wrap_async_context_manager(served(functions)) as row:
            made = Client([row["command"], *row["args"]])
            yield made
        with made:
            made.close_stdin()
            assert made.read() is None
            assert made.wait() == 0
        assert not Path(row["args"][-1]).parent.exists()


def test_a_signature_is_the_schema_and_the_docstring_the_description() -> None:
    row: Any = FunctionTool(weather).row()
    assert (row["name"], row["description"]) == ("weather", "Say how the weather will be.")
    schema = row["inputSchema"]
    assert schema["type"] == "object"
    assert schema["required"] == ["place"]
    assert schema["properties"]["unit"] == {"enum": ["c", "f"], "default": "c"}
    assert schema["properties"]["days"] == {"type": "integer", "minimum": 1, "maximum": 9, "default": 1}
    assert schema["$defs"]["Place"]["properties"]["city"] == {"type": "string"}


def test_an_agent_lists_and_calls_functions() -> None:
    with client(weather, doubled, broken, exploding) as agent:
        assert agent.ask("initialize", protocolVersion="2025-06-18")["protocolVersion"] == "2025-06-18"
        names = [row["name"] for row in agent.ask("tools/list")["tools"]]
        assert names == ["weather", "doubled", "broken", "exploding"]
        assert agent.call("weather", place={"city": "Ulm"}, days=2) == ("2 days of sun in Ulm, 20 c", False)
        assert agent.call("doubled", numbers=[1, 2]) == ("[2,4]", False)
        assert agent.call("broken") == ("LookupError: nothing is here", True)
        text, is_error = agent.call("weather", place={"city": 7})
        assert (is_error, "Expected `str`, got `int` - at `$.place.city`" in text) == (True, True)
        text, is_error = agent.call("weather", place={"city": "Ulm"}, day=2)
        assert (is_error, "`day`" in text) == (True, True)
        assert "no such tool; there are weather, doubled" in agent.ask("tools/call", name="wether")["message"]
        assert agent.ask("prompts/list")["code"] == -32601


def cut_off() -> None:
    raise asyncio.CancelledError


async def cut_off_later() -> None:
    task = asyncio.create_task(asyncio.sleep(5))
    task.cancel()
    await task


def test_a_task_that_a_function_lost_is_its_own_error_and_the_other_tools_go_on() -> None:
    with client(doubled, cut_off, cut_off_later) as agent:
        for name in ("cut_off", "cut_off_later"):
            text, is_error = agent.call(name)
            assert (is_error, "CancelledError: a task that it waited for was cancelled" in text) == (True, True)
        assert agent.call("doubled", numbers=[1]) == ("[2]", False)


@pytest.mark.anyio
async def test_only_a_cancellation_of_the_call_ends_its_task() -> None:
    with pytest.raises(RuntimeError, match="CancelledError"):
        await call_function(cut_off)
    for waits in (anyio.sleep_forever, threading.Event().wait):
        with anyio.move_on_after(0.05) as scope:
            await call_function(waits)
        assert scope.cancelled_caught


VARIABLE: ContextVar[int] = ContextVar("VARIABLE")


@pytest.mark.anyio
async def test_a_function_in_a_thread_has_the_callers_context_and_no_loop() -> None:
    async def seven() -> int:
        return VARIABLE.get()

    VARIABLE.set(7)
    assert await call_function(lambda: anyio.run(seven)) == 7
    with pytest.raises(SystemExit):
        await call_function(sys.exit, 3)


def refused() -> HandlerResult:
    return HandlerResult("not today", is_error=True)


@pytest.mark.parametrize("kind", ["function", "definition"])
def test_a_function_says_itself_that_it_failed(kind: str) -> None:
    definition = ToolDefinition(
        name="refused", description="", parameters={"type": "object"}, handler=lambda _: refused()
    )
    (tool,) = Toolset([refused if kind == "function" else definition]).offered
    with client(tool) as agent:
        assert agent.call("refused") == ("not today", True)


def test_what_a_definitions_schema_does_not_take_reaches_no_handler() -> None:
    taken: list[Any] = []
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    whole = ToolDefinition(name="whole", description="", parameters=schema, handler=taken.append)
    wrong = ToolDefinition(name="wrong", description="", parameters={"type": "objekt"}, handler=taken.append)
    with client(*Toolset([whole, wrong]).offered) as agent:
        text, is_error = agent.call("whole", a="notint")
        assert (text, is_error) == ("the arguments do not fit: /a: 'notint' is not of type 'integer'", True)
        assert agent.call("whole") == ("the arguments do not fit: /: 'a' is a required property", True)
        assert agent.call("whole", a=1) == ("null", False)
        assert "its parameters are no schema" in agent.call("wrong")[0]
    assert taken == [{"a": 1}]


@pytest.mark.parametrize("functions", [[lambda x: x], [7], [starred], [unknown], [weather, weather]])
def test_what_cannot_be_a_tool_is_refused_before_a_run(functions: Any, backplane_home: Path) -> None:
    with pytest.raises(backplane.BackplaneError) as caught:
        backplane.run("x", backend="claude", home=backplane_home, tools=functions)
    assert caught.value.code == "config_invalid"


def test_a_host_without_mcp_refuses_tools(backplane_home: Path, tmp_path: Path) -> None:
    run = backplane.run("echo hi", backend="shell", root=tmp_path, home=backplane_home, tools=[weather])
    with pytest.raises(backplane.BackplaneError, match="mcp_servers") as caught:
        run.check()
    assert caught.value.code == "capability_unsupported"
