"""Conversations that Codex keeps: `sessions/YEAR/MONTH/DAY/rollout-TIME-ID.jsonl`, seen with 0.169.0 on 2026-11-24.

`response_item` rows are what its model is shown; `event_msg` rows say the same once more for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from backplane.agents.events import is_count, mapping, mappings
from backplane.agents.store import (
    NOTES,
    SUMMED,
    StoredHead,
    Talk,
    VendorStore,
    inner,
    require_known,
    rows,
    said_of,
    unknown,
)

VERSIONS: Final = "0."
_BESIDE: Final = frozenset({"event_msg", "turn_context", "world_state", "token_usage_record", "session_state"})
_NOTED: Final = ("<environment_context>", "<user_instructions>", "# AGENTS.md instructions", "<turn_aborted>")
"""How words begin that the program itself puts in; newer versions say it beside them."""


def read(path: Path, talk: Talk) -> StoredHead:
    head, model = dict[str, Any](), None
    for row in rows(path, talk):
        kind, body = row.get("type"), mapping(row.get("payload"))
        if kind == "session_meta" and not head:
            head = body
            require_known(path, "Codex", body.get("cli_version"), VERSIONS)
        elif kind == "response_item":
            _item(body, talk)
        elif kind == "compacted":
            talk.cut(0, SUMMED)
            before = mappings(body.get("replacement_history"))
            for item in before:
                _item(item, talk)
            if not before:
                talk.user(str(body.get("message", "")))
        elif kind == "event_msg" and body.get("type") == "thread_rolled_back" and is_count(body.get("num_turns")):
            talk.undo(body["num_turns"])
        elif kind == "turn_context":
            model = said_of(body.get("model")) or model
        elif kind not in _BESIDE and kind != "session_meta":
            talk.drop(unknown(kind))
    if not head:
        require_known(path, "a program that says no version,", None, VERSIONS)
    return StoredHead(str(head.get("id", "")), said_of(head.get("cwd")), model)


def _item(item: Mapping[str, Any], talk: Talk) -> None:
    kind, output = item.get("type"), item.get("output")
    if kind == "message":
        _message(item, talk)
    elif kind == "local_shell_call":
        id = str(item.get("call_id") or item.get("id"))
        talk.call(id, "shell", item.get("action"))
    else:
        whole = {"output": output.get("content", "")} if isinstance(output, dict) else {}
        talk.take("codex", "input", {**item, **whole})


def _message(item: Mapping[str, Any], talk: Talk) -> None:
    role, parts = item.get("role"), mappings(item.get("content"))
    texts = [str(part.get("text")) for part in parts if "text" in part]
    if role not in ("user", "assistant") or (role == "user" and _is_note(item, texts)):
        talk.drop(NOTES)
        return
    # Around a picture it says in words that there is one.
    has_image = any(part.get("type") == "input_image" for part in parts)
    shown = [part for part in parts if not (has_image and part.get("text") in ("<image>", "</image>"))]
    talk.take("codex", "input", {"type": "message", "role": role, "content": shown})


def _is_note(item: Mapping[str, Any], words: list[str]) -> bool:
    kinds = inner(item, "internal_chat_message_metadata_passthrough").get("content_item_kinds")
    if isinstance(kinds, list):
        return not any(str(kind).startswith("user.") for kind in kinds)
    return any(text.startswith(_NOTED) for text in words)


STORE: Final = VendorStore(
    home=("CODEX_HOME", ".codex"),
    files=("sessions", "*", "*", "*", "rollout-*.jsonl"),
    id_of=lambda path: path.stem.split("-", 6)[-1],
    read=read,
)
