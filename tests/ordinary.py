"""An ordinary user, for tests that root runs: nobody's rights, and an interpreter that they reach."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Final

NOBODY: Final = 65534


def as_nobody() -> list[str]:
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]


def python_of_everybody() -> str | None:
    """Return an interpreter of our version that an ordinary user may run; None when there is none."""
    for name in (sys.executable, shutil.which(f"python3.{sys.version_info[1]}"), "/usr/bin/python3"):
        # By way of a shell: setpriv itself still has the rights to start what its child could not.
        words = [*as_nobody(), "sh", "-c", '"$0" -c "import sys; sys.exit(sys.version_info[1])"', str(name)]
        if name and subprocess.run(words, capture_output=True, check=False).returncode == sys.version_info[1]:
            return name
    return None
