"""The benchmark table: `bench.py [ROW…] [--json] [--against REV]`. Ours, an anchor's figure, and their ratio.

A round measures ours and the anchor one after the other, each in a process of its own; the next
round the other way about. What is shown are medians over the rounds, and the ratio is the median of
the rounds' ratios: only ratios are judged. Exit code 1 when a gate is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from bench import start
from bench.staging import measure as measure_staging
from tests.all.vendors import found as agent_programs

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WORK = str(HERE / "work.py")
SERVE_WORK = str(HERE / "serve.py")
AGENT_WORK = str(HERE / "agents.py")
OVERHEAD_WORK = str(HERE / "overhead.py")
UPSTREAM_WORK = str(HERE / "upstream.py")
GATEWAY_WORK = str(HERE / "gateway.py")
PEER_WORK = str(HERE / "peers.py")
PEER_VENV = ROOT / ".venv-bench"
PEER_PYTHON = str(PEER_VENV / "bin" / "python")
PEER_PACKAGES = ("mcp[cli]==2.3.0", "agent-client-protocol==0.12.1", "claude-agent-sdk==0.2.187")
"""Pinned: a ratio against a moving peer says nothing about us."""
PEER_S_MAX = 240
WORK_S_MAX = 180
"""One measurement takes seconds; three minutes mean that it hangs."""
ROUNDS = 5
"""Odd, so that the middle one is a measurement; more only where one is short."""

Figures = dict[str, Any]
Measured = TypeVar("Measured")


@dataclass(frozen=True)
class Line:
    """One line of the table; without a ratio it says in `note` why there is none."""

    row: str
    what: str
    unit: str = ""
    ours: float | None = None
    anchor: float | None = None
    against: str = ""
    ratio: float | None = None
    """Ours over the anchor; over it the other way where the goal is to be so many times better."""
    gate: float | None = None
    aim: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "absent"
        if self.gate is None:
            return "info"
        if self._holds(self.gate):
            return "aim" if self.aim is not None and self._holds(self.aim) else "pass"
        return "MISS"

    def _holds(self, bound: float) -> bool:
        assert self.ratio is not None
        return self.ratio >= bound if self.at_least else self.ratio <= bound


class Peers:
    """The environment with other people's clients, made on first use."""

    def __init__(self) -> None:
        self._missing: str | None = None
        self._looked = False

    def missing(self) -> str | None:
        """Why there are no peers; None when they are installed."""
        if not self._looked:
            self._looked = True
            self._missing = self._install()
        return self._missing

    def _install(self) -> str | None:
        stamp = PEER_VENV / "bench-stamp.json"
        if stamp.is_file() and json.loads(stamp.read_text()) == list(PEER_PACKAGES):
            return None
        pip = [PEER_PYTHON, "-m", "pip", "install", "-q", "--retries", "1", "--timeout", "20", *PEER_PACKAGES]
        for command in ([sys.executable, "-m", "venv", str(PEER_VENV)], pip):
            tell(" ".join(command[1:4]))
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=PEER_S_MAX, check=False)
            except subprocess.TimeoutExpired:
                return f"installing them took over {PEER_S_MAX} s"
            if done.returncode != 0:
                return (done.stderr.strip().splitlines() or ["they could not be installed"])[-1][:120]
        stamp.write_text(json.dumps(list(PEER_PACKAGES)))
        return None


PEERS = Peers()


def tell(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def worker(python: str, file: str, *words: object, root: str = "") -> Figures:
    """Run one measurement in a process of its own.

    Args:
        root: the checkout that it imports, before what is installed.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BACKPLANE_")}
    if root:
        environ["PYTHONPATH"] = root
    command = [python, file, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WORK_S_MAX, check=False, env=environ)
    if done.returncode != 0:
        said = [line.strip(" |") for line in done.stderr.splitlines()]
        why = [line for line in said if "Error" in line.split(":")[0]] or said or ["no words"]
        raise RuntimeError(f"{' '.join(map(str, words))}: {why[-1]}")
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


def work(*words: object) -> Figures:
    return worker(sys.executable, WORK, *words)


def peer(*words: object) -> Figures:
    return worker(PEER_PYTHON, PEER_WORK, *words)


def rounds(measures: Sequence[Callable[[], Measured]], count: int = ROUNDS) -> list[tuple[Measured, ...]]:
    """Measure everything once a round, in turning order; a row of figures for each round."""
    found = []
    for number in range(count):
        order = range(len(measures)) if number % 2 == 0 else reversed(range(len(measures)))
        figures = {index: measures[index]() for index in order}
        found.append(tuple(figures[index] for index in range(len(measures))))
    return found


def compared(
    found: Sequence[tuple[float, ...]],
    ours: int,
    anchor: int,
    *,
    at_least: bool = False,
    base: int | None = None,
    **members: Any,
) -> Line:
    """A line out of two columns of the rounds.

    Args:
        base: a column that is taken off both first.
    """
    pairs = [(row[ours] - (row[base] if base is not None else 0), row[anchor] - (row[base] if base is not None else 0))
             for row in found]  # fmt: skip
    ratios = [theirs / max(mine, 1e-9) if at_least else mine / max(theirs, 1e-9) for mine, theirs in pairs]
    return Line(
        ours=statistics.median(mine for mine, _ in pairs),
        anchor=statistics.median(theirs for _, theirs in pairs),
        ratio=statistics.median(ratios),
        at_least=at_least,
        **members,
    )


def absent(row: str, what: str) -> Line:
    return Line(row, what, note=f"no peers: {PEERS.missing()}")


# Rows -----------------------------------------------------------------------------------------------------------------

EVENTS = 100_000
"""Of a run that is measured in bulk: a third of a second of ours."""


def event_path() -> list[Line]:
    found = rounds(
        [
            lambda: work("ours_stream", "stream", EVENTS)["us"],
            lambda: work("floor_stream", "stream", EVENTS)["us"],
            lambda: work("ours_stream", "mixed", EVENTS)["us"],
            lambda: work("floor_stream", "mixed", EVENTS)["us"],
        ],
        7,
    )
    return [
        compared(found, 0, 1, row="1", what="event, whole path, CPU", unit="µs", against="floor", gate=3.5, aim=2.5),
        compared(found, 2, 3, row="1", what="the same, a tool call in ten", unit="µs", against="floor"),
    ]


PEER_STREAMS = (
    # name, events, what the table calls it, gate, aim
    ("mcp", 5_000, "mcp", 30, 50),
    ("acp", 10_000, "agent-client-protocol", 12, 20),
    ("claude_client", 15_000, "claude-agent-sdk", 6, 10),
    ("claude_transport", 50_000, "its bare transport", 1.5, 2.5),
)


def event_path_of_peers() -> list[Line]:
    if PEERS.missing():
        return [absent("2", f"event, CPU, against {title}") for _, _, title, _, _ in PEER_STREAMS]
    measures = [lambda: work("ours_stream", "stream", EVENTS)["us"]]
    measures += [lambda name=name, n=n: peer("stream", name, n)["us"] for name, n, _, _, _ in PEER_STREAMS]  # type: ignore[misc]
    found = rounds(measures)
    return [
        compared(
            found, 0, column, at_least=True, row="2", what="event, CPU, times better", unit="µs", against=title,
            gate=gate, aim=aim,
        )
        for column, (_, _, title, gate, aim) in enumerate(PEER_STREAMS, 1)
    ]  # fmt: skip


def latency() -> list[Line]:
    if PEERS.missing():
        return [absent("4", "added latency of a paced event")]
    names = (("claude_client", "claude-agent-sdk", 1.0, 0.5), ("acp", "agent-client-protocol", 0.5, 0.33))
    measures = [lambda: work("ours_paced", 400)["us"], lambda: work("floor_paced", 400)["us"]]
    measures += [lambda name=name: peer("paced", name, 400)["us"] for name, _, _, _ in names]  # type: ignore[misc]
    found = rounds(measures)
    return [
        compared(
            found, 0, column, base=1, row="4", what="latency above a blocking reader, p50", unit="µs", against=title,
            gate=gate, aim=aim,
        )
        for column, (_, title, gate, aim) in enumerate(names, 2)
    ]  # fmt: skip


def round_trip() -> list[Line]:
    echoes: list[Figures] = []

    def echo() -> float:
        echoes.append(work("echo", 2000))
        return float(echoes[-1]["us"])

    found = rounds([lambda: work("ours_ask", 1000)["us"], echo])
    blocking = statistics.median(each["blocking_us"] for each in echoes)
    note = f"without a loop: {blocking:.0f} µs"
    return [compared(found, 0, 1, row="5", what="ask answered by policy, p50", unit="µs", against="echo", note=note)]


def receipts() -> list[Line]:
    lines = []
    for count, many in ((1_000, "1k"), (100_000, "100k")):
        made = [work("sealing", count) for _ in range(ROUNDS)]
        found = [(each["ours_ms"], each["anchor_ms"]) for each in made]
        what = f"receipt of {many} events sealed, CPU"
        lines.append(
            compared(found, 0, 1, row="6", what=what, unit="ms", against="encode + sha256", gate=1.3, aim=0.75)
        )
    return lines


def loop_pause() -> list[Line]:
    made = [work("pause", EVENTS) for _ in range(ROUNDS)]
    found = [(each["ours_ms"], each["anchor_ms"]) for each in made]
    what = "longest pause while 100k events end"
    return [compared(found, 0, 1, row="7", what=what, unit="ms", against="encode + sha256", gate=0.7, aim=0.1)]


def memory() -> list[Line]:
    grown = [(work("kept", EVENTS)["bytes"], 200.0) for _ in range(3)]
    lines = [compared(grown, 0, 1, row="8", what="memory an event", unit="B", against="raw", gate=1.6, aim=1.3)]
    if PEERS.missing():
        return [*lines, absent("8", "memory a live idle run"), absent("8", "memory of a parent with one run")]
    pairs = [(work("idle", 40), peer("memory", "mcp", 40)) for _ in range(3)]
    for name, what, unit, scale, gate, aim in (
        ("each_bytes", "memory a live idle run", "kB", 1e3, 1.0, 0.7),
        ("one_bytes", "memory of a parent with one run", "MB", 1e6, 0.65, 0.5),
    ):
        found = [(ours[name] / scale, theirs[name] / scale) for ours, theirs in pairs]
        lines.append(compared(found, 0, 1, row="8", what=what, unit=unit, against="mcp", gate=gate, aim=aim))
    return lines


def help_and_version() -> list[Line]:
    ours = [lambda: start.cli("--help"), lambda: start.cli("--version")]
    found = rounds([*ours, lambda: start.python("import msgspec, anyio")], 9)
    against = "import msgspec, anyio"
    lines = [
        compared(found, column, 2, row="9", what=f"{word}, CPU", unit="ms", against=against, gate=0.9, aim=0.65)
        for column, word in enumerate(("--help", "--version"))
    ]
    what = "--help, CPU, times better"
    if PEERS.missing():
        return [*lines, absent("9", what)]
    theirs = str(PEER_VENV / "bin" / "mcp")
    found = rounds([ours[0], lambda: start.cpu_ms([theirs, "--help"])])
    line = compared(found, 0, 1, at_least=True, row="9", what=what, unit="ms", against="mcp --help", gate=12, aim=20)
    return [*lines, line]


def starts() -> list[Line]:
    found = rounds(
        [
            start.run_to_first_spawn,
            lambda: start.python("import asyncio, msgspec"),
            start.host_to_hello,
            start.msgspec_to_first_line,
        ],
        9,
    )
    return [
        compared(
            found, 0, 1, row="10", what="run to its first spawn, CPU", unit="ms", against="import asyncio, msgspec",
            gate=2, aim=1.5,
        ),
        compared(
            found, 2, 3, row="10", what="host kit to its hello, CPU", unit="ms", against="import msgspec",
            gate=2, aim=1.5,
        ),
    ]  # fmt: skip


def dispatch() -> list[Line]:
    lines: list[Line] = []
    for isolation, mode, what in (
        ("best_effort", "staged", "sandbox, copy"),
        ("off", "pass_through", "none, in place"),
    ):
        found = [work("dispatch", isolation, mode, 7) for _ in range(3)]
        for column, until, gate in (("", "to a host with its hello", 0.1), ("_event", "to the first event", None)):
            rows = [(made[f"warm{column}_ms"], made[f"cold{column}_ms"]) for made in found]
            title = f"{until} ({what})"
            aim = 0.03 if gate else None
            lines.append(compared(rows, 0, 1, row="11", what=title, unit="ms", against="cold", gate=gate, aim=aim))
    return lines


STREAM_GOALS = {"chat": (15, 27), "responses": (12, 22), "messages": (4, 6), "gemini": (20, 40)}
"""Family of streams → times the vendor's SDK at least (gate, aim)."""
STREAMS_S_MAX = 300


def _found(pattern: str, text: str) -> tuple[float, ...]:
    match = re.search(pattern, text, re.M)
    if match is None:
        raise RuntimeError(f"the stream benchmark printed nothing like {pattern!r}")
    return tuple(map(float, match.groups()))


def streams() -> list[Line]:
    """Reading streams as bytes, in the environment that has the SDKs."""
    python = ROOT / ".venv-referees" / "bin" / "python"
    if not python.exists():
        return [Line("12", "vendors' streams", note="no SDKs: run `xtask.py referees` once")]
    done = subprocess.run(
        [python, "-m", "bench.streams"], cwd=ROOT, capture_output=True, text=True,
        timeout=STREAMS_S_MAX, check=True,
    )  # fmt: skip
    lines: list[Line] = []
    for kind, (times, times_aim) in STREAM_GOALS.items():
        ours, sdk, ratio = _found(rf"^{kind} +ours +(\S+) .* sdk +(\S+) +ratio +(\S+)$", done.stdout)
        times_better = Line("12", f"{kind}, CPU a chunk, times better", "µs", ours, sdk, "its SDK", ratio)
        lines.append(replace(times_better, gate=times, aim=times_aim, at_least=True))
    return lines


IDLE_RUNS = 500


def many_children() -> list[Line]:
    found = rounds([lambda: work("fleet", 50, EVENTS)["us"], lambda: work("fleet", 1, EVENTS)["us"]], 3)
    lines = [
        compared(
            found, 0, 1, row="14", what="event with 50 hosts streaming, CPU", unit="µs", against="one host",
            gate=1.25, aim=1.05,
        )
    ]  # fmt: skip
    made = work("idle", IDLE_RUNS)
    threads, fds = made["each_threads"], made["each_fds"]
    what = f"of {IDLE_RUNS} idle runs"
    lines.append(Line("14", f"threads added by each {what}", "", threads, 0.0, "none", threads, gate=0, aim=0))
    lines.append(Line("14", f"descriptors for each {what}", "", fds, 1.0, "", fds, gate=4, aim=3))
    return lines


SERVED_RUNS, SERVED_EVENTS = 50, 6_000
"""Runs at once, and events of each; it takes that many to see more than the start of fifty children."""


def through_serve() -> list[Line]:
    words = (SERVED_RUNS, SERVED_EVENTS)
    found = rounds(
        [lambda way=way: worker(sys.executable, SERVE_WORK, way, *words)["events_s"] for way in ("serve", "api")]  # type: ignore[misc]
    )
    ratios = [served / alone for served, alone in found]
    ours, alone = (statistics.median(row[column] for row in found) / 1e3 for column in (0, 1))
    what = f"events a second, {SERVED_RUNS} runs through serve"
    ratio = statistics.median(ratios)
    return [Line("serve", what, "k/s", ours, alone, "the Python API", ratio, gate=0.7, aim=0.85, at_least=True)]


UPSTREAMS = ("openai_compatible", "openai_responses", "anthropic", "gemini_ai_studio")


def upstream(*words: str, python: str = sys.executable) -> Callable[[], float]:
    """Make a measure of a model's stream: milliseconds of a paced one, microseconds a chunk of the others."""
    unit = "ms" if words[0] == "paced" else "us"
    return lambda: float(worker(python, UPSTREAM_WORK, *words)[unit])


def models() -> list[Line]:
    """A model's stream: added time over a bare client, and processor time beside the vendors' own clients."""
    found = rounds([upstream("paced", way) for way in ("turn", "host", "bare")], 3)
    lines = [
        compared(
            found, column, 2, row="models", what=f"1,000 chunks, one a ms, {what}", unit="ms", against="bare httpx",
            gate=1.05, aim=1.01,
        )
        for column, what in enumerate(("a turn", "a run"))
    ]  # fmt: skip
    python = ROOT / ".venv-referees" / "bin" / "python"
    if not python.exists():
        return [*lines, Line("models", "CPU a chunk", note="no SDKs: run `xtask.py referees` once")]
    for protocol in UPSTREAMS:
        found = rounds([upstream("cpu", way, protocol, python=str(python)) for way in ("ours", "sdk")], 3)
        what = f"{protocol}, CPU a chunk"
        lines.append(compared(found, 0, 1, row="models", what=what, unit="µs", against="its SDK's client"))
    return lines


AGENTS = ("claude", "codex")
AGENT_ADDED_MS = 100.0
"""What a host may add to the cold start of its agent's program."""
AGENT_ROUNDS = 15


def agents() -> list[Line]:
    """From a process's start to the first request at the model: through a host, and the agent's program alone."""
    lines: list[Line] = []
    for agent in AGENTS:
        if not agent_programs.installed(agent):
            lines.append(Line("agents", agent, note=f"not installed: run `xtask.py vendors {agent}` once"))
            continue
        ways = [lambda way=way, agent=agent: worker(sys.executable, AGENT_WORK, agent, way) for way in ("host", "bare")]
        found = rounds([*ways, import_ms], AGENT_ROUNDS)
        ours, bare, imports = ([row[column]["ms"] for row in found] for column in range(3))
        cpu_ms = statistics.median(row[0]["cpu_ms"] for row in found)
        best = f"best {min(ours):.0f} against {min(bare):.0f}, {cpu_ms:.0f} ms of the host's own CPU"
        # Of each round, as the machine may change its speed between two.
        added = statistics.median(with_host - alone for with_host, alone in zip(ours, bare, strict=True))
        whole = Line(
            "agents", f"{agent}, first request", "ms", statistics.median(ours), statistics.median(bare), "bare"
        )
        lines.append(replace(whole, ratio=statistics.median(ours) / statistics.median(bare), note=best))
        speed = f"`import msgspec` takes {statistics.median(imports):.0f} ms here, 33 at the goal"
        what = f"{agent}, added by the host"
        ratio = added / AGENT_ADDED_MS
        lines.append(Line("agents", what, "ms", added, AGENT_ADDED_MS, "ms", ratio, gate=1, aim=0.5, note=speed))
    return lines


OVERHEAD_ROUNDS = 15


def overhead() -> list[Line]:
    """A whole run of Claude Code beside claude-agent-sdk, in one process, with the same program and scripted model."""
    if PEERS.missing():
        return [absent("overhead", "a run of claude")]
    if not agent_programs.installed("claude"):
        return [Line("overhead", "a run of claude", note="not installed: run `xtask.py vendors claude` once")]
    made = worker(sys.executable, OVERHEAD_WORK, agent_programs.program("claude"), OVERHEAD_ROUNDS)
    lines: list[Line] = []
    for way, what, gate in (("in_place", "in place", 1.05), ("staged", "copy, sandbox", 1.10)):
        title, cpu = f"a run of claude, {what}", statistics.median(made[way]["cpu_ms"])
        note = f"{cpu:.0f} ms of own CPU, {statistics.median(made['sdk']['cpu_ms']):.0f} the peer's"
        for column, until, bound in (("ms", "", gate), ("first_ms", ", first text", None)):
            pairs = list(zip(made[way][column], made["sdk"][column], strict=True))
            lines.append(
                compared(
                    pairs, 0, 1, row="overhead", what=title + until, unit="ms", against="claude-agent-sdk", gate=bound,
                    note=note if not until else "",
                )
            )  # fmt: skip
    return lines


def import_ms() -> Figures:
    """What a host's start is made of, for the most part: how fast this machine is just now."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-E", "-s", "-c", "import msgspec"], check=True)
    return {"ms": (time.perf_counter() - began) * 1000}


def staging() -> list[Line]:
    made = measure_staging(20_000)
    return [
        Line(
            "staging", f"20,000 files, {what}", "s", made[f"{kind}_s"], made[f"{kind}_cp_s"], "cp -a",
            made[f"{kind}_ratio"], gate=gate,
        )
        for kind, what, gate in (("plain", "a plain folder", 4), ("git", "a git repository", 2))
    ]  # fmt: skip


def routing() -> list[Line]:
    found = [(work("routing")["decision_ms"], 1.0) for _ in range(3)]
    what = "a decision among 40 backends"
    return [compared(found, 0, 1, row="routing", what=what, unit="ms", against="a millisecond", gate=1, aim=0.5)]


SESSION_US_MAX = 1.0
"""Of a session with its backend by the router, a chunk, on top of our host driven by an order."""


def sessions() -> list[Line]:
    found = [work("session_stream", 50_000) for _ in range(3)]
    extra = statistics.median(made["session_us"] - made["run_us"] for made in found)
    note = f"a run takes {statistics.median(made['run_us'] for made in found):.1f}"
    what = "a routed session's chunk, on top of the run"
    return [
        Line(
            "13", what, "µs", extra, SESSION_US_MAX, "µs", max(extra, 0.0) / SESSION_US_MAX, gate=1, aim=0.5, note=note
        )
    ]


REJUDGED_S_MAX = 10.0
"""For a policy to be tried on a thousand runs of 200 events: somebody waits for it."""


def replay() -> list[Line]:
    made = work("rejudged", 1_000, 200)
    spent_s, note = made["s"], f"{made['wall_s']:.1f} s by the clock"
    what = "1,000 runs × 200 calls re-judged, CPU"
    return [
        Line("replay", what, "s", spent_s, REJUDGED_S_MAX, "s", spent_s / REJUDGED_S_MAX, gate=1, aim=0.5, note=note)
    ]


GATEWAY_GOALS = (
    # figure, what the table calls it, unit, way, goal, at least
    ("first_8k_ms", "added to the first byte, 8 KB", "ms", "ours, translated", 3.0, False),
    ("first_50k_ms", "the same, a known history of 50 KB", "ms", "ours, translated", 2.0, False),
    ("first_50k_ms", "the same, 50 KB, same dialect", "ms", "ours, same dialect", 2.0, False),
    ("chunk_us", "a translated chunk", "µs", "ours, translated", 25.0, False),
    ("per_s", "requests a second", "/s", "ours, translated", 1_200.0, True),
    ("rss_idle", "memory, idle", "MiB", "ours, translated", 45.0, False),
    ("rss_100", "memory, 100 open streams", "MiB", "ours, translated", 80.0, False),
    ("start_ms", "start to listening", "ms", "ours, translated", 250.0, False),
)
GATEWAY_FIGURES = {
    "first_8k_ms": ("added first byte, 8 KB", "ms"), "first_50k_ms": ("added first byte, 50 KB", "ms"),
    "whole_ms": ("added to a whole answer", "ms"), "cpu_ms": ("CPU a request", "ms"),
    "cpu_50k_ms": ("CPU a streamed request, 50 KB", "ms"),
    "chunk_us": ("a chunk", "µs"), "per_s": ("requests a second", "/s"),
    "rss_idle": ("memory, idle", "MiB"), "rss_100": ("memory, 100 open streams", "MiB"),
    "rss_500": ("memory, 500 open streams", "MiB"), "start_ms": ("start to listening", "ms"),
}  # fmt: skip
GATEWAY_PEERS = {"claude-code-router": "ours, translated", "portkey": "ours, same dialect"}
"""Peer → the way of ours that does the same."""


def gateways() -> list[Line]:
    """What a gateway adds: ours against the goals, and beside the peers."""
    made = worker(sys.executable, GATEWAY_WORK, root=str(ROOT))
    figures, lines = made["figures"], []
    for name, what, unit, way, goal, at_least in GATEWAY_GOALS:
        found = figures[way].get(name, 0.0 if at_least else float("inf"))
        line = Line("gateway", what, unit, found, goal, unit, found / goal, gate=1, at_least=at_least)
        lines.append(line)
    for peer, way in GATEWAY_PEERS.items():
        if peer not in figures:
            why = made["failed"].get(peer, made["absent"])
            lines.append(Line("gateway", f"beside {peer}", note=f"no peer: {why}"))
            continue
        for name, (what, unit) in GATEWAY_FIGURES.items():
            mine, theirs = figures[way].get(name), figures[peer].get(name)
            if mine is None or theirs is None:
                lines.append(Line("gateway", what, note=f"{peer} does not answer this" if mine else "ours failed"))
                continue
            gate = 1.0 if name == "per_s" else None
            lines.append(
                Line("gateway", what, unit, mine, theirs, peer, mine / theirs, gate=gate, at_least=name == "per_s")
            )
    return lines


ROWS: dict[str, Callable[[], list[Line]]] = {
    "1": event_path,
    "2": event_path_of_peers,
    "4": latency,
    "5": round_trip,
    "6": receipts,
    "7": loop_pause,
    "8": memory,
    "9": help_and_version,
    "10": starts,
    "11": dispatch,
    "12": streams,
    "14": many_children,
    "serve": through_serve,
    "models": models,
    "agents": agents,
    "overhead": overhead,
    "staging": staging,
    "routing": routing,
    "sessions": sessions,
    "replay": replay,
    "gateway": gateways,
}
"""Row → what measures it; the numbers are those of the goals, and some of them have no row yet."""


# The table ------------------------------------------------------------------------------------------------------------


def shown(line: Line) -> str:
    if line.ratio is None:
        return f"{line.row:<9}{line.what:<38}{line.note}"
    against = f"{_figure(line.anchor)} {line.against}".strip()
    sign = "≥" if line.at_least else "≤"
    goals = f"{sign} {line.gate:g}" if line.gate is not None else ""
    aim = f"{line.aim:g}" if line.aim is not None else ""
    ours = f"{_figure(line.ours)} {line.unit}".strip()
    text = (
        f"{line.row:<9}{line.what:<38}{ours:>12}  {against:<30}{line.ratio:>8.2f} x  {goals:<8}{aim:<6}{line.verdict}"
    )
    return f"{text}  {line.note}".rstrip()


def _figure(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.3g}"


def measured(name: str, against: str | None = None) -> list[Line]:
    """The lines of one row; a measurement that fails is a missed line, not the end of the table."""
    try:
        if against is not None:
            from bench import against as commits

            return commits.compare(name, against)
        return ROWS[name]()
    except (RuntimeError, OSError, subprocess.SubprocessError) as fault:
        return [Line(name, "could not be measured", ratio=float("inf"), gate=0, note=str(fault)[:200])]


def main(argv: list[str] | None = None) -> int:
    """Measure the named rows, or all; 0 when every gate holds, 1 when one is missed, 2 usage."""
    parser = argparse.ArgumentParser(prog="bench", description="Print the benchmark table.")
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"one of: {', '.join(ROWS)} (all)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    text = "measure this commit, too, in the same rounds, and print ours, theirs and the ratio (rows 1, 2, 4 to 8)"
    parser.add_argument("--against", metavar="REV", help=text)
    options = parser.parse_args(argv)
    rows = tuple(ROWS) if options.against is None else ("1", "2", "4", "5", "6", "7", "8")
    unknown = [name for name in options.rows if name not in rows]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; there are {', '.join(rows)}")
    began = time.monotonic()
    folder = tempfile.mkdtemp(prefix="backplane-bench-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    lines: list[Line] = []
    try:
        if not options.json:
            print(f"{'row':<9}{'what':<38}{'ours':>12}  {'anchor':<30}{'ratio':>10}  {'gate':<8}{'aim':<6}verdict")
        for name in options.rows or rows:
            tell(f"row {name}")
            for line in measured(name, options.against):
                lines.append(line)
                print(
                    json.dumps({**asdict(line), "verdict": line.verdict}) if options.json else shown(line), flush=True
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    missed = [line for line in lines if line.verdict == "MISS"]
    tell(f"{len(lines)} lines, {len(missed)} gates missed, {time.monotonic() - began:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
