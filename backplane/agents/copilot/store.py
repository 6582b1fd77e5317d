"""Conversations that Copilot CLI keeps: `session-state/ID/events.jsonl`, seen with 1.0.102 on 2026-11-24."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.agents.events import mapping, mappings
from backplane.agents.store import (
    BELOW,
    NOTES,
    SUMMED,
    UNDONE,
    Place,
    StoredHead,
    Talk,
    VendorStore,
    calls_of,
    inner,
    require_known,
    rows,
    said_of,
    text_and_images,
    text_of,
    unknown,
)
from backplane.contract.canonical import timestamp_at
from backplane.contract.conversation import Image

VERSION: Final = "1.0.102"
"""Of the program whose form is written."""
VERSIONS: Final = "1."
"""Of the form of its events, not of the program."""
_BESIDE: Final = (
    *("session.", "assistant.", "tool.", "model.", "permission.", "hook.", "subagent.", "skill.", "abort", "agent."),
    *("user_input.", "external_tool.", "exit_plan_mode.", "elicitation.", "mcp.", "command.", "pending_messages."),
)
"""How the kinds of events begin that say again, or about the program, what others say to the model."""

_SAID: Final = ("user.message", "assistant.message", "tool.execution_complete")


def read(place: Place, talk: Talk) -> StoredHead:
    head, model = dict[str, Any](), None
    for row in _kept(place.path, talk):
        kind, body = str(row.get("type")), mapping(row.get("data"))
        if kind == "session.start" and not head:
            head = body
            require_known(place.path, "Copilot CLI in the form", body.get("version"), VERSIONS)
        elif row.get("agentId") is not None or body.get("parentToolCallId") is not None:
            talk.drop(BELOW)
        elif kind == "session.compaction_complete" and isinstance(body.get("summaryContent"), str):
            talk.cut(0, SUMMED)
            talk.user(body["summaryContent"])
        else:
            model = said_of(body.get("model")) or model
            _event(kind, body, talk)
    if not head:
        require_known(place.path, "a program that says no version,", None, VERSIONS)
    talk.order_results()  # They stand in the order in which their tools ended.
    return StoredHead(str(head.get("sessionId", "")), said_of(inner(head, "context").get("cwd")), model)


def _kept(path: Path, talk: Talk) -> list[dict[str, Any]]:
    """The events that were not taken back."""
    kept: list[dict[str, Any]] = []
    for row in rows(path, talk):
        body = mapping(row.get("data"))
        if row.get("type") != "session.snapshot_rewind":
            kept.append(row)
            continue
        ids = [one.get("id") for one in kept]
        first = ids.index(body["upToEventId"]) if body.get("upToEventId") in ids else len(ids)
        named = body.get("eventIds")
        gone = set(named) if isinstance(named, list) else set(ids[first:])
        talk.drop(UNDONE, sum(one.get("type") in _SAID and one.get("id") in gone for one in kept))
        kept = [one for one in kept if one.get("id") not in gone]
    return kept


def _event(kind: str, body: Mapping[str, Any], talk: Talk) -> None:
    if kind == "user.message":
        shown = mappings(body.get("attachments"))
        images = [
            Image(media_type=said_of(one.get("mimeType")), data=one["data"])
            for one in shown
            if one.get("type") == "blob" and isinstance(one.get("data"), str)
        ]
        talk.user(str(body.get("content", "")), images)
        if len(images) < len(shown):
            talk.drop("attachments", len(shown) - len(images))
    elif kind == "assistant.message":
        talk.think(said_of(body.get("reasoningText")) or "", said_of(body.get("reasoningOpaque")))
        talk.say(str(body.get("content") or ""))
        for call in mappings(body.get("toolRequests")):
            talk.call(str(call.get("toolCallId")), str(call.get("name")), call.get("arguments"))
    elif kind == "tool.execution_complete":
        failed = body.get("success") is False
        told = inner(body, "error").get("message") if failed else inner(body, "result").get("content")
        talk.result(str(body.get("toolCallId")), text_of(told if told is not None else ""), is_error=failed)
    elif kind == "system.message":
        talk.drop(NOTES)
    elif not kind.startswith(_BESIDE):
        talk.drop(unknown(kind))


# Writing --------------------------------------------------------------------------------------------------------------


def files_of(home: Path, data: bytes, id: str, *, root: str, now_ns: int) -> dict[Path, bytes]:
    """Return where the program looks for it, and the file in which it names its folder."""
    folder, then = home / "session-state" / id, timestamp_at(now_ns)
    # A string of JSON is one of YAML.
    rows = {"id": id, "cwd": root, "client_name": "backplane", "created_at": then, "updated_at": then}
    about = b"".join(f"{name}: ".encode() + msgspec.json.encode(value) + b"\n" for name, value in rows.items())
    return {folder / "events.jsonl": data, folder / "workspace.yaml": about}


def write(document: Mapping[str, Any], id: str, *, root: str, now_ns: int) -> list[dict[str, Any]]:
    then, turn = timestamp_at(now_ns), 0
    head = {
        "sessionId": id, "version": 1, "producer": "copilot-agent", "copilotVersion": VERSION, "startTime": then,
        "context": {"cwd": root}, "alreadyInUse": False, "remoteSteerable": False,
    }  # fmt: skip
    said: list[tuple[str, dict[str, Any]]] = [("session.start", head)]
    for message in document["messages"]:
        words, images = text_and_images(message.get("content"))
        if message["role"] == "user":
            shown = [{"type": "blob", "mimeType": one.media_type, "data": one.data} for one in images]
            said.append(("user.message", {"content": words, **({"attachments": shown} if shown else {})}))
        elif message["role"] == "assistant":
            calls = [
                {"toolCallId": id, "name": name, "arguments": given, "type": "function"}
                for id, name, given in calls_of(message)
            ]
            spoken = {"messageId": str(uuid.uuid4()), "content": words, "toolRequests": calls}
            said += [("assistant.turn_start", {"turnId": str(turn)}), ("assistant.message", spoken)]
            turn += 1
        else:
            told = {"toolCallId": message["tool_call_id"], "success": True, "result": {"content": words}}
            said.append(("tool.execution_complete", told))
    lines, parent = list[dict[str, Any]](), None
    for kind, body in said:
        own = str(uuid.uuid4())
        lines.append({"type": kind, "data": body, "id": own, "timestamp": then, "parentId": parent})
        parent = own
    return lines


STORE: Final = VendorStore(
    home=("COPILOT_HOME", ".copilot"),
    files=("session-state", "*", "events.jsonl"),
    id_of=lambda path: path.parent.name,
    read=read,
    dialect="openai",
    write=write,
    files_of=files_of,
)
