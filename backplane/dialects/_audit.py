"""What a translation lost without saying so: the document is translated back, and what did not return is named.

The safety net under the dialects' own reports. It knows no dialect: two documents are compared, pointer by pointer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.dialects._parts import json_text, parse_json
from backplane.ir import Loss, LossKind

NOTHING: Final[tuple[Json, ...]] = (None, "", [], {})
"""Values that say nothing."""

KIND_WORDS: Final = frozenset({"type", "role", "object"})
"""Members that say what kind of thing something is; the translation of these words is not worth a loss each."""

_MISSING: Final = object()


def unnamed(
    document: Json, written: Json, back: Json, losses: tuple[Loss, ...], source: str, target: str
) -> tuple[Loss, ...]:
    """Return a loss for every pointer that came back changed and that no loss names.

    Args:
        document: what was translated, in the dialect `source`.
        written: what it became, in the dialect `target`.
        back: what that becomes in `source`.
        losses: what is known already.
    """
    named = {loss.path for loss in losses}
    text = json_text(written)
    there = {leaf for leaf in leaves(written) if isinstance(leaf, int | float)}
    out: list[Loss] = []
    differences = list(changed(document, back, ""))
    for pointer, before, after in differences:
        if is_named(pointer, named):
            continue
        kind, code, reason = _judge(pointer, before, after, named, text, there)
        size = None if before is _MISSING else len(json_text(before))
        out.append(
            Loss(path=pointer, dialect=source, target=target, kind=kind, code=code, reason=reason, size_chars=size)
        )
    named.update(pointer for pointer, _, _ in differences)
    for pointer, leaf in placed_leaves(document, ""):
        if pointer.rpartition("/")[2] in KIND_WORDS or _stands_as_such(leaf, text, there) or is_named(pointer, named):
            continue
        reason = "the target says it in other words"
        out.append(Loss(path=pointer, dialect=source, target=target, kind="degraded", code="shape", reason=reason))
    return tuple(out)


def _judge(
    pointer: str, before: Any, after: Any, named: set[str], text: str, there: set[Any]
) -> tuple[LossKind, str, str]:
    if before is _MISSING:
        return "synthesised", "shape", "the target always says it"
    told = [placed for placed in placed_leaves(before, pointer) if not _is_label(placed[0])]
    if not told and not _is_label(pointer):
        told = list(placed_leaves(before, pointer))  # it is nothing but a label: that one counts
    if before in NOTHING or all(is_named(at, named) or _stands(leaf, text, there) for at, leaf in told):
        return "degraded", "shape", "said in another place or another form"
    if after is _MISSING:
        return "dropped", "unaccounted", "it did not come back"
    return "degraded", "unaccounted", "it came back as something else"


def _is_label(pointer: str) -> bool:
    """Whether a member says what kind of thing a member of a list is: every vendor has words of its own for that."""
    holder, _, name = pointer.rpartition("/")
    return name == "type" and holder.rpartition("/")[2].isdigit()


def _stands(leaf: Any, text: str, there: set[Any]) -> bool:
    """Whether a value stands anywhere in the text of a document, also inside a text that is JSON."""
    if leaf is None or isinstance(leaf, bool):
        return True
    if isinstance(leaf, int | float):
        return leaf in there
    inner = json_text(leaf)[1:-1]
    if inner in text or json_text(inner)[1:-1] in text:
        return True
    return leaf[:1] == "{" and (value := parse_json(leaf)) is not None and json_text(value) in text


def _stands_as_such(leaf: Any, text: str, there: set[Any]) -> bool:
    """Whether a value that says something stands in a document, a truth value by its own word."""
    if isinstance(leaf, bool):
        return json_text(leaf) in text
    return leaf in NOTHING or _stands(leaf, text, there)


def placed_leaves(value: Json, pointer: str) -> Iterator[tuple[str, Any]]:
    """Yield pointer and value of everything that holds no other value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from placed_leaves(inner, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from placed_leaves(inner, f"{pointer}/{place}")
    else:
        yield pointer, value


def leaves(value: Json) -> Iterator[Any]:
    """Yield every value that holds no other."""
    return (leaf for _, leaf in placed_leaves(value, ""))


def changed(before: Json, after: Json, pointer: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield pointer, old and new value wherever two documents differ; `_MISSING` stands for no value."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in (*before, *(key for key in after if key not in before)):
            at = f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}"
            yield from changed(before.get(key, _MISSING), after.get(key, _MISSING), at)
    elif isinstance(before, list) and isinstance(after, list):
        for place in range(max(len(before), len(after))):
            old = before[place] if place < len(before) else _MISSING
            new = after[place] if place < len(after) else _MISSING
            yield from changed(old, new, f"{pointer}/{place}")
    elif type(before) is not type(after) or before != after:
        yield pointer, before, after


def is_named(pointer: str, named: set[str]) -> bool:
    """Whether a pointer or one that holds it is named; the whole document's is not enough."""
    while pointer:
        if pointer in named:
            return True
        pointer = pointer.rpartition("/")[0]
    return False
