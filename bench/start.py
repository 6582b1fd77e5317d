"""What it costs to start: the command line and the host kit, as CPU milliseconds of their own process.

The programs are the real ones. Where a moment in their life is meant and not their end, the moment
is seen from outside: an audit hook sees the first spawn, the reader of a pipe sees the first line.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_S_MAX = 30

# `process_time` counts from the start of the process, the interpreter's own start included.
_TO_FIRST_SPAWN = """
import os, sys, time

def hook(event, arguments):
    if event == "subprocess.Popen":
        os.write(2, b"spawn %d" % time.process_time_ns())
        os._exit(0)

sys.addaudithook(hook)
sys.argv[0] = "backplane"
from backplane.__main__ import main
sys.exit(main())
"""


def environment(**more: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if not name.startswith("BACKPLANE_")}, **more}


def cpu_ms(command: Sequence[str]) -> float:
    """User and system time of a command, from its start to its end."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment(), capture_output=True, timeout=START_S_MAX, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1000


def python(code: str) -> float:
    return cpu_ms([sys.executable, "-c", code])


def cli(*words: str) -> float:
    return cpu_ms([sys.executable, "-m", "backplane", *words])


def run_to_first_spawn() -> float:
    """`backplane run` in place, in an empty folder, with the host's manifest kept from an earlier run."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        root.mkdir()
        words = ["run", "true", "--backend", "shell", "--in-place", "--isolation", "off"]
        environ = environment(BACKPLANE_HOME=str(Path(folder, "home")))

        def run(*start: str) -> subprocess.CompletedProcess[bytes]:
            command = [sys.executable, *start, *words]
            return subprocess.run(
                command, cwd=root, env=environ, capture_output=True, timeout=START_S_MAX, check=False
            )  # fmt: skip

        kept = run("-m", "backplane")
        if kept.returncode != 0:
            raise RuntimeError(f"run: {kept.stderr.decode(errors='replace')[-200:]}")
        words_of_end = run("-c", _TO_FIRST_SPAWN).stderr.split()
    if words_of_end[:1] != [b"spawn"]:
        raise RuntimeError("run: no first spawn was seen")
    return int(words_of_end[1]) / 1e6


def to_first_line(command: Sequence[str]) -> float:
    """CPU of a process until its first line could be read; a few microseconds more, for the reading."""
    child = subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with child:
        assert child.stdout is not None
        line = child.stdout.readline()
        spent_ns = sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{child.pid}/task").glob("*/schedstat"))
        child.kill()
    if not line:
        raise RuntimeError(f"{command[-1]} said nothing")
    return spent_ns / 1e6


def host_to_hello() -> float:
    return to_first_line([sys.executable, "-E", "-s", str(ROOT / "hosts" / "shell.py")])


def msgspec_to_first_line() -> float:
    return to_first_line([sys.executable, "-E", "-s", "-c", "import msgspec, os; os.write(1, b'x\\n'); os.read(0, 1)"])
