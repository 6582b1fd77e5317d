"""The gateway's clients: their keys, the models they may ask, their rates and their budgets."""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from backplane.config import GatewayClientSettings
from backplane.errors import BackendError, PolicyError
from backplane.upstream.cost import MICROS

OPEN_MAX: Final = 600
"""Exchanges at once, of all clients; an open stream takes some 100 KB, and a whole answer may take some MB."""

MINUTE_S: Final = 60.0
RETRY_S: Final = 5
"""Seconds after which a client may try again when too many of its requests are open."""

KEY_PREFIX: Final = "bpk-"
"""Beginning of a key, so that people and scanners of secrets know it."""

ONLY: Final = "this start"
"""Name of the client without a configuration, whose key is made at each start."""


def new_key() -> str:
    """Return a new key: 256 random bits."""
    return KEY_PREFIX + secrets.token_hex(32)


def digest(key: str) -> str:
    """Return the hash under which a key is kept; a key is random, so one plain hash is enough."""
    return hashlib.sha256(key.encode()).hexdigest()


class TooMany(BackendError):
    """A client has reached one of its limits; `retry_after_s` says when it may try again."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__("backend_rate_limited", message)
        self.retry_after_s = retry_after_s


class Client:
    """One client: its limits, and what it has open."""

    def __init__(self, name: str, settings: GatewayClientSettings) -> None:
        self.name, self._settings = name, settings
        self._open = 0
        self._starts: deque[float] = deque()

    @property
    def budget(self) -> int | None:
        """Budget of a month in millionths of a dollar; None is no limit."""
        found = self._settings.budget_usd
        return None if found is None else round(found * MICROS)

    def may_ask(self, model: str) -> bool:
        """Return True if the client may ask this model."""
        return any(fnmatch.fnmatchcase(model, glob) for glob in self._settings.models)

    @contextmanager
    def place(self, *, is_free: bool) -> Iterator[None]:
        """Take a place for one exchange.

        Args:
            is_free: it costs nothing, so the rate does not count it: a client may count tokens 40 times at once.

        Raises:
            TooMany: `backend_rate_limited`, too many are open, or too many began in this minute.
        """
        if self._open >= self._settings.exchanges_max:
            raise TooMany(f"{self._open} requests of this key are open, which is its limit", RETRY_S)
        if not is_free:
            self._note_start(time.monotonic())
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    def _note_start(self, now: float) -> None:
        most = self._settings.requests_per_minute
        if most is None:
            return
        while self._starts and self._starts[0] <= now - MINUTE_S:
            self._starts.popleft()
        if len(self._starts) >= most:
            wait = int(self._starts[0] + MINUTE_S - now) + 1
            raise TooMany(f"this key may send {most} requests a minute", wait)
        self._starts.append(now)

    def check_budget(self, used: int, at_most: int | None, model: str) -> int:
        """Return the amount to reserve for an exchange: the most that it can cost, in millionths of a dollar.

        Args:
            used: amount of the budget that is used or reserved.
            at_most: the highest cost; None is unknown.

        Raises:
            PolicyError: `policy_denied`, it does not fit into the budget, or its cost is unknown.
        """
        assert self.budget is not None, "only a client with a budget reserves"
        if at_most is None:
            raise PolicyError(
                "policy_denied", f"this key has a budget, and the price of {model} is unknown",
                hint="set `prices` in the options of its backend",
            )  # fmt: skip
        if at_most and used + at_most > self.budget:
            left = max(self.budget - used, 0) / MICROS
            raise PolicyError(
                "policy_denied", f"the budget of this key has {left:.4f} dollars left this month, and this request may "
                f"cost {at_most / MICROS:.4f}", hint="raise `budget_usd`, ask for fewer tokens, or take another model",
            )  # fmt: skip
        return at_most


class Clients:
    """All clients, found by their keys.

    Args:
        settings: clients by name.
        only_key: the key of one more client, made for this start.
    """

    def __init__(self, settings: Mapping[str, GatewayClientSettings], only_key: str | None = None) -> None:
        rows = dict(settings)
        if only_key is not None:
            rows[ONLY] = GatewayClientSettings(key_sha256=digest(only_key), exchanges_max=OPEN_MAX)
        self._rows = [(one.key_sha256.lower(), Client(name, one)) for name, one in rows.items()]

    def find(self, key: str | None) -> Client:
        """Return the client with a key.

        Raises:
            BackplaneError: `backend_auth_failed`.
        """
        given, found = digest(key or ""), None
        for right, client in self._rows:  # All are compared, so that the time says nothing.
            if hmac.compare_digest(given, right):
                found = client
        if found is None:
            fact = "no key came with the request" if not key else "the gateway does not know this key"
            raise BackendError("backend_auth_failed", fact, hint="send the key that `backplane gateway` names")
        return found
