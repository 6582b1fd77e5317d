"""Make a site of README, guide, contracts, examples and docstrings with mkdocs.

`xtask.py docs` and `xtask.py check` run it; a link that leads nowhere fails it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GATHERED = ROOT / ".cache" / "docs"
MODULES = ("backplane", "backplane.host", "backplane.providers", "backplane.routing", "backplane.testing")


def main(arguments: list[str]) -> int:
    """Write the site to `.cache/site/`; arguments go to `mkdocs build`."""
    shutil.rmtree(GATHERED, ignore_errors=True)
    GATHERED.mkdir(parents=True)
    for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE"):
        shutil.copyfile(ROOT / name, GATHERED / name)
    for name in ("contracts", "docs/guide", "docs/decisions", "docs/examples", "docs/pictures", "schemas", "hosts"):
        shutil.copytree(ROOT / name, GATHERED / name, ignore=shutil.ignore_patterns("__pycache__"))
    pages = "\n\n".join(f"::: {name}" for name in MODULES)
    (GATHERED / "python.md").write_text(f"# From Python\n\n{pages}\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", str(ROOT / "docs" / "mkdocs.yml")]
    code = subprocess.run([*command, *arguments], cwd=ROOT, check=False).returncode
    if code == 0:
        sys.stdout.write(f"the site is in {(ROOT / '.cache' / 'site').relative_to(ROOT)}\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
