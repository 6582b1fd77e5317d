"""Prices and limits of a model: our dated table first, then the package `genai-prices` where it is installed."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from importlib import import_module
from typing import Any, Final

import msgspec

from backplane.upstream.cost import Price, micros, price_of

PACKAGE: Final = "genai-prices"


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model; None is unknown."""

    price: Price | None = None
    context_tokens: int | None = None
    """Most tokens of a request and its answer together."""


def facts_of(model: str, base_url: str | None) -> ModelFacts:
    """Look a model up.

    Args:
        base_url: its service where that is not the model's own vendor, whose prices are others; None for the vendor.
    """
    own = price_of(model) if base_url is None else None
    found = _of_package(model, base_url)
    return found if own is None else msgspec.structs.replace(found, price=own)


def _of_package(model: str, base_url: str | None) -> ModelFacts:
    """What the package says: a quarter of a second to load, so only for who asks."""
    try:
        package = import_module("genai_prices")
        snapshot = import_module("genai_prices.data_snapshot").get_snapshot()
    except ImportError:
        return ModelFacts()
    try:
        _, row = snapshot.find_provider_model(model, None, None, base_url)
    except LookupError:
        return ModelFacts()
    prices = row.get_prices(datetime.now(UTC))
    sent, made = _micros(prices.input_mtok), _micros(prices.output_mtok)
    if sent is None or made is None:
        return ModelFacts(context_tokens=row.context_window)
    read, write = _micros(prices.cache_read_mtok), _micros(prices.cache_write_mtok)
    source = f"{PACKAGE} {package.__version__}"
    price = Price(input=sent, output=made, cache_read=read, cache_write=write, source=source)
    return ModelFacts(price=price, context_tokens=row.context_window)


def _micros(price: Any) -> int | None:
    """A price of the package, of whose tiers the first counts here, in millionths of a dollar."""
    price = getattr(price, "base", price)
    return micros(price) if isinstance(price, Decimal) else None
