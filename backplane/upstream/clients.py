"""What can be wrong before anything is sent: addresses, and what a client reads while it is made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from backplane.errors import ConfigError


def is_http(text: str) -> bool:
    """Whether a text is an http or https address that can be connected to: with a host, and a port that there is."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@contextmanager
def making_client() -> Iterator[None]:
    """Translate what a client raises while it is made.

    Raises:
        ConfigError: `config_invalid`: a bundle of certificates is missing or none, a proxy or header cannot be read.
    """
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        named = [name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ]
        # A header's value may be a key, so the exception's own words are told for files alone.
        why, hint = "a proxy or header is none", "check the proxy variables and the headers"
        if isinstance(error, OSError):
            why = f"certificates cannot be loaded: {error.strerror or error}"
            hint = f"correct {' and '.join(named)}" if named else "install the system's certificates"
        raise ConfigError("config_invalid", f"no HTTP client can be made: {why}", hint=hint) from error
