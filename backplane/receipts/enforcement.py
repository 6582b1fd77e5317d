"""Finds the layer that enforced each rule of a run, and the acts that broke one. Pure: reads a `RunState`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.contract.work import PolicyProfile
from backplane.policy.rules import TOOL_LISTS, Layer
from backplane.receipts.state import Objection, RunState

_NO_LAYERS: Final[Mapping[str, Layer]] = MappingProxyType({})

_UNSEEN: Final = {
    "deny_read": "what commands read is not seen",
    "deny_write": "what commands change among files that git ignores, and in .git, is not seen",
    "workspace": "what commands write outside is not seen",
    "allow_network": "where commands connect to is not seen",
    "deny_network": "where commands connect to is not seen",
}
"""List of the policy → acts that no audit of the events and of the patch can see."""


def enforcement_of(state: RunState) -> Json:
    """Return the receipt's `enforcement`: the layer of each rule, violations, and attempts that failed."""
    if state.policy is None:
        return {"rules": []}
    held = held_by(state, {} if state.replayed else _layers(state))
    for name, rows in (("violations", violations(state) + shortfalls(state)), ("attempts", _attempts(state))):
        if rows:
            held[name] = rows
    # Patterns come from the caller and reasons from the host, so either may contain a secret.
    return state.redactor.json(held)[0]


def held_by(state: RunState, layers: Mapping[str, Layer] = _NO_LAYERS) -> dict[str, Json]:
    """Return the host's sandbox, and the layer that enforces each rule, with its gap.

    Args:
        layers: list name → layer of its rules, beside the operating system; empty before the host has run.
    """
    assert state.policy is not None
    rules: list[dict[str, Json]] = []
    for rule in state.policy.rules():
        gap = state.held_by_system.get(rule)
        layer = layers.get(rule.name) if gap is None else "os"
        if layer == "audit":
            gap = "; ".join(filter(None, (_why_not_host(state, rule.name), _UNSEEN.get(rule.name))))
        row = {"rule": rule.name, "pattern": rule.pattern, "layer": layer}
        rules.append({**row, "gap": gap} if gap else row)
    label = state.contained or _uncontained(state)
    shortfall = _shortfall(state, rules, label) if state.shortfall[0] else ""
    return {"rules": rules, **label, **({"shortfall": shortfall} if shortfall else {})}


def violations(state: RunState) -> list[dict[str, str]]:
    """Return a row for each call or change that was made although a rule forbids it; a denied call was not made."""
    open_ = [it for it in state.objections if not it.is_settled]
    done = [_row(it) for it in open_ if not _is_attempt(state, it)]
    named = {id(it.call) for it in open_ if it.call is not None}
    breaches = state.book.breaches() if state.book is not None else []
    done += [{"rule": "ask", "reason": reason} for call, reason in breaches if id(call) not in named]
    return done + [row for row in state.forbidden if row not in done]


def shortfalls(state: RunState) -> list[dict[str, str]]:
    """Return a row for each list of the policy that was enforced more weakly than the order demands."""
    demanded = state.settings.get("enforcement")
    if state.replayed or not isinstance(demanded, dict):
        return []
    rows: list[Any] = held_by(state, _layers(state))["rules"]
    weak = {row["rule"]: row for row in rows if row["layer"] in ("audit", None)}
    names = [name for name, layer in demanded.items() if layer in ("host", "vendor") and name in weak]
    text = "{} was to be held by {!r} and was only audited: {}"
    return [
        {"rule": name, "reason": text.format(name, demanded[name], weak[name].get("gap", "no layer held it"))}
        for name in names
    ]


def _attempts(state: RunState) -> list[dict[str, str]]:
    return [_row(it) for it in state.objections if not it.is_settled and _is_attempt(state, it)]


def _row(it: Objection) -> dict[str, str]:
    return {"rule": it.rule, "reason": it.reason}


def _is_attempt(state: RunState, it: Objection) -> bool:
    """Return True if a call failed before its host asked, and no call of its tool ran without a question."""
    call = it.call
    if call is None or call.answer or not call.failed or "ask/1" not in state.extensions:
        return False
    return call.tool not in state.calls.unasked_tools


def _layers(state: RunState) -> dict[str, Layer]:
    """Return the layer that enforced the rules of each list, beside the operating system."""
    names = (*PolicyProfile.__struct_fields__, "workspace")
    return {name: "audit" if _why_not_host(state, name) else "host" for name in names}


def _why_not_host(state: RunState, name: str) -> str:
    """Return why the host may have failed to enforce the rules of a list; empty if it has enforced them."""
    book = state.book
    if "ask/1" not in state.extensions:
        return "the host does not ask before its tools run (ask/1)"
    if state.unclaimed:
        return f"changed files that no event names: {state.unclaimed}"
    if book is None:
        return ""
    if book.is_full or book.has_unasked() or book.breaches():
        return "not every call was asked about before it ran and done as it was answered"
    opaque = book.opaque() if name not in TOOL_LISTS else []
    return f"tools that do not name each place they touch: {', '.join(opaque)}" if opaque else ""


def _shortfall(state: RunState, rules: Sequence[Mapping[str, Json]], label: Mapping[str, Any]) -> str:
    """Return one line: which rules are not enforced in advance, why, and the next step; empty if all are."""
    count = sum(row["layer"] in (None, "audit") and row["rule"] not in TOOL_LISTS for row in rules)
    proxy = state.added.get("key_proxy")
    what = [f"{count} rule{'s' if count > 1 else ''}"] if count else []
    what += ["the credential stores"] if label["kinds"]["credentials"]["state"] == "none" else []
    what += ["the model's key"] if isinstance(proxy, dict) and proxy.get("state") != "enforced" else []
    listed = " and ".join([part for part in (", ".join(what[:-1]), *what[-1:]) if part])
    why, step = state.shortfall
    return f"{listed} {'is' if what == ['1 rule'] else 'are'} not held: {why}; {step}" if what else ""


def _uncontained(state: RunState) -> dict[str, Json]:
    """Return the description of a host without a sandbox, for the receipt."""
    names = ("files", "credentials", "sockets", "network", "syscalls", "limits", "processes", "environment")
    kinds: dict[str, Json] = {name: {"state": "none"} for name in names}
    if state.guarded:
        gap = "if the guard itself is killed, who has left the session stays"
        kinds["processes"] = {"state": "partial", "by": ["guard"], "gap": gap}
        gap = "what /proc shows of this user's other processes, ours too"
        kinds["environment"] = {"state": "partial", "by": ["allow list"], "gap": gap}
    return {"isolation": state.isolation, "layers": [], "kinds": kinds, "approvals": "unprotected"}
