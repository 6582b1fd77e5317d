"""Checks addresses, and translates errors about certificates, proxies and headers, before a request."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from backplane.errors import ConfigError


def is_http(text: str) -> bool:
    """Return True for an http or https address with a host and, if it has a port, a valid one."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


@contextmanager
def making_client() -> Iterator[None]:
    """Translate exceptions that the block raises while it makes an HTTP client.

    Raises:
        ConfigError: `config_invalid`, the certificates, a proxy or a header cannot be read.
    """
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        named = [name for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ]
        # A header's value may be a key, so only a file's error is shown.
        why, hint = "a proxy or header is invalid", "check the proxy variables and the headers"
        if isinstance(error, OSError):
            why = f"certificates cannot be loaded: {error.strerror or error}"
            hint = f"correct {' and '.join(named)}" if named else "install the system's certificates"
        raise ConfigError("config_invalid", f"no HTTP client can be made: {why}", hint=hint) from error
