"""Tools of a request, for all dialects: definitions that only a vendor runs itself, and a tool that must be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.dialects._parts import Ledger, take
from backplane.ir import Conversation, ToolSpec

FREE_TEXT: Final[dict[str, Json]] = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
}  # fmt: skip
"""The schema of a tool that takes free text, where tools take only objects."""


def read_tools(rest: dict[str, Any], read: Callable[[Json, str], ToolSpec]) -> tuple[ToolSpec, ...]:
    """Take the tool definitions of a request; an empty list stays, so that it is written again."""
    if not rest.get("tools"):
        return ()
    return tuple(read(tool, f"/tools/{place}") for place, tool in enumerate(take(rest, "tools", list) or ()))


def write_tools(specs: tuple[ToolSpec, ...], ledger: Ledger, write: Callable[[ToolSpec, Ledger], Json]) -> list[Json]:
    """Write the tool definitions that the target has words for; `write` gives None for the others."""
    out: list[Json] = []
    for tool in specs:
        written = write(tool, ledger)
        if written is not None or (tool.kind == "server" and ledger.is_home):
            out.append(written)
    return out


def write_server_tool(tool: ToolSpec, ledger: Ledger) -> Json:
    """Write the definition of a tool that a vendor runs itself as it came; None with a loss for any other vendor."""
    if ledger.is_home:
        return tool.payload
    ledger.drop(tool.at, "tool", f"{tool.name} is run by {ledger.source} itself", tool.payload)
    return None


def lose_cache(tool: ToolSpec, ledger: Ledger) -> None:
    """Report a breakpoint of the prompt cache after a tool."""
    if tool.cache is not None:
        ledger.drop(tool.at, "cache", "the target has no breakpoint here", tool.cache)


def lose_strict(tool: ToolSpec, ledger: Ledger) -> None:
    """Report a tool whose arguments have to fit; one that says no is what others do anyway."""
    if tool.strict:
        ledger.drop(tool.at, "tool_field", "no tool is strict here", True)
    elif tool.strict is not None:
        ledger.degrade(tool.at, "shape", "not strict, said in words")


def chosen_kind(choice: dict[str, Any], conversation: Conversation, ledger: Ledger, at: str) -> str | None:
    """Return the kind of the tool that has to be called; None with a refusal where only another vendor runs it."""
    kinds: dict[str, str] = {tool.name: tool.kind for tool in conversation.tools}
    kind: str = kinds.get(choice["name"], choice.get("kind", "function"))
    if kind == "server" and not ledger.is_home:
        ledger.refuse(at, "tool_choice", f"{choice['name']} is forced, and only {ledger.source} has it")
        return None
    return kind
