"""What a member of the contract may be, for an error about one that is something else."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

_NO_CHOICE: Final = re.compile(r"Invalid enum value '(.*?)'(?: - at `\$(.*)`)?", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[]+)|\[[^\]]*\]")
_SHOWN_CHARS_MAX: Final = 40
"""Of a wrong word; all of the contract's are shorter."""


def explain(error: msgspec.ValidationError, shape: type[Any]) -> str:
    """Say what is wrong with a value; of a word that is none of its choices, which these are and the nearest one.

    Args:
        shape: what the value was to become.
    """
    from backplane.contract.unheard import nearest_name  # It reads orders, and explains their mistakes by this.

    found = _NO_CHOICE.fullmatch(str(error))
    choices = _choices(shape, found[2] or "") if found is not None else ()
    if found is None or not choices:
        return str(error)
    nearest = nearest_name(found[1], choices)
    meant = f" (did you mean {nearest!r}?)" if nearest is not None else ""
    place = f" - at `${found[2]}`" if found[2] else ""
    return f"{found[1][:_SHOWN_CHARS_MAX]!r} is none of {', '.join(map(repr, choices))}{meant}{place}"


def _choices(shape: type[Any], path: str) -> tuple[str, ...]:
    """The words that may stand at a place, as `.lane` or `.required[0].min_support`; empty where it is of no words."""
    import msgspec.inspect as types  # Milliseconds, for whoever made a mistake.

    at = [types.type_info(shape)]
    for step in _STEP.finditer(path):
        at = [below for one in at for below in _below(_plain(one), step[1])]
    words = [word for one in at for kind in _plain(one) if isinstance(kind, types.LiteralType) for word in kind.values]
    return tuple(word for word in words if isinstance(word, str))


def _plain(kind: Any) -> list[Any]:
    """The types that a union stands for."""
    return [one for member in kind.types for one in _plain(member)] if hasattr(kind, "types") else [kind]


def _below(kinds: list[Any], name: str | None) -> list[Any]:
    """The types of a member, or of the items where there is no name."""
    if name is not None:
        return [field.type for kind in kinds for field in getattr(kind, "fields", ()) if field.encode_name == name]
    items = [getattr(kind, "item_type", getattr(kind, "value_type", None)) for kind in kinds]
    return [item for item in items if item is not None]
