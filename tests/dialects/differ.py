"""Looks for values of one document that are missing in another; knows no dialect.

A value is there when it stands anywhere in the other document, as itself or inside a longer text, or in a text that is
itself JSON. Words that only say what kind of thing something is are no values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

KIND_WORDS = frozenset(
    [
        "type",
        "role",
        "object",
        "finish_reason",
        "stop_reason",
        "status",
        "mode",
        "finishReason",
        "total_tokens",
        "totalTokenCount",
        "index",
        "kind",
        "who",
        "halted",
        "thought",
    ]
) | {"total_token_count"}
"""Members whose values are words of their dialect, or sums that say nothing new."""

COUNTERS = frozenset(
    [
        "prompt_tokens",
        "completion_tokens",
        "input_tokens",
        "output_tokens",
        "promptTokenCount",
        "candidatesTokenCount",
        "prompt_token_count",
        "candidates_token_count",
        "thoughtsTokenCount",
        "toolUsePromptTokenCount",
        "in",
        "out",
    ]
)
"""Counted in another way by every dialect; compared by the conversion's own tests."""


def leaves(value: Any, pointer: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield pointer, member and value of everything that holds nothing else."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            step = key.replace("~", "~0").replace("/", "~1")
            for at, member, leaf in leaves(inner, f"{pointer}/{step}"):
                yield at, member or key, leaf
    elif isinstance(value, list) and value:
        for place, inner in enumerate(value):
            yield from leaves(inner, f"{pointer}/{place}")
    else:
        yield pointer, "", value


def member_of(pointer: str) -> str:
    steps = [step for step in pointer.split("/") if not step.isdecimal()]
    return steps[-1] if steps else ""


def texts_of(value: Any) -> Iterator[Any]:
    """Yield every leaf, and the leaves of texts that are JSON, and the pieces of data URLs."""
    for _, _, leaf in leaves(value):
        yield leaf
        if isinstance(leaf, str) and leaf[:1] in "{[":
            try:
                inner = json.loads(leaf)
            except ValueError:
                continue
            yield from texts_of(inner)
        if isinstance(leaf, str) and leaf.startswith("data:"):
            head, _, data = leaf.partition(",")
            yield from (head[5:].partition(";")[0], data)


def is_named(pointer: str, paths: set[str]) -> bool:
    """Whether a loss names this pointer or something that holds it."""
    while pointer:
        if pointer in paths:
            return True
        pointer = pointer.rpartition("/")[0]
    return False


def missing(source: Any, target: Any, paths: set[str]) -> list[str]:
    """Return the pointers of values that are neither in the target nor named by a loss."""
    there = list(texts_of(target))
    words = [word for word in there if isinstance(word, str)]
    joined = "\n".join(words)
    out = []
    for pointer, _, leaf in leaves(source):
        member = member_of(pointer)
        if member in KIND_WORDS or member in COUNTERS or is_named(pointer, paths):
            continue
        if leaf in ("", [], {}):
            continue
        if isinstance(leaf, str):
            found = leaf in words or leaf in joined or _pieces(leaf, there, joined)
        else:
            found = any(type(word) is type(leaf) and word == leaf for word in there) or _same_number(leaf, there)
        if not found:
            out.append(pointer)
    return out


def _same_number(leaf: Any, there: list[Any]) -> bool:
    if isinstance(leaf, bool):
        return (not leaf) in there  # said the other way round
    return isinstance(leaf, int | float) and any(word == leaf for word in there if not isinstance(word, bool))


def _pieces(leaf: str, there: list[Any], joined: str) -> bool:
    """A text that is JSON may stand as an object, a data URL as its parts."""
    if leaf[:1] in "{[":
        try:
            inner = json.loads(leaf)
        except ValueError:
            return False
        return all(
            value in there or (isinstance(value, str) and value in joined) or value in ({}, [])
            for _, _, value in leaves(inner)
        )
    if leaf.startswith("data:"):
        head, _, data = leaf.partition(",")
        return data in there and head[5:].partition(";")[0] in there
    return False


def changed(before: Any, after: Any, pointer: str = "") -> list[str]:
    """Return the pointers at which two documents differ, the members that only one has included."""
    if isinstance(before, dict) and isinstance(after, dict):
        out = []
        for key in sorted(before.keys() | after.keys()):
            at = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
            if key not in before or key not in after:
                out.append(at)
            else:
                out += changed(before[key], after[key], at)
        return out
    if isinstance(before, list) and isinstance(after, list):
        out = []
        for place in range(max(len(before), len(after))):
            at = f"{pointer}/{place}"
            if place >= len(before) or place >= len(after):
                out.append(at)
            else:
                out += changed(before[place], after[place], at)
        return out
    same = type(before) is type(after) and before == after
    return [] if same else [pointer]
