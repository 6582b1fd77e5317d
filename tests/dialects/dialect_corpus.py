"""The documents and streams under `contracts/dialects/`, as the tests read them; `Corpus` holds any others too."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from backplane.dialects import DIALECTS

FOLDER = Path(__file__).resolve().parents[2] / "contracts" / "dialects"
NAMES = tuple(DIALECTS)
PAIRS = [(source, target) for source in NAMES for target in NAMES]
KINDS = ("request", "response")


@cache
def _lines(dialect: str, file: str) -> tuple[dict[str, Any], ...]:
    text = (FOLDER / dialect / f"{file}.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


def documents(dialect: str, kind: str) -> list[tuple[str, Any]]:
    """Return name and document of each request or response."""
    return [(line["name"], line["document"]) for line in _lines(dialect, f"{kind}s")]


def streams(dialect: str) -> list[tuple[str, list[Any]]]:
    """Return name and chunks of each stream."""
    return [(line["name"], line["chunks"]) for line in _lines(dialect, "streams")]


class Corpus(NamedTuple):
    """Where the measures take their documents and streams from."""

    documents: Callable[[str, str], list[tuple[str, Any]]]
    """Dialect and kind → name and document of each."""
    streams: Callable[[str], list[tuple[str, list[Any]]]]
    """Dialect → name and chunks of each."""
    names: Sequence[str] = NAMES
    pairs: Sequence[tuple[str, str]] = PAIRS


CONTRACTS = Corpus(documents, streams)


def canonical(value: Any) -> str:
    """Write a value so that equal text is equal JSON, nulls and number forms included."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
