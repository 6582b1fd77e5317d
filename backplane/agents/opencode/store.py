"""Conversations that opencode keeps: rows of the SQLite database `opencode.db`, seen with 1.18.33 on 2026-11-24.

The database may be in use: it is copied by SQLite's own call for that, and the copy is read.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec

from backplane.agents.events import mapping
from backplane.agents.store import (
    FILE_BYTES_MAX,
    NOTES,
    SUMMED,
    UNDONE,
    Place,
    StoredHead,
    Talk,
    VendorStore,
    address_of,
    calls_of,
    image_of,
    inner,
    require_known,
    said_of,
    text_and_images,
    text_of,
    unknown,
)
from backplane.errors import ConfigError

VERSIONS: Final = "1."
BUSY_S: Final = 5.0
"""For a writer to finish: one writes for milliseconds."""
_BESIDE: Final = frozenset({"step-start", "step-finish", "snapshot", "patch", "agent", "retry"})
"""Parts in which nobody says anything to the model."""
_SESSION: Final = "select id, directory, version, revert from session where parent_id is null {} order by {} limit 1"
_PARTS: Final = (
    "select message.id, message.data, part.id, part.data from message left join part on part.message_id = message.id "
    "where message.session_id = ? order by message.time_created, message.id, part.id"
)


def choose(found: list[Path], id: str) -> Place | None:
    """Return the newest conversation whose id begins so, with or without its `ses_`, in the newest database."""
    return Place(found[0], f"ses_{id.removeprefix('ses_')}" if id else None) if found else None


def read(place: Place, talk: Talk) -> StoredHead:
    with tempfile.TemporaryDirectory(prefix="backplane-store-") as folder:
        copy = Path(folder, "copy.db")
        try:
            _copy(place.path, copy)
            with closing(sqlite3.connect(copy)) as store:
                return _read(store, place, talk)
        except sqlite3.Error as error:
            fact = f"{place.path} cannot be read: {error}"
            raise ConfigError("config_invalid", fact, hint="give the path of `opencode.db`") from error


def _copy(path: Path, to: Path) -> None:
    if path.is_symlink() or not path.is_file():
        raise ConfigError("config_invalid", f"{path} is no file of its own", hint="name the database itself")
    source = sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True, timeout=BUSY_S)
    with closing(source), closing(sqlite3.connect(to)) as target:
        pages, size = (source.execute(f"pragma {name}").fetchone()[0] for name in ("page_count", "page_size"))
        if pages * size > FILE_BYTES_MAX:
            fact = f"{path} is over {FILE_BYTES_MAX} bytes"
            raise ConfigError("config_invalid", fact, hint="`opencode export ID`, and import that session elsewhere")
        source.backup(target)


def _read(store: sqlite3.Connection, place: Place, talk: Talk) -> StoredHead:
    where, order = ("and substr(id, 1, ?) = ?", "id") if place.id else ("", "time_updated desc")
    given = (len(place.id), place.id) if place.id else ()
    row = store.execute(_SESSION.format(where, order), given).fetchone()
    if row is None:
        raise ConfigError("config_invalid", f"{place.path} has no such conversation", hint="`opencode session list`")
    id, root, version, reverted = row
    require_known(place.path, "opencode", version, VERSIONS)
    model = None
    gone = said_of(_object(reverted).get("messageID"))
    for number, message, parts in _messages(store, id):
        if gone is not None and number >= gone:
            talk.drop(UNDONE)
            continue
        model = said_of(message.get("modelID")) or said_of(inner(message, "model").get("modelID")) or model
        if message.get("summary") is True:
            talk.cut(0, SUMMED)
        (_user if message.get("role") == "user" else _assistant)(parts, talk)
    return StoredHead(id, root, model)


def _messages(store: sqlite3.Connection, id: str) -> Iterator[tuple[str, dict[str, Any], list[dict[str, Any]]]]:
    last, message, parts = None, dict[str, Any](), list[dict[str, Any]]()
    for number, data, part, content in store.execute(_PARTS, (id,)):
        if number != last:
            if last is not None:
                yield last, message, parts
            last, message, parts = number, _object(data), []
        if part is not None:
            parts.append(_object(content))
    if last is not None:
        yield last, message, parts


def _object(text: object) -> dict[str, Any]:
    try:
        return mapping(msgspec.json.decode(text)) if isinstance(text, str) else {}
    except (ValueError, RecursionError):
        return {}


def _user(parts: list[dict[str, Any]], talk: Talk) -> None:
    words, images = [], []
    for part in parts:
        kind = part.get("type")
        if part.get("synthetic") or part.get("ignored"):
            talk.drop(NOTES)
        elif kind == "text":
            words.append(str(part.get("text")))
        elif kind == "file" and str(part.get("mime")).startswith("image/"):
            image = image_of(part.get("url"), part.get("mime"))
            images += [image] if image is not None else []
        elif kind == "compaction":
            talk.drop(NOTES)
        elif kind not in _BESIDE:
            talk.drop(unknown(kind))
    if words or images:
        talk.user("\n\n".join(words), images)


def _assistant(parts: list[dict[str, Any]], talk: Talk) -> None:
    results: list[tuple[str, str, bool]] = []  # Calls of one step are made at once, and answered together.
    for part in parts:
        kind = part.get("type")
        if kind == "text":
            talk.say(str(part.get("text")))
        elif kind == "reasoning":
            talk.think(str(part.get("text", "")))
            if part.get("metadata"):
                talk.drop("proofs of thinking, which opencode keeps in a form of its own")
        elif kind == "tool":
            state, id = mapping(part.get("state")), str(part.get("callID"))
            talk.call(id, str(part.get("tool")), state.get("input"))
            if state.get("status") in ("completed", "error"):
                failed = state["status"] == "error"
                results.append((id, text_of(state.get("error" if failed else "output", "")), failed))
            if state.get("attachments"):
                talk.drop("files in what tools gave")
        elif kind == "step-finish":
            _answer(results, talk)
        elif kind not in _BESIDE:
            talk.drop(unknown(kind))
    _answer(results, talk)


def _answer(results: list[tuple[str, str, bool]], talk: Talk) -> None:
    for id, text, failed in results:
        talk.result(id, text, is_error=failed)
    results.clear()


# Writing --------------------------------------------------------------------------------------------------------------

VERSION: Final = "1.18.33"
"""Of the program whose form is written."""


def new_id() -> str:
    """Make the id of a conversation."""
    return _id("ses", time.time_ns())


def _id(kind: str, now_ns: int) -> str:
    """An id as the program makes it: it begins with the time, so that ids have the order of what they name."""
    return f"{kind}_{now_ns & (1 << 60) - 1:015x}{uuid.uuid4().hex[:11]}"


def write(document: Mapping[str, Any], id: str, *, root: str, now_ns: int) -> list[dict[str, Any]]:
    """Write a request's messages as the program exports them, one document."""
    ms, made = now_ns // 1_000_000, list[dict[str, Any]]()
    results = {one["tool_call_id"]: one for one in document["messages"] if one["role"] == "tool"}
    zero = {"input": 0, "output": 0, "reasoning": 0, "cache": {"read": 0, "write": 0}}
    model, user = {"providerID": "imported", "modelID": "imported"}, ""
    for number, message in enumerate(document["messages"]):
        if message["role"] == "tool":
            continue
        own = _id("msg", now_ns + number)
        info: dict[str, Any] = {"id": own, "sessionID": id, "role": message["role"], "agent": "build"}
        if message["role"] == "user":
            user = own
            info |= {"time": {"created": ms}, "model": model}
        else:
            info |= {
                "parentID": user, "mode": "build", "path": {"cwd": root, "root": root}, "cost": 0, "tokens": zero,
                **model, "time": {"created": ms, "completed": ms}, "finish": "stop",
            }  # fmt: skip
        words, images = text_and_images(message.get("content"))
        parts: list[dict[str, Any]] = [{"type": "text", "text": words}] if words else []
        parts += [{"type": "file", "mime": image.media_type, "url": address_of(image)} for image in images]
        for call, name, given in calls_of(message):
            output, _ = text_and_images(results.get(call, {}).get("content"))
            state = {
                "status": "completed", "input": given, "output": output, "metadata": {}, "title": name,
                "time": {"start": ms, "end": ms},
            }  # fmt: skip
            parts.append({"type": "tool", "tool": name, "callID": call, "state": state})
        kept = [
            {"id": _id("prt", now_ns + place), "sessionID": id, "messageID": own, **part}
            for place, part in enumerate(parts)
        ]
        made.append({"info": info, "parts": kept})
    about = {
        "id": id, "slug": "imported", "projectID": "global", "directory": root, "title": "imported",
        "version": VERSION, "time": {"created": ms, "updated": ms},
    }  # fmt: skip
    return [{"info": about, "messages": made}]


STORE: Final = VendorStore(
    home=("XDG_DATA_HOME", ".local/share", "opencode"),
    files=("opencode*.db",),
    id_of=lambda path: path.stem,
    choose=choose,
    read=read,
    dialect="openai",
    write=write,
    files_of=lambda *_, **__: {},
    new_id=new_id,
    takes_in="opencode import FILE",
)
