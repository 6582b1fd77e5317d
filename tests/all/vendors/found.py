"""Where a pinned agent of `pins.toml` stands on this machine, and the skip where it does not.

The cache lies outside git: `$BACKPLANE_VENDORS`, else `.cache/vendors/` in the checkout. A folder there is whole or
absent, and its name holds the version and a digest of everything it was made from. `install.py` fills it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
PINS = Path(__file__).with_name("pins.toml")
CACHE = Path(os.environ.get("BACKPLANE_VENDORS") or ROOT / ".cache" / "vendors").absolute()
"""Read once: the suite hides the project's variables from the tests."""
DIGEST_CHARS = 8
"""Enough to tell the few pins of one agent apart."""


def pins() -> dict[str, dict[str, Any]]:
    with PINS.open("rb") as file:
        return tomllib.load(file)


def version(pin: dict[str, Any]) -> str:
    return str(pin["npm"].rpartition("@")[2] if "npm" in pin else pin["pip"].rpartition("=")[2])


def folder(name: str) -> Path:
    """Return the folder of an agent, whether it is there or not."""
    return CACHE / name / f"{version(pins()[name])}-{_digest(name)}"


def _digest(name: str) -> str:
    pin = pins()[name]
    # What starts a script names Node by its whole path, so both the cache's place and Node's own pin are part of it.
    made_from = [pin, str(CACHE), [_digest(other) for other in pin.get("needs", ())]]
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:DIGEST_CHARS]


def program(name: str) -> Path:
    """Return the path of an agent's program, whether it is there or not; its folder may be put on PATH."""
    return folder(name) / "bin" / name


def installed(name: str) -> bool:
    return all(program(one).exists() for one in (name, *pins()[name].get("needs", ())))


def referee(module: str) -> str:
    """Return the Python of the environment that holds the public SDKs; skip the test where this one is not in it."""
    import pytest

    python = ROOT / ".venv-referees" / "bin" / "python"
    if not python.exists() or not any(python.parents[1].glob(f"lib/python*/site-packages/{module}")):
        pytest.skip(f"referees: {module} not installed (python3 xtask.py referees)")
    return str(python)


def vendor(name: str) -> str:
    """Return the path of an agent's program; skip the test where it is not installed."""
    import pytest  # Not at the top: the installer needs none.

    if not installed(name):
        pytest.skip(f"vendors: {name} not installed (python3 xtask.py vendors {name})")
    return str(program(name))
