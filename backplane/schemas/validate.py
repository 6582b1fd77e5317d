"""Recognise a document of the contract and find every fault in it.

Bytes go in, findings with JSON pointers come out, never an exception. The schemas have the shape; strict JSON,
duplicate keys, print forms and a receipt's hash are checked by code. A fault that our reader would forgive is a finding
all the same: a stricter peer would not.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Final

import msgspec

from backplane.config import read_toml
from backplane.contract import canonical, unknown
from backplane.contract.canonical import Json
from backplane.contract.conversation import FORMAT
from backplane.contract.events import AgentEvent, Failed
from backplane.contract.receipt import Receipt, read_receipt, receipt_hash, verify_bytes
from backplane.contract.work import PolicyProfile, WorkspaceSpec
from backplane.policy.rules import TOOL_LISTS, unknown_names, unknown_tools, unmatched_paths
from backplane.protocol.lines import strict
from backplane.schemas import build

BYTES_MAX: Final = 256 * 1024 * 1024
"""Largest document in bytes; receipts of a million events stay below it."""

FINDINGS_MAX: Final = 1000
"""Findings of one document; the search ends there, as each takes up to a millisecond."""


class DocumentFault(msgspec.Struct, frozen=True):
    """One fault of a document."""

    pointer: str
    """JSON pointer (RFC 6901) into the document; empty for the whole."""
    message: str
    line: int | None = None
    """Line of a transcript or of unreadable text, from 1."""

    note: bool = False
    """True for a warning: the document is valid all the same."""


class Findings(msgspec.Struct, frozen=True):
    """The kind of a document, and its faults."""

    name: str
    """Name of the document, usually a file name."""
    kind: str
    """Name of its schema, `transcript`, or `unknown`."""
    findings: tuple[DocumentFault, ...] = ()

    @property
    def valid(self) -> bool:
        return all(finding.note for finding in self.findings)


def validate(data: bytes, name: str) -> Findings:
    """Recognise a document by its content and find all its faults.

    Args:
        data: a work order, receipt, event, envelope, transcript (JSON lines), policy, or a configuration (TOML).
        name: its file name, for findings; `.jsonl` and `.toml` decide if the content cannot.
    """
    if len(data) > BYTES_MAX:
        return Findings(name, "unknown", (DocumentFault("", f"{len(data)} bytes are over the limit of {BYTES_MAX}"),))
    if not data.strip():
        return Findings(name, "unknown", (DocumentFault("", "the document is empty"),))
    if name.endswith(".jsonl") or _is_lines(data):
        return _bounded(name, "transcript", _transcript(data))
    if name.endswith(".toml") or not data.lstrip(b" \t\r\n\xef\xbb\xbf").startswith((b"{", b"[")) or _is_toml(data):
        return _configuration(data, name)
    value, faults = _read(data)
    kind = _recognise(value)
    if kind == "unknown":
        faults = faults or [DocumentFault("", _why_unknown(value))]
        return _bounded(name, kind, iter(faults))
    return _bounded(name, kind, _document(value, kind, data, faults))


def _bounded(name: str, kind: str, found: Iterator[DocumentFault]) -> Findings:
    kept = tuple(islice(found, FINDINGS_MAX + 1))
    if len(kept) > FINDINGS_MAX:
        last = msgspec.structs.replace(kept[-1], message=f"over {FINDINGS_MAX} findings: the rest was not checked")
        kept = (*kept[:-1], last)
    return Findings(name, kind, kept)


def _document(value: Json, kind: str, data: bytes, faults: list[DocumentFault]) -> Iterator[DocumentFault]:
    yield from faults
    found = False
    for finding in _against_schema(value, kind):
        found = True
        yield finding
    if not found:
        yield from _beyond_schema(value, kind, data)


def _read(data: bytes) -> tuple[Json, list[DocumentFault]]:
    """Read strict JSON; the value is None if it cannot be read."""
    if data.startswith(b"\xef\xbb\xbf"):
        return None, [DocumentFault("", "begins with a byte order mark, which is not JSON")]
    try:
        value = strict(data)
    except ValueError as error:
        position = re.search(r"\(byte (\d+)\)", str(error))
        line = data.count(b"\n", 0, int(position[1])) + 1 if position else None
        return None, [DocumentFault("", f"not strict JSON: {error}", line)]
    if canonical.duplicate_key(data, value) is None:
        return value, []
    return value, [DocumentFault(pointer, "duplicate key in one object") for pointer in _doubled(data)]


class _Pairs(list[tuple[str, Any]]):
    """An object's members as they were written, a name that stands twice included."""


def _doubled(text: bytes) -> Iterator[str]:
    """Yield the pointers of duplicate keys."""
    stack: list[tuple[str, Any]] = [("", json.loads(text, object_pairs_hook=_Pairs))]
    while stack:
        pointer, value = stack.pop()
        if isinstance(value, _Pairs):
            seen = set()
            for key, member in value:
                place = f"{pointer}/{_escaped(key)}"
                if key in seen:
                    yield place
                seen.add(key)
                stack.append((place, member))
        elif isinstance(value, list):
            stack.extend((f"{pointer}/{index}", item) for index, item in enumerate(value))


def _escaped(key: str | int) -> str:
    return str(key).replace("~", "~0").replace("/", "~1")


_ENVELOPES: Final = frozenset(name.removeprefix("envelope_") for name in build.names() if name.startswith("envelope_"))
_RECEIPT: Final = {"meta", "receipt_sha256", "outcome", "trace", "verification", "usage_raw"}
_ORDER: Final = {"task", "lane", "workspace", "context", "requirements"}
_POLICY: Final = PolicyProfile.__struct_fields__
_WITH_PATTERNS: Final = ("policy", "workspace")
_SETTINGS: Final = {"default_backend", "backends", "limits", "isolation"}


def _recognise(value: Json) -> str:
    """Return the kind of document that has these members."""
    if not isinstance(value, dict):
        return "unknown"
    members = set(value)
    if "t" in members:
        t = value["t"]
        return f"envelope_{t}" if isinstance(t, str) and t in _ENVELOPES else "envelope"
    if value.get("format") == FORMAT:
        return "session"
    if "type" in members and ("ts" in members or not members & _ORDER):
        return "event"
    if len(members & _RECEIPT) >= 2:
        return "receipt"
    if members & _ORDER:
        return "work_order"
    if "ts" in members:
        return "event"
    if any(name in _POLICY or unknown.nearest_name(name, _POLICY) for name in members):
        return "policy"
    return "configuration" if members & _SETTINGS else "unknown"


def _why_unknown(value: Json) -> str:
    if not isinstance(value, dict):
        return f"an object is expected, but this is {_json_type(value)}"
    return f"no kind of document has these members: {', '.join(sorted(value)[:8])}" if value else "the object is empty"


def _json_type(value: Json) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _against_schema(value: Json, kind: str) -> Iterator[DocumentFault]:
    if kind == "envelope":
        yield DocumentFault("/t", f"{value['t']!r:.60} is not one of " + ", ".join(sorted(_ENVELOPES)))
        return
    value, indexes = _without_plain_events(value)
    for error in (near for far in validator_of(kind).iter_errors(value) for near in _nearest(far)):
        path = list(error.absolute_path)
        if path[:1] == ["trace"] and path[1:]:
            path[1] = indexes[path[1]]
        place = _pointer(path)
        if error.validator == "additionalProperties":
            known = set(error.schema["properties"])
            for stranger in sorted(set(error.instance) - known):
                near = unknown.nearest_name(stranger, sorted(known))
                meant = f"; did you mean {near!r}?" if near else ""
                yield DocumentFault(f"{place}/{_escaped(stranger)}", f"unknown member{meant}")
        else:
            yield DocumentFault(place, _words(error))


def _nearest(error: Any) -> list[Any]:
    """Return the errors of a value in the one of several shapes that its type selects."""
    of_type = [one for one in error.context if one.validator != "type" or one.absolute_path != error.absolute_path]
    return of_type if error.validator == "anyOf" and of_type else [error]


@functools.cache
def validator_of(kind: str) -> Any:
    """Return the validator of a kind's JSON Schema."""
    # jsonschema takes 60 ms to import, so it is imported only for a validation.
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(build.load_schema(kind)))


def _without_plain_events(value: Json) -> tuple[Json, list[int]]:
    """Leave out a trace's events that the typed reader accepts: it is a thousand times as fast as a schema."""
    trace = value.get("trace")
    if not isinstance(trace, list):
        return value, []
    indexes = [index for index, event in enumerate(trace) if not _is_plain_event(event)]
    return {**value, "trace": [trace[index] for index in indexes]}, indexes


def _is_plain_event(event: Json) -> bool:
    try:
        # Only an error has a member (its code) whose schema is stricter than the type.
        return not isinstance(msgspec.convert(event, AgentEvent), Failed) and canonical.is_timestamp(event["ts"])
    except ValueError:
        return False


def _pointer(path: Any) -> str:
    return "".join("/" + _escaped(part) for part in path)


def _words(error: Any) -> str:
    value = json.dumps(error.instance, ensure_ascii=False)
    shown = value if len(value) <= 80 else value[:77] + "…"
    words: dict[str, Callable[[Any], str]] = {
        "required": lambda _: str(error.message),
        "enum": lambda allowed: f"{shown} is not one of " + ", ".join(map(json.dumps, allowed)),
        "type": lambda wanted: (
            f"{shown} is not of type " + (wanted if isinstance(wanted, str) else " or ".join(wanted))
        ),
        "pattern": lambda wanted: f"{shown} does not have the form {wanted}",
        "oneOf": lambda _: "the value must match exactly one of the alternatives of the schema",
    }
    return words.get(error.validator, lambda _: str(error.message)[:200])(error.validator_value)


def _beyond_schema(value: Json, kind: str, data: bytes) -> Iterator[DocumentFault]:
    """Find faults that no schema finds: integers with a point, dates that do not exist, wrong order, hash, settings."""
    found = [*_wrong_type(value, build.SHAPES[kind], ""), *_wrong_times(value, "")]
    found += [*_unheard(value, kind), *_without_match(value, kind)]
    if kind in ("envelope_final", "envelope_fatal") and "receipt" in value:
        found += _wrong_type(value["receipt"], Receipt, "/receipt") or _wrong_sums(value["receipt"], None, "/receipt")
    elif kind == "receipt" and not found:
        found += _wrong_sums(value, data, "")
    yield from found


_PATH: Final = re.compile(r" - at `\$(.*)`$", re.DOTALL)


def _wrong_type(value: Json, shape: Any, place: str) -> list[DocumentFault]:
    try:
        msgspec.convert(value, shape)
    except ValueError as error:
        match = _PATH.search(str(error))
        if match is None:
            return []  # A form inside a string: the patterns of the schema and `_wrong_times` name it better.
        pointer = re.sub(r"\[(\d+)\]", r".\1", match[1]).replace(".", "/")
        return [DocumentFault(place + pointer, _PATH.sub("", str(error)))] if not _is_form(str(error)) else []
    return []


def _unheard(value: Json, kind: str) -> Iterator[DocumentFault]:
    """Find unknown members and settings of an order: those for which it is refused, and those without effect."""
    place = {"work_order": "", "envelope_run": "/work_order"}.get(kind)
    if place is None:
        return
    order = value["work_order"] if place else value
    vendor = order.get("config", {}).get("vendor", {})
    for one in [*(one for one, _ in unknown.unknown_members(order)), *unknown.unknown_settings(vendor)]:
        refused = one.refused and not unknown.is_lenient(vendor)
        yield DocumentFault(place + one.pointer, _why_unheard(one, refused), note=not refused)
    for pointer, why in unknown.wrong_settings(vendor):
        yield DocumentFault(place + pointer, why)


def _without_match(value: Json, kind: str) -> Iterator[DocumentFault]:
    """Find patterns of rules that match nothing: no path has this form, or no known tool has this name."""
    place = {"envelope_run": "/work_order", "work_order": "", "configuration": "", "policy": ""}.get(kind)
    if place is None:
        return
    holder = {"policy": value} if kind == "policy" else value["work_order"] if place else value
    policy, workspace = (member if isinstance(member := holder.get(name), dict) else {} for name in _WITH_PATTERNS)
    profile = msgspec.convert(policy, PolicyProfile)
    paths, tools = unmatched_paths(profile, msgspec.convert(workspace, WorkspaceSpec)), unknown_tools(profile)
    for where, lists in ((place if kind == "policy" else f"{place}/policy", policy), (f"{place}/workspace", workspace)):
        for name, patterns in lists.items():
            for index, pattern in enumerate(patterns if isinstance(patterns, list) else ()):
                if pattern in (found := tools if name in TOOL_LISTS else paths):
                    what = "no known tool" if found is tools else "no file of a workspace"
                    yield _matches_none(f"{where}/{name}/{index}", what, found[pattern])
    for number, hook in enumerate(value.get("hooks", ()) if kind == "configuration" else ()):
        hooked = hook.get("tools", ())
        for name, near in unknown_names(hooked).items():
            yield _matches_none(f"/hooks/{number}/tools/{hooked.index(name)}", "no known tool", near)


def _matches_none(pointer: str, what: str, near: str | None) -> DocumentFault:
    return DocumentFault(pointer, f"matches {what}" + (f"; did you mean {near!r}?" if near else ""), note=True)


def _why_unheard(one: unknown.UnknownMember, refused: bool) -> str:
    effect = "an order with it is refused" if refused else "it has no effect unless the host knows it"
    return f"unknown member: {effect}" + (f"; did you mean {one.nearest!r}?" if one.nearest else "")


def _is_form(message: str) -> bool:
    return not message.startswith(("Expected", "Object", "Invalid", "Integer", "Number"))


_TIMES: Final = ("ts", "started_at", "finished_at")


def _wrong_times(value: Json, place: str) -> list[DocumentFault]:
    """Find times that do not exist, such as the 30th of February."""
    if not isinstance(value, dict):
        return []
    found = []
    for name in _TIMES:
        try:
            canonical.timestamp(value.get(name, "2000-01-01T00:00:00Z"))
        except (ValueError, TypeError) as error:
            found.append(DocumentFault(f"{place}/{name}", f"not a valid time: {error}"))
    for name in ("meta", "event", "receipt"):
        found += _wrong_times(value.get(name), f"{place}/{name}")
    trace = value.get("trace")
    for index, event in enumerate(trace if isinstance(trace, list) else ()):
        found += _wrong_times(event, f"{place}/trace/{index}")
    return found


def _wrong_sums(value: Json, data: bytes | None, place: str) -> list[DocumentFault]:
    """Check the order of the two times, and the hash."""
    receipt = read_receipt(value)
    # Without the final Z the print forms sort as the times do, whatever digits their fractions have.
    if receipt.meta.started_at[:-1] > receipt.meta.finished_at[:-1]:
        return [DocumentFault(f"{place}/meta/finished_at", "finished_at is before started_at")]
    if receipt.receipt_sha256 is None:
        return []
    computed = receipt_hash(receipt)
    if receipt.receipt_sha256 == computed or (data is not None and verify_bytes(data) is None):
        return []
    return [DocumentFault(f"{place}/receipt_sha256", f"the hash does not match the content, whose hash is {computed}")]


def _is_lines(data: bytes) -> bool:
    """Return True if the data are several lines with an object each."""
    first, newline, rest = data.strip().partition(b"\n")
    if not newline or not first.startswith(b"{") or not rest.lstrip().startswith(b"{"):
        return False
    try:
        return isinstance(canonical.decode(first), dict)
    except (ValueError, RecursionError):
        return False


def _is_toml(data: bytes) -> bool:
    return re.match(rb"\s*\[{1,2}[A-Za-z0-9_.\"'-]+\]{1,2}\s*(#.*)?(\n|$)", data) is not None


def _transcript(data: bytes) -> Iterator[DocumentFault]:
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        value, faults = _read(line)
        kind = "transcript line" if _is_annotated(value) else _recognise(value)
        if kind == "transcript line":
            faults += _annotated_line(value)
        elif kind == "unknown":
            faults = faults or [DocumentFault("", _why_unknown(value))]
        else:
            faults = list(_document(value, kind, line, faults))
        for fault in faults:
            yield msgspec.structs.replace(fault, line=number)


def _is_annotated(value: Json) -> bool:
    """Return True if the object describes a line, as in the shipped transcripts."""
    return isinstance(value, dict) and ("verdict" in value or set(value) == {"set"})


def _annotated_line(value: dict[str, Any]) -> list[DocumentFault]:
    if "set" in value:
        return []
    wrong = [
        ("/from", value.get("from") in ("host", "control"), "must be host or control"),
        ("/verdict", value.get("verdict") in ("accept", "noise", "drop", "end"), "must be accept, noise, drop or end"),
        ("/code", ("code" in value) == (value.get("verdict") == "end"), "is required with the verdict end only"),
        ("/line", isinstance(value.get("line", value.get("line_base64")), str), "the raw text of the line is missing"),
    ]
    return [DocumentFault(pointer, words) for pointer, holds, words in wrong if not holds]


def _configuration(data: bytes, name: str) -> Findings:
    try:
        value = read_toml(data)
        json.dumps(value)
    except (ValueError, RecursionError) as error:
        line = re.search(r"at line (\d+)", str(error))
        what = "not TOML" if name.endswith(".toml") else "neither JSON nor TOML"
        fault = DocumentFault("", f"{what}: {error or type(error).__name__}", int(line[1]) if line else None)
        return Findings(name, "configuration" if name.endswith(".toml") else "unknown", (fault,))
    except TypeError:
        return Findings(name, "configuration", (DocumentFault("", "no setting accepts a date or a time"),))
    return _bounded(name, "configuration", _document(value, "configuration", data, []))
