"""What commands start with: the settings, this user's store, and the error for a word that is wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from backplane import config
from backplane.cli import streams
from backplane.cli.parser import Options
from backplane.config import Settings
from backplane.errors import ConfigError
from backplane.view.figures import span_s

if TYPE_CHECKING:
    from backplane.receipts.store import Store


def wrong(fact: str, hint: str | None = None) -> ConfigError:
    """Make the error `config_invalid` of a word, a file or a setting that cannot be used."""
    return ConfigError("config_invalid", fact, hint=hint)


def wrong_words(fact: str, hint: str | None = None) -> ConfigError:
    """Make the error `usage_invalid` of a command's words or options."""
    return ConfigError("usage_invalid", fact, hint=hint)


def load_settings(options: Options, flags: Mapping[str, str | float | None] | None = None) -> Settings:
    """Read the configuration that a command is to use.

    Args:
        flags: settings that other options stand for.

    Raises:
        ConfigError: `config_invalid`.
    """
    return config.load(options.config or None, os.environ, streams.folder(), flags)


def open_store(*, readonly: bool = True) -> Store:
    """Open the store of this user's state folder; a folder that is not there is made only to be written to."""
    from backplane.receipts.store import Store  # A run loads it while its host starts.

    home = config.home_path(os.environ) if readonly else config.home(os.environ)
    return Store.open(home, readonly=readonly)


def before_ms(option: str, span: str) -> int:
    """The time so long ago, in milliseconds since 1970. Raises ConfigError `usage_invalid` for what is no span."""
    seconds = span_s(span)
    if seconds is None:
        raise wrong_words(f"{option} {span!r} is no span of time", "as 90s, 5m, 2h, 3d or 1w")
    return time.time_ns() // 1_000_000 - seconds * 1000
