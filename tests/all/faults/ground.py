"""The ground a fault is tried on: one command of ours with folders of its own, watched while it runs.

`Ground.run` starts the real program and gives what it did; `Ground.amiss` says what differs from the outcome common
to all cases of the catalogue, (a) to (f). This process is a subreaper meanwhile, so whatever the command leaves
behind is seen as a child.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from backplane.errors import CODES
from backplane.process import guard
from backplane.receipts.database import ReceiptRow
from backplane.receipts.store import Store
from backplane.runtime.state import KEPT
from tests.all.faults import hosts, sizes

PROGRAM: Final = (sys.executable, "-P", "-m", "backplane")
ROOT: Final = Path(__file__).resolve().parents[3]
GROWTH_BYTES_MAX: Final = 64 * 1024 * 1024
"""(e) of the common outcome."""
AFTER_S_MAX: Final = 1.0
"""(d): beyond deadline and grace."""
HANGS_S: Final = 90.0
"""A command that takes longer hangs, whatever its case."""
RSS_LOOK_S: Final = 0.01
_REAPED_S: Final = 0.1
"""For what has ended to be reaped; one that has not by then hangs."""
UGLY: Final = (
    b"Traceback (most recent",
    b"Exception ignored",
    b"was never retrieved",
    b"never awaited",
    b"Fatal Python",
)

GRACE_S: Final = 0.4
"""The grace of most cases: long enough to be seen, short enough for a suite."""
LADDER_S: Final = 0.5
OFF: Final = {"BACKPLANE_ISOLATION": "off"}
"""For a case that shows what holds beneath the containment, which would stop it before."""


@dataclass
class Ended:
    """What a command did."""

    code: int
    stdout: bytes
    stderr: bytes
    wall_s: float
    peak_bytes: int
    """Largest resident size seen."""
    left: list[str]
    """Processes of it that were alive when it returned."""
    messages: list[dict[str, Any]] = field(default_factory=list)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [message["event"] for message in self.messages if message["t"] == "event"]

    @property
    def error(self) -> str | None:
        """The code on stderr."""
        first, _, _ = self.stderr.partition(b"\n")
        word = first.partition(b": ")[0].decode(errors="replace")
        return word if word in CODES else None

    @property
    def fatal(self) -> str | None:
        """The code of the one message of `--json` where there was no run."""
        alone = len(self.messages) == 1 and self.messages[0]["t"] == "fatal" and self.messages[0]["ref_id"] is None
        return str(self.messages[0]["error_code"]) if alone else None

    @property
    def receipt(self) -> dict[str, Any]:
        """As the last message of `--json` carries it."""
        found: dict[str, Any] = self.messages[-1]["receipt"]
        return found

    @property
    def own(self) -> dict[str, Any]:
        """What we add to a receipt."""
        found: dict[str, Any] = self.receipt["usage_raw"]["backplane"]
        return found


class Running:
    """A command at work, watched for its size."""

    def __init__(self, process: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes], before: set[int]) -> None:
        self.process = process
        self.pid = process.pid
        self.peak_bytes = 0
        self._out, self._err, self._before = out, err, before
        self._began = time.monotonic()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while self.process.returncode is None:
            size = high_water(self.pid)
            self.peak_bytes = max(self.peak_bytes, size)
            time.sleep(RSS_LOOK_S)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began

    def output(self) -> bytes:
        """What it has said so far."""
        return os.pread(self._out.fileno(), 1 << 30, 0)

    def until(self, what: Callable[[], bool], bound_s: float = 20.0) -> None:
        """Wait for something that it does."""
        end_s = time.monotonic() + bound_s
        while not what():
            assert self.process.poll() is None, f"it ended before: {self._errors()!r}"
            assert time.monotonic() < end_s, f"not within {bound_s:g} s: {self.output()[-300:]!r} {self._errors()!r}"
            time.sleep(0.005)

    def said(self, text: bytes) -> None:
        self.until(lambda: text in self.output())

    def _errors(self) -> bytes:
        return os.pread(self._err.fileno(), 2000, 0)

    def end(self, bound_s: float = HANGS_S) -> Ended:
        if self.process.poll() is None:
            # `wait` with a bound looks every 50 ms, which is twice what containment may cost.
            ended = os.pidfd_open(self.pid)
            select.select([ended], [], [], bound_s)
            os.close(ended)
        try:
            code = self.process.wait(_REAPED_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
            raise AssertionError(f"hangs: {self._errors()!r}") from None
        wall_s = time.monotonic() - self._began
        left = leftovers(self._before)
        self._watcher.join(5)
        for stream in (self._out, self._err):
            stream.seek(0)
        stdout, stderr = self._out.read(), self._err.read()
        self._out.close()
        self._err.close()
        return Ended(code, stdout, stderr, wall_s, self.peak_bytes, left, _messages(stdout))


def _messages(data: bytes) -> list[dict[str, Any]]:
    found = []
    for line in data.split(b"\n")[:-1]:
        with suppress(ValueError):
            value = json.loads(line)
            if isinstance(value, dict) and isinstance(value.get("t"), str):
                found.append(value)
    return found


def high_water(pid: int) -> int:
    """Largest resident size of a process so far, in bytes; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def children() -> set[int]:
    me = os.getpid()
    return {pid for pid, row in guard.look().items() if row[guard.PARENT] == me}


def leftovers(before: set[int]) -> list[str]:
    """Who is alive now among our children that was not there before; the ended ones are reaped."""
    found = []
    for pid in children() - before:
        row = guard.look_at(pid)
        if row is None or row[guard.STATE] == guard.ZOMBIE:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            continue
        name = Path(f"/proc/{pid}/cmdline")
        with suppress(OSError):
            found.append(f"{pid} {name.read_bytes().replace(bytes(1), b' ').decode(errors='replace')[:200]}")
    return found


class Ground:
    """Folders of one case, and the program run in them."""

    def __init__(self, folder: Path, base: tuple[float, int]) -> None:
        self.folder = folder
        self.home, self.work, self.tmp, self.out = (folder / name for name in ("home", "work", "tmp", "out"))
        for path in (self.home, self.work, self.tmp, self.out):
            path.mkdir(parents=True, exist_ok=True)
        (self.work / "a.txt").write_text("one\n")
        self.base_s, self.base_bytes = base
        """Wall time and size of a run in which nothing happens."""

    def host(self, body: str, name: str = "host.py") -> str:
        """A host of these lines, as a command."""
        return hosts.command(hosts.script(self.folder, body, name=name))

    def environ(self, **more: str) -> dict[str, str]:
        kept = ("PATH", "LANG", "HOME", "PYTHONPATH")
        own = {"BACKPLANE_HOME": str(self.home), "TMPDIR": str(self.tmp), "XDG_CONFIG_HOME": str(self.folder / "user")}
        quick = {"BACKPLANE_CANCEL_GRACE_S": str(GRACE_S), "BACKPLANE_ISOLATION": "best_effort"}
        return {name: os.environ[name] for name in kept if name in os.environ} | own | quick | more

    def start(
        self,
        *words: str,
        env: Mapping[str, str] | None = None,
        program: tuple[str, ...] = PROGRAM,
        cwd: Path | None = None,
        stdin: Any = subprocess.DEVNULL,
        stdout: Any = None,
        **popen: Any,
    ) -> Running:
        before = children()
        out = (self.out / f"{time.monotonic_ns()}.out").open("w+b")
        err = (self.out / f"{time.monotonic_ns()}.err").open("w+b")
        process = subprocess.Popen(
            [*program, *words],
            env=self.environ(**(env or {})),
            cwd=cwd or self.work,
            stdin=stdin,
            stdout=out if stdout is None else stdout,
            stderr=err,
            **popen,
        )
        return Running(process, out, err, before)

    def run(self, body: str, *words: str, task: str = "do it", **more: Any) -> Ended:
        """Run an order on a host of these lines, to its end."""
        return self.started(body, *words, task=task, **more).end()

    def started(self, body: str, *words: str, task: str = "do it", **more: Any) -> Running:
        return self.start("run", task, "--sidecar", self.host(body), "--json", *words, **more)

    def call(self, *words: str, **more: Any) -> Ended:
        """Any other command, to its end."""
        return self.start(*words, **more).end()

    def rows(self) -> list[ReceiptRow]:
        with Store.open(self.home, readonly=True) as store:
            return store.rows(100_000)

    def amiss(
        self,
        ended: Ended,
        *,
        code: str | None = None,
        exit_code: int | None = None,
        outcome: str = "failed",
        accepted: int | None = None,
        bound_s: float = 0.0,
        stored: bool = True,
    ) -> list[str]:
        """What differs from the common outcome, in words; nothing when all of it holds.

        Args:
            code: of the error; None for a run that ends without one.
            bound_s: deadline and grace of this case; what every run takes is added.
            stored: False where the case is that it cannot be.
        """
        complete = code is None and outcome == "complete"
        wanted = exit_code if exit_code is not None else 0 if complete else 3 if outcome == "partial" else None
        limit_s = (bound_s + self.base_s + AFTER_S_MAX) * sizes.share() + sizes.SLACK_S
        grown = ended.peak_bytes - self.base_bytes
        said = ended.stderr + ended.stdout
        facts = [
            (ended.error == code, f"the error is {ended.error}, not {code}: {ended.stderr[-2000:]!r}"),
            (
                ended.code == wanted if wanted is not None else ended.code > 0,
                f"the exit code is {ended.code}: {ended.stderr[-2000:]!r}",
            ),
            (ended.left == [], f"processes are left: {ended.left}"),
            (ended.wall_s <= limit_s, f"it took {ended.wall_s:.2f} s, the bound is {limit_s:.2f} s"),
            (grown < GROWTH_BYTES_MAX, f"it grew by {grown >> 20} MiB"),
            *((word not in said, f"it says {word!r}: {said[-3000:]!r}") for word in UGLY),
        ]
        found = [words for holds, words in facts if not holds] + self.litter()
        return found + self._badly_stored(ended, outcome, accepted) if stored else found

    def _badly_stored(self, ended: Ended, outcome: str, accepted: int | None) -> list[str]:
        with Store.open(self.home, readonly=True) as store:
            row, findings = store.rows(1)[0], store.verify_all().findings
            lines = list(store.trace(row).lines())
        told = [line for line in ended.stdout.split(b"\n") if line.startswith(b'{"t":"event",')]
        facts = [
            (row.outcome == outcome, f"stored is the outcome {row.outcome}, not {outcome}"),
            (findings == (), f"the store has findings: {findings}"),
            (accepted in (None, len(lines)), f"stored are {len(lines)} events, not {accepted}"),
            (
                [line.partition(b',"event":')[2][:-1] for line in told] == lines,
                f"{len(told)} events were told, and the {len(lines)} stored are not the same",
            ),
        ]
        return [words for holds, words in facts if not holds]

    def litter(self) -> list[str]:
        """What is left of ours on the disk beside what is stored."""
        known = {row.run_id for row in self.rows()}
        left = [path for folder in (self.tmp, self.home / "stage") if folder.is_dir() for path in folder.iterdir()]
        # A run that was killed at work leaves the copy that has its work, told and marked, until it is pruned.
        left = [path for path in left if not (path / KEPT).exists()]
        runs = self.home / "runs"
        left += [path for path in runs.iterdir() if path.name not in known] if runs.is_dir() else []
        return [f"{path.relative_to(self.folder)} is left" for path in left]


def kill_9(running: Running) -> None:
    """End the command as the kernel would, and wait until all it had started is gone."""
    os.kill(running.pid, signal.SIGKILL)
    running.process.wait(10)
    end_s = time.monotonic() + 5 * sizes.share()
    while (left := leftovers(running._before)) and time.monotonic() < end_s:
        time.sleep(0.002)
    assert not left, left
