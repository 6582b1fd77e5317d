"""`demo`: a sample with a bug, and the commands that repair it; no key, no network.

The sample lies in a temporary folder; the run is stored in a state folder of the demo's own. The first command that
fails ends the demo.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Final

from backplane import config
from backplane.cli import streams
from backplane.cli.command import Args, Parser, load
from backplane.config import child_environment
from backplane.errors import BackendError
from backplane.process.tool import run_tool

HELP = """Show a whole run on a small sample project: a scripted agent fixes a bug, the receipt is verified, and
the patch is applied. The demo needs no key and no network."""
EXAMPLE = "backplane demo"

SAMPLE: Final = Path(__file__).resolve().parent / "sample"
"""The sample's files, each with `.txt` behind its name, as they are no code of ours."""

REPAIR: Final = "repair.py.txt"
"""The script that is the order's task; not part of the sample's project."""

TEST_S_MAX: Final = 60.0
"""Seconds for the sample's test: it takes milliseconds, and a minute on a machine that swaps."""

_PYTHON: Final = (sys.executable, "-E", "-s", "-B")


def options(p: Parser) -> None:
    """Add no option: the demo is the same everywhere."""


def run(args: Args) -> int:
    home = config.home(os.environ | {"BACKPLANE_HOME": str(config.home_path(os.environ) / "demo")})
    os.environ["BACKPLANE_HOME"] = str(home)
    with tempfile.TemporaryDirectory(prefix="backplane-demo-") as folder:
        sample, settings = Path(folder) / "sample", Path(folder) / "backplane.toml"
        settings.write_text("[limits]\nrun_s = 120\n")  # The user's own settings do not apply.
        sample.mkdir()
        for source in SAMPLE.glob("*.txt"):
            if source.name != REPAIR:
                shutil.copyfile(source, sample / source.name.removesuffix(".txt"))
        task = shlex.join([*_PYTHON, "-c", (SAMPLE / REPAIR).read_text(encoding="utf-8")])
        _test(sample, "FAILED")
        _command("run", "--backend", "shell", "--root", str(sample), "--config", str(settings), "--patch", "-", task)
        _command("receipts verify", "last")
        _command("apply", "last")
        _test(sample, "OK")
    streams.write(f"\nThe run is stored in {streams.one_line(home)}; look at it:\n\n")
    streams.write(f"  export BACKPLANE_HOME={shlex.quote(str(home))}\n")
    name = "backplane" if shutil.which("backplane") else f"{shlex.quote(sys.executable)} -m backplane"
    for words in ("show last", "why last", "receipts show last", "report last > run.html"):
        streams.write(f"  {name} {words}\n")
    return 0


def _command(name: str, *words: str) -> None:
    """Print and run one command of ours."""
    streams.write(f"\n$ backplane {name} {streams.one_line(shlex.join(words), 120)}\n")
    command = load(name)
    _require(command.run(Parser(name, command).parse(list(words))) == 0, name)


def _test(sample: Path, verdict: str) -> None:
    """Run the sample's own test, and print its last line, which has to be this verdict."""
    streams.write("\n$ python -m unittest\n")
    env = child_environment({}, {}, os.environ)
    done = run_tool((*_PYTHON, "-m", "unittest"), env=env, cwd=str(sample), timeout_s=TEST_S_MAX)
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    streams.write("".join(f"{streams.one_line(line)}\n" for line in lines[-1:]))
    _require(lines[-1:][0].startswith(verdict), "python -m unittest")


def _require(holds: bool, command: str) -> None:
    if not holds:
        raise BackendError("internal", f"the demo failed: `{command}` ended with an unexpected result")
