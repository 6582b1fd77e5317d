"""What went through the door of a run's network, for its receipt."""

from __future__ import annotations

from typing import Final

from backplane.contract.canonical import Json

NOTES_MAX: Final = 100
"""Refusals and hosts that are named in the receipt; all are counted."""


class Connections:
    """What went through the door of one run."""

    def __init__(self) -> None:
        self.allowed = 0
        self.denied = 0
        self._hosts: dict[str, None] = {}
        self._refusals: dict[str, None] = {}

    def allow(self, target: str) -> None:
        self.allowed += 1
        if len(self._hosts) < NOTES_MAX:
            self._hosts[target] = None

    def deny(self, reason: str) -> None:
        self.denied += 1
        if len(self._refusals) < NOTES_MAX:
            self._refusals[reason] = None

    def to_wire(self) -> dict[str, Json]:
        return {
            "allowed": self.allowed,
            "denied": self.denied,
            **({"hosts": list(self._hosts)} if self._hosts else {}),
            **({"refusals": list(self._refusals)} if self._refusals else {}),
        }
