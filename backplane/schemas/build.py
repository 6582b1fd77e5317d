"""JSON Schema (draft 2020-12) of every shape of the contract, written from its structs.

`python -m backplane.schemas` writes `schemas/`, `--check` only compares. Members with a default may be left out, but
a command prints every member (`cli_…`). Unknown members are allowed, but not in a policy, a configuration or a session,
where they are mistakes. Our reader forgives more (an unknown event type, say); that is no promise and in no schema.
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

from backplane import config, resources
from backplane.contract import envelope
from backplane.contract.canonical import Json
from backplane.contract.conversation import SessionFile
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import CONTRACT_VERSION, Receipt
from backplane.contract.work import PolicyProfile, WorkOrder
from backplane.errors import CODES, OWN_CODES, ConfigError, provider_code
from backplane.policy.rules import PROFILES
from backplane.sandbox.credentials import STORES
from backplane.schemas import options
from backplane.schemas.facts import FIELDS, PRINTED_FIELDS, RULES

_DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
_ID: Final = f"urn:{CONTRACT_VERSION.replace('/', ':')}:"

_ENVELOPES: Final[dict[str, Any]] = {
    "hello": envelope.Hello,
    "run": envelope.RunMessage,
    "event": envelope.EventMessage,
    "final": envelope.Final,
    "fatal": envelope.Fatal,
    "cancel": envelope.Cancel,
    "input": envelope.Input,
    "interrupt": envelope.Interrupt,
    "ping": envelope.Ping,
    "pong": envelope.Pong,
    "ask": envelope.Ask,
    "answer": envelope.AnswerMessage,
}

_PRINTED: Final = {
    "cli_backends": "backplane.runtime.readiness:BackendStatus",
    "cli_backends_probe": "backplane.conform.trials:Proof",
    "cli_checkpoints": "backplane.workspace.checkpoints:Checkpoint",
    "cli_compare": "backplane.routing.intervals:Comparison",
    "cli_conform": "backplane.conform.runner:Report",
    "cli_cost": "backplane.cli.cost:Spend",
    "cli_doctor": "backplane.cli.doctor:DoctorCheck",
    "cli_exchanges": "backplane.gateway.record:RecordedExchange",
    "cli_queue_limit": "backplane.scale.engine:QueueLimits",
    "cli_queue_list": "backplane.scale.engine:Status",
    "cli_queue_show": "backplane.scale.commands.common:QueuedOrder",
    "cli_queue_status": "backplane.scale.commands.status:QueueCounts",
    "cli_receipts_audit": "backplane.receipts.claims:Audited",
    "cli_receipts_checkpoint": "backplane.receipts.database:ChainCheckpoint",
    "cli_receipts_verify": "backplane.receipts.audit:Audit",
    "cli_route": "backplane.routing.router:RoutingDecision",
    "cli_dry_run": "backplane.cli.dry_run:DryRun",
    "cli_replay": "backplane.receipts.rejudge:Rejudged",
    "cli_runs": "backplane.receipts.memory:Remembered",
    "cli_translate_loss": "backplane.dialects.ir:Loss",
    "cli_version": "backplane.cli.version:Version",
    "cli_why": "backplane.view.why:Diagnosis",
}
"""Types that only commands print, as places: they are imported when a schema is built."""

SHAPES: Final[dict[str, Any]] = {
    "work_order": WorkOrder,
    "receipt": Receipt,
    "event": AgentEvent,
    "backplane": None,
    "policy": PolicyProfile,
    "configuration": config.Settings,
    "session": SessionFile,
    **{f"envelope_{name}": kind for name, kind in _ENVELOPES.items()},
    **_PRINTED,
}
"""Name of a schema → its type, or the type's place.

None for a receipt's `usage_raw.backplane`: many rooms add to it, so its file is edited by hand, and
`tests/described.py` checks real receipts by it.
"""

_CLOSED: Final = ("policy", "configuration")
"""Files that people write: an unknown member is a mistake, and an editor shows each member's description."""


def names() -> tuple[str, ...]:
    """Return the names of all schemas, in the order of their files."""
    return tuple(SHAPES)


def build(name: str) -> Json:
    """Make one schema from the contract's structs."""
    head = {"$schema": _DRAFT, "$id": _ID + name, "title": name}
    kind, printed = SHAPES[name], name in _PRINTED
    if kind is None:
        body: Json = json.loads((resources.find("schemas") / f"{name}.json").read_bytes())
        body["properties"]["end"]["properties"]["code"]["enum"] = list(CODES)
        return body
    if printed:
        module, _, struct = kind.partition(":")
        kind = getattr(import_module(module), struct)
    extra = [Receipt] if kind in (envelope.Final, envelope.Fatal) else []
    (root, *_), found = msgspec.json.schema_components([kind, *extra], ref_template="#/$defs/{name}")
    definitions = {key: _tidy(body) for key, body in found.items()}
    for (owner, field), more in (FIELDS | PRINTED_FIELDS if printed else FIELDS).items():
        owner = kind.__name__ if owner == name else owner
        if owner in definitions:
            definitions[owner]["properties"][field] |= more
    for owner, body in definitions.items():
        if printed:
            members = body["properties"].items()
            body["required"] = [key for key, member in members if key in body["required"] or "default" in member]
        body |= RULES.get(owner, {})
        if name in _CLOSED and "properties" in body:
            body["additionalProperties"] = False
            struct = PolicyProfile if owner == "PolicyProfile" else getattr(config, owner)
            for member, about in options.docstrings(struct).items():
                body["properties"][member].setdefault("description", about)
    if name == "configuration":
        _with_options(definitions)
    return head | _whole(_tidy(root), definitions)


def _with_options(definitions: dict[str, Json]) -> None:
    """Add the options of each shipped host to the schema of a backend."""
    backend, cases = definitions["BackendSettings"], []
    for host in options.HOSTS:
        schema, found = options.options_of(host)
        definitions |= {name: _tidy(body) for name, body in found.items()}
        definitions[f"options_{host}"] = _tidy(schema)
        then = {"properties": {"options": {"$ref": f"#/$defs/options_{host}"}}}
        cases.append({"if": {"properties": {"host": {"const": host}}, "required": ["host"]}, "then": then})
    backend["allOf"] = [*backend.get("allOf", ()), *cases]


def _whole(root: Json, definitions: dict[str, Json]) -> Json:
    """Put the root's own shape at the top: code generators fail on a root that is a reference."""
    if set(root) == {"$ref"}:
        root = definitions.pop(root["$ref"].rpartition("/")[2])
        del root["title"]
    return {**root, "$defs": definitions} if definitions else root


def _tidy(node: Json) -> Json:
    """Write a choice by tag as `if`/`then`, so that a validator points at the member and not at the choice."""
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
    """Return the bytes of `schemas/NAME.json`; the same on every machine."""
    return (json.dumps(build(name), indent=2, ensure_ascii=False) + "\n").encode()


def load_schema(name: str) -> bytes:
    """Read a written schema, from a checkout or an installed copy, by its name or its `$id`.

    Raises:
        ConfigError: `config_invalid`, no schema of this name.
    """
    name = name.removeprefix(_ID)
    path = resources.find("schemas") / f"{name}.json"
    if name not in names() or not path.is_file():
        raise ConfigError("config_invalid", f"no schema named {name!r}", hint="`backplane schema` lists them")
    return path.read_bytes()


def error_table() -> str:
    """Return the text of `contracts/errors.md`."""
    rows = [
        f"| `{code}` | {facts.meaning}{'' if facts.ours else ' †'} | {facts.fault} "
        f"| {'yes' if facts.retryable else 'no'} | {facts.exit_code} | `{provider_code(code)}` |"
        for code, facts in CODES.items()
    ]
    own = [f"- `{code}` (exit {facts.exit_code}): {facts.meaning}" for code, facts in OWN_CODES.items()]
    return _ERRORS_HEAD + "\n".join((*rows, _ERRORS_OWN, *own)) + "\n"


_ERRORS_OWN: Final = "\nOnly on stderr and in exceptions of Python, in no message and no receipt:\n"


_ERRORS_HEAD: Final = """# Error codes

Stable strings, never changed or removed; the words beside them may change. *Fault* says where to look: the caller
(the order or the configuration), this control plane, the host, the model's service (upstream) or the machine.
*Retry*: whether the same order may succeed later. *Exit* is the exit code of a command that ends with the error;
a run whose outcome is `partial`, or that has a finding of its order's `fail_on`, ends with 3 whatever its error, one
that a signal ended with 128 and its number.
*Provider code* is the nearest of the seven codes of the provider interface. A peer that sends any other code is taken
to say `internal`. † Only peers send it: nothing here ends with it by itself. This file is written by
`python -m backplane.schemas`.

| code | meaning | fault | retry | exit | provider code |
|---|---|---|---|---|---|
"""


def credentials_table() -> str:
    """Return the text of `contracts/credentials.md`."""
    rows = [f"| `{name}` | {', '.join(f'`{_place(spot)}`' for spot in spots)} |" for name, spots in STORES.items()]
    return _CREDENTIALS_HEAD + "\n".join(rows) + "\n"


def _place(spot: str) -> str:
    return spot if spot.startswith("$") else f"~/{spot}"


_CREDENTIALS_HEAD: Final = """# Stores of credentials

What a contained host does not see, whatever the policy: each folder is empty there, each file has no content.
`config.vendor.abp.credentials = ["git"]` opens a store for one order, `credentials = ["git"]` in `[backends.NAME]` for
a backend; so does a variable of the host that holds its path, a path in `writable`, and a workspace inside it. The
login of an agent is open to the agent that works with the user's own folder (`own_state`). Links are followed. The
receipt says what was covered and what was left open: `usage_raw.backplane.enforcement.kinds.credentials`, which is
`none` without bubblewrap. This file is written by `python -m backplane.schemas`.

| store | where |
|---|---|
"""


def stale() -> list[Path]:
    """Return the generated files that are missing or out of date, and schemas without a type."""
    wanted = _generated()
    strangers = set(resources.find("schemas").glob("*.json")) - set(wanted)
    return sorted(
        strangers | {path for path, data in wanted.items() if not path.is_file() or path.read_bytes() != data}
    )


def _generated() -> dict[Path, bytes]:
    schemas = {resources.find("schemas") / f"{name}.json": render(name) for name in names()}
    contracts = resources.find("contracts")
    profiles = {
        contracts / "examples" / "policy" / f"{name}.json": msgspec.json.format(msgspec.json.encode(profile)) + b"\n"
        for name, profile in PROFILES.items()
    }
    pages = {"errors.md": error_table(), "credentials.md": credentials_table(), "options.md": options.table()}
    return {**schemas, **profiles, **{contracts / name: text.encode() for name, text in pages.items()}}


def main(arguments: Sequence[str]) -> int:
    """Write stale files, or with `--check` only print their names (exit code 1)."""
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
