"""Make a site of README, guide, contracts, examples and docstrings with mkdocs.

`xtask.py docs` runs it, and `xtask.py check` with `--links`; a link that leads nowhere fails it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GATHERED = ROOT / ".cache" / "docs"
FOLDERS = ("contracts", "docs/guide", "docs/decisions", "docs/examples", "docs/pictures", "schemas", "hosts")
MODULES = ("backplane", "backplane.host", "backplane.providers", "backplane.routing", "backplane.testing")
TWICE = {"backplane.host": ("Decision",)}
"""Names that another module's reference has; without them here a link to one is not ambiguous."""


LINKS_ONLY = "--links"


def main(arguments: list[str]) -> int:
    """Write the site to `.cache/site/`; arguments go to `mkdocs build`.

    With `--links` only the links are checked: the reference made of docstrings takes three quarters of the time.
    """
    links_only = LINKS_ONLY in arguments
    site = ROOT / ".cache" / ("links" if links_only else "site")
    shutil.rmtree(GATHERED, ignore_errors=True)
    GATHERED.mkdir(parents=True)
    for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "LICENSE"):
        shutil.copyfile(ROOT / name, GATHERED / name)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, GATHERED / name, ignore=shutil.ignore_patterns("__pycache__"))
    pages = "\n\n".join(reference(name) for name in MODULES if not links_only)
    (GATHERED / "python.md").write_text(f"# Python reference\n\n{pages}\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--config-file", str(ROOT / "docs" / "mkdocs.yml")]
    command += ["--site-dir", str(site), *(word for word in arguments if word != LINKS_ONLY)]
    # Not `--quiet`: mkdocs then does not count its warnings, and its strict mode lets all of them pass.
    done = subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.stdout.write("".join(line for line in done.stdout.splitlines(True) if not line.startswith("INFO")))
    elif not links_only:
        sys.stdout.write(f"the site is in {site.relative_to(ROOT)}\n")
    return done.returncode


def reference(name: str) -> str:
    """Return what mkdocstrings makes the reference of a module from."""
    hidden = "".join(f', "!^{word}$"' for word in TWICE.get(name, ()))
    return f'::: {name}\n    options:\n      filters: ["!^_"{hidden}]'


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
