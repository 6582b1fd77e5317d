"""Finds the unknown members of an order, and suggests the names that may be meant.

The structs of `work` are the only list of known names. An order with a misspelt rule or root is refused, because that
would have no effect. Any other unknown member is kept below `config.vendor.abp.unheard`, by its JSON pointer, and is
listed in the receipt. A value of a wrong type is explained with the words or names that are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import Requirement, Requirements
from backplane.contract.work import (
    OF_HOST,
    OTHERS_SETTINGS,
    SETTINGS,
    ContextPacket,
    PolicyProfile,
    RuntimeConfig,
    Snippet,
    WorkOrder,
    WorkspaceSpec,
    settings_of,
)
from backplane.errors import CapabilityError, ConfigError, PolicyError

UNHEARD: Final = "unheard"
"""The setting below `config.vendor.abp` that holds an order's unknown members, pointer → value."""

_HINT_LIKENESS_MIN: Final = 0.6
"""Minimum likeness for a hint; difflib's default. At 0.5, the hint for `fast` is `cost`."""

_MISSPELT_LIKENESS_MIN: Final = 0.75
"""Minimum likeness for a refusal: one letter of four differs. A name less alike may be one of another version."""

_SHOWN_CHARS_MAX: Final = 40
"""Maximum length of a wrong word in an error; all words of the contract are shorter."""


class UnknownMember(msgspec.Struct, frozen=True):
    """One unknown member."""

    pointer: str
    """JSON pointer (RFC 6901) into the order."""
    nearest: str | None
    """The most similar known name; None if there is none."""
    refused: bool
    """True if an order with it is refused, unless the order is lenient."""

    def __str__(self) -> str:
        return f"{self.pointer} is no member of an order" + (f": {self.nearest}?" if self.nearest else "")


class _StructPart(msgspec.Struct, frozen=True):
    """One struct of an order, with the structs of its members."""

    shape: type[msgspec.Struct]
    parts: Mapping[str, _StructPart] = {}
    closed: bool = False
    """True if every unknown member is refused, because the members say what the agent may do, or where."""


_ORDER: Final = _StructPart(
    WorkOrder,
    {
        "workspace": _StructPart(WorkspaceSpec, closed=True),
        "context": _StructPart(ContextPacket, {"snippets": _StructPart(Snippet)}),
        "policy": _StructPart(PolicyProfile, closed=True),
        "requirements": _StructPart(Requirements, {"required": _StructPart(Requirement, closed=True)}, closed=True),
        "config": _StructPart(RuntimeConfig),
    },
)


def read_work_order(value: Json, *, lenient: bool = False) -> WorkOrder:
    """Read a work order from plain JSON; only `task` is required.

    Args:
        lenient: accept an order with unknown members, even if it is not marked as lenient.

    Raises:
        PolicyError: `policy_invalid`, an unknown member of `policy`, `requirements` or `workspace`, or a misspelt one.
        ValueError: it has the wrong shape.
    """
    try:
        return msgspec.convert(keep_unknown(value, lenient=lenient), WorkOrder)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(explain(error, WorkOrder)) from error


def keep_unknown(value: Json, *, lenient: bool = False) -> Json:
    """Return an order with its unknown members below `config.vendor.abp.unheard`; the same object if it has none.

    Raises:
        PolicyError: see `read_work_order`.
    """
    found = dict(unknown_members(value))
    if not found or not isinstance(value, dict):
        return value
    config = value.get("config", {})
    vendor = config.get("vendor", {}) if isinstance(config, dict) else None
    if not isinstance(vendor, dict):
        return value  # The type is wrong, which `msgspec` reports.
    if not lenient and not is_lenient(vendor):
        refuse(found)
    members = {one.pointer: member for one, member in found.items()}
    own = vendor.get("abp", {})
    if isinstance(own, dict):
        before = own.get(UNHEARD)  # Another control plane has kept these and passed the order on.
        members = {**before, **members} if isinstance(before, dict) else members
        vendor = {**vendor, "abp": {**own, UNHEARD: members}}
    else:
        vendor = {**vendor, f"abp.{UNHEARD}": members}
    return {**value, "config": {**config, "vendor": vendor}}


def check_settings(order: WorkOrder) -> None:
    """Refuse an order with a misspelt setting below `config.vendor.abp`, or one of a wrong type.

    Raises:
        PolicyError: `policy_invalid`, a name is misspelt, or `lenient` is neither true nor false.
        ConfigError: `config_invalid`, a value has a wrong type.
    """
    vendor = order.config.vendor
    lenient = order.abp("lenient", False)
    if not isinstance(lenient, bool):
        fact = "config.vendor.abp.lenient is neither true nor false"
        raise PolicyError("policy_invalid", fact, hint="true takes an order with members that are not known here")
    if not lenient:
        refuse(unknown_settings(vendor))
    for pointer, why in wrong_settings(vendor):
        raise ConfigError(
            "config_invalid", f"{pointer[1:].replace('/', '.')}: {why}", hint="see `backplane schema work_order`"
        )


def is_lenient(vendor: Mapping[str, Any]) -> bool:
    """Return True if an order with these settings is accepted although it has unknown members."""
    return settings_of(vendor).get("lenient") is True


def refuse(found: Iterable[UnknownMember]) -> None:
    """Raise an error if an order is refused for one of these members.

    Raises:
        PolicyError: `policy_invalid`.
    """
    refused = [one for one in found if one.refused]
    if refused:
        raise PolicyError(
            "policy_invalid",
            "; ".join(str(one)[:200] for one in refused[:3]),
            hint="correct the name; a stranger's order is taken with --lenient (config.vendor.abp.lenient)",
        )


def check_supported(order: WorkOrder, heeds: Collection[str], host: str) -> None:
    """Refuse an order with a setting that its host does not support.

    Args:
        heeds: names of the supported settings in `OF_HOST`, from the host's hello.
        host: name of the host, for the error.

    Raises:
        CapabilityError: `capability_unsupported`, with every unsupported setting.
    """
    lost = [OF_HOST[name] + _GIVEN_AS.get(name, "") for name in order.of_host() if name not in heeds]
    if lost:
        raise CapabilityError(
            "capability_unsupported",
            f"the host {host!r} does nothing with {', '.join(lost)}",
            hint="leave it out, or choose another backend by the table in docs/guide/agents-tested.md",
        )


_GIVEN_AS: Final = {
    "images": " (--image)",
    "mcp_servers": " (`tools` in Python, --mcp, [mcp_servers])",
    "output_schema": " (`output` in Python, --schema)",
    "session": " (--keep, --resume, -c)",
}
"""Member of the order → the options that set it, for an error about it."""


def unknown_members(order: Json) -> Iterator[tuple[UnknownMember, Json]]:
    """Yield each unknown member of an order, with its value; members of a wrong type are skipped."""
    yield from _unknown(order, _ORDER, "")


def _settings_at(vendor: Mapping[str, Any]) -> Iterator[tuple[str, str, Json]]:
    """Yield the JSON pointer, name and value of each setting of ours, below `abp` or as `abp.NAME`."""
    own = vendor.get("abp")
    for name, value in sorted(own.items(), key=itemgetter(0)) if isinstance(own, dict) else ():
        yield _pointer("/config/vendor", "abp", name), name, value
    for key in sorted(key for key in vendor if key.startswith("abp.")):
        yield _pointer("/config/vendor", key), key.removeprefix("abp."), vendor[key]


def unknown_settings(vendor: Mapping[str, Any]) -> Iterator[UnknownMember]:
    """Yield each unknown setting below `config.vendor.abp`."""
    if not isinstance(vendor.get("abp", {}), dict):
        yield UnknownMember("/config/vendor/abp", None, True)
    given = {name for _, name, _ in _settings_at(vendor)}
    missing = sorted({*SETTINGS, *OTHERS_SETTINGS} - given)
    for pointer, name, _ in _settings_at(vendor):
        if name not in SETTINGS and name not in OTHERS_SETTINGS:
            meant = misspelt(name, missing)
            yield UnknownMember(pointer, meant, meant is not None)


def wrong_settings(vendor: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the JSON pointer of each setting of ours with a value of a wrong type, and an explanation."""
    for pointer, name, value in _settings_at(vendor):
        shape = SETTINGS.get(name, Any)
        try:
            msgspec.convert(value, shape | None)
        except msgspec.ValidationError as error:
            yield pointer, explain(error, shape)


def unknown_pointers(vendor: Mapping[str, Any]) -> Iterator[str]:
    """Yield the JSON pointers of the unknown members of an order, which have no effect, for its receipt."""
    members = settings_of(vendor).get(UNHEARD)
    yield from members if isinstance(members, dict) else ()
    yield from (one.pointer for one in unknown_settings(vendor))


def _unknown(value: Json, part: _StructPart, pointer: str) -> Iterator[tuple[UnknownMember, Json]]:
    if isinstance(value, list):
        for place, item in enumerate(value):
            yield from _unknown(item, part, f"{pointer}/{place}")
    if not isinstance(value, dict):
        return
    names = part.shape.__struct_fields__
    for name, member in value.items():
        if name in part.parts:
            yield from _unknown(member, part.parts[name], _pointer(pointer, name))
        elif name not in names:
            meant = misspelt(name, [known for known in names if known not in value])
            nearest = meant or (nearest_name(name, names) if part.closed else None)
            yield UnknownMember(_pointer(pointer, name), nearest, part.closed or meant is not None), member


def _pointer(start: str, *names: str) -> str:
    return start + "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in names)


# Names and words ------------------------------------------------------------------------------------------------------


def nearest_name(name: str, names: Collection[str], *, likeness_min: float = _HINT_LIKENESS_MIN) -> str | None:
    """Return the most similar name, the first of several, ignoring case and dashes; None if none is similar."""
    import difflib  # It takes two milliseconds to load, and only mistakes need it.

    spelt = {_bare(known): known for known in reversed(tuple(names))}
    close = difflib.get_close_matches(_bare(name), spelt, n=1, cutoff=likeness_min)
    return spelt[close[0]] if close else None


def misspelt(name: str, names: Sequence[str]) -> str | None:
    """Return the known name of which this is a misspelling: one letter of four may differ; None if there is none."""
    return nearest_name(name, names, likeness_min=_MISSPELT_LIKENESS_MIN)


def _bare(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


_PARTS: Final = re.compile(r"(.*?)(?: - at `\$(.*)`)?", re.DOTALL)
_NO_CHOICE: Final = re.compile(r"Invalid enum value '(.*)'", re.DOTALL)
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_STEP: Final = re.compile(r"\.([^.\[]+)|\[[^\]]*\]")
_TYPES: Final = re.compile(r"(?:Expected|got) `[\w |]+`")
_OF_JSON: Final = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
"""msgspec's name of a type → its name in JSON and TOML."""


def explain(error: msgspec.ValidationError, shape: Any) -> str:
    """Explain what is wrong in a value and where; for an unknown word or member, list the known ones.

    Args:
        shape: the type that the value was converted to.
    """
    fact, path = explained(error, shape)
    return f"{fact} - at `${path}`" if path else fact


def explained(error: msgspec.ValidationError, shape: Any) -> tuple[str, str]:
    """Return the explanation of `explain`, and the path of the value, such as `.required[0].min_support`."""
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
    """Return the member types of a union; for any other type, the type alone."""
    return [one for member in kind.types for one in _plain(member)] if hasattr(kind, "types") else [kind]


def _below(kinds: list[Any], name: str | None) -> list[Any]:
    """Return the types of the member `name`, or of the items if `name` is None."""
    if name is not None:
        return [field.type for kind in kinds for field in getattr(kind, "fields", ()) if field.encode_name == name]
    items = [getattr(kind, "item_type", getattr(kind, "value_type", None)) for kind in kinds]
    return [item for item in items if item is not None]
