"""Where the files that travel with the package are: hosts, schemas and contracts.

In a checkout they stand beside the package, in an installed copy inside it. Nothing is read here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

from backplane.errors import ConfigError

Kind = Literal["hosts", "schemas", "contracts"]
KINDS: Final[tuple[Kind, ...]] = ("hosts", "schemas", "contracts")

PACKAGE: Final = Path(__file__).resolve().parent
_PLACES: Final = (PACKAGE / "_share", PACKAGE.parent)
"""The wheel's place first: a folder named `hosts` beside an installed package is somebody else's."""


def find(kind: Kind) -> Path:
    """The folder with the shipped files of this kind, whatever the current folder is.

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
    """All of these folders that are there."""
    candidates = ((place / kind for place in _PLACES) for kind in KINDS)
    return [found for places in candidates if (found := next(filter(Path.is_dir, places), None)) is not None]
