"""Judges recorded traffic by the six measures: `python -m tests.dialects.recorded FOLDER [M1 M2 …]`.

Every file below the folder is read: JSON, JSON lines, or a stream as it came over the wire. A recording may be the bare
document or an exchange (`url` or `path`, `body` or `request`, `response`). What is no model traffic is counted and
left out. Recordings belong into a folder that is not committed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backplane.dialects import read_stream
from backplane.errors import BackplaneError
from tests.dialects import measures
from tests.dialects.dialect_corpus import KINDS, NAMES, Corpus

Found = tuple[str, str, Any]
"""Dialect, kind (`request`, `response`, `stream`) and the document or chunks."""

PATHS = (
    ("/chat/completions", "openai"), ("/messages", "claude"), ("/responses", "codex"), ("generateContent", "gemini"),
    ("GenerateContent", "gemini"),
)  # fmt: skip
CHAT_HOSTS = (("moonshot", "kimi"), ("kimi", "kimi"), ("copilot", "copilot"))
"""Words of an address that tell one dialect of the Chat family from another."""


def by_address(address: str) -> str | None:
    """Return the dialect that is spoken at an address, None for anything that is no model call."""
    path = address.partition("?")[0].rstrip("/")
    name = next((name for word, name in PATHS if path.endswith(word)), None)
    if name == "openai":
        return next((kin for word, kin in CHAT_HOSTS if word in address), name)
    return name


def by_shape(document: Any) -> Found | None:
    """Tell what a bare document is by its members."""
    if isinstance(document, list):
        inner = by_shape(document[0]) if document else None
        return None if inner is None else (inner[0], "stream", document)
    if not isinstance(document, dict):
        return None
    rules = (
        ("gemini", "request", "contents" in document),
        ("gemini", "response", "candidates" in document or "usageMetadata" in document),
        ("openai", "response", "choices" in document),
        ("codex", "response", document.get("object") == "response"),
        ("claude", "response", document.get("type") == "message"),
        ("codex", "request", "input" in document and "model" in document),
        ("claude", "request", "messages" in document and ("system" in document or "anthropic_version" in document)),
        ("openai", "request", "messages" in document),
        ("codex", "chunk", str(document.get("type")).startswith("response.")),
        ("claude", "chunk", str(document.get("type")).startswith(("message_", "content_block_"))),
    )
    return next(((name, kind, document) for name, kind, holds in rules if holds), None)


def of_exchange(line: dict[str, Any]) -> Iterator[Found]:
    """Yield the request and the answer of one recorded exchange."""
    name = by_address(str(line.get("url") or line.get("path") or ""))
    if name is None:
        return
    asked = _json(line.get("body", line.get("request")))
    if isinstance(asked, dict):
        yield name, "request", _json(asked.get("body", asked))
    answer = line.get("response")
    if isinstance(answer, dict) and "body" in answer:
        answer = answer["body"]
    yield from of_answer(name, answer)


def of_answer(name: str, answer: Any) -> Iterator[Found]:
    """Yield an answer, which may be a document, its text, or the text of a stream."""
    answer = _json(answer)
    if isinstance(answer, dict):
        yield name, "response", answer
    elif isinstance(answer, list):
        yield name, "stream", answer
    elif isinstance(answer, str) and answer:
        chunks = read_stream(answer.encode(), name)
        if chunks:
            yield name, "stream", chunks


def _json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def in_file(path: Path) -> Iterator[Found | None]:
    """Yield what a file holds; None for each record that is no model traffic."""
    text = path.read_text(encoding="utf-8", errors="replace")
    whole = _json(text)
    if isinstance(whole, str) and path.suffix != ".jsonl":
        yield from _of_wire(whole)
        return
    for line in [whole] if not isinstance(whole, str) else map(_json, text.splitlines()):
        found: list[Found | None] = [*_of_line(line, path)]
        yield from found or [None]


def _of_wire(text: str) -> Iterator[Found | None]:
    chunks = read_stream(text.encode(), "openai")
    found = next((shape for chunk in chunks if (shape := by_shape(chunk))), None)
    yield (found[0], "stream", chunks) if found is not None else None


def _of_line(line: Any, path: Path) -> Iterator[Found]:
    if isinstance(line, dict) and path.parent.name in NAMES and ("document" in line or "chunks" in line):
        kind = "stream" if "chunks" in line else path.stem.removesuffix("s")
        yield path.parent.name, kind, line.get("chunks", line.get("document"))
    elif isinstance(line, dict) and ("url" in line or "path" in line):
        yield from of_exchange(line)
    elif (found := by_shape(line)) is not None:
        yield found


def corpus_of(folder: Path) -> tuple[Corpus, int, list[str]]:
    """Read a folder; return its corpus, how many records are no model traffic, and what no dialect can read."""
    kept: dict[tuple[str, str], list[tuple[str, Any]]] = {}
    left, unread = 0, []
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        for place, found in enumerate(in_file(path)):
            if found is None:
                left += 1
                continue
            name, kind, document = found
            title = f"{path.relative_to(folder)}:{place + 1}"
            try:
                if kind != "stream":
                    measures.reader(name, kind)(document)
            except BackplaneError as error:
                unread.append(f"{title}: {error}")
                continue
            kept.setdefault((name, kind), []).append((title, document))
    return Corpus(lambda n, k: kept.get((n, k), []), lambda n: kept.get((n, "stream"), [])), left, unread


def main(folder: str, names: list[str]) -> int:
    """Print what was found and the six measures; return the exit code."""
    corpus, left, unread = corpus_of(Path(folder))
    for name in NAMES:
        counts = [len(corpus.documents(name, kind)) for kind in KINDS]
        print(f"{name}: {counts[0]} requests, {counts[1]} responses, {len(corpus.streams(name))} streams")
    print(f"left out, no model traffic: {left}; refused as no document of its dialect: {len(unread)}")
    for line in unread:
        print(f"  {line}")
    return 1 if measures.report(corpus, names) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
