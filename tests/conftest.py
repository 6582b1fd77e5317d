"""What every test gets: a state folder of its own, a look for children left behind, and skips that count.

A test that needs a program says `@pytest.mark.needs("node")` or takes the fixture `needs`; its skip then reads
"needs node: not found". `BACKPLANE_REQUIRE=node,jq` turns a skip whose reason names one of these into a failure.

Exact words stand in `tests/words.txt` alone; `pytest tests/test_words.py --words` writes them anew, and `git diff`
shows what changed. Every other test asserts codes, exit codes and places.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

from backplane.process import guard
from backplane.runtime.backends import Backend
from tests import runs, worker

LEFT_BEHIND_S_MAX = 2.0
"""A child that was told to end may still be ending when its test is over."""
LEFT_BEHIND_POLL_S = 0.01
INSTALL_S_MAX = 100
ROOT = Path(__file__).resolve().parent.parent
PROBE_S_MAX = 10
DESCENDANTS_MAX = 1000

# The machine is shared and coverage slows it: a wall clock is no property of the code.
hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")

# A shell's job in the background has Ctrl-C ignored, and hands that on to every program that is tried here.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) is signal.SIG_IGN:
        with suppress(ValueError):  # not in a main thread
            signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

# What a machine says of its screen: a build server sets CI, and then nothing is painted.
for _name in ("CI", "NO_COLOR", "FORCE_COLOR", "ACCESSIBLE"):
    os.environ.pop(_name, None)

PROBES = {
    # Being there is not enough for these two: a container may forbid namespaces or tracing.
    "bwrap": ["--ro-bind", "/", "/", "--unshare-user", "true"],
    "strace": ["-o", "/dev/null", "true"],
}


# A state folder a test ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def user_settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder of settings: none, but where there is no bubblewrap he has said that he knows."""
    folder = tmp_path_factory.mktemp("settings")
    if program("bwrap")[0] is None:  # else each run says on stderr which rules are not held
        (folder / "backplane").mkdir()
        (folder / "backplane/backplane.toml").write_text('isolation = "off"\n')
    return folder


@pytest.fixture(autouse=True)
def backplane_home(
    no_child_left: None, user_settings: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Point BACKPLANE_HOME at a fresh folder; nothing of the user's own state is read or written."""
    home = tmp_path_factory.mktemp("home")
    for name in [name for name in os.environ if name.startswith("BACKPLANE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BACKPLANE_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(user_settings))
    return home


@pytest.fixture(scope="session")
def path_without_agents(tmp_path_factory: pytest.TempPathFactory) -> str:
    """This machine's PATH with none of the programs that shipped hosts drive: with one there is one backend more."""
    rows = [row for file in (ROOT / "hosts").glob("*.toml") for row in tomllib.loads(file.read_text()).values()]
    agents = {str(row["program"]).split()[0] for row in rows if "program" in row}
    folders = [Path(part) for part in os.environ["PATH"].split(os.pathsep) if os.path.isdir(part)]
    for place, folder in enumerate(folders):
        if any((folder / name).exists() for name in agents):
            folders[place] = tmp_path_factory.mktemp("bin")
            for program in folder.iterdir():
                if program.name not in agents:
                    (folders[place] / program.name).symlink_to(program)
    return os.pathsep.join(map(str, folders))


@pytest.fixture
def no_agents(path_without_agents: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", path_without_agents)


# What a run is made of; a file with other wants has its own of the same name ------------------------------------------


@pytest.fixture
def anyio_backend() -> str:
    """The event loop of the tests; `tests/all/test_trio.py` has the other one."""
    return "asyncio"


@pytest.fixture
def mock() -> Backend:
    """The scripted agent in a process of its own."""
    return runs.mock_backend("process")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty folder to work in."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def beside_tmp() -> Iterator[Path]:
    """An empty folder that is not below /tmp: each contained host has a /tmp of its own."""
    if ROOT.is_relative_to(tempfile.gettempdir()):
        pytest.skip("needs a checkout that is not below the folder of temporary files")
    (ROOT / ".cache").mkdir(exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="test-", dir=ROOT / ".cache"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def without_bubblewrap(tmp_path: Path) -> str:
    """A PATH with everything of this machine but bubblewrap."""
    folder = tmp_path / "no-bwrap"
    folder.mkdir()
    for part in reversed([part for part in os.environ["PATH"].split(os.pathsep) if os.path.isdir(part)]):
        for program in Path(part).iterdir():
            if program.name != "bwrap":
                (folder / program.name).unlink(missing_ok=True)
                (folder / program.name).symlink_to(program)
    return str(folder)


# Programs of npm's, installed once into the checkout's cache ----------------------------------------------------------


@pytest.fixture
def npm_programs(needs: Callable[[str], str]) -> Callable[..., Path]:
    """A function from packages with their versions to the folder with their programs; skips where there is no npm."""

    def installed(*packages: str) -> Path:
        needs("node")
        npm = needs("npm")
        first = packages[0].removeprefix("@").partition("@")[0].replace("/", "-")
        name = first + "-" + hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
        cache = ROOT / ".cache" / name
        draft = cache.with_name(f"{name}.{os.getpid()}")
        words = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", *packages]
        try:
            if not cache.exists():
                draft.mkdir(parents=True)
                (draft / "package.json").write_text("{}")
                made = subprocess.run(words, cwd=draft, capture_output=True, text=True, timeout=INSTALL_S_MAX)
                if made.returncode != 0:
                    pytest.skip("needs npm and its registry: " + (made.stderr.strip().splitlines() or ["it fails"])[-1])
                try:
                    draft.replace(cache)
                except OSError:
                    if not cache.exists():  # else another worker was faster
                        raise
        except subprocess.TimeoutExpired:
            pytest.skip(f"needs npm and its registry: no end within {INSTALL_S_MAX} s")
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return cache / "node_modules" / ".bin"

    return installed


# Exact words ----------------------------------------------------------------------------------------------------------

WORDS = Path(__file__).with_name("words.txt")
MARKS = (
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{8}\b", "ID"),
    (r"\b[0-9a-f]{16,64}\b", "HASH"),
    (r"\b\d{4}-\d\d-\d\dT[0-9:.]+Z|\b\d+\.\d s\b", "TIME"),
)
"""What differs from run to run, and the mark that stands for it."""


@pytest.fixture
def said(request: pytest.FixtureRequest, tmp_path: Path, backplane_home: Path) -> Callable[[str, str], None]:
    """A function that compares a text with the section of this name in `words.txt`, or writes that section anew."""

    def compare(name: str, text: str) -> None:
        text = text.replace(str(backplane_home), "HOME").replace(str(tmp_path), "FOLDER")
        for found, mark in MARKS:
            text = re.sub(found, mark, text)
        _, *parts = re.split(r"^== (.*) ==\n", WORDS.read_text(), flags=re.M)
        sections = dict(zip(parts[::2], parts[1::2], strict=True))
        if request.config.getoption("words"):
            sections[name] = text.strip() + "\n\n"
            WORDS.write_text("".join(f"== {key} ==\n{sections[key]}" for key in sorted(sections)))
        assert sections.get(name, "").strip() == text.strip(), f"{name}: pytest tests/test_words.py --words takes it"

    return compare


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--words", action="store_true", help="write tests/words.txt anew")


# Children left behind -------------------------------------------------------------------------------------------------


def children(pid: int) -> set[int]:
    """Return the pids of a process's children, zombies included; empty where there is no /proc."""
    if pid == os.getpid():
        try:  # A call; the table of all processes takes a millisecond.
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return set()
    if not Path("/proc/self/stat").exists():
        return set()
    return {child for child, row in guard.look().items() if row[guard.PARENT] == pid}


def command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return f"{pid} (gone)"
    return f"{pid} {words}" if words else f"{pid} [{name}] ended, but was never waited for"


def descendants(pids: set[int]) -> list[int]:
    """Return the processes and all below them, parents first."""
    found = sorted(pids)
    for pid in found:
        if len(found) < DESCENDANTS_MAX:
            found += sorted(children(pid) - set(found))
    return found


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    """Fail a test that leaves a child process, naming and killing what it left."""
    me = os.getpid()
    before = children(me)
    yield
    deadline = time.monotonic() + LEFT_BEHIND_S_MAX
    while (left := children(me) - before) and time.monotonic() < deadline:
        time.sleep(LEFT_BEHIND_POLL_S)
    if not left:
        return
    everything = descendants(left)
    names = [command_line(pid) for pid in everything]
    for pid in everything:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for pid in left:
        try:
            os.waitpid(pid, 0)
        except ChildProcessError:  # its own Popen object was quicker
            continue
    pytest.fail("the test left processes running:\n  " + "\n  ".join(names), pytrace=False)


# Programs a test needs ------------------------------------------------------------------------------------------------


@functools.cache
def program(name: str) -> tuple[str | None, str]:
    """Return a program's path and "", or None and why it cannot be used."""
    path = shutil.which(name)
    if path is None:
        return None, "not found"
    if name in PROBES:
        try:
            done = subprocess.run([path, *PROBES[name]], capture_output=True, timeout=PROBE_S_MAX, check=False)
        except subprocess.TimeoutExpired:
            return None, f"hangs for {PROBE_S_MAX} s"
        if done.returncode != 0:
            return None, (done.stderr.decode(errors="replace").strip().splitlines() or ["fails"])[-1]
    return path, ""


@pytest.fixture(scope="session")
def needs() -> Callable[[str], str]:
    """A function from a program's name to its path; it skips the test where there is none."""

    def find(name: str) -> str:
        path, why = program(name)
        if path is None:
            pytest.skip(f"needs {name}: {why}")
        return path

    return find


@pytest.fixture(autouse=True)
def _needed_programs(request: pytest.FixtureRequest, needs: Callable[[str], str]) -> None:
    for marker in request.node.iter_markers("needs"):
        for name in marker.args:
            needs(name)


# Skips ----------------------------------------------------------------------------------------------------------------

REQUIRED = frozenset(name.strip() for name in os.environ.get("BACKPLANE_REQUIRE", "").split(",") if name.strip())
"""Read once: `backplane_home` hides the variable from the tests themselves."""


def skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Return why something was skipped, None when it was not (an expected failure is no skip)."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return None
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")


def fail_if_required(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip into a failure where the machine was said to have what it asks for."""
    reason = skip_reason(report)
    named = sorted(name for name in REQUIRED if reason and re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", reason))
    if named:
        report.outcome = "failed"
        report.longrepr = f"skipped although BACKPLANE_REQUIRE names {', '.join(named)}: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_if_required(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_if_required(report)
    return report


# The end --------------------------------------------------------------------------------------------------------------

ALL_ADDS = (
    "xtask.py test --all adds tests/all: the vendors' agents, clients in four languages, the fault catalogue, "
    "the queue on Postgres, browsers, trio; and the gate of coverage"
)


COUNTED = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "error")
SUMMARY = os.environ.get("BACKPLANE_SUITE_SUMMARY")
BEGAN = time.monotonic()
LONG = ("tests/all/vendors/", "tests/all/scale/", "tests/all/clients/", "tests/all/faults/", "tests/all/doors/")
"""Files that take longest: in the whole suite every worker begins with some of them, those of the agents on half of the
workers. Else the end is a wait for one worker that is alone at them."""


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in an order of which each worker at first gets an equal part, long files first in each."""
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    long = [[item for item in items if item.nodeid.startswith(folder)] for folder in LONG]
    halves = parts[: workers // 2] or parts, parts[workers // 2 :]
    for place, tests in enumerate(long):
        to = halves[place > 0]
        for number, (_, file) in enumerate(itertools.groupby(tests, key=lambda item: item.path)):
            to[number % len(to)].extend(file)
    placed = {item.nodeid for tests in long for item in tests}
    others = [item for item in items if item.nodeid not in placed]
    for part in parts:
        free = max(0, len(items) // workers - len(part))
        part += others[:free]
        del others[:free]
    return [*itertools.chain(*parts), *others]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if worker.FOLDER:
        # Tests that the core has by name from `tests/all/`, where they run too.
        files = {str(item.path) for item in items}
        items[:] = [
            item
            for item in items
            if not item.nodeid.startswith("tests/stories/")
            or getattr(item, "function").__code__.co_filename not in files  # noqa: B009
        ]
        items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def pytest_runtest_logstart(nodeid: str) -> None:
    worker.follow(nodeid)


def pytest_unconfigure() -> None:
    worker.end()


def pytest_collection_finish() -> None:
    """Keep thousands of collected tests out of every later look for garbage."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*programs): skipped where one of these programs cannot be used")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the skips by reason, and what the whole suite has beyond the core."""
    reasons = Counter(skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section("skipped, by reason")
        for reason, count in sorted(reasons.items(), key=lambda pair: (-pair[1], str(pair[0]))):
            terminalreporter.line(f"{count:5} × {reason}")
    if config.getoption("ignore"):
        terminalreporter.line(ALL_ADDS)
    if SUMMARY and "PYTEST_XDIST_WORKER" not in os.environ:  # `suite.py` has more to say before the closing line
        counts = {name: len(terminalreporter.stats.get(name, [])) for name in COUNTED}
        parts = [f"{count} {name}" for name, count in counts.items() if count] or ["no tests ran"]
        closing = f"{', '.join(parts)} in {time.monotonic() - BEGAN:.2f}s"
        Path(SUMMARY).write_text(json.dumps({"closing": closing, "counts": counts}), encoding="utf-8")
