"""Reads configured prices, and computes the cost of tokens and the sums of a run. Pure. `prices` has list prices.

Money is an integer in millionths of a dollar. Unknown values stay unknown and are never taken as zero: a model without
a row has no price, and an answer without counters makes the sums unknown.
"""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Final

import msgspec

from backplane.contract import receipt
from backplane.dialects.ir import TokenCounts
from backplane.errors import ConfigError

MICROS: Final = 1_000_000
"""Millionths in a dollar, and the number of tokens that a price is given for."""

TOKENS_MAX: Final = 1_000_000_000_000
"""Maximum value of a counter, above which it counts as unknown: a million times the largest context window."""

USD_MAX: Final = 1_000_000
"""Maximum configured price of a million tokens, in dollars: a thousand times the highest known."""


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Prices of a million tokens, in millionths of a dollar."""

    input: int
    output: int
    cache_read: int | None = None
    """Price of cached tokens; None uses the price of input, which can only be too high."""
    cache_write: int | None = None
    """Price of tokens written to the cache; None uses the price of input."""
    long_tokens: int | None = None
    """Tokens of input above which all tokens have the prices in `long`; None if there is no such limit."""
    long: Price | None = None
    source: str = "configuration"
    """Name of the price list."""
    read_on: str = ""
    """Day on which the prices were read in the list; empty for a configuration."""


def micros(usd: Decimal) -> int:
    """Return an amount of dollars in millionths, rounded to the nearest."""
    return int((usd * MICROS).to_integral_value(ROUND_HALF_UP))


_NAMES: Final = ("input", "output", "cache_read", "cache_write")


def read_price(value: object, where: str) -> Price:
    """Read prices from a configuration: dollars for a million tokens, as numbers or texts.

    Args:
        where: name of the setting, for errors.

    Raises:
        ConfigError: `config_invalid`.
    """
    if not isinstance(value, dict) or not set(value) <= set(_NAMES) or not {"input", "output"} <= set(value):
        raise ConfigError(
            "config_invalid", f"{where} needs input and output", hint=f"it may have {', '.join(_NAMES)}, in dollars"
        )
    amounts = {name: _amount(amount, f"{where}.{name}") for name, amount in value.items()}
    read, write = amounts.get("cache_read"), amounts.get("cache_write")
    return Price(input=amounts["input"], output=amounts["output"], cache_read=read, cache_write=write)


def _amount(value: object, where: str) -> int:
    try:
        usd = Decimal(str(value)) if not isinstance(value, bool) else Decimal("NaN")
    except InvalidOperation:
        usd = Decimal("NaN")
    if not (usd.is_finite() and 0 <= usd <= USD_MAX):
        raise ConfigError("config_invalid", f"{where} is no price: {str(value)[:40]!r}", hint="write dollars, as 2.50")
    return micros(usd)


def believed(usage: TokenCounts | None) -> TokenCounts | None:
    """Return the counters without impossible ones: a negative one would give money back to a budget."""
    if usage is None:
        return None
    seen = {name: getattr(usage, name) for name in _NAMES}
    return TokenCounts(**{name: one for name, one in seen.items() if one is not None and 0 <= one <= TOKENS_MAX})


def actual(price: Price | None, usage: TokenCounts | None) -> int | None:
    """Return the cost of one answer in millionths of a dollar, rounded up; None if price or counters are unknown.

    Tokens of the cache without a counter count as plain input.
    """
    if price is None or usage is None or usage.input is None or usage.output is None:
        return None
    if price.long is not None and price.long_tokens is not None and usage.input > price.long_tokens:
        price = price.long
    read, write = usage.cache_read or 0, usage.cache_write or 0
    plain = max(usage.input - read - write, 0)
    read_price = price.input if price.cache_read is None else price.cache_read
    write_price = price.input if price.cache_write is None else price.cache_write
    total = plain * price.input + read * read_price + write * write_price + usage.output * price.output
    return -(-total // MICROS)


HIDDEN_TOKENS: Final = 1_000
"""Tokens that a service may add to a request, with a margin; to explain tools to the model, it adds about 350."""


def most(price: Price, input_tokens: int, output_tokens: int) -> int:
    """Return the highest possible cost of a call, in millionths of a dollar, by the highest of its model's prices."""
    rows = [price] if price.long is None else [price, price.long]
    sent = max(max(row.input, row.cache_write or 0, row.cache_read or 0) for row in rows)
    return -(-(input_tokens * sent + output_tokens * max(row.output for row in rows)) // MICROS)


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens and money of a run so far; None is unknown."""

    requests: int = 0
    """Number of answered requests."""
    input: int | None = 0
    output: int | None = 0
    cache_read: int | None = 0
    cache_write: int | None = 0
    micros: int | None = 0
    """Cost in millionths of a dollar."""
    lost: int = 0
    """Number of requests that may be billed, but whose answers did not arrive."""

    def plus_lost(self, at_most: int | None) -> Spent:
        """Add a request without an answer: its tokens are unknown, and its cost is the highest possible one.

        Args:
            at_most: that cost, in millionths of a dollar; None is unknown.
        """
        return msgspec.structs.replace(
            self, lost=self.lost + 1, micros=_sum(self.micros, at_most), **dict.fromkeys(_NAMES)
        )

    def plus(self, usage: TokenCounts | None, price: Price | None) -> Spent:
        """Add one answer; the sum of a counter that it lacks, or that is impossible, is unknown from then on."""
        seen = believed(usage) or TokenCounts()
        return msgspec.structs.replace(
            self, requests=self.requests + 1, micros=_sum(self.micros, actual(price, seen)),
            **{name: _sum(getattr(self, name), getattr(seen, name)) for name in _NAMES},
        )  # fmt: skip

    def usage(self) -> receipt.Usage:
        """Return the usage for a receipt; all of it is unknown before the first answer."""
        if not self.requests and not self.lost:
            return receipt.Usage()
        return receipt.Usage(
            input_tokens=self.input,
            output_tokens=self.output,
            cache_read_tokens=self.cache_read,
            cache_write_tokens=self.cache_write,
            request_units=self.requests,
            estimated_cost_usd=None if self.micros is None else self.micros / MICROS,
        )


def _sum(so_far: int | None, more: int | None) -> int | None:
    return None if so_far is None or more is None else so_far + more
