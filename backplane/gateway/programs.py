"""Variables and options that make vendors' programs use the gateway. Pure.

They were read in the programs' sources in November 2026.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

KEY_VARIABLE: Final = "BACKPLANE_GATEWAY_KEY"
"""Variable that holds the key for a program whose configuration names a variable."""

MODEL: Final = "default"
"""Name of a model for a program that needs one, if the gateway's table has only patterns."""


class Pointed(NamedTuple):
    """The start of a program that is to use the gateway."""

    env: dict[str, str]
    arguments: tuple[str, ...] = ()
    """Options that follow the program's name."""
    without: tuple[str, ...] = ()
    """Variables to remove, as with them the program would use another address or key."""


def _claude(url: str, key: str, _models: Sequence[str]) -> Pointed:
    return Pointed({"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key}, without=("ANTHROPIC_API_KEY",))


def _codex(url: str, key: str, _models: Sequence[str]) -> Pointed:
    provider = {"name": "backplane", "base_url": f"{url}/v1", "env_key": KEY_VARIABLE, "wire_api": "responses"}
    options = {f"model_providers.backplane.{name}": value for name, value in provider.items()}
    rows = {"model_provider": "backplane", **options}
    words = [word for name, value in rows.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    return Pointed({KEY_VARIABLE: key}, tuple(words))


def _gemini(url: str, key: str, _models: Sequence[str]) -> Pointed:
    return Pointed({"GOOGLE_GEMINI_BASE_URL": url, "GEMINI_API_KEY": key})


def _opencode(url: str, key: str, models: Sequence[str]) -> Pointed:
    names = tuple(models) or (MODEL,)
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "backplane",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {name: {} for name in names},
    }
    first = f"backplane/{names[0]}"
    config = {"provider": {"backplane": provider}, "model": first, "small_model": first}
    return Pointed({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


PROGRAMS: Final[dict[str, Callable[[str, str, Sequence[str]], Pointed]]] = {
    "claude": _claude,
    "codex": _codex,
    "gemini": _gemini,
    "opencode": _opencode,
}
"""Program → function that takes the gateway's address, a client's key and the names of models."""
