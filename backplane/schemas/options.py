"""The options of each shipped host, from the structs that read them: for the schema and for `contracts/options.md`."""

from __future__ import annotations

import ast
import inspect
import json
import re
from itertools import pairwise
from typing import Any, Final

import msgspec

from backplane.agents import rows as agents
from backplane.agents.rows import OF_DRIVER, PROVIDERS, AgentRow, taken
from backplane.contract.canonical import Json
from backplane.upstream.endpoint import Endpoint
from backplane.upstream.presets import PRESETS, SETTABLE

HOSTS: Final[dict[str, type[Any]]] = {"api": Endpoint, **dict.fromkeys(OF_DRIVER, AgentRow)}
"""Struct of the options of each host, by its name; `shell` and `mock` have none."""

_CHOSEN: Final[dict[str, tuple[str, Json, str]]] = {
    "api": ("preset", {"enum": list(PRESETS)}, "A known service, whose protocol, address and key variable are taken."),
    "acp": ("profile", {"type": "string"}, "A row of `hosts/agents.toml` whose values are taken."),
}
"""Options that name a row of defaults, which the struct itself does not have."""

_ATTRIBUTE: Final = r"^    (\w+): (.*(?:\n {8}.*)*)"


def docstrings(kind: type[Any]) -> dict[str, str]:
    """Return what the docstrings of a struct, of its members and of the structs that it extends say of each member."""
    found: dict[str, str] = {}
    for struct in reversed(kind.__mro__):
        if issubclass(struct, msgspec.Struct) and struct is not msgspec.Struct:
            found |= _own_docstrings(struct)
    return found


def _own_docstrings(kind: type[Any]) -> dict[str, str]:
    (owner,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(owner, ast.ClassDef)
    section = inspect.getdoc(kind) if "Attributes:" in (kind.__doc__ or "") else ""
    rows = re.findall(_ATTRIBUTE, (section or "").partition("\nAttributes:\n")[2].partition("\n\n")[0], re.M)
    found = {name: " ".join(about.split()) for name, about in rows}
    for member, about in pairwise(owner.body):
        if isinstance(member, ast.AnnAssign) and isinstance(about, ast.Expr) and isinstance(about.value, ast.Constant):
            assert isinstance(member.target, ast.Name)
            found[member.target.id] = " ".join(str(about.value.value).split())
    return found


def options_of(host: str) -> tuple[Json, dict[str, Json]]:
    """Return the JSON Schema of a host's options, and the definitions that it refers to."""
    kind, abouts = HOSTS[host], docstrings(HOSTS[host])
    (_,), found = msgspec.json.schema_components((kind,), ref_template="#/$defs/{name}")
    members = found.pop(kind.__name__)["properties"]
    known = SETTABLE if host == "api" else taken(host)
    rows = {name: members[name] | {"description": abouts[name]} for name in known if name in members}
    if host in PROVIDERS:
        rows["provider"] |= {"enum": list(PROVIDERS[host]), "default": PROVIDERS[host][0]}
    if host in _CHOSEN:
        name, shape, about = _CHOSEN[host]
        rows = {name: shape | {"description": about}, **rows}
    for name, body in found.items():
        for member, about in docstrings(getattr(agents, name)).items():
            body["properties"][member] |= {"description": about}
        body["additionalProperties"] = False
    return {"type": "object", "properties": rows, "additionalProperties": False}, found


def table() -> str:
    """Return the text of `contracts/options.md`."""
    parts = [_HEAD]
    for host in HOSTS:
        schema, found = options_of(host)
        rows = [
            f"| `{name}` | {_kind(row, found)} | {row['description'].replace('|', '∣')} |"
            for name, row in schema["properties"].items()
        ]
        parts.append("\n".join([f"\n## {host}\n", "| option | value | meaning |", "|---|---|---|", *rows]) + "\n")
    return "".join(parts)


def _kind(row: Json, found: dict[str, Json]) -> str:
    """Return in words what value an option takes, with its default."""
    if "enum" in row:
        words = ", ".join(f"`{choice}`" for choice in row["enum"] if choice is not None)
    elif "anyOf" in row:
        words = " or ".join(_kind(choice, found) for choice in row["anyOf"] if choice.get("type") != "null")
    else:
        words = {"array": "list", "object": "table"}.get(row.get("type", "object"), row.get("type", "table"))
    default = None if isinstance(row.get("default"), dict) else row.get("default")
    return f"{words} (default: {json.dumps(default)})" if default or default is False else words


_HEAD: Final = """# Options of hosts

What `options = { … }` of a `[backends.NAME]`, or `BackendSettings(options={…})` in Python, may hold, by the name of the
backend's `host`. The hosts `shell` and `mock` take none. `backplane schema configuration` has the same as JSON Schema,
with which editors check the file. This file is written by `python -m backplane.schemas`.
"""
