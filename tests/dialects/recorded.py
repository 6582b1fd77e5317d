"""Judges recorded traffic by the six measures: `python -m tests.dialects.recorded FOLDER [--shapes N] [M1 M2 …]`.

Every file below the folder is read: JSON, JSON lines, a stream as it came over the wire, or a cassette of a test suite
(YAML, packed or not; `packages.py` fetches those of public packages, YAML needs `pip install pyyaml`). A recording may
be the bare document or an exchange (`url`, `uri` or `path`, `body` or `request`, `response`). What is no model traffic
is counted and left out, and what was recorded twice is judged once; of recordings with the same members `--shapes`
judges N only, for a quick look.
Recordings belong into a folder that is not committed.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backplane.dialects import read_stream
from backplane.errors import BackplaneError
from tests.dialects import measures
from tests.dialects.dialect_corpus import KINDS, NAMES, Corpus, canonical
from tests.dialects.differ import KIND_WORDS

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
    if "/threads/" in path:
        return None
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
    """Yield the request and the answer of one recorded exchange; an address that was blacked out is told by shape."""
    address = str(line.get("url") or line.get("uri") or line.get("path") or "")
    asked = _json(line.get("body", line.get("request")))
    if isinstance(asked, dict) and "url" not in asked:
        asked = _json(asked.get("body", asked))
    answer = line.get("response")
    if isinstance(answer, dict) and "body" in answer:
        answer = answer["body"]
    name = by_address(address)
    if name is None and "/" not in address:
        heard = _json(answer)
        heard = read_stream(heard.encode(), "openai") if isinstance(heard, str) else heard
        shape = by_shape(heard) or by_shape(asked)
        name = None if shape is None else shape[0]
    if name is None:
        return
    if isinstance(asked, dict):
        yield name, "request", asked
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


def of_cassette(text: str) -> Iterator[Found | None]:
    """Yield the exchanges of a cassette: a list of interactions, or requests and responses side by side."""
    yaml: Any = importlib.import_module("yaml")
    tape = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    turns = tape.get("interactions") if isinstance(tape, dict) else None
    if not isinstance(tape, dict) or not isinstance(turns, list | None):
        yield None
        return
    both = ((one.get("request"), one.get("response")) for one in turns or ())
    for asked, answered in [*both, *zip(tape.get("requests") or (), tape.get("responses") or (), strict=False)]:
        line = {"uri": asked.get("uri"), "body": _body(asked), "response": _body(answered or {})}
        found: list[Found | None] = [*of_exchange(line)]
        yield from found or [None]


def _body(message: dict[str, Any]) -> Any:
    """Return the body of a taped message: parsed, as text, or packed as it came over the wire."""
    body = message.get("parsed_body", message.get("body"))
    body = body.get("string") if isinstance(body, dict) and list(body) == ["string"] else body
    if not isinstance(body, bytes):
        return body
    packed = body[:2] == b"\x1f\x8b"
    return (zlib.decompress(body, wbits=31) if packed else body).decode(errors="replace")


def in_file(path: Path) -> Iterator[Found | None]:
    """Yield what a file holds; None for each record that is no model traffic."""
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode(errors="replace")
    if {".yaml", ".yml"} & {*path.suffixes}:
        yield from of_cassette(text)
        return
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


def shape_of(value: Any) -> Any:
    """Return what a recording is made of: its members and words of kind, without texts and numbers."""
    if isinstance(value, dict):
        return tuple(sorted((key, value[key] if key in KIND_WORDS else shape_of(value[key])) for key in value))
    if isinstance(value, list):
        return tuple(sorted({repr(shape_of(inner)) for inner in value}))
    return type(value).__name__


def corpus_of(folder: Path, shapes: int = 0) -> tuple[Corpus, int, list[str]]:
    """Read a folder; return its corpus, how many records are no model traffic, and what no dialect can read.

    Args:
        shapes: most recordings of one shape; 0 is all of them.
    """
    kept: dict[tuple[str, str], list[tuple[str, Any]]] = {}
    left, unread = 0, []
    seen: Counter[str] = Counter()
    for path in sorted(file for file in folder.rglob("*") if file.is_file()):
        for place, found in enumerate(in_file(path)):
            if found is None:
                left += 1
                continue
            name, kind, document = found
            whole, shape = canonical([name, kind, document]), repr((name, kind, shape_of(document)))
            if seen[whole] or (shapes and seen[shape] >= shapes):
                continue
            seen.update((whole, shape))
            title = f"{path.relative_to(folder)}:{place + 1}"
            try:
                if kind != "stream":
                    measures.reader(name, kind)(document)
            except BackplaneError as error:
                unread.append(f"{title}: {error}")
                continue
            kept.setdefault((name, kind), []).append((title, document))
    return Corpus(lambda n, k: kept.get((n, k), []), lambda n: kept.get((n, "stream"), [])), left, unread


def main(args: list[str]) -> int:
    """Print what was found and the six measures; return the exit code."""
    parser = argparse.ArgumentParser(prog="recorded")
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="M1")
    parser.add_argument("--shapes", type=int, default=0, metavar="N")
    said = parser.parse_intermixed_args(args)
    corpus, left, unread = corpus_of(said.folder, said.shapes)
    for name in NAMES:
        counts = [len(corpus.documents(name, kind)) for kind in KINDS]
        print(f"{name}: {counts[0]} requests, {counts[1]} responses, {len(corpus.streams(name))} streams")
    print(f"left out, no model traffic: {left}; refused as no document of its dialect: {len(unread)}")
    for line in unread:
        print(f"  {line}")
    return 1 if measures.report(corpus, said.names) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
