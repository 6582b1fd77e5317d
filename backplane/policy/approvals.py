"""Questions that a host asks before it acts, and their answers. Pure.

The policy answers first; what it leaves open goes to a person or a callback, and where nobody
answers in time the ask's default decides.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from backplane.contract import envelope as wire
from backplane.contract.approval import Decision
from backplane.contract.canonical import Json
from backplane.policy.rules import Policy


def judge(policy: Policy, ask: wire.Ask, *, root: str) -> Decision | None:
    """Return the policy's answer to an ask; None if a person has to answer."""
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
    """The message that carries a decision back."""
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
    """Return a caller's decision with the types of its members checked, except its input.

    Raises:
        ValueError: a member is of another type, or a word that is none of its own.
        TypeError: it is no decision at all.
    """
    if not isinstance(decision, Decision):
        raise TypeError(f"the function gave a {type(decision).__name__}, not a Decision")
    members = msgspec.structs.asdict(msgspec.structs.replace(decision, input=UNSET))
    return msgspec.structs.replace(msgspec.convert(members, Decision), input=decision.input)


def answered(answer: wire.AnswerMessage) -> Decision:
    """The decision that a message carries."""
    return Decision(
        decision=answer.decision,
        reason=answer.reason or "",
        input=answer.input,
        text=None if answer.text is UNSET else answer.text,
        remember=answer.remember,
    )


def changed(ask: wire.Ask, decision: Decision, reason: str) -> Decision:
    """Say yes to an ask that was changed on its way: with what it holds now."""
    decision = msgspec.structs.replace(decision, decision="modify", reason=reason)
    if ask.kind == "result":
        text = ask.output if isinstance(ask.output, str) else None
        return msgspec.structs.replace(decision, text=text)
    return msgspec.structs.replace(decision, input=ask.input)


def describe(ask: wire.Ask) -> str:
    """One readable line for the event that records an ask."""
    if ask.kind == "tool":
        return f"asks to run {ask.name}"
    if ask.kind == "patch":
        return f"asks to apply a patch to {len(ask.files or ())} files"
    if ask.kind == "result":
        return f"shows the result of {ask.name}"
    return f"asks: {ask.question or ''}"


def body(ask: wire.Ask) -> dict[str, Json]:
    """The ask as it stands in the event's `ext.ask`."""
    members: dict[str, Json] = msgspec.to_builtins(ask)
    return {name: value for name, value in members.items() if name not in ("t", "ref_id")}


def by_default(ask: wire.Ask, why: str) -> Decision:
    """The ask's own default, for when nobody answers; for a tool that is always a denial."""
    return Decision(decision="deny" if ask.kind == "tool" else ask.default, reason=f"{why}; the default decides")
