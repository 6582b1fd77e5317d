"""Members of a work order that this version does not know: which are refused, which are kept and reported.

The known names are read from the structs of `work`; there is no second list. A rule or a root under a misspelt
name would not be in force, so an order with one is refused. Everything else that is unknown travels on below
`config.vendor.abp.unheard`, by its JSON pointer, and stands in the receipt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import Requirement, Requirements
from backplane.contract.choices import explain
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
"""For a hint; difflib's own default. At 0.5 `fast` is `cost` and `--nosuch` is `--schema`."""

_MISSPELT_LIKENESS_MIN: Final = 0.8
"""For a refusal: two letters of ten. Under it, a name is taken for one of another version or of a stranger."""


class Unheard(msgspec.Struct, frozen=True):
    """One unknown member."""

    pointer: str
    """JSON pointer (RFC 6901) into the order."""
    nearest: str | None
    """The known name it is most like; None when there is none."""
    refused: bool
    """Whether an order with it is refused, unless that is lenient."""

    def __str__(self) -> str:
        return f"{self.pointer} is no member of an order" + (f": {self.nearest}?" if self.nearest else "")


class _StructPart(msgspec.Struct, frozen=True):
    """One struct of an order, and those below its members."""

    shape: type[msgspec.Struct]
    parts: Mapping[str, _StructPart] = {}
    closed: bool = False
    """Every unknown member is refused: it would have said what the agent may do, or where."""


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
        lenient: take an order with unknown members, also where it does not say so itself.

    Raises:
        PolicyError: `policy_invalid`, an unknown member of `policy`, `requirements` or `workspace`, or a misspelt one.
        ValueError: it has the wrong shape.
    """
    try:
        return msgspec.convert(heard(value, lenient=lenient), WorkOrder)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(explain(error, WorkOrder)) from error


def heard(value: Json, *, lenient: bool = False) -> Json:
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
        return value  # The shape is wrong, and whoever reads it says so.
    if not lenient and not is_lenient(vendor):
        refuse(found)
    members = {one.pointer: member for one, member in found.items()}
    own = vendor.get("abp", {})
    if isinstance(own, dict):
        before = own.get(UNHEARD)  # Of a control plane above, which knew as little.
        members = {**before, **members} if isinstance(before, dict) else members
        vendor = {**vendor, "abp": {**own, UNHEARD: members}}
    else:
        vendor = {**vendor, f"abp.{UNHEARD}": members}
    return {**value, "config": {**config, "vendor": vendor}}


def check_settings(order: WorkOrder) -> None:
    """Refuse an order with a misspelt setting below `config.vendor.abp`, or one of the wrong shape.

    Raises:
        PolicyError: `policy_invalid`, a name is misspelt, or `lenient` is neither true nor false.
        ConfigError: `config_invalid`, a value has another shape than its setting.
    """
    vendor = order.config.vendor
    lenient = order.abp("lenient", False)
    if not isinstance(lenient, bool):
        fact = "config.vendor.abp.lenient is neither true nor false"
        raise PolicyError("policy_invalid", fact, hint="true takes an order with members that are not known here")
    if not lenient:
        refuse(unheard_settings(vendor))
    for pointer, why in misshapen_settings(vendor):
        raise ConfigError(
            "config_invalid", f"{pointer[1:].replace('/', '.')}: {why}", hint="see `backplane schema work_order`"
        )


def is_lenient(vendor: Mapping[str, Any]) -> bool:
    """Whether the order wants to be taken although some of its members are unknown."""
    return settings_of(vendor).get("lenient") is True


def refuse(found: Iterable[Unheard]) -> None:
    """Raise for the unknown members that an order is refused for.

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


def check_heeded(order: WorkOrder, heeds: Collection[str], host: str) -> None:
    """Refuse an order with a setting that its host would pass over in silence.

    Args:
        heeds: names of `OF_HOST`, from the host's hello.
        host: its name, for the error.

    Raises:
        CapabilityError: `capability_unsupported`, with every such setting.
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


def unknown_members(order: Json) -> Iterator[tuple[Unheard, Json]]:
    """Yield each unknown member of an order, with its value; what has the wrong shape is passed over."""
    yield from _unknown(order, _ORDER, "")


def _settings_at(vendor: Mapping[str, Any]) -> Iterator[tuple[str, str, Json]]:
    """Yield the JSON pointer, name and value of each setting in the place of ours, below `abp` or as `abp.NAME`."""
    own = vendor.get("abp")
    for name, value in sorted(own.items(), key=itemgetter(0)) if isinstance(own, dict) else ():
        yield _pointer("/config/vendor", "abp", name), name, value
    for key in sorted(key for key in vendor if key.startswith("abp.")):
        yield _pointer("/config/vendor", key), key.removeprefix("abp."), vendor[key]


def unheard_settings(vendor: Mapping[str, Any]) -> Iterator[Unheard]:
    """Yield each setting in the place of ours that is none of ours."""
    if not isinstance(vendor.get("abp", {}), dict):
        yield Unheard("/config/vendor/abp", None, True)
    given = {name for _, name, _ in _settings_at(vendor)}
    missing = sorted({*SETTINGS, *OTHERS_SETTINGS} - given)
    for pointer, name, _ in _settings_at(vendor):
        if name not in SETTINGS and name not in OTHERS_SETTINGS:
            meant = misspelt(name, missing)
            yield Unheard(pointer, meant, meant is not None)


def misshapen_settings(vendor: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the JSON pointer of each setting of ours whose value has another shape, and what is wrong with it."""
    for pointer, name, value in _settings_at(vendor):
        shape = SETTINGS.get(name, Any)
        try:
            msgspec.convert(value, shape | None)
        except msgspec.ValidationError as error:
            yield pointer, explain(error, shape)


def unheard_pointers(vendor: Mapping[str, Any]) -> Iterator[str]:
    """Yield the JSON pointer of everything in an order that had no effect, as its receipt lists it."""
    members = settings_of(vendor).get(UNHEARD)
    yield from members if isinstance(members, dict) else ()
    yield from (one.pointer for one in unheard_settings(vendor))


def _unknown(value: Json, part: _StructPart, pointer: str) -> Iterator[tuple[Unheard, Json]]:
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
            yield Unheard(_pointer(pointer, name), nearest, part.closed or meant is not None), member


def _pointer(start: str, *names: str) -> str:
    return start + "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in names)


def nearest_name(name: str, names: Collection[str], *, likeness_min: float = _HINT_LIKENESS_MIN) -> str | None:
    """Return the name most like this one, whatever its case and its dashes, of two the first; None when none is."""
    import difflib  # Two milliseconds, for whoever made a mistake.

    spelt = {_plain(known): known for known in reversed(tuple(names))}
    close = difflib.get_close_matches(_plain(name), spelt, n=1, cutoff=likeness_min)
    return spelt[close[0]] if close else None


def misspelt(name: str, names: Sequence[str]) -> str | None:
    """Return the known name that this one is but for case, dashes and one letter (or two exchanged); None for none."""
    nearest = nearest_name(name, names)
    likely = names if nearest is None else [nearest, *names]
    return next((known for known in likely if _is_misspelling(_plain(name), _plain(known))), None)


def _is_misspelling(one: str, other: str) -> bool:
    if nearest_name(one, (other,), likeness_min=_MISSPELT_LIKENESS_MIN):
        return True
    one, other = _without_same_start(one, other)
    one, other = _without_same_start(one[::-1], other[::-1])
    return max(len(one), len(other)) <= 1 or (len(one) == 2 and one == other[::-1])


def _without_same_start(one: str, other: str) -> tuple[str, str]:
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[same:], other[same:]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
