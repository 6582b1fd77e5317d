"""Changes the JSON Schemas of tools so that a vendor's service accepts them, and reports the changes.

`RULES` is the table: dialect → rules, each with its source and the date of reading. `accepted` applies them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.dialects.ir import Loss, ToolSpec

Schema = dict[str, Any]
Rewritten = tuple[Schema, tuple[str, ...]]
"""A schema, and JSON pointers to the changes in it."""

DEPTH_MAX: Final = 64
"""Maximum nesting; deeper inner schemas are not changed, as no service accepts them."""
NODES_MAX: Final = 5_000
"""Maximum schemas into which references are copied; a schema of references to references grows exponentially."""

CHOICES_MAX: Final = 500
"""Maximum alternatives at the top that are merged, with nested ones; a further one counts as an empty schema."""

MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Members of a schema whose values are schemas by name."""
INNER: Final = (
    "items", "anyOf", "oneOf", "allOf", "prefixItems", "not", "additionalProperties", "contains", "propertyNames",
    "if", "then", "else",
)  # fmt: skip
"""Members of a schema whose value is a schema or a list of schemas."""
COMBINED: Final = ("allOf", "anyOf", "oneOf")


class SchemaRule(msgspec.Struct, frozen=True):
    """A feature of schemas that a service refuses, and the rewrite that avoids it."""

    rewrite: Callable[[Schema], Rewritten]
    reason: str
    source: str
    """The page that documents the refusal, or the report that quotes the service."""
    code: str = "tool_field"
    """One of `ir.LOSS_CODES`."""
    read_on: str = "2026-11"


class SchemaChange(msgspec.Struct, frozen=True):
    """One rule's changes of a schema."""

    rule: SchemaRule
    places: tuple[str, ...]
    """JSON pointers into the schema; empty for its top."""


def accepted(schema: Json, dialect: str) -> tuple[Schema, tuple[SchemaChange, ...]]:
    """Return a tool's schema in a form that a dialect's service accepts, and the changes."""
    out: Schema = schema if isinstance(schema, dict) else {}
    changes = []
    for rule in RULES.get(dialect, ()):
        out, places = rule.rewrite(out)
        if places:
            changes.append(SchemaChange(rule, places))
    return out, tuple(changes)


def accepted_tool(tool: ToolSpec, dialect: str, source: str, at: str) -> tuple[ToolSpec, tuple[Loss, ...]]:
    """Return a tool with a schema that the service accepts, and a loss for each kind of change.

    Args:
        source: dialect of the document into which `at` points.
        at: JSON pointer to the tool.
    """
    if tool.kind != "function" or tool.schema is None:
        return tool, ()
    schema, changes = accepted(tool.schema, dialect)
    if not changes:
        return tool, ()
    words: dict[str, list[str]] = {}
    for change in changes:
        place = f" (at {change.places[0]})" if change.places[0] else ""
        words.setdefault(change.rule.code, []).append(f"{change.rule.reason}{place}")
    losses = tuple(
        Loss(path=at, dialect=source, target=dialect, kind="synthesised" if code == "required" else "degraded",
             code=code, reason=f"schema of {tool.name[:80]}: {'; '.join(said)}")
        for code, said in words.items()
    )  # fmt: skip
    return msgspec.structs.replace(tool, schema=schema), losses


# Walks ----------------------------------------------------------------------------------------------------------------


def every_schema(schema: Schema, change: Callable[[Schema], Schema]) -> Rewritten:
    """Apply `change` to a schema and to each schema inside it, from the top down."""
    places: list[str] = []

    def schema_at(node: Any, at: str, depth: int) -> Any:
        if not isinstance(node, dict) or depth > DEPTH_MAX:
            return node
        found = change(node)
        if found is not node:
            places.append(at)
        return _with_inner(found, lambda inner, step: schema_at(inner, f"{at}/{step}", depth + 1))

    out = schema_at(schema, "", 0)
    return (out, tuple(places)) if places else (schema, ())


def _with_inner(node: Schema, change: Callable[[Any, str], Any]) -> Schema:
    """Return a schema with each direct inner schema replaced by the result of `change(schema, pointer)`."""
    out: Schema = {}
    for name, value in node.items():
        if name in MAPS and isinstance(value, dict):
            out[name] = {key: change(inner, f"{name}/{_step(key)}") for key, inner in value.items()}
        elif name in INNER and isinstance(value, list):
            out[name] = [change(inner, f"{name}/{place}") for place, inner in enumerate(value)]
        else:
            out[name] = change(value, name) if name in INNER else value
    return out


def _step(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def _target(reference: Any, root: Schema) -> Schema | None:
    """Return the schema that a reference within the document points to; None for any other reference."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found: Any = root
    for step in reference.split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        elif isinstance(found, dict) and key in found:
            found = found[key]
        else:
            return None
    return found if isinstance(found, dict) else None


def _both(one: Schema, other: Schema) -> Schema:
    """Merge two schemas; where they differ, the second counts."""
    out = {**one, **other}
    if isinstance(one.get("properties"), dict) and isinstance(other.get("properties"), dict):
        out["properties"] = {**one["properties"], **other["properties"]}
    if isinstance(one.get("required"), list) and isinstance(other.get("required"), list):
        out["required"] = list(dict.fromkeys([*one["required"], *other["required"]]))
    return out


# The top --------------------------------------------------------------------------------------------------------------


def _no_reference(schema: Schema) -> Rewritten:
    """Replace a reference at the top by the referenced schema; remove one that refers to no schema."""
    out, seen = schema, set[int]()
    while "$ref" in out:
        found = _target(out["$ref"], schema)
        beside = {name: value for name, value in out.items() if name != "$ref"}
        is_new = found is not None and found is not schema and id(found) not in seen
        seen.add(id(found))
        out = _both(found, beside) if found is not None and is_new else beside
    return (out, ("/$ref",)) if out is not schema else (schema, ())


def _no_choices(schema: Schema) -> Rewritten:
    """Merge alternatives at the top into one object with the members of each."""
    found = tuple(name for name in COMBINED if isinstance(schema.get(name), list))
    if not found:
        return schema, ()
    left = iter(range(CHOICES_MAX))
    return _merged(schema, schema, left, ()), tuple(f"/{name}" for name in found)


def _merged(schema: Schema, root: Schema, left: Iterator[int], inside: tuple[str, ...]) -> Schema:
    """Merge the alternatives of a schema into it.

    Args:
        left: yields once for each alternative that may still be merged.
        inside: references that led to this schema; a repeated one is ignored.
    """
    own = {name: value for name, value in schema.items() if name not in COMBINED}
    for name in COMBINED:
        choices = list(_objects(schema.get(name), root, left, inside))
        if choices:
            own = _joined(own, choices, is_all=name == "allOf")
    return own


def _objects(choices: Any, root: Schema, left: Iterator[int], inside: tuple[str, ...]) -> Iterator[Schema]:
    """Yield the alternatives that an object can satisfy, with their own alternatives merged."""
    for one in choices if isinstance(choices, list) else ():
        if not isinstance(one, dict) or next(left, None) is None or len(inside) > DEPTH_MAX:
            yield from ({},) if one is not False else ()
            continue
        reference = str(one.get("$ref", ""))
        if "$ref" in one:
            beside = {key: value for key, value in one.items() if key != "$ref"}
            one = beside if reference in inside else _both(_target(reference, root) or {}, beside)
        if "object" in (one.get("type") or "object"):
            yield _merged(one, root, left, (*inside, reference))


def _joined(own: Schema, choices: list[Schema], *, is_all: bool) -> Schema:
    members: dict[str, Any] = dict(own.get("properties") or {})
    names = dict.fromkeys(name for one in choices for name in one.get("properties") or () if name not in members)
    for name in names:
        said = [one["properties"][name] for one in choices if name in (one.get("properties") or {})]
        said = [one for place, one in enumerate(said) if one not in said[:place]]
        members[name] = said[0] if len(said) == 1 else said[-1] if is_all else {"anyOf": said}
    wanted = [set(one.get("required") or ()) for one in choices]
    needed = set.union(*wanted) if is_all else set.intersection(*wanted)
    order = dict.fromkeys(
        [*(own.get("required") or ()), *(name for one in choices for name in one.get("required") or ())]
    )
    required = [name for name in order if name in needed or name in (own.get("required") or ())]
    out = {**own, "properties": members, **({"required": required} if required else {})}
    is_closed = all(one.get("additionalProperties") is False and "patternProperties" not in one for one in choices)
    if "additionalProperties" not in own and is_closed:
        out["additionalProperties"] = False
    return out


def _object_type(schema: Schema) -> Rewritten:
    """Set `type: object` at the top if it is missing."""
    if schema.get("type") == "object":
        return schema, ()
    return {"type": "object", **{name: value for name, value in schema.items() if name != "type"}}, ("",)


def _members(schema: Schema) -> Rewritten:
    if schema.get("type") != "object" or "properties" in schema:
        return schema, ()
    return {**schema, "properties": {}}, ("",)


def _no_top(*names: str) -> Callable[[Schema], Rewritten]:
    """Make a rewrite that removes members at the top."""

    def drop(schema: Schema) -> Rewritten:
        found = tuple(f"/{name}" for name in names if name in schema)
        return ({name: value for name, value in schema.items() if name not in names} if found else schema), found

    return drop


# Everywhere -----------------------------------------------------------------------------------------------------------


def _bare_references(*kept: str) -> Callable[[Schema], Rewritten]:
    """Make a rewrite that replaces each reference with members beside it by the referenced schema.

    Args:
        kept: members that the service accepts beside a reference.
    """

    def rewrite(schema: Schema) -> Rewritten:
        places: list[str] = []
        count = 0

        def schema_at(node: Any, at: str, depth: int, inside: tuple[str, ...]) -> Any:
            nonlocal count
            count += 1
            if not isinstance(node, dict) or depth > DEPTH_MAX:
                return node
            beside = {name: value for name, value in node.items() if name != "$ref" and name not in kept}
            beside = {name: value for name, value in beside.items() if not name.startswith("$")}
            if "$ref" in node and beside:
                places.append(at)
                reference = str(node["$ref"])
                found = _target(reference, schema)
                if found is None or reference in inside or count > NODES_MAX:
                    node = {name: value for name, value in node.items() if name not in beside}
                else:
                    node = _both(found, {name: value for name, value in node.items() if name != "$ref"})
                    inside = (*inside, reference)
                    return schema_at(node, at, depth + 1, inside)
            return _with_inner(node, lambda inner, step: schema_at(inner, f"{at}/{step}", depth + 1, inside))

        out = schema_at(schema, "", 0, ())
        return (out, tuple(dict.fromkeys(places))) if places else (schema, ())

    return rewrite


def _items(schema: Schema) -> Rewritten:
    def named(node: Schema) -> Schema:
        kinds = node.get("type")
        is_list = kinds == "array" or (isinstance(kinds, list) and "array" in kinds)
        return {**node, "items": {}} if is_list and not {"items", "prefixItems"} & node.keys() else node

    return every_schema(schema, named)


def _definitions(schema: Schema) -> Rewritten:
    """Move `definitions` to `$defs` at the top, and change the references to them."""
    if not isinstance(schema.get("definitions"), dict):
        return schema, ()

    def moved(node: Schema) -> Schema:
        said = node.get("$ref")
        if not isinstance(said, str) or not said.startswith("#/definitions/"):
            return node
        return {**node, "$ref": f"#/$defs/{said.removeprefix('#/definitions/')}"}

    own = schema.get("$defs")
    named = {**schema["definitions"], **(own if isinstance(own, dict) else {})}
    out = {name: value for name, value in schema.items() if name != "definitions"} | {"$defs": named}
    return every_schema(out, moved)[0], ("/definitions",)


ANYTHING: Final = tuple({"type": kind} for kind in ("string", "number", "boolean", "object", "null"))
"""Alternatives for a schema without a type, for services that require one in each schema."""
KINDS: Final[tuple[tuple[type[Any], str], ...]] = (
    (bool, "boolean"), (str, "string"), (int, "integer"), (float, "number"), (type(None), "null"), (dict, "object"),
    (list, "array"),
)  # fmt: skip


def _typed(schema: Schema) -> Rewritten:
    return every_schema(schema, _with_type)


def _with_type(node: Schema) -> Schema:
    """Return a schema with one type, or with alternatives of one type each."""
    if "$ref" in node:
        return node
    out = {("anyOf" if name == "oneOf" and "anyOf" not in node else name): value for name, value in node.items()}
    said = out.get("type")
    if isinstance(out.get("anyOf"), list):
        out["anyOf"] = [_of_type(one, said) for one in out["anyOf"]]
        out.pop("type", None)
    elif isinstance(out.get("enum"), list) and {type(one) for one in out["enum"]} & {bool, type(None), dict, list}:
        out = _by_kind(out)
    elif isinstance(said, list) and said:
        out = _alternatives(out, [{"type": kind} for kind in said])
    elif said is None:
        out = _guessed(out)
    return out if out != node else node


def _of_type(choice: Any, said: Any) -> Any:
    has_own = not isinstance(choice, dict) or said is None or {"type", "$ref", "anyOf", "oneOf"} & choice.keys()
    return choice if has_own else {"type": said, **choice}


def _alternatives(node: Schema, kinds: list[Schema]) -> Schema:
    """Return alternatives of these types; each but `null` has the schema's other members."""
    above: Schema = {name: node[name] for name in ("description", "default", "$defs") if name in node}
    rest = {name: value for name, value in node.items() if name not in above and name != "type"}
    if len(kinds) == 1:
        return {**above, **rest, **kinds[0]}
    return {**above, "anyOf": [one if one == {"type": "null"} else {**rest, **one} for one in kinds]}


def _by_kind(node: Schema) -> Schema:
    """Return a schema whose `enum` has only texts and numbers; other values become their types."""
    kinds: dict[str, list[Any]] = {}
    for value in node["enum"]:
        kinds.setdefault(next(name for kind, name in KINDS if isinstance(value, kind)), []).append(value)
    said = [
        {"type": kind, "enum": values} if kind in ("string", "integer", "number") else {"type": kind}
        for kind, values in kinds.items()
    ]
    return _alternatives({name: value for name, value in node.items() if name != "enum"}, said)


def _guessed(node: Schema) -> Schema:
    """Return a schema with the type that its other members imply."""
    listed = [node["const"]] if "const" in node else node.get("enum")
    if isinstance(listed, list) and listed:
        return {"type": next(name for kind, name in KINDS if isinstance(listed[0], kind)), **node}
    if {"properties", "additionalProperties", "required"} & node.keys():
        return {"type": "object", **node}
    if {"items", "prefixItems"} & node.keys():
        return {"type": "array", **node}
    if {"pattern", "minLength", "maxLength", "format"} & node.keys():
        return {"type": "string", **node}
    return _alternatives(node, list(ANYTHING)) if not set(COMBINED) & node.keys() else node


# The table ------------------------------------------------------------------------------------------------------------

CLAUDE_WORDS: Final = "the service's own words, github.com/anthropics/claude-code/issues/5319"
OPENAI_WORDS: Final = "the service's own words, github.com/langchain-ai/langchainjs/issues/9804"
NOTION_WORDS: Final = "the service's own words, github.com/nspady/google-calendar-mcp/issues/39"
GEMINI_PAGE: Final = "docs.cloud.google.com, GenerationConfig.responseJsonSchema; anomalyco/opencode/issues/12295"
GEMINI_CALLS: Final = "ai.google.dev/gemini-api/docs/function-calling"
MFJS: Final = "github.com/MoonshotAI/walle, docs/mfjs-spec.md; MoonshotAI/kimi-cli/issues/1595 and 2061"

NO_TYPE: Final = "the top says that it is of an object here"
NO_CHOICES: Final = "alternatives at the top are refused here; their members were merged into one object"
NO_MEMBERS: Final = "members beside a reference are refused here; the schema stands in its place"
NO_REFERENCE: Final = "a reference at the top is refused here; the schema it points to stands in its place"
OPENAI: Final = (
    SchemaRule(_no_reference, NO_REFERENCE, OPENAI_WORDS),
    SchemaRule(_no_choices, NO_CHOICES, OPENAI_WORDS),
    SchemaRule(_no_top("enum", "not", "const"), "enum and not are refused at the top here", NOTION_WORDS),
    SchemaRule(_object_type, NO_TYPE, OPENAI_WORDS, "required"),
    SchemaRule(_members, "an object names its members here", OPENAI_WORDS, "required"),
    SchemaRule(_items, "a list names its items here", OPENAI_WORDS, "required"),
)
RULES: Final[dict[str, tuple[SchemaRule, ...]]] = {
    "claude": (
        SchemaRule(_no_reference, NO_REFERENCE, CLAUDE_WORDS),
        SchemaRule(_no_choices, NO_CHOICES, CLAUDE_WORDS),
        SchemaRule(_object_type, NO_TYPE, "docs.anthropic.com/en/api/messages, tools", "required"),
    ),
    "openai": OPENAI,
    "codex": OPENAI,
    "copilot": OPENAI,
    "kimi": (
        SchemaRule(_definitions, "definitions stand in $defs here", MFJS, "required"),
        SchemaRule(_no_reference, NO_REFERENCE, MFJS),
        SchemaRule(_definitions, "definitions stand in $defs here", MFJS, "required"),  # The step above adds some.
        SchemaRule(_no_choices, NO_CHOICES, MFJS),
        SchemaRule(_object_type, NO_TYPE, MFJS, "required"),
        SchemaRule(_bare_references(), NO_MEMBERS, MFJS),
        SchemaRule(_typed, "each schema says one type here, and values of a list have one type", MFJS),
    ),
    "gemini": (
        SchemaRule(_no_reference, NO_REFERENCE, GEMINI_CALLS),
        SchemaRule(_object_type, NO_TYPE, GEMINI_CALLS, "required"),
        SchemaRule(_bare_references("description", "default"),
             NO_MEMBERS, GEMINI_PAGE),
    ),
}  # fmt: skip
"""Dialect → rules of its service, applied in this order."""
