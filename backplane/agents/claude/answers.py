"""Questions of such an agent about its tools, and the answers it understands. Pure.

It asks before a tool (a hook, then a permission), after one, and for a person. What is answered is `agent`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import msgspec

from backplane.agents.events import mapping
from backplane.contract.canonical import Json

BEFORE: Final = "before"
AFTER: Final = "after"
FAILED: Final = "failed"
ENDED: Final = "subagent_end"
UNREAD: Final = "policy_denied: the host cannot read this question"
_EVENTS: Final = {BEFORE: "PreToolUse", AFTER: "PostToolUse", FAILED: "PostToolUseFailure"}


def wanted(events: Collection[Json], *, answer_s: int) -> Json:
    """Return the hooks for `initialize`; a hook without a readable answer blocks its call.

    Args:
        events: that hooks of the order wait for: for `post_tool` results are asked about, too.
        answer_s: seconds an answer may take.
    """
    names = (BEFORE, AFTER, FAILED) if "post_tool" in events else (BEFORE,)
    rest = {"timeout": answer_s, "onFailure": "block"}
    hooks = {_EVENTS[name]: [{"matcher": None, "hookCallbackIds": [name], **rest}] for name in names}
    if ENDED in events:
        hooks["SubagentStop"] = [{"matcher": None, "hookCallbackIds": [ENDED]}]
    return hooks


def read_subagent(request: Mapping[str, Any]) -> Json:
    """Return what the program tells of a sub-agent that has ended; None for any other request."""
    body = request.get("input")
    if request.get("callback_id") != ENDED or not isinstance(body, dict):
        return None
    return {name: body[name] for name in ("agent_id", "agent_type") if name in body}


def blocks(reply: Json) -> bool:
    """Return whether the program confirms, in its answer to `initialize`, that a failed hook blocks."""
    return mapping(reply).get("hook_on_failure_supported") is True


class Question(msgspec.Struct, frozen=True):
    """One question: about a tool before or after it ran, or about a permission."""

    when: str
    """BEFORE, AFTER, FAILED, or `permission`."""
    tool: str
    input: Json
    id: str
    output: Json = None


def read_question(request: Mapping[str, Any]) -> Question | None:
    """Parse a control request; return None if its subtype is unknown."""
    kind, body = request.get("subtype"), request
    when = "permission" if kind == "can_use_tool" else str(request.get("callback_id"))
    if kind == "hook_callback" and isinstance(request.get("input"), dict):
        body = request["input"]
    if (kind != "can_use_tool" and (kind != "hook_callback" or when not in _EVENTS)) or not body.get("tool_name"):
        return None
    input = body.get("input") if kind == "can_use_tool" else body.get("tool_input")
    output = body.get("error") if when == FAILED else body.get("tool_response")
    return Question(when, str(body["tool_name"]), input, str(body.get("tool_use_id") or ""), output)


def allow(question: Question, input: Json = None) -> Json:
    """Let it run, with another input where one is given."""
    if question.when == "permission":
        return {"behavior": "allow", "updatedInput": question.input if input is None else input}
    changed = {} if input is None else {"updatedInput": input}
    return _hook(question.when, {"permissionDecision": "allow", **changed})


def deny(question: Question, reason: str) -> Json:
    """Return the answer that denies a call and gives the model the reason."""
    if question.when == "permission":
        return {"behavior": "deny", "message": reason}
    return _hook(question.when, {"permissionDecision": "deny", "permissionDecisionReason": reason})


def show(question: Question, output: Json) -> Json:
    """Let the model have this in place of the tool's output."""
    return _hook(question.when, {"updatedToolOutput": output})


def block(request: Mapping[str, Any]) -> Json:
    """Answer a question that cannot be read, so that nothing runs and the model sees no result."""
    if request.get("subtype") == "can_use_tool":
        return {"behavior": "deny", "message": UNREAD}
    if request.get("callback_id") in (AFTER, FAILED):
        return stop(UNREAD)
    return {"decision": "block", "reason": UNREAD}


def stop(reason: str) -> Json:
    """End the turn here; the model gets nothing more."""
    return {"continue": False, "stopReason": reason}


def _hook(when: str, body: dict[str, Json]) -> Json:
    return {"hookSpecificOutput": {"hookEventName": _EVENTS[when], **body}}


_PLACES: Final[dict[str, Callable[[dict[str, Any], str], Json]]] = {
    "Bash": lambda output, text: {**output, "stdout": text, "stderr": ""},
    "Read": lambda output, text: {**output, "type": "text", "file": {**mapping(output.get("file")), "content": text}},
    "Grep": lambda output, text: {**output, "mode": "content", "content": text, "filenames": [], "numFiles": 0},
    "Glob": lambda output, text: {**output, "filenames": [text], "numFiles": 1},
}
"""Tools whose result has a place for any text, found out by trying; the agent drops a result of any other shape."""


def text_of(question: Question) -> str:
    """Return the text in a tool's output."""
    output = question.output
    if isinstance(output, str):
        return output
    if not isinstance(output, dict):
        return msgspec.json.encode(output).decode()
    inner = mapping(output.get("file"))
    for value in (output.get("stdout"), inner.get("content"), output.get("content")):
        if isinstance(value, str):
            errors = output.get("stderr")
            return value + (f"\n{errors}" if isinstance(errors, str) and errors else "")
    return msgspec.json.encode(output).decode()


def with_text(question: Question, text: str) -> Json:
    """The tool's output with this text in it; None where the agent would not take it."""
    if question.when == FAILED:
        return None
    if question.tool.startswith("mcp__"):
        return text
    place = _PLACES.get(question.tool)
    return place(question.output, text) if place is not None and isinstance(question.output, dict) else None
