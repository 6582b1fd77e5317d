"""Counts tokens in a service's answers while a proxy passes them on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

import msgspec

from backplane.contract.receipt import Usage
from backplane.dialects import dialect, framing
from backplane.dialects.ir import (
    Began,
    PartDelta,
    PartStarted,
    Stopped,
    StreamEnded,
    StreamFailed,
    TokenCounts,
    UsageSeen,
)
from backplane.upstream.cost import HIDDEN_TOKENS, Price, Spent, believed, most

_ANSWERS: Final = (
    (re.compile(r"/messages$"), "claude"),
    (re.compile(r"/responses$"), "codex"),
    (re.compile(r"/chat/completions$"), "openai"),
    (re.compile(r":(?:generate|streamGenerate)Content$"), "gemini"),
)
"""Pattern for the end of a request's path → dialect of its answer."""

REQUEST_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes kept of a request, to read the limit that it sets for its answer; a longer request counts as without one."""

_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""Members at the top of a request that limit the tokens of its answer."""

MODELS_MAX: Final = 32
"""Number of models that the receipt names; answers of others count as `other`."""

NAME_CHARS_MAX: Final = 200
"""Maximum length of a counted name; the rest is cut."""


def tally(counts: dict[str, int], name: str, most: int) -> None:
    """Count a name; a new name beyond `most` names counts as `other`."""
    name = name if name in counts or len(counts) < most else "other"
    counts[name] = counts.get(name, 0) + 1


def asked_tokens(document: Any) -> int | None:
    """Return the maximum tokens of all answers that a request asks for; None if it does not limit them."""
    if not isinstance(document, dict):
        return None
    config = document.get("generationConfig")
    inner = config if isinstance(config, dict) else {}
    limits = [*map(document.get, _LIMITS), inner.get("maxOutputTokens")]
    most = max((one for one in limits if type(one) is int and one > 0), default=None)
    answers = [one for one in (document.get("n"), inner.get("candidateCount"), 1) if type(one) is int]
    return None if most is None else most * max(answers)


class AnswerMeter:
    """Reads the counters of one answer, streamed or whole; an answer that cannot be read raises nothing.

    Attributes:
        model: the service's name of the model; None until the answer names it.
        counts: the counters so far; None is unknown.
        failure: the failure that the stream reports; None if there is none.
        has_content: True once a part of the answer itself has come.
        is_readable: False after bytes that are no answer in the dialect.
    """

    def __init__(self, dialect_name: str) -> None:
        self.framing = framing.Detecting(is_named=dialect_name == "copilot")
        self._reader: Any = dialect(dialect_name).StreamReader()
        self.model: str | None = None
        self.counts: TokenCounts | None = None
        self.failure: StreamFailed | None = None
        self.has_content = False
        self.is_readable = True
        self._asked: list[bytes] = []
        self._sent = 0

    def ask(self, data: bytes) -> None:
        """Keep a piece of the request's body."""
        self._sent += len(data)
        if self._sent <= REQUEST_BYTES_MAX:
            self._asked.append(data)

    @property
    def longest(self) -> int | None:
        """Maximum tokens of the answer; None if the request does not limit them, or was too long to read."""
        if self._sent > REQUEST_BYTES_MAX:
            return None
        try:
            return asked_tokens(msgspec.json.decode(b"".join(self._asked)))
        except framing.UNREADABLE:
            return None

    @property
    def sent_most(self) -> int:
        """Tokens of the request: the service's count, or else a maximum: one for each byte, plus `HIDDEN_TOKENS`."""
        known = self.counts.input if self.counts is not None else None
        return self._sent + HIDDEN_TOKENS if known is None else known

    def feed(self, data: bytes) -> list[Any]:
        """Read bytes of the body, without content encoding; return the documents that they complete."""
        return self._read(lambda: self.framing.feed(data))

    def finish(self) -> list[Any]:
        """Read the body's end; return the last documents."""
        documents = self._read(self.framing.finish)
        self._guarded(lambda: self._look(self._reader.finish(done=self.framing.is_done)))
        return documents

    @property
    def whole_counts(self) -> TokenCounts | None:
        """The counters of a finished answer; None if it has none or is not complete."""
        return self.counts if self.is_readable and self.failure is None else None

    def _read(self, step: Callable[[], list[Any]]) -> list[Any]:
        documents: list[Any] = []

        def work() -> None:
            documents.extend(step())
            for document in documents:
                self._look(self._reader.read(document))

        if self.is_readable:
            self._guarded(work)
        return documents

    def _look(self, events: list[Any]) -> None:
        for event in events:
            kind = type(event)
            if kind is UsageSeen:
                self.counts = event.usage
            elif kind is Began and isinstance(event.model, str):
                self.model = event.model
            elif kind is StreamFailed:
                self.failure = self.failure or event
            elif kind is StreamEnded and event.answer is not None:
                self.counts = event.answer.usage or self.counts
                self.has_content = True
            elif kind in (PartStarted, PartDelta, Stopped):
                self.has_content = True

    def _guarded(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception:  # A wrong answer is passed on, too; its counters stay unknown.
            self.is_readable, self.counts = False, None


class ServiceMeter:
    """Adds up the tokens and the cost of all answers of a service in one run.

    An answer without counters, such as one that broke off, counts as the most that it can cost.

    Attributes:
        spent: counted tokens, and the highest possible cost.
        tokens_most: highest possible number of tokens; None if an answer had neither counters nor a limit.

    Args:
        price: price of the model; None is unknown.
    """

    def __init__(self, price: Price | None = None) -> None:
        self.spent = Spent()
        self.tokens_most: int | None = 0
        self.uncounted = 0
        """Number of answers that broke off, or had no readable counters."""
        self.models: dict[str, int] = {}
        """The service's name of a model → number of its answers."""
        self._price = price
        self._has_price = price is not None

    def begin(self, path: str) -> AnswerMeter | None:
        """Return a reader for the answer to a request with this path; None if the request asks no model."""
        spelt = unquote(path).rstrip("/")  # Decoded as the service decodes it, as a budget depends on it.
        name = next((name for pattern, name in _ANSWERS if pattern.search(spelt)), None)
        return None if name is None else AnswerMeter(name)

    def end(self, answer: AnswerMeter, *, is_whole: bool) -> None:
        """Add an answer that has ended; `is_whole` is False if it was cut off."""
        answer.finish()
        counts = answer.whole_counts if is_whole else None
        self.add(answer.model, counts, self._price, answer.sent_most, None if counts else answer.longest)

    def add(
        self, model: str | None, counts: TokenCounts | None, price: Price | None, sent: int, made: int | None
    ) -> None:
        """Add an answer.

        Args:
            model: the service's name of the model; None is unknown.
            counts: the answer's counters; None is unknown.
            sent: maximum tokens of the request.
            made: maximum tokens of the answer; None is unknown.
        """
        if model is not None:
            tally(self.models, model[:NAME_CHARS_MAX], MODELS_MAX)
        counts = believed(counts)
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
        """Names of the budgets that can no longer be checked, because an answer had neither counters nor a limit."""
        is_costly = self._has_price and self.spent.micros is None
        return ["budget_tokens"] * (self.tokens_most is None) + ["max_budget_usd"] * is_costly

    @property
    def usage(self) -> Usage | None:
        """The sums; None if no model has answered."""
        if not self.spent.requests and not self.spent.lost:
            return None
        return msgspec.structs.replace(self.spent.usage(), request_units=None)
