"""Finds the losses of a translation: compares a document with its translation back from the target.

Elements of lists are matched by their content, then by their id or name, so that a dropped element does not shift the
others. Null, absent and empty are equal, and so are a text and a list of one text. `patched` makes an edit in a
document without changing the rest of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from backplane.contract.canonical import Json
from backplane.dialects.common import encode, escape
from backplane.dialects.ir import LossKind

ABSENT: Final[Any] = object()
IDS: Final = ("id", "tool_use_id", "call_id", "tool_call_id", "name")
"""Members by which an element of a list is matched if its content differs."""

CODES: Final[dict[str, str]] = {
    "tools": "tool_field", "tool_choice": "tool_choice", "usage": "usage", "usageMetadata": "usage",
    "usage_metadata": "usage", "id": "identity", "model": "identity", "created": "identity", "created_at": "identity",
    "cache_control": "cache", "citations": "citation", "annotations": "citation", "signature": "signature",
    "thoughtSignature": "signature", "thinking": "thinking", "reasoning_content": "thinking", "role": "role",
    "name": "role", "detail": "media", "filename": "media", "is_error": "tool_field", "arguments": "arguments",
    "finish_reason": "stop", "stop_reason": "stop", "stop_sequence": "stop", "finishReason": "stop",
}  # fmt: skip
"""Member → code of a loss in it; the innermost member counts."""
REASONS: Final[dict[LossKind, str]] = {
    "dropped": "it does not come back from the target",
    "degraded": "it comes back from the target in another form or place",
    "synthesised": "the way back adds it",
}


class Difference(NamedTuple):
    """A value of a document that is not equal after translation back."""

    at: str
    """JSON pointer into the document; for an added value, into the document after translation back."""
    kind: LossKind


def differences(before: Json, after: Json, at: str = "", *, exact: bool = False) -> Iterator[Difference]:
    """Yield every difference between a document and its translation back.

    Args:
        exact: True if absent, null and empty differ, and a text differs from a list of one text.
    """
    if not exact:
        before, after = _like(before, after), _like(after, before)
    if before is ABSENT or (not exact and is_nothing(before)):
        if after is not ABSENT and (exact or not is_nothing(after)):
            yield Difference(at, "synthesised")
    elif after is ABSENT or (not exact and is_nothing(after)):
        yield Difference(at, "dropped")
    elif type(before) is dict and type(after) is dict:
        for key in (*before, *(key for key in after if key not in before)):
            one, two = before.get(key, ABSENT), after.get(key, ABSENT)
            if one is not two:
                yield from differences(one, two, f"{at}/{escape(key)}", exact=exact)
    elif type(before) is list and type(after) is list:
        yield from _in_lists(before, after, at, exact)
    elif type(before) is not type(after) or before != after:
        yield Difference(at, "degraded")


def is_nothing(value: Json) -> bool:
    """Return whether a value counts as absent: null or empty."""
    return value is ABSENT or value is None or (type(value) in (str, list, dict) and not value)


def _like(value: Json, other: Json) -> Json:
    """Return a text as a list of one text if `other` is such a list, with or without further members."""
    if type(value) is str and type(other) is list and len(other) == 1 and type(other[0]) is dict and "text" in other[0]:
        return [{"type": other[0].get("type"), "text": value}]
    return value


def _in_lists(before: list[Any], after: list[Any], at: str, exact: bool) -> Iterator[Difference]:
    equal, twins = _aligned(before, after)
    places = [there for _, there in sorted(equal.items())]
    if places != sorted(places):
        yield Difference(at, "degraded")  # the same elements in another order
    for place, there in sorted(twins.items()):
        yield from differences(before[place], after[there], f"{at}/{place}", exact=exact)
    for place in range(len(before)):
        if place not in equal and place not in twins:
            yield from differences(before[place], ABSENT, f"{at}/{place}", exact=exact)
    found = {*places, *twins.values()}
    for place in range(len(after)):
        if place not in found:
            yield from differences(ABSENT, after[place], f"{at}/{place}", exact=exact)


def _aligned(before: list[Any], after: list[Any]) -> tuple[dict[int, int], dict[int, int]]:
    """Match the elements of two lists; return index in `before` → index in `after`, for equal and for changed ones."""
    mine, theirs = ([encode(value, in_order=True) for value in side] for side in (before, after))
    equal = _matched(mine, theirs)
    found = {*equal.values()}
    left = [place for place in range(len(before)) if place not in equal]
    free = [place for place in range(len(after)) if place not in found]
    named = _matched([_name(before[place]) for place in left], [_name(after[place]) for place in free])
    twins = {left[one]: free[two] for one, two in named.items()}
    found |= {*twins.values()}
    left = [place for place in left if place not in twins]
    free = [place for place in free if place not in found]
    if len(left) == len(free):  # equal numbers of changed elements: match them in order
        twins |= zip(left, free, strict=True)
    return equal, twins


def _matched(mine: list[Any], theirs: list[Any]) -> dict[int, int]:
    """Return index in `mine` → index of the equal key in `theirs`, each used once; None matches nothing."""
    waiting: dict[Any, list[int]] = {}
    for place in reversed(range(len(theirs))):
        if theirs[place] is not None:
            waiting.setdefault(theirs[place], []).append(place)
    return {place: waiting[key].pop() for place, key in enumerate(mine) if waiting.get(key)}


def _name(value: Json) -> Any:
    """Return the id or name of a list's element, from its members or from an object among them; None without one."""
    if type(value) is not dict:
        return None
    for holder in (value, *(inner for inner in value.values() if type(inner) is dict)):
        for name in IDS:
            if type(holder.get(name)) is str:
                return name, holder[name], str(value.get("type"))
    return None


def patched(raw: Json, before: Json, after: Json, doubts: list[Json], spell: Callable[[str], str] = str) -> Json:
    """Return the document `raw` with an edit: the difference between `before` and `after`.

    Values that the edit does not change stay as they are in `raw`, also if the writer spells them in another way.

    Args:
        before: document that the writer makes of `raw` without the edit.
        after: document that the writer makes of `raw` with the edit.
        doubts: gets each edited value of `raw` that the writer spells in another way; the document may then have both.
        spell: returns the writer's spelling of a member's name.
    """
    if before == after:
        return raw
    if type(raw) is dict and type(before) is dict and type(after) is dict:
        names = {name: name if name in before or name in after else spell(name) for name in raw}
        out = {
            name: patched(raw[name], before.get(word, ABSENT), after.get(word, ABSENT), doubts, spell)
            for name, word in names.items()
        }
        known = {*names.values()}
        for name in (name for name in after if name not in known):
            if (value := patched(ABSENT, before.get(name, ABSENT), after[name], doubts)) is not ABSENT:
                out[name] = value
        return {name: value for name, value in out.items() if value is not ABSENT}
    if type(raw) is list and type(before) is list and type(after) is list and len(raw) == len(before):
        equal, twins = _aligned(before, after)
        place_of = {there: place for place, there in (equal | twins).items()}
        return [
            patched(raw[place_of[there]], before[place_of[there]], value, doubts, spell) if there in place_of else value
            for there, value in enumerate(after)
        ]
    if raw is not before and raw != before:
        doubts.append(raw)
    return after


def code_of(at: str, kind: LossKind) -> str:
    """Return the code of a loss: that of the innermost member in `CODES`, else one by the kind and depth."""
    steps = at.split("/")[1:]
    other = "option" if len(steps) == 1 else "part" if kind == "degraded" or steps[-1].isdecimal() else "extension"
    return next((CODES[step] for step in reversed(steps) if step in CODES), other)


def is_named(at: str, named: Iterable[str]) -> bool:
    """Return whether a pointer or one of its parents is in `named`; the whole document does not count."""
    while at:
        if at in named:
            return True
        at = at.rpartition("/")[0]
    return False
