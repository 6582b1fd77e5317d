"""What such an agent asks before it acts, and the answers in its own words.

A question is read into the call it is about; who decides is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from backplane.agents.codex.items import OpenCall, called
from backplane.agents.events import mapping, mappings
from backplane.contract.canonical import Json

COMMAND: Final = "item/commandExecution/requestApproval"
PATCH: Final = "item/fileChange/requestApproval"
SERVER: Final = "mcpServer/elicitation/request"
PEOPLE: Final = "item/tool/requestUserInput"

ACTIONS_MAX: Final = 100
"""Parts of a command that are looked at; the agent's own reading of a longer one is worth little."""


class Question(msgspec.Struct, frozen=True):
    """A call that wants to be allowed."""

    method: str
    id: str
    """Of the item."""
    call: OpenCall
    reads: tuple[tuple[str, str, str], ...] = ()
    """Files that the agent itself sees the command read: path, root, and where the path counts from."""
    wider: bool = False
    """It asks for more than the call: for a whole folder, say."""


def read_question(method: str, params: Mapping[str, Any], calls: Mapping[str, OpenCall], root: str) -> Question | None:
    """The call that a question is about; None for a question that is not about one.

    Args:
        calls: open calls, by the item's id.
    """
    id = str(params.get("itemId"))
    if method == COMMAND:
        call = calls.get(id) or called({"type": "commandExecution", **params}, root)
        wider = params.get("additionalPermissions") or params.get("networkApprovalContext")
        assert call is not None
        return Question(method, id, call, _reads(params, root), bool(wider))
    if method == PATCH and id in calls:
        return Question(method, id, calls[id], wider=params.get("grantRoot") is not None)
    if method == SERVER:
        meta = mapping(params.get("_meta"))
        tool = meta.get("tool_name")
        if isinstance(tool, str):
            call = OpenCall(f"mcp__{params.get('serverName')}__{tool}", meta.get("tool_params"), "mcpToolCall")
            open_id = next((id for id, one in calls.items() if one.name == call.name and one.input == call.input), "")
            return Question(method, open_id, call)
    return None


def _reads(params: Mapping[str, Any], root: str) -> tuple[tuple[str, str, str], ...]:
    cwd = params["cwd"] if isinstance(params.get("cwd"), str) else root
    named = [row.get("path") for row in mappings(params.get("commandActions"))[:ACTIONS_MAX]]
    return tuple((path, root, cwd) for path in named if isinstance(path, str) and path)


def answer(question: Question, decision: Literal["allow", "deny"]) -> Json:
    """The answer in the agent's words."""
    word = {"allow": "accept", "deny": "decline"}[decision]
    if question.method == SERVER:
        return {"action": word, "content": {} if decision == "allow" else None}
    return {"decision": word}


def questions(params: Mapping[str, Any]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Questions for a person: id, words, options."""
    made = []
    for row in mappings(params.get("questions")):
        labels = tuple(str(one.get("label")) for one in mappings(row.get("options")))
        made.append((str(row.get("id")), str(row.get("question")), labels))
    return made


def said(answers: Mapping[str, str]) -> Json:
    """A person's answers, by the question's id."""
    return {"answers": {id: {"answers": [text]} for id, text in answers.items()}}
