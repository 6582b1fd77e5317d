"""Translates Claude Code's requests about its tools, and the answers to them. Pure.

The program asks before a tool runs (by a hook, then for a permission) and after it, and it asks the user questions.
`agent` decides.
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
        events: events of the order's hooks; with `post_tool`, the agent also asks about results.
        answer_s: seconds for an answer.
    """
    names = (BEFORE, AFTER, FAILED) if "post_tool" in events else (BEFORE,)
    rest = {"timeout": answer_s, "onFailure": "block"}
    hooks = {_EVENTS[name]: [{"matcher": None, "hookCallbackIds": [name], **rest}] for name in names}
    if ENDED in events:
        hooks["SubagentStop"] = [{"matcher": None, "hookCallbackIds": [ENDED]}]
    return hooks


def read_subagent(request: Mapping[str, Any]) -> Json:
    """Return the id and type in a report that a sub-agent has ended; None for any other request."""
    body = request.get("input")
    if request.get("callback_id") != ENDED or not isinstance(body, dict):
        return None
    return {name: body[name] for name in ("agent_id", "agent_type") if name in body}


def blocks(reply: Json) -> bool:
    """Return True if the program confirms, in its answer to `initialize`, that a failed hook blocks."""
    return mapping(reply).get("hook_on_failure_supported") is True


class Question(msgspec.Struct, frozen=True):
    """One question: about a tool before or after it ran, or about a permission."""

    when: str
    """Kind of the question: BEFORE, AFTER, FAILED, or `permission`."""
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
    """Return the answer that allows a call, with another input if one is given."""
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
    """Return the answer that replaces the tool's output for the model."""
    return _hook(question.when, {"updatedToolOutput": output})


def block(request: Mapping[str, Any]) -> Json:
    """Return the answer to an unreadable request: the tool does not run, or the model sees no result."""
    if request.get("subtype") == "can_use_tool":
        return {"behavior": "deny", "message": UNREAD}
    if request.get("callback_id") in (AFTER, FAILED):
        return stop(UNREAD)
    return {"decision": "block", "reason": UNREAD}


def stop(reason: str) -> Json:
    """Return the answer that ends the turn at once; the model gets no more results."""
    return {"continue": False, "stopReason": reason}


def _hook(when: str, body: dict[str, Json]) -> Json:
    return {"hookSpecificOutput": {"hookEventName": _EVENTS[when], **body}}


_PLACES: Final[dict[str, Callable[[dict[str, Any], str], Json]]] = {
    "Bash": lambda output, text: {**output, "stdout": text, "stderr": ""},
    "Read": lambda output, text: {**output, "type": "text", "file": {**mapping(output.get("file")), "content": text}},
    "Grep": lambda output, text: {**output, "mode": "content", "content": text, "filenames": [], "numFiles": 0},
    "Glob": lambda output, text: {**output, "filenames": [text], "numFiles": 1},
}
"""Tool → function that puts a text into its result. Found by trial: the agent drops a result of another shape."""


def text_of(question: Question) -> str:
    """Return the text in a tool's output."""
    output, members = question.output, mapping(question.output)
    known = (members.get("stdout"), mapping(members.get("file")).get("content"), members.get("content"), output)
    text = next((value for value in known if isinstance(value, str)), None)
    if text is None:
        return msgspec.json.encode(output).decode()
    errors = members.get("stderr")
    return f"{text}\n{errors}" if isinstance(errors, str) and errors else text


def with_text(question: Question, text: str) -> Json:
    """Return the tool's output with this text in it; None if the agent would not accept it."""
    if question.when == FAILED:
        return None
    if question.tool.startswith("mcp__"):
        return text
    place = _PLACES.get(question.tool)
    return place(question.output, text) if place is not None and isinstance(question.output, dict) else None
