"""Translates Codex's approval requests to requests of the gate, and verdicts to Codex's answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from backplane.agents.calls import OpenCall, OpenCalls
from backplane.agents.codex.items import called, operations
from backplane.agents.events import mapping, mappings
from backplane.agents.gate import ToolRequest
from backplane.contract.canonical import Json

COMMAND: Final = "item/commandExecution/requestApproval"
PATCH: Final = "item/fileChange/requestApproval"
SERVER: Final = "mcpServer/elicitation/request"
PEOPLE: Final = "item/tool/requestUserInput"


def read_question(method: str, params: Mapping[str, Any], calls: OpenCalls, root: str) -> ToolRequest | None:
    """Read the call that a question is about; return None if it is about none."""
    call = calls.open.get(str(params.get("itemId")))
    if method == COMMAND:
        call = call or called({"type": "commandExecution", **params}, root)
        assert call is not None
        wider = bool(params.get("additionalPermissions") or params.get("networkApprovalContext"))
        return call.request(reads=_reads(params, root), wider=wider)
    if method == PATCH and call is not None:
        neutral, wider = tuple(operations(call.input)), params.get("grantRoot") is not None
        return call.request(neutral=neutral, wider=wider)
    if method == SERVER:
        meta = mapping(params.get("_meta"))
        name, input = f"mcp__{params.get('serverName')}__{meta.get('tool_name')}", meta.get("tool_params")
        if isinstance(meta.get("tool_name"), str):
            return ToolRequest(id=calls.find(name, input), tool=name, name=name, input=input)
    return None


def read_hook(said: Mapping[str, Any], root: str) -> OpenCall:
    """Read the call that the agent's hook asks about, in the form of its later item."""
    id, tool, input = str(said.get("tool_use_id") or ""), str(said.get("tool_name")), said.get("tool_input")
    if tool != "Bash":
        return OpenCall(id, tool, tool, input)
    item = {"type": "commandExecution", "id": id, "command": mapping(input).get("command"), "cwd": said.get("cwd")}
    call = called(item, root)
    assert call is not None
    return call


def _reads(params: Mapping[str, Any], root: str) -> tuple[tuple[str, str], ...]:
    cwd = params["cwd"] if isinstance(params.get("cwd"), str) else root
    named = [row.get("path") for row in mappings(params.get("commandActions"))]
    return tuple((path, cwd) for path in named if isinstance(path, str) and path)


def answer(method: str, refused: str | None) -> Json:
    """Return the agent's form of the answer to an approval request.

    Args:
        method: method of the request.
        refused: why the call is refused; None allows it.
    """
    word = "accept" if refused is None else "decline"
    if method == SERVER:
        return {"action": word, "content": {} if refused is None else None}
    return {"decision": word}
