"""Looks up list prices and context windows of vendors' models in `prices.json`, which `xtask.py prices` writes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

from backplane.upstream.cost import Price


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a model; None is unknown."""

    price: Price | None = None
    context_tokens: int | None = None
    """Most tokens of a request and its answer together."""


class _Table(msgspec.Struct, frozen=True):
    source: str
    read_on: str
    models: dict[str, ModelFacts]


_DATED: Final = re.compile(r"-(latest|20\d{2}-?\d{2}-?\d{2})$")


@cache
def _table() -> _Table:
    return msgspec.json.decode(Path(__file__).with_name("prices.json").read_bytes(), type=_Table)


def known_models() -> tuple[str, ...]:
    """Return the names of the models in the table."""
    return tuple(_table().models)


def facts_of(model: str) -> ModelFacts:
    """Look a model up, by its name with or without a date."""
    table, name = _table(), model.removeprefix("models/")
    found = table.models.get(name) or table.models.get(_DATED.sub("", name)) or ModelFacts()
    if found.price is None:
        return found
    price = msgspec.structs.replace(found.price, source=table.source, read_on=table.read_on)
    return msgspec.structs.replace(found, price=price)


def price_of(model: str) -> Price | None:
    """Return the list price of a model at its own vendor, or None if it is unknown."""
    return facts_of(model).price
