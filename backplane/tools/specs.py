"""Describes the tools by names, descriptions and JSON Schemas, and checks a call's input. Pure.

The names are the policy's neutral ones, so its rules on paths and addresses apply to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from backplane.contract.canonical import Json
from backplane.dialects.ir import ToolSpec

TIMEOUT_S: Final = 120
"""Seconds that a command may take unless its call names a time."""

TIMEOUT_S_MAX: Final = 600
"""Most seconds that a call may name; a test suite takes minutes."""


def _text(description: str, **more: Json) -> Json:
    return {"type": "string", "description": description, **more}


def _object(required: str, **properties: Json) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


_PATH: Final = _text("Path in the workspace, relative to its root.", minLength=1)

SPECS: Final[tuple[ToolSpec, ...]] = (
    ToolSpec(
        name="read_file",
        description="Read a text file of the workspace. Long files come in parts: use offset, limit and column.",
        schema=_object(
            "path",
            path=_PATH,
            offset={"type": "integer", "minimum": 1, "description": "First line wanted, counted from 1."},
            limit={"type": "integer", "minimum": 1, "description": "How many lines; 2000 at most."},
            column={"type": "integer", "minimum": 1, "description": "First character wanted of the first line."},
        ),
    ),
    ToolSpec(
        name="write_file",
        description="Make a file or replace all of it. Missing folders are made. To change a part, use edit_file.",
        schema=_object("path content", path=_PATH, content=_text("The whole new text.")),
    ),
    ToolSpec(
        name="edit_file",
        description="Replace a text in a file. It must stand there exactly so and only once, unless all is true.",
        schema=_object(
            "path old new",
            path=_PATH,
            old=_text("The text to replace, with its blanks and line ends.", minLength=1),
            new=_text("What to put there."),
            all={"type": "boolean", "description": "Replace it wherever it stands."},
        ),
    ),
    ToolSpec(
        name="bash",
        description=(
            "Run a shell command in the workspace's root, without a terminal or input. Both output streams come back, "
            "and the exit code. What it leaves running is ended with it."
        ),
        schema=_object(
            "command",
            command=_text("The command line.", minLength=1),
            timeout_s={
                "type": "integer",
                "minimum": 1,
                "maximum": TIMEOUT_S_MAX,
                "description": f"Seconds until it is stopped; {TIMEOUT_S} unless given.",
            },
        ),
    ),
    ToolSpec(
        name="glob",
        description="List files whose path matches a pattern. * matches any text, slashes too: *.py finds all of them.",
        schema=_object(
            "pattern",
            pattern=_text("As src/*.py or *test*.", minLength=1),
            path=_text("Folder to look in; the root unless given."),
        ),
    ),
    ToolSpec(
        name="grep",
        description="Find lines that match a regular expression, as file:line:text.",
        schema=_object(
            "pattern",
            pattern=_text("A Python regular expression, applied line by line.", minLength=1),
            path=_text("Folder or file to look in; the root unless given."),
            glob=_text("Only files whose path matches, as *.py."),
            ignore_case={"type": "boolean"},
        ),
    ),
    ToolSpec(
        name="web_fetch",
        description="Fetch a page from the web and give its text.",
        schema=_object("url", url=_text("An http or https address.", minLength=1)),
    ),
    ToolSpec(
        name="ask_user",
        description="Ask the person who gave the task. Only for what cannot be found out or decided otherwise.",
        schema=_object(
            "question",
            question=_text("One clear question.", minLength=1),
            options={"type": "array", "items": {"type": "string"}, "description": "Answers to choose from."},
        ),
    ),
)

BY_NAME: Final[dict[str, ToolSpec]] = {spec.name: spec for spec in SPECS}


NO_OBJECT: Final = "the arguments are not one JSON object; nothing was run, so call again with one object"


def no_tool(name: str, names: Iterable[str]) -> str:
    """Return the answer to a call of a tool that does not exist."""
    return f"there is no tool {name[:80]!r}; there are {', '.join(names)}"


def fault_in(name: str, input: Json) -> str | None:
    """Return what is wrong with a call, so that the model can correct it; None if the call is right."""
    spec = BY_NAME.get(name)
    if spec is None:
        return no_tool(name, BY_NAME)
    if not isinstance(input, dict):
        return NO_OBJECT
    # Loading it takes longer than most hosts' whole start.
    from jsonschema import Draft202012Validator

    schema: Any = spec.schema
    fault = min(Draft202012Validator(schema).iter_errors(input), key=lambda fault: fault.message, default=None)
    if fault is None:
        return None
    place = "".join(f".{step}" for step in fault.absolute_path)
    return f"{name}{place}: {fault.message[:300]}"
