"""Requests an answer that matches a JSON Schema, finds the value in the text, and checks it against the schema."""

from __future__ import annotations

import re
from itertools import islice
from typing import Any, Final

import msgspec
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable

from backplane.contract import canonical
from backplane.contract.canonical import Json
from backplane.errors import ConfigError

FAULTS_SHOWN: Final = 5
"""Maximum faults in one correction request; with more of them a model does not correct better."""

FAULT_CHARS_MAX: Final = 300

_FENCED: Final = re.compile(r"```[a-z]*\s*\n(.*?)\n\s*```", re.DOTALL | re.IGNORECASE)


class AnswerSchema:
    """A JSON Schema that checks answers.

    Raises:
        ConfigError: `config_invalid`, it is no schema, or refers to another document.
    """

    def __init__(self, schema: Json) -> None:
        if not isinstance(schema, dict | bool):
            raise ConfigError("config_invalid", "the output schema is no JSON object")
        kind: Any = validator_for(schema)
        try:
            kind.check_schema(schema)
        except SchemaError as error:
            raise ConfigError("config_invalid", f"the output schema is none: {error.message[:300]}") from error
        if _points_outside(schema):
            raise ConfigError(
                "config_invalid", "the output schema points outside itself", hint="put what $ref names under $defs"
            )
        self.schema = schema
        self._validator: Any = kind(schema)

    def request(self) -> str:
        """Return the text that asks a model for such an answer."""
        schema = msgspec.json.encode(self.schema).decode()
        return (
            "When the work is done, answer with one JSON value and nothing else, without a code fence. "
            f"It has to satisfy this JSON Schema:\n{schema}"
        )

    def read(self, text: str) -> tuple[Json, str | None]:
        """Return the value in an answer, and its mismatch; None if it matches.

        Raises:
            ConfigError: `config_invalid`, the schema refers to a missing part of itself.
        """
        value, fault = _value(text)
        if fault is not None:
            return None, fault
        try:
            found = list(islice(self._validator.iter_errors(value), FAULTS_SHOWN))
        except Unresolvable as error:
            fact = "a $ref of the output schema names nothing in it"
            raise ConfigError("config_invalid", fact, hint="put what $ref names under $defs") from error
        except RecursionError:
            return None, "the schema and the answer lead into each other deeper than can be checked"
        places = ["/" + "/".join(map(str, fault.absolute_path)) for fault in found]
        faults = [f"{at}: {fault.message[:FAULT_CHARS_MAX]}" for at, fault in zip(places, found, strict=True)]
        return value, "\n".join(faults) or None


def _value(text: str) -> tuple[Json, str | None]:
    fenced = _FENCED.search(text)
    try:
        return canonical.decode((fenced[1] if fenced else text).strip().encode()), None
    except (ValueError, RecursionError) as error:
        return None, f"the answer is not one JSON value: {str(error)[:FAULT_CHARS_MAX]}"


def _points_outside(schema: Json) -> bool:
    """Return True if a reference points to another document, which would have to be fetched."""
    if isinstance(schema, list):
        return any(_points_outside(item) for item in schema)
    if not isinstance(schema, dict):
        return False
    reference = schema.get("$ref", schema.get("$dynamicRef"))
    if isinstance(reference, str) and not reference.startswith("#"):
        return True
    return any(_points_outside(item) for item in schema.values())
