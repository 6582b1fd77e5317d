"""A backend's abilities three times side by side: what the public document says, its manifest, what trials showed.

Where two of them differ a sentence in `contracts/matrix.toml` says why; what has none is a gap. Pure but for that file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from backplane.contract.canonical import Json
from backplane.contract.capability import CAPABILITIES
from backplane.resources import find

FILE: Final = "matrix.toml"
NONE: Final = "-"
"""Not said at all."""
CLAIMS: Final = ("native", "emulated", "restricted")
"""Levels that say that an ability is there."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One ability: its level in the document and in the manifest (`-`: not there), and its proof: proved, failed, stale
    or `-` where it was not tried."""

    ability: str
    document: str
    manifest: str
    proof: str
    reason: str = ""

    @property
    def gap(self) -> str | None:
        """What is not explained; None where nothing is left open."""
        if self.reason:
            return None
        if NONE not in (self.document, self.manifest) and self.document != self.manifest:
            return f"{self.ability}: {self.document} in the document, {self.manifest} in the manifest"
        if self.manifest in CLAIMS and self.proof == NONE:
            return f"{self.ability}: {self.manifest} in the manifest and shown by no trial"
        return None


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """The abilities of one backend."""

    id: str
    on: str | None
    """When it was tried last; None where it never was."""
    rows: list[Row]


def columns() -> dict[str, Any]:
    """Name → `document`, `reasons` and `untried`, of every backend that the document knows."""
    return tomllib.loads((find("contracts") / FILE).read_text(encoding="utf-8"))


def untried(name: str) -> dict[str, str]:
    """Ability → why no trial can show it of this backend."""
    table = columns()
    return {**table["every"]["untried"], **table.get(name, {}).get("untried", {})}


def rows(name: str, manifest: Mapping[str, Json], findings: Mapping[str, str]) -> list[Row]:
    """The rows of one backend, in the contract's order; abilities that nobody names are left out.

    Args:
        findings: ability → proved, failed, stale.
    """
    column = columns().get(name, {})
    document, why = column.get("document", {}), {**untried(name), **column.get("reasons", {})}
    named = {*document, *manifest, *findings}
    return [
        Row(
            ability=ability,
            document=document.get(ability, NONE),
            manifest=level(manifest.get(ability)),
            proof=findings.get(ability, NONE),
            reason=why.get(ability, ""),
        )
        for ability in CAPABILITIES
        if ability in named
    ]


def level(value: Json) -> str:
    """The name of a level as a manifest writes it; `-` where there is none."""
    return NONE if value is None else value if isinstance(value, str) else "restricted"
