"""Conversations that Gemini CLI keeps: `tmp/FOLDER/chats/session-TIME-ID.jsonl`, seen with 0.61.0 on 2026-11-24.

A message is written again, under its id, whenever something comes to it; `$set` gives a new list, `$rewindTo` takes
back what is after a message. The file says no version of the program: it is known by its head.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from backplane.agents.events import mapping, mappings
from backplane.agents.store import (
    NOTES,
    UNDONE,
    Place,
    StoredHead,
    Talk,
    VendorStore,
    files,
    require_known,
    rows,
    said_of,
    unknown,
)
from backplane.contract.canonical import timestamp_at

KIND: Final = "main"
"""Of a conversation with a person, in the file's head; agents below it have files of another kind."""
MARK: Final = ".project_root"
"""A file that says which work folder a folder of the store belongs to."""
_NOTE: Final = "<session_context>"
_TOLD: Final = ("info", "warning", "error")
"""Types of messages that are said to the person alone."""


def id_of(path: Path) -> str:
    """Return the beginning of an id, which is all of it that a file's name has."""
    return path.stem.rpartition("-")[2]


def choose(found: list[Path], id: str) -> Place | None:
    """Return the newest conversation whose id begins so; beside the one that has all of it there may be empty ones."""
    newest = next((id_of(path) for path in found if id_of(path).startswith(id[:8])), None)
    same = [path for path in found if id_of(path) == newest]
    return Place(max(same, key=lambda path: path.stat().st_size)) if same else None


def read(place: Place, talk: Talk) -> StoredHead:
    head, said = dict[str, Any](), dict[str, dict[str, Any]]()
    for row in rows(place.path, talk):
        if not head:
            head = row
            known = "projectHash" in row and row.get("kind", KIND) == KIND
            require_known(place.path, "Gemini CLI as a", "chat" if known else row.get("kind"), "chat.")
        elif isinstance(row.get("$rewindTo"), str):
            ids = list(said)
            gone = ids[ids.index(row["$rewindTo"]) :] if row["$rewindTo"] in said else ids
            talk.drop(UNDONE, len(gone))
            said = {id: one for id, one in said.items() if id not in gone}
        elif isinstance(row.get("$set"), dict):
            if isinstance(row["$set"].get("messages"), list):
                said = {str(one.get("id")): one for one in mappings(row["$set"]["messages"])}
        elif isinstance(row.get("id"), str):
            said[row["id"]] = row
        else:
            talk.drop(unknown(next(iter(row), "")))
    model = None
    for one in said.values():
        model = said_of(one.get("model")) or model
        _message(one, talk)
    return StoredHead(str(head.get("sessionId", "")), _root(place.path), model)


def _root(path: Path) -> str | None:
    try:
        return (path.parent.parent / MARK).read_text(encoding="utf-8").strip() or None
    except (OSError, ValueError):
        return None


def _message(one: Mapping[str, Any], talk: Talk) -> None:
    kind, content = one.get("type"), one.get("content")
    if kind == "gemini":
        parts = [{"text": content}] if isinstance(content, str) else mappings(content)
        thought = "".join(str(part.get("text", "")) for part in parts if part.get("thought"))
        talk.think(thought or _thought(one.get("thoughts")))
        talk.say("".join(str(part.get("text", "")) for part in parts if not part.get("thought")))
        for part in parts:
            call = mapping(part.get("functionCall"))
            if call:
                id, proof = str(call.get("id")), said_of(part.get("thoughtSignature"))
                talk.call(id, str(call.get("name")), call.get("args"), proof)
        for call in mappings(one.get("toolCalls")):
            talk.call(str(call.get("id")), str(call.get("name")), call.get("args"))
    elif kind == "user":
        _user(content, talk)
    elif kind in _TOLD:
        talk.drop(NOTES)
    else:
        talk.drop(unknown(kind))


def _thought(thoughts: object) -> str:
    said = ""
    for one in mappings(thoughts):
        subject, words = str(one.get("subject", "")), str(one.get("description", ""))
        said += f"\n\n{subject}\n{words}" if subject and said else f"{subject}\n{words}" if subject else words
    return said


def _user(content: object, talk: Talk) -> None:
    parts = [{"text": content}] if isinstance(content, str) else mappings(content)
    said = [part for part in parts if not str(part.get("text", "")).startswith(_NOTE)]
    talk.drop(NOTES, len(parts) - len(said))
    talk.take("gemini", "contents", {"role": "user", "parts": said})


# Writing --------------------------------------------------------------------------------------------------------------


def files_of(home: Path, data: bytes, id: str, *, root: str, now_ns: int) -> dict[Path, bytes]:
    """Return where the program looks for it when it works in this folder, and the mark of a folder that is new to it.

    It finds a work folder's place by that mark where its list of folders does not name it.
    """
    marks = [path for path in files(home, "tmp", "*", MARK) if _root(path.parent / "chats" / MARK) == root]
    folder = marks[0].parent if marks else home / "tmp" / f"c-{id[:8]}"
    # A day ago: in the minute that its name says, the program takes it for a new one.
    then = time.strftime("%Y-%m-%dT%H-%M", time.gmtime(now_ns // 10**9 - 86_400))
    made = {folder / "chats" / f"session-{then}-{id[:8]}.jsonl": data}
    return made if marks else {**made, folder / MARK: root.encode()}


def write(document: Mapping[str, Any], id: str, *, root: str, now_ns: int) -> list[dict[str, Any]]:
    then, folder = timestamp_at(now_ns), hashlib.sha256(root.encode()).hexdigest()
    lines: list[dict[str, Any]] = [
        {"sessionId": id, "projectHash": folder, "startTime": then, "lastUpdated": then, "kind": KIND}
    ]
    for content in document["contents"]:
        row: dict[str, Any] = {"id": str(uuid.uuid4()), "timestamp": then, "type": "user", "content": content["parts"]}
        if content["role"] == "model":
            calls = [
                {**part["functionCall"], "status": "success"} for part in content["parts"] if "functionCall" in part
            ]
            words = "".join(str(part.get("text", "")) for part in content["parts"])
            row |= {"type": "gemini", "content": words, "thoughts": [], "toolCalls": calls}
        lines.append(row)
    return lines


STORE: Final = VendorStore(
    home=("GEMINI_CLI_HOME", "", ".gemini"),
    files=("tmp", "*", "chats", "session-*.jsonl"),
    id_of=id_of,
    choose=choose,
    read=read,
    dialect="gemini",
    write=write,
    files_of=files_of,
)
