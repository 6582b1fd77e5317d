"""Counters of tokens, read from a service's answers while a proxy passes them on."""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from backplane.contract.receipt import Usage
from backplane.dialects import dialect, framing
from backplane.dialects.ir import Began, StreamFailed, TokenCounts, UsageSeen
from backplane.upstream.cost import HIDDEN_TOKENS, Price, Spent, most

_ANSWERS: Final = (
    (re.compile(r"/messages$"), "claude"),
    (re.compile(r"/responses$"), "codex"),
    (re.compile(r"/chat/completions$"), "openai"),
    (re.compile(r":(?:generate|streamGenerate)Content$"), "gemini"),
)
"""End of a request's path → dialect of its answer."""

_LONGEST: Final = re.compile(rb'"(?:max_(?:completion_|output_)?tokens|maxOutputTokens)"\s*:\s*(\d{1,9})')
"""Members of a request that limit the tokens of its answer; in a text they have other quotes."""

_TAIL_BYTES: Final = 64
"""Bytes of a request's piece that are read again with the next one: a limit may stand in both."""

MODELS_MAX: Final = 32
"""Models that are named in the receipt; answers of others count as `other`."""

NAME_CHARS_MAX: Final = 200
"""Characters of a counted name."""


def tally(counts: dict[str, int], name: str, most: int) -> None:
    """Count a name; a new name beyond `most` names counts as `other`."""
    name = name if name in counts or len(counts) < most else "other"
    counts[name] = counts.get(name, 0) + 1


class AnswerMeter:
    """Reads the counters of one answer, streamed or whole; a wrong answer does not raise.

    Attributes:
        model: the service's name of the model that answers.
        longest: most tokens that the answer may have by its request; None if the request does not limit them.
    """

    def __init__(self, dialect_name: str) -> None:
        self._framing = framing.Detecting()
        self._reader: Any = dialect(dialect_name).StreamReader()
        self.model: str | None = None
        self.longest: int | None = None
        self._sent, self._tail = 0, b""
        self._counts: TokenCounts | None = None
        self._failed = False

    def ask(self, data: bytes) -> None:
        """Read a piece of the request's body."""
        self._sent += len(data)
        window = self._tail + data
        for found in _LONGEST.finditer(window):
            self.longest = max(self.longest or 0, int(found[1]))
        self._tail = window[-_TAIL_BYTES:]

    @property
    def sent_most(self) -> int:
        """Tokens of the request: the service's count, else at most each byte and what services add."""
        known = self._counts.input if self._counts is not None else None
        return self._sent + HIDDEN_TOKENS if known is None else known

    def feed(self, data: bytes) -> None:
        """Read unpacked bytes of the body."""
        if not self._failed:
            self._guarded(lambda: self._take(self._framing.feed(data)))

    def finish(self) -> TokenCounts | None:
        """Return the counters at the body's end; None if the answer has none or is not complete."""
        self._guarded(lambda: self._take(self._framing.finish()))
        self._guarded(lambda: self._look(self._reader.finish()))
        return None if self._failed else self._counts

    def _take(self, documents: list[Any]) -> None:
        for document in documents:
            self._look(self._reader.read(document))

    def _look(self, events: list[Any]) -> None:
        for event in events:
            if type(event) is UsageSeen:
                self._counts = event.usage
            elif type(event) is Began and isinstance(event.model, str):
                self.model = event.model
            elif type(event) is StreamFailed:
                self._failed = True

    def _guarded(self, step: Any) -> None:
        try:
            step()
        except Exception:  # A wrong answer is passed on, too.
            self._failed = True


class ServiceMeter:
    """Adds up what a service counted in all its answers to one run.

    An answer without counters, as one that broke off, is counted as the most that it can cost.

    Attributes:
        spent: tokens and money, the latter at most.
        tokens_most: tokens, at most; None is unknown, as an answer has neither counters nor a limit.

    Args:
        price: price of the model; None is unknown.
    """

    def __init__(self, price: Price | None = None) -> None:
        self.spent = Spent()
        self.tokens_most: int | None = 0
        self.uncounted = 0
        """Answers that broke off, or had no readable counters."""
        self.models: dict[str, int] = {}
        """The service's name of the model that answered → answers."""
        self._price = price
        self._has_price = price is not None

    def begin(self, path: str) -> AnswerMeter | None:
        """Return the reader of a request's answer; None if the request asks no model."""
        spelt = unquote(path).rstrip("/")  # A budget depends on this, so it is read as the service does.
        name = next((name for pattern, name in _ANSWERS if pattern.search(spelt)), None)
        return None if name is None else AnswerMeter(name)

    def end(self, answer: AnswerMeter, *, is_whole: bool) -> None:
        """Add the counters of an answer, whole or cut."""
        counts = answer.finish() if is_whole else None
        self.add(answer.model, counts, self._price, answer.sent_most, answer.longest)

    def add(
        self, model: str | None, counts: TokenCounts | None, price: Price | None, sent: int, made: int | None
    ) -> None:
        """Add an answer.

        Args:
            counts: its counters; None is unknown.
            sent: tokens of the request, at most.
            made: tokens of the answer, at most; None is unknown.
        """
        if model is not None:
            tally(self.models, model[:NAME_CHARS_MAX], MODELS_MAX)
        if counts is not None and counts.input is not None and counts.output is not None:
            tokens: int | None = counts.input + counts.output
            self.spent = self.spent.plus(counts, price)
        else:
            self.uncounted += 1
            tokens = None if made is None else sent + made
            self.spent = self.spent.plus_lost(None if made is None or price is None else most(price, sent, made))
        self.tokens_most = None if self.tokens_most is None or tokens is None else self.tokens_most + tokens
        self._has_price = price is not None

    @property
    def unknown(self) -> list[str]:
        """The budgets of which it is unknown how much may be used: an answer has neither counters nor a limit."""
        is_costly = self._has_price and self.spent.micros is None
        return ["budget_tokens"] * (self.tokens_most is None) + ["max_budget_usd"] * is_costly

    @property
    def usage(self) -> Usage | None:
        """The sums; None if no model has answered."""
        if not self.spent.requests and not self.spent.lost:
            return None
        return msgspec.structs.replace(self.spent.usage(), request_units=None)
