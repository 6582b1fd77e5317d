"""Vendors' agents as hosts drive them: one session each, a room a protocol."""

from typing import Final

STORES: Final = ("claude", "codex")
"""Vendors whose own conversations can be read: `agents.VENDOR.store` reads the records of one."""
