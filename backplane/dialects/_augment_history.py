"""Turns of Augment's history into messages. That every call stands beside its result is `pairing`'s."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects._augment_nodes import (
    HISTORY_SUMMARY,
    NAME,
    REQUEST_BODIES,
    Members,
    is_said,
    listed,
    lose_ids,
    node_kind,
    read_answer,
    read_node,
)
from backplane.dialects.codec import Ledger
from backplane.ir import Message, Part, Text, ToolResult

REQUEST_NODES: Final = ("request_nodes", "structured_request_nodes", "nodes")
RESPONSE_NODES: Final = ("response_nodes", "structured_output_nodes")

SUMMARY_DEPTH_MAX: Final = 8
"""Summaries within the end of a summary: each compaction nests one, and editors keep two or three."""


def read_exchange(value: Json, at: str, ledger: Ledger, depth: int = 0) -> list[Message]:
    """Read one exchange of the history: what was asked, what was answered."""
    members = Members(value, at, ledger)
    lose_ids(members)
    asked = members.text("request_message", "message")
    answered = members.text("response_text", "response", "text")
    turn = read_turn(asked, f"{at}/request_message", members, ledger, depth)
    nodes = list(listed(members, *RESPONSE_NODES))
    parts = read_answer(answered, nodes, f"{at}/response_text", ledger)
    for key, left in members.rest().items():
        ledger.drop(f"{at}/{key}", "extension", f"only {NAME} knows it", left)
    return [*turn, *([Message(role="assistant", parts=tuple(parts), at=at)] if parts else [])]


def read_turn(
    text: str, text_at: str, members: Members, ledger: Ledger, depth: int = 0, code: Iterable[Part] = ()
) -> list[Message]:
    """Read what a user's turn says: earlier messages from a summary, results, then text, `code` and nodes."""
    before: list[Message] = []
    results: list[Part] = []
    parts: list[Part] = [Text(text=text, at=text_at)] if is_said(text) else []
    said = {text.strip()}
    parts += code
    for at, node in listed(members, *REQUEST_NODES):
        if node_kind(node) == HISTORY_SUMMARY and depth < SUMMARY_DEPTH_MAX:
            before += _read_summary(node, at, ledger, depth)
            continue
        part = read_node(node, at, ledger)
        if isinstance(part, ToolResult):
            results.append(part)
        elif part is not None and not (type(part) is Text and part.text.strip() in said):
            parts.append(part)
            said.add(part.text.strip() if isinstance(part, Text) else "")
    out = before
    if results:
        out.append(Message(role="tool", parts=tuple(results), at=members.at))
    if parts:
        out.append(Message(role="user", parts=joined(parts), at=members.at))
    return out


def has_summary(value: Json) -> bool:
    """Whether an exchange or a request holds a summary of what was before it."""
    if type(value) is not dict:
        return False
    members = Members(value, "", Ledger(NAME, NAME))
    return any(node_kind(node) == HISTORY_SUMMARY for _, node in listed(members, *REQUEST_NODES))


def joined(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Make one text of texts that follow each other: there are gateways that take only plain text."""
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if type(part) is Text and type(last) is Text and not part.ext and not last.ext:
            out[-1] = msgspec.structs.replace(last, text=f"{last.text}\n\n{part.text}")
        else:
            out.append(part)
    return tuple(out)


def _read_summary(node: Json, at: str, ledger: Ledger, depth: int) -> Iterator[Message]:
    """The summary as a text, and the exchanges it keeps word for word as exchanges."""
    outer = Members(node, at, ledger)
    where, found = next(outer.each(dict, REQUEST_BODIES[HISTORY_SUMMARY]), (at, {}))
    body = Members(found, where, ledger)
    ledger.degrade(at, "part", "a summary is said as text")
    values: dict[str, Any] = {
        "summary": body.text("summary_text"),
        "summarization_request_id": body.text("summarization_request_id"),
        "beginning_part_dropped_num_exchanges": body.number("history_beginning_dropped_num_exchanges") or 0,
        "middle_part_abridged": body.text("history_middle_abridged_text"),
        "end_part_full": "(the messages that follow)",
    }
    template = body.text("message_template")
    words = template
    for name, value in values.items():
        words = words.replace("{" + name + "}", str(value))
    missing = [str(values[name]) for name in ("summary", "middle_part_abridged") if str(values[name]) not in words]
    text = "\n\n".join(found for found in (words if template else "Summary of what came before:", *missing) if found)
    yield Message(role="user", parts=(Text(text=text, at=at),), at=at, ext=body.ext())
    for end_at, value in listed(body, "history_end"):
        yield from read_exchange(value, end_at, ledger, depth + 1)


# Pairing --------------------------------------------------------------------------------------------------------------
