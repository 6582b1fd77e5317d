"""Conversations that Kimi keeps: `sessions/FOLDER/session_ID/agents/main/wire.jsonl`, seen with 2.1.0 on 2026-11-24.

`context.*` rows are what its model is shown; the others say it once more, or how it came about.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane.agents.events import is_count, mapping, mappings
from backplane.agents.store import (
    NOTES,
    SUMMED,
    Place,
    StoredHead,
    Talk,
    VendorStore,
    address_of,
    arguments_of,
    calls_of,
    image_of,
    inner,
    open_file,
    require_known,
    rows,
    said_of,
    text_and_images,
    text_of,
    unknown,
)
from backplane.contract.conversation import Image
from backplane.errors import ConfigError

VERSIONS: Final = "1."
"""Of the form of its rows, not of the program."""
STATE_BYTES_MAX: Final = 1024 * 1024
"""Of `state.json`, which has a title and a folder."""


def _id_of(path: Path) -> str:
    return path.parents[2].name if len(path.parents) > 2 else ""


def read(place: Place, talk: Talk) -> StoredHead:
    version, model = None, None
    for row in rows(place.path, talk):
        kind = str(row.get("type"))
        if version is None:
            version = row.get("protocol_version") if kind == "metadata" else ""
            require_known(place.path, "Kimi in the form", version, VERSIONS)
        elif kind == "llm.request":
            model = said_of(row.get("model")) or model
        elif kind == "context.append_message":
            _message(mapping(row.get("message")), talk)
        elif kind == "context.append_loop_event":
            _event(mapping(row.get("event")), talk)
        elif kind == "context.clear":
            talk.cut(0, "messages before the history was cleared")
        elif kind == "context.apply_compaction":
            talk.cut(0, SUMMED)
            summary = row.get("contextSummary", row.get("summary"))
            talk.user(summary if isinstance(summary, str) else _words(mapping(summary).get("content"), talk)[0])
        elif kind == "context.undo" and is_count(row.get("count")):
            talk.undo(row["count"])
        elif kind.startswith("context."):
            talk.drop(unknown(kind))
    if version is None:
        require_known(place.path, "a program that says no version,", None, VERSIONS)
    return StoredHead(_id_of(place.path), _root(place.path), model)


def _root(path: Path) -> str | None:
    state = path.parents[2] / "state.json" if len(path.parents) > 2 else path
    try:
        with open(open_file(state), "rb") as file:
            return said_of(mapping(msgspec.json.decode(file.read(STATE_BYTES_MAX))).get("cwd"))
    except (ConfigError, ValueError, RecursionError, OSError):
        return None


def _message(message: Mapping[str, Any], talk: Talk) -> None:
    role, origin = message.get("role"), inner(message, "origin").get("kind")
    words, images = _words(message.get("content"), talk)
    if role == "user" and origin in ("user", None):
        talk.user(words, images)
    elif role == "assistant":
        talk.say(words)
        for call in mappings(message.get("toolCalls")):
            talk.call(str(call.get("id")), str(call.get("name")), arguments_of(call.get("arguments")))
    elif role == "tool":
        talk.result(str(message.get("toolCallId")), words, is_error=message.get("isError") is True)
    else:
        talk.drop(NOTES)


def _event(event: Mapping[str, Any], talk: Talk) -> None:
    kind, part = event.get("type"), mapping(event.get("part"))
    if kind == "content.part" and part.get("type") == "think":
        talk.think(str(part.get("think", "")), said_of(part.get("encrypted")))
    elif kind == "content.part" and part.get("type") == "text":
        talk.say(str(part.get("text")))
    elif kind == "tool.call":
        talk.call(str(event.get("toolCallId")), str(event.get("name")), event.get("args"))
    elif kind == "tool.result":
        result = mapping(event.get("result"))
        output = result.get("output", "")
        text = _words(output, talk)[0] if isinstance(output, list) else text_of(output)
        talk.result(str(event.get("toolCallId")), text, is_error=result.get("isError") is True)
    elif kind not in ("step.begin", "step.end"):
        talk.drop(unknown(part.get("type") if kind == "content.part" else kind))


def _words(content: object, talk: Talk) -> tuple[str, list[Image]]:
    if isinstance(content, str):
        return content, []
    words, images = [], []
    for part in mappings(content):
        address = part.get("imageUrl", part.get("image_url"))
        image = image_of(address.get("url") if isinstance(address, dict) else address)
        if part.get("type") == "text":
            words.append(str(part.get("text")))
        elif image is not None:
            images.append(image)
        else:
            talk.drop(unknown(part.get("type")))
    return "\n\n".join(words), images


# Writing --------------------------------------------------------------------------------------------------------------


def files_of(home: Path, data: bytes, id: str, *, root: str, now_ns: int) -> dict[Path, bytes]:
    """Return where the program looks for it when it works in this folder, and the file of its state."""
    name = re.sub(r"[^a-z0-9._-]+", "-", Path(root).name.lower()).strip("-")[:40].strip("-")
    folder = home / "sessions" / f"wd_{name}_{hashlib.sha256(root.encode()).hexdigest()[:12]}" / id
    main, ms = folder / "agents" / "main", now_ns // 1_000_000
    state = {
        "id": id, "version": 2, "cwd": root, "archived": False, "createdAt": ms, "updatedAt": ms, "custom": {},
        "agents": {"main": {"homedir": str(main), "type": "main"}}, "isCustomTitle": False,
    }  # fmt: skip
    return {main / "wire.jsonl": data, folder / "state.json": msgspec.json.encode(state)}


def write(document: Mapping[str, Any], id: str, *, root: str, now_ns: int) -> list[dict[str, Any]]:
    ms = now_ns // 1_000_000
    lines: list[dict[str, Any]] = [{"type": "metadata", "protocol_version": "1.5", "created_at": ms}]
    for message in document["messages"]:
        words, images = text_and_images(message.get("content"))
        parts: list[dict[str, Any]] = [{"type": "text", "text": words}] if words else []
        parts += [{"type": "image_url", "imageUrl": {"url": address_of(image)}} for image in images]
        said: dict[str, Any] = {"role": message["role"], "content": parts, "toolCalls": []}
        if message["role"] == "user":
            said |= {"origin": {"kind": "user"}}
        elif message["role"] == "tool":
            said |= {"toolCallId": message["tool_call_id"]}
        for id, name, given in calls_of(message):
            text = msgspec.json.encode(given).decode()
            said["toolCalls"].append({"type": "function", "id": id, "name": name, "arguments": text})
        lines.append({"type": "context.append_message", "agentId": "main", "message": said, "time": ms})
    return lines


STORE: Final = VendorStore(
    home=("KIMI_CODE_HOME", ".kimi-code"),
    files=("sessions", "*", "session_*", "agents", "main", "wire.jsonl"),
    id_of=_id_of,
    prefix="session_",
    read=read,
    dialect="openai",
    write=write,
    files_of=files_of,
    new_id=lambda: f"session_{uuid.uuid4()}",
)
