"""Reads conversations that Claude Code keeps in `projects/FOLDER/ID.jsonl` (seen with 2.1.330 on 2026-11-24).

Each row names the row before it, so rows that were taken back stay in the file as a branch of their own. An answer has
one row for each of its blocks. The result of a call follows the row of that call, and the next answer follows the
result that was written last. With parallel calls, some rows of an answer and some results are therefore not on the path
from the last row to the first, but belong to the conversation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from backplane.agents.events import mapping
from backplane.dialects.history import BELOW, NOTES, SUMMED, UNDONE, StoredHead, Talk, text_or_none, unknown

PROGRAM: Final = "Claude Code"
VERSIONS: Final = "2."
"""Prefix of the versions that this reader was tried with."""
HOME: Final = ("CLAUDE_CONFIG_DIR", ".claude", "projects")
"""Variable with the program's folder, its default below the user's home, and the folder of conversations in it."""
FILES: Final = "*/*.jsonl"
_BESIDE: Final = frozenset(
    {
        *("atis-latch", "queue-operation", "tools-used", "last-prompt", "cost-state", "mode", "summary"),
        *("api-request", "api-request-blob", "api-request-shape", "file-history-snapshot", "permission-mode"),
        *("agent-name", "ai-title", "custom-title", "progress", "pr-link", "tag"),
    }
)
"""Kinds of rows without content for the model: bookkeeping, titles, and the program's own requests."""


def id_of(path: Path) -> str:
    """Return the id in a conversation's path."""
    return path.stem


def read(rows: Iterable[dict[str, Any]], talk: Talk) -> StoredHead:
    """Read a conversation's records."""
    kept, parents = list[dict[str, Any]](), dict[str, str | None]()
    for row in rows:
        kind, id = row.get("type"), row.get("uuid")
        if isinstance(id, str):
            parents[id] = text_or_none(row.get("parentUuid"))
        if kind in ("user", "assistant"):
            kept.append(row)
        elif kind in ("attachment", "system"):
            talk.drop(NOTES)
        elif kind not in _BESIDE:
            talk.drop(unknown(kind))
    model, branch = None, _branch(kept, parents)
    for row in _whole_answers(kept):
        if row.get("isSidechain"):
            talk.drop(BELOW)
        elif not _is_on(row, branch):
            talk.drop(SUMMED if _is_before(row, kept, branch) else UNDONE)
        elif row.get("isMeta") or row.get("isApiErrorMessage"):
            talk.drop(NOTES)
        else:
            message = mapping(row.get("message"))
            model = text_or_none(message.get("model")) or model
            talk.take("claude", "messages", {"role": row["type"], "content": message.get("content")})
    first = kept[0] if kept else {}
    id, root = text_or_none(first.get("sessionId")) or "", text_or_none(first.get("cwd"))
    return StoredHead(id, root, model, first.get("version") if kept else VERSIONS)


def _branch(kept: list[dict[str, Any]], parents: dict[str, str | None]) -> set[str]:
    """Return the ids of the rows that a resumed conversation has: the last row, and its parents up to the first.

    If one row of an answer is among them, all rows of the answer are.
    """
    own = [row for row in kept if not row.get("isSidechain")]
    id, found = text_or_none(own[-1].get("uuid")) if own else None, set[str]()
    while id is not None and id not in found:
        found.add(id)
        id = parents.get(id)
    answers = {_answer_of(row) for row in own if row.get("uuid") in found} - {None}
    return found | {str(row.get("uuid")) for row in own if _answer_of(row) in answers}


def _answer_of(row: Mapping[str, Any]) -> str | None:
    """Return the id of the answer to which a row belongs; None if the row is no part of an answer."""
    return text_or_none(mapping(row.get("message")).get("id")) if row.get("type") == "assistant" else None


def _whole_answers(kept: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the rows with all blocks of an answer moved to its first; a call's result may stand between them."""
    blocks: dict[tuple[str, bool], list[dict[str, Any]]] = {}
    for row in kept:
        if (answer := _answer_of(row)) is not None:
            blocks.setdefault((answer, bool(row.get("isSidechain"))), []).append(row)
    for row in kept:
        answer = _answer_of(row)
        if answer is None:
            yield row
        else:
            yield from blocks.pop((answer, bool(row.get("isSidechain"))), ())


def _is_on(row: Mapping[str, Any], branch: set[str]) -> bool:
    above = row.get("sourceToolAssistantUUID") or (row.get("parentUuid") if _has_result(row) else None)
    return row.get("uuid") in branch or above in branch


def _has_result(row: Mapping[str, Any]) -> bool:
    content = mapping(row.get("message")).get("content")
    return isinstance(content, list) and any(mapping(part).get("type") == "tool_result" for part in content)


def _is_before(row: Mapping[str, Any], kept: list[dict[str, Any]], branch: set[str]) -> bool:
    first = next(one for one in kept if one.get("uuid") in branch)
    return str(row.get("timestamp")) < str(first.get("timestamp"))
