"""The documents and streams under `contracts/dialects/`, as the tests read them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

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


def canonical(value: Any) -> str:
    """Write a value so that equal text is equal JSON, nulls and number forms included."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)
