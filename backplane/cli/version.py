"""What `version --json` prints."""

from __future__ import annotations

import msgspec


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """Which program this is."""

    version: str
    contract: str
    """The one that its hosts and clients speak."""
    python: str
