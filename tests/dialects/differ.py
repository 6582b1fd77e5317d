"""Looks for what of one document is not in another one; knows no dialect, and nothing of the product's own comparison.

A value is there when it stands in its place. The place of a list's member is found by what it says, else by its id or
name, else by its order. Null, absent and empty are one; so are a text and a list of one text.
"""

from __future__ import annotations

import json
from collections import deque
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


EMPTY: tuple[Any, ...] = (None, "", [], {})
IDENTITIES = ("id", "tool_use_id", "call_id", "tool_call_id", "name")


def is_named(pointer: str, paths: set[str]) -> bool:
    """Whether a loss names this pointer or something that holds it."""
    while pointer:
        if pointer in paths:
            return True
        pointer = pointer.rpartition("/")[0]
    return False


def unequal(before: Any, after: Any, pointer: str = "") -> list[str]:
    """Return the pointers of what is in only one of two documents, or says something else in the other."""
    if before in EMPTY and not isinstance(before, bool | int | float):
        return [] if after in EMPTY and not isinstance(after, bool | int | float) else [pointer]
    if isinstance(before, dict) and isinstance(after, dict):
        steps = [(key, key.replace("~", "~0").replace("/", "~1")) for key in sorted(before.keys() | after.keys())]
        return [at for key, step in steps for at in unequal(before.get(key), after.get(key), f"{pointer}/{step}")]
    if isinstance(before, list) and isinstance(after, list):
        return _in_list(before, after, pointer)
    if isinstance(before, str) and is_one_text(after):
        return unequal([{"type": after[0].get("type"), "text": before}], after, pointer)
    if isinstance(after, str) and is_one_text(before):
        return unequal(before, [{"type": before[0].get("type"), "text": after}], pointer)
    return [] if type(before) is type(after) and before == after else [pointer]


def is_one_text(value: Any) -> bool:
    """Whether a value is a list of one block, which has a text."""
    return isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict) and "text" in value[0]


def _in_list(before: list[Any], after: list[Any], pointer: str) -> list[str]:
    out: list[str] = []
    mine, theirs = deque(enumerate(before)), deque(enumerate(after))
    met: list[tuple[int, int]] = []
    for how in (said, identity):
        left: deque[tuple[int, Any]] = deque()
        for place, value in mine:
            found = next((one for one in theirs if how(value) is not None and how(value) == how(one[1])), None)
            if found is None:
                left.append((place, value))
            else:
                theirs.remove(found)
                met.append((place, found[0]))
        if how is said and [there for _, there in met] != sorted(there for _, there in met):
            out.append(pointer)  # another order
        mine = left
    if len(mine) == len(theirs):
        met += [(place, there) for (place, _), (there, _) in zip(mine, theirs, strict=True)]
        mine, theirs = deque(), deque()
    out += [at for place, there in met for at in unequal(before[place], after[there], f"{pointer}/{place}")]
    return out + [f"{pointer}/{place}" for place, value in (*mine, *theirs) if value not in EMPTY]


def said(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def identity(value: Any) -> Any:
    """Return the id or name of a list's member, or of the only object in it."""
    if not isinstance(value, dict):
        return None
    holders = [value, *(inner for inner in value.values() if isinstance(inner, dict))]
    names = [(name, holder[name]) for holder in holders for name in IDENTITIES if isinstance(holder.get(name), str)]
    return (*names[0], said(value.get("type"))) if names else None


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
