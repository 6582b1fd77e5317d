"""Whether the schema of what a receipt has added describes all of it: open objects say that they are."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from backplane.schemas.build import build
from backplane.schemas.validate import validator_of

_validator = functools.cache(validator_of)


def faults(added: Any) -> list[str]:
    """What is wrong with `usage_raw.backplane` of a receipt: members that nothing describes, or of another shape."""
    wrong = [f"{error.json_path}: {error.message[:200]}" for error in _validator("backplane").iter_errors(added)]
    return [*(f"{at} is not described" for at in undescribed(added, build("backplane"), "$")), *wrong]


def undescribed(value: Any, schema: Any, at: str) -> Iterator[str]:
    if schema is True or (isinstance(schema, dict) and schema.get("additionalProperties") is True):
        return
    if isinstance(value, dict):
        members, more = schema.get("properties", {}), schema.get("additionalProperties")
        for name, member in value.items():
            below = members.get(name, more)
            if below is None:
                yield f"{at}.{name}"
            else:
                yield from undescribed(member, below, f"{at}.{name}")
    if isinstance(value, list):
        for item in value:
            yield from undescribed(item, schema.get("items", {}), f"{at}[]")
