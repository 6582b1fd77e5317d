"""Write `backplane/upstream/prices.json`: list prices and windows of four vendors' models, from `genai-prices`.

Prices are in millionths of a dollar for a million tokens.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import genai_prices
from genai_prices.data_snapshot import get_snapshot
from genai_prices.types import TieredPrices

from backplane.upstream.cost import micros

TABLE: Final = Path(__file__).parent.parent / "backplane" / "upstream" / "prices.json"
VENDORS: Final = {"anthropic": "claude", "openai": "", "google": "gemini", "moonshotai": "kimi"}
"""Vendor in the package → beginning of its own models' names; Google also resells others' models."""

COUNTERS: Final = ("input", "output", "cache_read", "cache_write")
OTHER_KINDS: Final = re.compile(
    r"audio|davinci|embedding|image|live|moderation|realtime|search|streaming|transcribe|tts|vision|whisper|:|-$"
    r"|^(ada|babbage|claude-[12v]|computer|curie|gemini-(pro|nano|omni|robotics|flash-1)|gpt-3|gpt-oss)"
)
"""Names of models that do not answer a conversation in words, are no longer served, or are only a beginning."""


def price_at(prices: Any, start: int) -> dict[str, int]:
    """Return the prices of an input that is longer than `start` tokens, in millionths of a dollar."""
    found = {}
    for name in COUNTERS:
        price = getattr(prices, f"{name}_mtok")
        if isinstance(price, TieredPrices):
            price = next((tier.price for tier in reversed(price.tiers) if tier.start <= start), price.base)
        if price is not None:
            found[name] = micros(price)
    return found


def facts(prices: Any, context_tokens: int | None) -> dict[str, Any]:
    """Return what the table says of a model."""
    price: dict[str, Any] = price_at(prices, 0)
    tiered = [getattr(prices, f"{name}_mtok") for name in COUNTERS]
    if starts := [tier.start for one in tiered if isinstance(one, TieredPrices) for tier in one.tiers]:
        price |= {"long_tokens": max(starts), "long": price_at(prices, max(starts))}
    return {"price": price} if context_tokens is None else {"context_tokens": context_tokens, "price": price}


def table() -> str:
    now = datetime.now(UTC)
    rows = []
    for provider in get_snapshot().providers:
        for model in provider.models if provider.id in VENDORS else ():
            name = model.id.removesuffix("-latest")
            if not name.startswith(VENDORS[provider.id]) or OTHER_KINDS.search(name) or model.deprecated:
                continue
            prices = model.get_prices(now)
            if prices.input_mtok and prices.output_mtok:
                rows.append(f"{json.dumps(name)}: {json.dumps(facts(prices, model.context_window))}")
    head = f'"source": "genai-prices {genai_prices.__version__}", "read_on": "{now.date()}"'
    return f'{{{head}, "models": {{\n' + ",\n".join(rows) + "\n}}\n"


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
