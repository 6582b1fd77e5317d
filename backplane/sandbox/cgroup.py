"""A cgroup of version 2 a run, where there is no pid namespace: by it a later start finds who was left behind."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

GONE_S_MAX: Final = 1.0
"""For a killed group to be empty; some ms are usual."""

_LOOK_S: Final = 0.002

_MOUNTS: Final = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")


def own() -> Path | None:
    """The folder of our own cgroup."""
    with suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        name = next((line[3:] for line in lines if line.startswith("0::")), None)
        for mount in _MOUNTS if name is not None else ():
            if os.path.exists(f"{mount}{name}/cgroup.procs"):
                return Path(f"{mount}{name}")
    return None


def leaf_of(home: Path, run_id: str) -> Path | None:
    """Where a run's own group is or would be."""
    above = own()
    return above / f"{_prefix(home)}{run_id}" if above is not None else None


def _prefix(home: Path) -> str:
    # Another control plane's groups are not ours to judge.
    return f"backplane-{hashlib.sha256(os.fsencode(home.resolve())).hexdigest()[:12]}-"


def remove(leaf: Path) -> bool:
    """Kill all that is in a group and remove it; False when somebody is still there after `GONE_S_MAX`."""
    end_s = time.monotonic() + GONE_S_MAX
    while time.monotonic() < end_s:
        try:
            (leaf / "cgroup.kill").write_text("1")
            leaf.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            time.sleep(_LOOK_S)
    return False


def sweep(home: Path, is_live: Callable[[str], bool]) -> None:
    """Remove the groups of runs whose control plane is gone.

    Args:
        is_live: tells by a run's id whether its control plane lives.
    """
    above, prefix = own(), _prefix(home)
    with suppress(OSError):
        names = os.listdir(above) if above is not None else []
        for name in names:
            if name.startswith(prefix) and not is_live(name.removeprefix(prefix)):
                assert above is not None
                remove(above / name)
