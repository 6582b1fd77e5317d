"""Reads conversations that Codex keeps in `sessions/YEAR/MONTH/DAY/rollout-TIME-ID.jsonl` (0.169.0, 2026-11-24).

`response_item` rows are sent to the model; `event_msg` rows repeat them for display.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from backplane.agents.events import is_count, mapping, mappings
from backplane.dialects.history import NOTES, SUMMED, StoredHead, Talk, text_or_none, unknown

PROGRAM: Final = "Codex"
VERSIONS: Final = "0."
"""Prefix of the versions that this reader was tried with."""
HOME: Final = ("CODEX_HOME", ".codex", "sessions")
"""Variable with the program's folder, its default below the user's home, and the folder of conversations in it."""
FILES: Final = "*/*/*/rollout-*.jsonl"
_BESIDE: Final = frozenset({"event_msg", "turn_context", "world_state", "token_usage_record", "session_state"})
_NOTED: Final = ("<environment_context>", "<user_instructions>", "# AGENTS.md instructions", "<turn_aborted>")
"""Prefixes of messages that the program itself adds; newer versions mark them by a member."""


def id_of(path: Path) -> str:
    """Return the id in a conversation's path."""
    return path.stem.split("-", 6)[-1]


def read(rows: Iterable[dict[str, Any]], talk: Talk) -> StoredHead:
    """Read a conversation's records."""
    head, model = dict[str, Any](), None
    for row in rows:
        kind, body = row.get("type"), mapping(row.get("payload"))
        if kind == "session_meta" and not head:
            head = body
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
            model = text_or_none(body.get("model")) or model
        elif kind not in _BESIDE and kind != "session_meta":
            talk.drop(unknown(kind))
    return StoredHead(str(head.get("id", "")), text_or_none(head.get("cwd")), model, head.get("cli_version"))


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
    # The program puts texts around an image that only name it.
    has_image = any(part.get("type") == "input_image" for part in parts)
    shown = [part for part in parts if not (has_image and part.get("text") in ("<image>", "</image>"))]
    talk.take("codex", "input", {"type": "message", "role": role, "content": shown})


def _is_note(item: Mapping[str, Any], words: list[str]) -> bool:
    kinds = mapping(item.get("internal_chat_message_metadata_passthrough")).get("content_item_kinds")
    if isinstance(kinds, list):
        return not any(str(kind).startswith("user.") for kind in kinds)
    return any(text.startswith(_NOTED) for text in words)
