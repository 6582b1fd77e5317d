"""Drivers of vendors' agents: the code that all share, and a folder for each vendor or protocol."""

from typing import Final

STORES: Final = ("claude", "codex")
"""Vendors whose own stored conversations can be read, by `agents.VENDOR.store`."""
