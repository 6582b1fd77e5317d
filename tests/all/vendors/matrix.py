"""Abilities of agents side by side: what the public document says, their manifest, and what trials show.

Where two of them differ a sentence in `matrix.toml` says why; a difference without one is a gap.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from backplane.conform.trials import CLAIMS
from backplane.contract.capability import CAPABILITIES

COLUMNS: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""Name → `document`, `reasons` and `untried`, of every backend that the document knows."""


def untried(name: str) -> dict[str, str]:
    """Return ability → why no trial can show it of this backend."""
    return {**COLUMNS["every"]["untried"], **COLUMNS.get(name, {}).get("untried", {})}


def gaps(name: str, manifest: Mapping[str, Any], shown: Collection[str]) -> Iterator[str]:
    """Yield the differences that no sentence explains; `shown` are the abilities that have a trial."""
    column = COLUMNS.get(name, {})
    explained = {*untried(name), *column.get("reasons", {})}
    for ability in CAPABILITIES:
        document, level = column.get("document", {}).get(ability), manifest.get(ability)
        claim = level if level is None or isinstance(level, str) else "restricted"
        if ability in explained:
            continue
        if None not in (document, claim) and document != claim:
            yield f"{ability}: {document} in the document, {claim} in the manifest"
        elif claim in CLAIMS and ability not in shown:
            yield f"{ability}: {claim} in the manifest and shown by no trial"
