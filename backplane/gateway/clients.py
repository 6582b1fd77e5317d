"""The gateway's clients: their keys, the models that they may ask, their rates and their budgets."""

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
"""Exchanges of all clients at once; further ones get 429. An open stream takes about 100 KB, a whole answer some MB."""

MINUTE_S: Final = 60.0
RETRY_S: Final = 5
"""Seconds after which a client may try again if too many of its requests are open."""

KEY_PREFIX: Final = "bpk-"
"""Prefix of each key, by which people and secret scanners recognise it."""

ONLY: Final = "this start"
"""Name of the client that is not in the configuration; its key is made at each start."""


def new_key() -> str:
    """Return a new key: 256 random bits."""
    return KEY_PREFIX + secrets.token_hex(32)


def digest(key: str) -> str:
    """Return the hash by which a key is stored; a key is random, so it needs no salt and no slow hash."""
    return hashlib.sha256(key.encode()).hexdigest()


class TooMany(BackendError):
    """Error for a client that has reached one of its limits; it may try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__("backend_rate_limited", message)
        self.retry_after_s = retry_after_s


class Client:
    """One client: its limits, its open exchanges, and their starts in the last minute."""

    def __init__(self, name: str, settings: GatewayClientSettings) -> None:
        self.name, self._settings = name, settings
        self._open = 0
        self._starts: deque[float] = deque()

    @property
    def budget(self) -> int | None:
        """Budget for a month, in millionths of a dollar; None is no limit."""
        found = self._settings.budget_usd
        return None if found is None else round(found * MICROS)

    def may_ask(self, model: str) -> bool:
        """Return True if the client may ask this model."""
        return any(fnmatch.fnmatchcase(model, glob) for glob in self._settings.models)

    @contextmanager
    def place(self, *, is_free: bool) -> Iterator[None]:
        """Count an exchange as open until the block ends.

        Args:
            is_free: True if it costs nothing; it does not count for the rate, as some clients send 40 requests at once
                to count tokens.

        Raises:
            TooMany: `backend_rate_limited`, too many are open, or too many began in the last minute.
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
        """Return the amount to reserve for an exchange: its highest possible cost. Amounts are millionths of a dollar.

        Args:
            used: the part of this month's budget that is used or reserved.
            at_most: the exchange's highest possible cost; None is unknown.

        Raises:
            PolicyError: `policy_denied`, the amount does not fit into the budget, or is unknown.
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
        only_key: key of one more client, `ONLY`; None adds no client.
    """

    def __init__(self, settings: Mapping[str, GatewayClientSettings], only_key: str | None = None) -> None:
        rows = dict(settings)
        if only_key is not None:
            rows[ONLY] = GatewayClientSettings(key_sha256=digest(only_key), exchanges_max=OPEN_MAX)
        self._rows = [(one.key_sha256.lower(), Client(name, one)) for name, one in rows.items()]

    @property
    def is_one(self) -> bool:
        """True if the gateway has only one client."""
        return len(self._rows) == 1

    def find(self, key: str | None) -> Client:
        """Return the client with a key.

        Raises:
            BackendError: `backend_auth_failed`, no client has this key, or none was sent.
        """
        given, found = digest(key or ""), None
        for right, client in self._rows:  # No early end: the time must not depend on the place.
            if hmac.compare_digest(given, right):
                found = client
        if found is None:
            fact = "no key came with the request" if not key else "the gateway does not know this key"
            raise BackendError("backend_auth_failed", fact, hint="send the key that `backplane gateway` names")
        return found
