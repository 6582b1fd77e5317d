"""Finds the files that travel with the package: hosts, schemas and contracts.

In a checkout, these files are beside the package; in an installed copy, they are inside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from backplane.errors import ConfigError

Kind = Literal["hosts", "schemas", "contracts"]
KINDS: Final[tuple[Kind, ...]] = ("hosts", "schemas", "contracts")

PACKAGE: Final = Path(__file__).resolve().parent
_PLACES: Final = (PACKAGE / "_share", PACKAGE.parent)
"""Folders to search, the wheel's own first: a folder `hosts` beside an installed package is another package's."""


def find(kind: Kind) -> Path:
    """Return the folder with the shipped files of this kind, independent of the current folder.

    Raises:
        ConfigError: `config_invalid`, the installation lacks the folder.
    """
    for place in _PLACES:
        if (place / kind).is_dir():
            return place / kind
    raise ConfigError(
        "config_invalid",
        f"the folder {kind!r} that belongs to backplane is missing beside {PACKAGE}",
        hint="install the package again, or run it from a whole checkout",
    )


def folders() -> list[Path]:
    """Return the existing folder of each kind."""
    candidates = ((place / kind for place in _PLACES) for kind in KINDS)
    return [found for places in candidates if (found := next(filter(Path.is_dir, places), None)) is not None]
