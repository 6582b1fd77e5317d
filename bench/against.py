"""The rows of the benchmark for this checkout and another commit, measured in the same rounds.

The other commit is checked out below `.cache/against/`; its own measuring programs run with this environment's
packages, so a commit whose dependencies differ cannot be compared.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench import table

PROGRAMS = ("bench/work.py", "tests/bench_work.py")
"""Where a commit has its measurements: the second is the place until November 2026."""
CHECKOUTS = table.ROOT / ".cache" / "against"
GIT_S_MAX = 120

WORKS: dict[str, tuple[tuple[str, str, tuple[object, ...], str], ...]] = {
    "1": (
        ("event, whole path, CPU", "µs", ("ours_stream", "stream", table.EVENTS), "us"),
        ("the same, a tool call in ten", "µs", ("ours_stream", "mixed", table.EVENTS), "us"),
    ),
    "2": (),
    "4": (("a paced event, p50", "µs", ("ours_paced", 400), "us"),),
    "5": (("ask, p50", "µs", ("ours_ask", 1000), "us"),),
    "6": (
        ("receipt of 1k events sealed, CPU", "ms", ("sealing", 1_000), "ours_ms"),
        ("receipt of 100k events sealed, CPU", "ms", ("sealing", 100_000), "ours_ms"),
    ),
    "7": (("longest pause while 100k events end", "ms", ("pause", table.EVENTS), "ours_ms"),),
    "8": (("memory an event", "B", ("kept", table.EVENTS), "bytes"),),
}
"""Row → its measurements: title, unit, words for `work.py`, member of its answer."""

FLOORS = {"stream": ("floor_stream", "stream", table.EVENTS), "mixed": ("floor_stream", "mixed", table.EVENTS)}


def checkout(revision: str) -> Path:
    """Check a commit out below `.cache/against/`, or return the checkout that is there.

    Raises:
        RuntimeError: git does not know the commit, or cannot check it out.
    """

    def git(*words: str) -> str:
        done = subprocess.run(
            ("git", *words), cwd=table.ROOT, capture_output=True, text=True, timeout=GIT_S_MAX, check=False
        )
        if done.returncode != 0:
            raise RuntimeError((done.stderr.strip().splitlines() or ["git failed"])[-1])
        return done.stdout.strip()

    commit = git("rev-parse", "--verify", f"{revision}^{{commit}}")
    folder = CHECKOUTS / commit[:12]
    if not folder.exists():
        git("worktree", "prune")
        git("worktree", "add", "--detach", "--force", str(folder), commit)
    return folder


def compare(row: str, revision: str) -> list[table.Line]:
    """Measure one row of both checkouts in turning order; the ratio is ours over theirs."""
    folder = checkout(revision)
    theirs = next(file for name in PROGRAMS if (file := folder / name).exists())

    def of(file: Path | str, words: tuple[object, ...], member: str) -> Callable[[], float]:
        root = str(Path(file).parent.parent)
        return lambda: float(table.worker(sys.executable, str(file), *words, root=root)[member])

    if row == "2":
        return _peers(revision, of(table.WORK, *_STREAM), of(theirs, *_STREAM))
    lines = []
    for what, unit, words, member in WORKS[row]:
        measures = [of(table.WORK, words, member), of(theirs, words, member)]
        if row == "1":
            measures.append(of(table.WORK, FLOORS[str(words[1])], "us"))
        found = table.rounds(measures)
        note = ""
        if row == "1":
            times = [statistics.median(one[side] / one[2] for one in found) for side in (0, 1)]
            note = f"{times[0]:.2f} and {times[1]:.2f} x floor"
        lines.append(table.compared(found, 0, 1, row=row, what=what, unit=unit, against=revision[:12], note=note))
    return lines


_STREAM: tuple[tuple[object, ...], str] = (("ours_stream", "stream", table.EVENTS), "us")


def _peers(revision: str, ours: Callable[[], float], theirs: Callable[[], float]) -> list[table.Line]:
    """Row 2: how many times less an event costs than at each peer, for both checkouts."""
    if table.PEERS.missing():
        return [table.absent("2", "event, CPU, against peers")]
    peers = [lambda name=name, n=n: table.peer("stream", name, n)["us"] for name, n, _, _, _ in table.PEER_STREAMS]
    found = table.rounds([ours, theirs, *peers])
    lines = []
    for column, (_, _, title, _, _) in enumerate(table.PEER_STREAMS, 2):
        times = [statistics.median(one[column] / one[side] for one in found) for side in (0, 1)]
        note = f"{times[0]:.1f} and {times[1]:.1f} times better than {title}"
        lines.append(
            table.compared(
                found, 0, 1, row="2", what=f"event, CPU ({title})", unit="µs", against=revision[:12], note=note
            )
        )
    return lines
