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

from tests import bench

CHECKOUTS = bench.ROOT / ".cache" / "against"
GIT_S_MAX = 120

WORKS: dict[str, tuple[tuple[str, str, tuple[object, ...], str], ...]] = {
    "1": (
        ("event, whole path, CPU", "µs", ("ours_stream", "stream", bench.EVENTS), "us"),
        ("the same, a tool call in ten", "µs", ("ours_stream", "mixed", bench.EVENTS), "us"),
    ),
    "2": (),
    "4": (("a paced event, p50", "µs", ("ours_paced", 400), "us"),),
    "5": (("ping, p50", "µs", ("ours_ping", 2000), "us"), ("ask, p50", "µs", ("ours_ask", 1000), "us")),
    "6": (
        ("receipt of 1k events sealed, CPU", "ms", ("sealing", 1_000), "ours_ms"),
        ("receipt of 100k events sealed, CPU", "ms", ("sealing", 100_000), "ours_ms"),
    ),
    "7": (("longest pause while 100k events end", "ms", ("pause", bench.EVENTS), "ours_ms"),),
    "8": (("memory an event", "B", ("kept", bench.EVENTS), "bytes"),),
}
"""Row → its measurements: title, unit, words for `bench_work.py`, member of its answer."""

FLOORS = {"stream": ("floor_stream", "stream", bench.EVENTS), "mixed": ("floor_stream", "mixed", bench.EVENTS)}


def checkout(revision: str) -> Path:
    """Check a commit out below `.cache/against/`, or return the checkout that is there.

    Raises:
        RuntimeError: git does not know the commit, or cannot check it out.
    """

    def git(*words: str) -> str:
        done = subprocess.run(
            ("git", *words), cwd=bench.ROOT, capture_output=True, text=True, timeout=GIT_S_MAX, check=False
        )
        if done.returncode != 0:
            raise RuntimeError((done.stderr.strip().splitlines() or ["git failed"])[-1])
        return done.stdout.strip()

    commit = git("rev-parse", "--verify", f"{revision}^{{commit}}")
    folder = CHECKOUTS / commit[:12]
    if not (folder / "tests" / "bench_work.py").exists():
        git("worktree", "prune")
        git("worktree", "add", "--detach", "--force", str(folder), commit)
    return folder


def compare(row: str, revision: str) -> list[bench.Line]:
    """Measure one row of both checkouts in turning order; the ratio is ours over theirs."""
    folder = checkout(revision)
    theirs = folder / "tests" / "bench_work.py"

    def of(file: Path | str, words: tuple[object, ...], member: str) -> Callable[[], float]:
        root = str(Path(file).parent.parent)
        return lambda: float(bench.worker(sys.executable, str(file), *words, root=root)[member])

    if row == "2":
        return _peers(revision, of(bench.WORK, *_STREAM), of(theirs, *_STREAM))
    lines = []
    for what, unit, words, member in WORKS[row]:
        measures = [of(bench.WORK, words, member), of(theirs, words, member)]
        if row == "1":
            measures.append(of(bench.WORK, FLOORS[str(words[1])], "us"))
        found = bench.rounds(measures)
        note = ""
        if row == "1":
            times = [statistics.median(one[side] / one[2] for one in found) for side in (0, 1)]
            note = f"{times[0]:.2f} and {times[1]:.2f} x floor"
        lines.append(bench.compared(found, 0, 1, row=row, what=what, unit=unit, against=revision[:12], note=note))
    return lines


_STREAM: tuple[tuple[object, ...], str] = (("ours_stream", "stream", bench.EVENTS), "us")


def _peers(revision: str, ours: Callable[[], float], theirs: Callable[[], float]) -> list[bench.Line]:
    """Row 2: how many times less an event costs than at each peer, for both checkouts."""
    if bench.PEERS.missing():
        return [bench.absent("2", "event, CPU, against peers")]
    peers = [lambda name=name, n=n: bench.peer("stream", name, n)["us"] for name, n, _, _, _ in bench.PEER_STREAMS]
    found = bench.rounds([ours, theirs, *peers])
    lines = []
    for column, (_, _, title, _, _) in enumerate(bench.PEER_STREAMS, 2):
        times = [statistics.median(one[column] / one[side] for one in found) for side in (0, 1)]
        note = f"{times[0]:.1f} and {times[1]:.1f} times better than {title}"
        lines.append(
            bench.compared(
                found, 0, 1, row="2", what=f"event, CPU ({title})", unit="µs", against=revision[:12], note=note
            )
        )
    return lines
