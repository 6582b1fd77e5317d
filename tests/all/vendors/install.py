"""Installs the pinned agents of `pins.toml` from npm and PyPI into the cache that `found.py` describes.

Install scripts stay off, so nothing is fetched from elsewhere. A folder is filled aside and renamed, so a call that
is broken off leaves nothing that looks whole; what is there already is left as it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from tests.all.vendors import found

INSTALL_S_MAX = 600
"""The largest needs 15 s on a good line; ten minutes mean that it hangs."""
EVIDENCE_CHARS_MAX = 300
MACHINE = ("Linux", "x86_64")
"""The pins name packages of this kind of machine."""


class Trouble(Exception):
    """Why an agent could not be installed, in one line."""


def main(names: Sequence[str]) -> int:
    """Install the named agents, all without a name; 0 when all are there, 1 when one is not, 2 for a wrong name."""
    known = found.pins()
    if unknown := [name for name in names if name not in known]:
        print(f"xtask: no vendor {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    failed = 0
    for name in with_needs(names or tuple(known), known):
        try:
            print(install(name, known[name]), flush=True)
        except Trouble as trouble:
            failed += 1
            print(f"{name:<10} FAILED  {trouble}", flush=True)
    return 1 if failed else 0


def with_needs(names: Sequence[str], known: dict[str, dict[str, Any]]) -> list[str]:
    """Return the names with what they need, each once, what is needed first."""
    return list(dict.fromkeys(one for name in names for one in (*known[name].get("needs", ()), name)))


def install(name: str, pin: dict[str, Any]) -> str:
    """Bring one agent into the cache; return the line that says what, which version, where.

    Raises:
        Trouble: another kind of machine, no npm, the index says no, or the program is not where the pin says.
    """
    began = time.monotonic()
    with alone(name):
        there = found.program(name).exists()
        if not there:
            make(name, pin)
    how = "there already" if there else f"installed in {time.monotonic() - began:.0f} s"
    return f"{name:<10} {found.version(pin):<10} {found.program(name)}  ({how}, {pin['licence']})"


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Two calls never install the same agent at once; the lock ends with its process."""
    found.CACHE.mkdir(parents=True, exist_ok=True)
    with (found.CACHE / f"{name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(name: str, pin: dict[str, Any]) -> None:
    if (platform.system(), platform.machine()) != MACHINE:
        raise Trouble(f"the pins are for {' '.join(MACHINE)}, this is {platform.system()} {platform.machine()}")
    final = found.folder(name)
    final.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=final.parent, ignore_cleanup_errors=True) as aside:
        fetch(Path(aside), pin)
        expose(Path(aside), name, pin)
        os.chmod(aside, 0o755)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(aside, final)
        if pin.get("node"):  # A sandbox may not write what it has compiled, so this start does.
            with tempfile.TemporaryDirectory() as home:
                run(final, "env", f"HOME={home}", str(final / "bin" / name), "--version")
    for old in final.parent.iterdir():
        if old != final:
            shutil.rmtree(old, ignore_errors=True)


def fetch(into: Path, pin: dict[str, Any]) -> None:
    if "pip" in pin:
        run(into, sys.executable, "-I", "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check",
            "--no-deps", "--only-binary", ":all:", "--target", str(into), pin["pip"])  # fmt: skip
        return
    npm = shutil.which("npm")
    if npm is None:
        raise Trouble("npm is not on PATH; install Node.js with npm, then repeat")
    run(into, npm, "install", "--prefix", str(into), "--ignore-scripts", "--no-audit", "--no-fund", "--no-save",
        "--loglevel", "error", pin["npm"])  # fmt: skip


def run(into: Path, *command: str) -> None:
    try:
        done = subprocess.run(
            command, cwd=into, text=True, errors="replace", timeout=INSTALL_S_MAX, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Trouble(f"{command[0]} was still at it after {INSTALL_S_MAX} s") from None
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if "error" in line.lower()] or [done.stdout.strip()]
        raise Trouble(f"{os.path.basename(command[0])}: {' '.join(errors)[:EVIDENCE_CHARS_MAX]}")


def expose(folder: Path, name: str, pin: dict[str, Any]) -> None:
    """Put the program at `bin/NAME`: a link to a binary, three lines of shell before a script of Node's.

    What Node has compiled of a script is kept beside it: a sixth of a start is spared, and there are hundreds.
    """
    program = folder / pin["program"]
    if not program.is_file():
        raise Trouble(f"the package holds no {pin['program']}; its pin has to be corrected")
    target = folder / "bin" / name
    target.parent.mkdir(exist_ok=True)
    if pin.get("node"):
        script = found.folder(name) / pin["program"]
        compiled = found.folder(name) / "compiled"
        words = f'export NODE_COMPILE_CACHE="{compiled}"\nexec "{found.program("node")}" "{script}" "$@"\n'
        target.write_text(f"#!/bin/sh\n{words}")
        target.chmod(0o755)
    elif target != program:
        program.chmod(0o755)
        target.symlink_to(os.path.relpath(program, target.parent))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
