"""Explains why a value does not fit a type of the contract, with the allowed words or names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

_PARTS: Final = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.DOTALL)
_NO_CHOICE: Final = re.compile(r"Invalid enum value '(.*)'", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[]+)|\[[^\]]*\]")
_TYPES: Final = re.compile(r"(?:Expected|got) `[\w |]+`")
_OF_JSON: Final = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
"""msgspec's name of a type → its name in JSON and TOML."""
_SHOWN_CHARS_MAX: Final = 40
"""Maximum length of a wrong word in an error; all words of the contract are shorter."""


def explain(error: msgspec.ValidationError, shape: Any) -> str:
    """Explain what is wrong in a value and where; for an unknown word or member, list the known ones.

    Args:
        shape: the type that the value was converted to.
    """
    fact, path = explained(error, shape)
    return f"{fact} - at `${path}`" if path else fact


def explained(error: msgspec.ValidationError, shape: Any) -> tuple[str, str]:
    """Return the explanation of `explain` and, as a second text, the path, such as `.required[0].min_support`."""
    found = _PARTS.fullmatch(str(error))
    fact, path = (found[1], found[2] or "") if found is not None else (str(error), "")
    if (word := _NO_CHOICE.fullmatch(fact)) is not None:
        if choices := _choices(_types_at(shape, path)):
            shown = repr(word[1][:_SHOWN_CHARS_MAX])
            fact = f"{shown} is none of {', '.join(map(repr, choices))}{_meant(word[1], choices)}"
    elif (name := _UNKNOWN.fullmatch(fact)) is not None:
        known = [field.encode_name for kind in _types_at(shape, path) for field in getattr(kind, "fields", ())]
        fact, path = f"no such name; known here are {', '.join(known)}{_meant(name[1], known)}", f"{path}.{name[1]}"
    return _TYPES.sub(_in_json, fact), path


def _in_json(types: re.Match[str]) -> str:
    return re.sub(r"\w+", lambda name: _OF_JSON.get(name[0], name[0]), types[0])


def _meant(word: str, known: Sequence[str]) -> str:
    from backplane.contract.unheard import nearest_name  # Imported here because `unheard` imports this module.

    nearest = nearest_name(word, known)
    return f" (did you mean {nearest!r}?)" if nearest is not None else ""


def _choices(kinds: list[Any]) -> tuple[str, ...]:
    """Return the words that the `Literal` types allow; empty without such a type."""
    return tuple(word for kind in kinds for word in getattr(kind, "values", ()) if isinstance(word, str))


def _types_at(shape: Any, path: str) -> list[Any]:
    """Return the types that a path allows, such as `.lane` or `.required[0].min_support`."""
    import msgspec.inspect as types  # It takes milliseconds to load, and only errors need it.

    at = _plain(types.type_info(shape))
    for step in _STEP.finditer(path):
        at = [plain for below in _below(at, step[1]) for plain in _plain(below)]
    return at


def _plain(kind: Any) -> list[Any]:
    """Return the member types of a union; any other type alone."""
    return [one for member in kind.types for one in _plain(member)] if hasattr(kind, "types") else [kind]


def _below(kinds: list[Any], name: str | None) -> list[Any]:
    """Return the types of the member `name`, or of the items if `name` is None."""
    if name is not None:
        return [field.type for kind in kinds for field in getattr(kind, "fields", ()) if field.encode_name == name]
    items = [getattr(kind, "item_type", getattr(kind, "value_type", None)) for kind in kinds]
    return [item for item in items if item is not None]
