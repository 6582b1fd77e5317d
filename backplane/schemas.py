"""JSON Schema (draft 2020-12) of every shape of the contract, written from its structs.

`python -m backplane.schemas` writes `schemas/`, `--check` only compares. A plain name is what a
reader takes (defaults may be left out); a name that ends in `_written`, or begins with `cli_` for
what a command prints, is what we write: every member there. Unknown members are allowed, but not
in a policy or a configuration, where they are mistakes. What our reader forgives beyond that (an
unknown event type, say) is no promise and stands in no schema.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from backplane import share
from backplane.config import Settings
from backplane.contract import envelope
from backplane.contract.canonical import INT_MAX, Json
from backplane.contract.capability import CAPABILITIES
from backplane.contract.events import EVENT_TYPES, AgentEvent
from backplane.contract.receipt import CONTRACT_VERSION, Receipt
from backplane.contract.work import PolicyProfile, WorkOrder
from backplane.errors import CODES, ConfigError
from backplane.ir import LOSS_CODES

_DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
_ID: Final = f"urn:{CONTRACT_VERSION.replace('/', ':')}:"

# ECMA-262 patterns: they run in every validator, whatever language it is written in.
_UUID: Final = r"^(urn:uuid:)?\{?[0-9a-fA-F]{8}(-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}\}?$"
_UUID_WRITTEN: Final = "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$"
_TIME: Final = (
    r"^[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?\s?(Z|z|UTC|[+-][0-9]{2}:?[0-9]{2})$"
)
_TIME_WRITTEN: Final = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.([0-9]{3}){1,3})?Z$"

_LEVEL: Final[Json] = {
    "anyOf": [
        {"enum": ["native", "emulated", "unsupported"]},
        {
            "type": "object",
            "properties": {
                "restricted": {"type": "object", "properties": {"reason": {"type": "string"}}, "required": ["reason"]}
            },
            "required": ["restricted"],
        },
    ]
}
_MANIFEST: Final[Json] = {
    "type": "object",
    "propertyNames": {"enum": list(CAPABILITIES)},
    "additionalProperties": _LEVEL,
}
_COUNTER: Final[Json] = {"maximum": INT_MAX}

_FIELDS: Final[dict[tuple[str, str], Json]] = {
    ("WorkOrder", "id"): {"pattern": _UUID},
    ("Requirement", "capability"): {"enum": list(CAPABILITIES)},
    ("RunMetadata", "run_id"): {"pattern": _UUID},
    ("RunMetadata", "work_order_id"): {"pattern": _UUID},
    ("RunMetadata", "started_at"): {"pattern": _TIME},
    ("RunMetadata", "finished_at"): {"pattern": _TIME},
    ("RunMetadata", "duration_ms"): _COUNTER,
    ("Usage", "input_tokens"): _COUNTER,
    ("Usage", "output_tokens"): _COUNTER,
    ("Usage", "cache_read_tokens"): _COUNTER,
    ("Usage", "cache_write_tokens"): _COUNTER,
    ("Usage", "request_units"): _COUNTER,
    ("Receipt", "capabilities"): _MANIFEST,
    ("Receipt", "receipt_sha256"): {"pattern": "^[0-9a-f]{64}$"},
    ("Hello", "capabilities"): _MANIFEST,
    ("Hello", "contract_version"): {"pattern": r"^abp/v[0-9]+\.[0-9]+$"},
    ("Fatal", "error_code"): {"enum": [*CODES, None]},
    ("Failed", "error_code"): {"enum": [*CODES, None]},
    ("Fatal", "receipt"): {"$ref": "#/$defs/Receipt"},
    ("Final", "receipt"): {"$ref": "#/$defs/Receipt"},
    ("Cancel", "grace_ms"): {"minimum": 0},
    **{(kind.__name__, "ts"): {"pattern": _TIME} for kind in EVENT_TYPES.values()},
    ("Ping", "seq"): {"minimum": 0, **_COUNTER},
    ("Pong", "seq"): {"minimum": 0, **_COUNTER},
}
"""What a member's Python type does not say."""

_RULES: Final[dict[str, Json]] = {"BackendSettings": {"oneOf": [{"required": ["command"]}, {"required": ["host"]}]}}
"""What holds between the members of one struct."""

_LINK: Final[Json] = {"pattern": "^[0-9a-f]{64}$"}
_FIELDS_WRITTEN: Final[dict[tuple[str, str], Json]] = {
    ("WorkOrder", "id"): {"pattern": _UUID_WRITTEN},
    ("RunMetadata", "run_id"): {"pattern": _UUID_WRITTEN},
    ("RunMetadata", "work_order_id"): {"pattern": _UUID_WRITTEN},
    ("RunMetadata", "contract_version"): {"const": CONTRACT_VERSION},
    ("RunMetadata", "started_at"): {"pattern": _TIME_WRITTEN},
    ("RunMetadata", "finished_at"): {"pattern": _TIME_WRITTEN},
    **{(kind.__name__, "ts"): {"pattern": _TIME_WRITTEN} for kind in EVENT_TYPES.values()},
    ("Receipt", "usage_raw"): {"type": "object", "properties": {"backplane": {"$ref": "#/$defs/Backplane"}}},
    ("cli_backends", "manifest"): {"type": ["object", "null"], "additionalProperties": _LEVEL},
    ("cli_checkpoints", "at"): {"pattern": _TIME_WRITTEN},
    ("cli_checkpoints", "tree"): {"pattern": "^[0-9a-f]{40}$"},
    ("cli_receipts_checkpoint", "link"): _LINK,
    ("cli_receipts_checkpoint", "time"): {"pattern": _TIME_WRITTEN},
    ("cli_receipts_list", "run_id"): {"pattern": _UUID_WRITTEN},
    ("cli_receipts_list", "work_order_id"): {"pattern": _UUID_WRITTEN},
    ("cli_receipts_list", "outcome"): {"enum": ["complete", "failed", "partial"]},
    ("cli_receipts_list", "started_at"): {"pattern": _TIME_WRITTEN},
    ("cli_receipts_list", "finished_at"): {"pattern": _TIME_WRITTEN},
    **{("cli_receipts_list", name): _LINK for name in ("sha256", "previous_link", "link")},
    ("cli_translate_loss", "code"): {"enum": list(LOSS_CODES)},
}
"""The same of what we write; what a command prints goes by its schema's name, as its types share theirs."""

_WRITTEN_THOUGH_MADE: Final = {"WorkOrder": "id"}
"""Members whose default is made anew each time, so that no default stands in the schema, and yet we write them."""


_COUNTS: Final[Json] = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}}
_SHA256: Final[Json] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_STRINGS: Final[Json] = {"type": "array", "items": {"type": "string"}}
_TEXT_OR_OBJECT: Final[Json] = {"type": ["string", "object"]}


def _object(about: str, required: Sequence[str] = (), **members: Json) -> Json:
    return {"description": about, "type": "object", "properties": members, "required": list(required)}


_BACKPLANE: Final[Json] = _object(
    "What the control plane adds to a receipt, under `usage_raw.backplane`; open for more members.",
    ["end"],
    end=_object(
        "How the run ended. Reasons so far: complete, partial, failed, cancelled, interrupted, refused, deadline, "
        "idle, budget, max_turns, host_exit, protocol, store.",
        ["reason"],
        reason={"type": "string"},
        code={"enum": list(CODES)},
        exit_code={"type": "integer"},
        signal={"type": "integer"},
    ),
    claims=_object("What the child said of itself and was seen otherwise, member by member."),
    reconciliation=_object("Where the events' claims and the files' difference do not meet; empty when they do."),
    enforcement=_object(
        "What held the host and each rule (os, host, vendor, audit, or null for none), what that left open (gap), "
        "and what broke a rule all the same.",
        isolation={"enum": ["required", "best_effort", "off"]},
        layers={"type": "array", "items": {"type": "object", "required": ["name", "state"]}},
        kinds={
            "description": "By kind of thing held: files, network, processes, syscalls, limits, environment.",
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "required": ["state"],
                "properties": {"state": {"enum": ["enforced", "partial", "advisory", "none"]}},
            },
        },
        rules={"type": "array", "items": {"type": "object", "required": ["rule", "layer"]}},
        violations={"type": "array"},
    ),
    losses={"description": "What a translation could not carry.", "type": "array"},
    unheard={"description": "Settings under `config.vendor.abp` that the backplane does not know.", **_STRINGS},
    route=_object("Which backend was chosen, and why the others lost."),
    cost=_object("What the run cost, and how that is known."),
    noise=_object(
        "Output of the host that was no message: its lines and its beginning.",
        lines={"type": "integer", "minimum": 0},
        text={"type": "string"},
    ),
    patch=_object(
        "The patch that lies beside the receipt.",
        ["bytes", "sha256"],
        bytes={"type": "integer", "minimum": 0},
        sha256=_SHA256,
        files={"type": "integer", "minimum": 0},
        ignored={"type": "integer", "minimum": 0},
    ),
    parent={"description": "The run of an outer plane that this run belongs to.", **_TEXT_OR_OBJECT},
    inner=_object("The receipt of a plane inside: its hash, whether that verified, and what it had added."),
    capabilities=_object("Abilities and levels of the manifest that the contract does not have, as they were sent."),
    counts={"description": "Messages and lines that had no effect, by why; and what was redacted.", **_COUNTS},
    usage=_object("Whose word each counter of the receipt's usage is."),
    endpoints={"description": "Network addresses of the backend itself, which no rule closes.", "type": "array"},
    start={"description": "cold or warm.", "type": "string"},
    guard={"description": "`lost`: it was killed, so nobody knows whether all of the host is gone.", "type": "string"},
    durability={"description": "What a power cut could still take, or has taken.", **_TEXT_OR_OBJECT},
    negotiation=_object("Requirements against the manifest, with the smallest change that would satisfy it."),
    hooks=_object(
        "Which hooks were attached, what each decided how often, and the single decisions up to a number.",
        ["attached", "counts", "decisions"],
        attached={
            "type": "array",
            "items": _object(
                "One hook; of kind above it lay with whoever gave the order.",
                ["name", "event", "kind", "tools"],
                name={"type": "string"},
                event={"enum": ["pre_tool", "post_tool"]},
                kind={"enum": ["command", "function", "above"]},
                tools=_STRINGS,
            ),
        },
        counts={
            "description": "By hook: allow, deny, modify; failed counts beside what then counted.",
            "type": "object",
            "additionalProperties": _COUNTS,
        },
        decisions={
            "type": "array",
            "items": _object(
                "One answer of one hook.",
                ["hook", "ask", "tool", "decision"],
                hook={"type": "string"},
                ask={"type": "string"},
                tool={"type": "string"},
                decision={"enum": ["allow", "deny", "modify"]},
                reason={"type": "string"},
            ),
        },
        missed={"description": "Uses of a tool that no hook was asked about, by event and tool.", **_COUNTS},
    ),
    checkpoints=_object(
        "States of the workspace that were kept, and the ways back to them.",
        ["made"],
        made={
            "type": "array",
            "items": _object(
                "One kept state: `tree` is git's name of all that is covered, `files` differ from the start.",
                ["id", "name", "at", "why", "tree", "files", "record_sha256"],
                id={"type": "string"},
                name={"type": "string"},
                at={"type": "string", "pattern": _TIME_WRITTEN},
                why={"enum": ["asked", "tool"]},
                tree={"type": "string", "pattern": "^[0-9a-f]{40}$"},
                files={"type": "integer", "minimum": 0},
                left_out={"type": "integer", "minimum": 0},
                record_sha256=_SHA256,
            ),
        },
        dropped={"description": "Automatic ones that made room.", "type": "integer", "minimum": 0},
        rewound={"type": "array", "items": _object("One way back.", ["at", "name", "files"])},
        failed={"type": "integer", "minimum": 0},
        failures={"type": "array", "items": _object("One that could not be made.", ["at", "ask", "reason"])},
    ),
)

_ENVELOPES: Final[dict[str, Any]] = {
    "hello": envelope.Hello,
    "run": envelope.Run,
    "event": envelope.Event,
    "final": envelope.Final,
    "fatal": envelope.Fatal,
    "cancel": envelope.Cancel,
    "input": envelope.Input,
    "interrupt": envelope.Interrupt,
    "ping": envelope.Ping,
    "pong": envelope.Pong,
    "ask": envelope.Ask,
    "answer": envelope.Answer,
    "tree": envelope.Tree,
    "patch": envelope.Patch,
}

_PRINTED: Final = {
    "cli_backends": "backplane.backends:BackendStatus",
    "cli_backends_matrix": "backplane.matrix:Matrix",
    "cli_backends_probe": "backplane.proof:Proof",
    "cli_checkpoints": "backplane.workspace.checkpoints:Checkpoint",
    "cli_conform": "backplane.conform:Report",
    "cli_doctor": "backplane.cli.doctor:Finding",
    "cli_receipts_checkpoint": "backplane.receipts:Checkpoint",
    "cli_receipts_list": "backplane.receipts.rows:Listed",
    "cli_translate_loss": "backplane.ir:Loss",
}
"""What commands print that is no shape of the contract, as places of types: only who writes schemas loads them."""

SHAPES: Final[dict[str, Any]] = {
    "work_order": WorkOrder,
    "work_order_written": WorkOrder,
    "receipt": Receipt,
    "receipt_written": Receipt,
    "event": AgentEvent,
    "event_written": AgentEvent,
    "backplane": None,
    "policy": PolicyProfile,
    "configuration": Settings,
    **{f"envelope_{name}": kind for name, kind in _ENVELOPES.items()},
    "envelope_run_written": envelope.Run,
    **_PRINTED,
}
"""Name of a schema → the type it describes, or where that stands; None for the one that is written here by hand."""

_CLOSED: Final = ("policy", "configuration")


def names() -> tuple[str, ...]:
    """The names of all schemas, in the order in which they are written."""
    return tuple(SHAPES)


def build(name: str) -> Json:
    """Make one schema from the contract's structs."""
    head = {"$schema": _DRAFT, "$id": _ID + name, "title": name}
    kind, written = SHAPES[name], name.endswith("_written") or name in _PRINTED
    if kind is None:
        return head | _BACKPLANE
    if name in _PRINTED:
        module, _, struct = kind.partition(":")
        kind = getattr(import_module(module), struct)
    extra = [Receipt] if kind in (envelope.Final, envelope.Fatal) else []
    (root, *_), found = msgspec.json.schema_components([kind, *extra], ref_template="#/$defs/{name}")
    definitions = {key: _tidy(body) for key, body in found.items()}
    for (owner, field), more in (_FIELDS | _FIELDS_WRITTEN if written else _FIELDS).items():
        owner = kind.__name__ if owner == name else owner
        if owner in definitions:
            definitions[owner]["properties"][field] |= more
    for owner, body in definitions.items():
        if written:
            members = body["properties"].items()
            body["required"] = [key for key, member in members if _is_written(owner, key, member, body)]
        body |= _RULES.get(owner, {})
        if name in _CLOSED and "properties" in body:
            body["additionalProperties"] = False
    if written and "Receipt" in definitions:
        definitions["Backplane"] = _BACKPLANE
    return head | _whole(_tidy(root), definitions)


def _whole(root: Json, definitions: dict[str, Json]) -> Json:
    """The root's own shape stands at the top: generators of code stumble over a root that is a reference."""
    if set(root) == {"$ref"}:
        root = definitions.pop(root["$ref"].rpartition("/")[2])
        del root["title"]
    return {**root, "$defs": definitions} if definitions else root


def _is_written(owner: str, key: str, member: Json, body: Json) -> bool:
    return key in body["required"] or "default" in member or _WRITTEN_THOUGH_MADE.get(owner) == key


def _tidy(node: Json) -> Json:
    """Say a choice by tag as `if`/`then`, so that a validator points at the member and not at the choice."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: value if key == "default" else _tidy(value) for key, value in node.items()}
    if "description" in node and isinstance(node["description"], str):
        node["description"] = inspect.cleandoc(node["description"]).split("\n\n")[0].replace("\n", " ")
    if "discriminator" in node:
        return _by_tag(node.pop("discriminator"))
    choices = node.get("anyOf", ())
    if choices and all(set(choice) <= _PLAIN and isinstance(choice.get("type"), str) for choice in choices):
        del node["anyOf"]
        merged = {key: value for choice in choices for key, value in choice.items()}
        return {**merged, **node, "type": [choice["type"] for choice in choices]}
    return node


_PLAIN: Final = {"type", "minimum", "maximum"}


def _by_tag(discriminator: Mapping[str, Any]) -> Json:
    tag, mapping = discriminator["propertyName"], discriminator["mapping"]
    return {
        "type": "object",
        "properties": {tag: {"enum": list(mapping)}},
        "required": [tag],
        "allOf": [
            {"if": {"properties": {tag: {"const": value}}, "required": [tag]}, "then": {"$ref": ref}}
            for value, ref in mapping.items()
        ],
    }


def render(name: str) -> bytes:
    """The bytes of `schemas/NAME.json`; the same on every machine."""
    return (json.dumps(build(name), indent=2, ensure_ascii=False) + "\n").encode()


def load_schema(name: str) -> bytes:
    """Read a written schema, from a checkout or an installed copy.

    Raises:
        ConfigError: `config_invalid`, no schema of this name.
    """
    path = share.find("schemas") / f"{name}.json"
    if name not in names() or not path.is_file():
        raise ConfigError("config_invalid", f"no schema named {name!r}", hint="`backplane schema` lists them")
    return path.read_bytes()


def error_table() -> str:
    """The text of `contracts/errors.md`."""
    rows = [
        f"| `{code}` | {facts.meaning} | {facts.fault} | {'yes' if facts.retryable else 'no'} "
        f"| {facts.exit_code} | `{facts.provider_code}` |"
        for code, facts in CODES.items()
    ]
    return _ERRORS_HEAD + "\n".join(rows) + "\n"


_ERRORS_HEAD: Final = """# Error codes

Stable strings, never changed or removed; the words beside them may change. *Fault* says where to look: the caller
(the order or the configuration), this control plane, the host, the model's service (upstream) or the machine.
*Retry*: whether the same order may succeed later. *Exit* is the exit code of a command that ends with the error,
*provider code* the nearest of the seven codes of the provider interface. A peer that sends any other code is taken
to say `internal`. This file is written by `python -m backplane.schemas`.

| code | meaning | fault | retry | exit | provider code |
|---|---|---|---|---|---|
"""


def stale() -> list[Path]:
    """Generated files that are missing or differ from what they are made of, and schemas that belong to no shape."""
    wanted = _generated()
    strangers = set(share.find("schemas").glob("*.json")) - set(wanted)
    return sorted(
        strangers | {path for path, data in wanted.items() if not path.is_file() or path.read_bytes() != data}
    )


def _generated() -> dict[Path, bytes]:
    schemas = {share.find("schemas") / f"{name}.json": render(name) for name in names()}
    return {**schemas, share.find("contracts") / "errors.md": error_table().encode()}


def main(arguments: Sequence[str]) -> int:
    """Write what is stale, or with `--check` only name it (exit code 1)."""
    old, wanted = stale(), _generated()
    if "--check" in arguments:
        for path in old:
            sys.stderr.write(f"{path} is stale; run: python -m backplane.schemas\n")
        return 1 if old else 0
    for path in old:
        if path in wanted:
            path.write_bytes(wanted[path])
        else:
            path.unlink()
    sys.stdout.write(f"{len(wanted)} generated files, {len(old)} of them changed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
