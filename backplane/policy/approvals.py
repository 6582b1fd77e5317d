"""Decides and converts approvals: the asks of a host before it acts, and their answers. Pure.

The policy decides first; if it has no answer, the user or a callback is asked, and without an answer in time the ask's
default counts.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from backplane.contract import envelope as wire
from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.policy.rules import Policy


def judge(policy: Policy, ask: wire.Ask, *, root: str) -> Decision | None:
    """Return the policy's answer to an ask; None if the user must answer."""
    if ask.kind == "tool":
        cwd = ask.cwd if isinstance(ask.cwd, str) else None
        verdict = policy.decide_tool_call(ask.name or "", None if ask.input is UNSET else ask.input, root=root, cwd=cwd)
        if verdict.allowed == "ask":
            return None
        return Decision(decision=verdict.allowed, reason=verdict.reason)
    if ask.kind == "patch":
        for path in ask.files or ():
            verdict = policy.decide_write(path, root)
            if verdict.allowed == "deny":
                return Decision(decision="deny", reason=verdict.reason)
        return Decision(decision="allow", reason="no rule forbids it")
    if ask.kind == "result":
        return Decision(decision="allow", reason="no hook changes it")
    return None


def answer(ask: wire.Ask, decision: Decision) -> wire.AnswerMessage:
    """Return the message to the host with a decision."""
    return wire.AnswerMessage(
        ref_id=ask.ref_id,
        id=ask.id,
        decision=decision.decision,
        input=decision.input,
        text=decision.text if decision.text is not None else UNSET,
        reason=decision.reason or UNSET,
        remember=decision.remember,
    )


def checked(decision: Decision) -> Decision:
    """Check the types of a caller's decision, except its input, and return it.

    Raises:
        ValueError: a member has a wrong type or an unknown value.
        TypeError: the value is no `Decision`.
    """
    if not isinstance(decision, Decision):
        raise TypeError(f"the function gave a {type(decision).__name__}, not a Decision")
    members = msgspec.structs.asdict(msgspec.structs.replace(decision, input=UNSET))
    return msgspec.structs.replace(msgspec.convert(members, Decision), input=decision.input)


def answered(answer: wire.AnswerMessage) -> Decision:
    """Return the decision in a message."""
    return Decision(
        decision=answer.decision,
        reason=answer.reason or "",
        input=answer.input,
        text=None if answer.text is UNSET else answer.text,
        remember=answer.remember,
    )


def changed(ask: wire.Ask, decision: Decision, reason: str) -> Decision:
    """Turn a decision on a changed ask into `modify`, with the ask's present content."""
    decision = msgspec.structs.replace(decision, decision="modify", reason=reason)
    if ask.kind == "result":
        text = ask.output if isinstance(ask.output, str) else None
        return msgspec.structs.replace(decision, text=text)
    return msgspec.structs.replace(decision, input=ask.input)


def describe(ask: wire.Ask) -> str:
    """Return one line for the event of an ask."""
    if ask.kind == "tool":
        return f"asks to run {ask.name}"
    if ask.kind == "patch":
        return f"asks to apply a patch to {len(ask.files or ())} files"
    if ask.kind == "result":
        return f"shows the result of {ask.name}"
    return f"asks: {ask.question or ''}"


def body(ask: wire.Ask) -> dict[str, Json]:
    """Return the ask in the form of the event's `ext.ask`."""
    members: dict[str, Json] = msgspec.to_builtins(ask)
    return {name: value for name, value in members.items() if name not in ("t", "ref_id")}


def by_default(ask: wire.Ask, why: str) -> Decision:
    """Return the decision for an ask without an answer: its default; for a tool always `deny`."""
    return Decision(decision="deny" if ask.kind == "tool" else ask.default, reason=f"{why}; the default decides")
