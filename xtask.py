#!/usr/bin/env python3
"""The project's own commands: demo, test, check, bench, faults, schema, referees, vendors, pictures, docs, stats.

Standard library only. The first call makes `.venv` beside this file and installs the project in it; later calls compare
one stamp and start at once. What a command does lives elsewhere: here is only how it is started.
The syntax is kept readable for Pythons we do not support, so that they can say so.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

PYTHON_MIN = (3, 11)
PIP_S_MAX = 900
"""A first install takes a minute on a slow line; a quarter of an hour means that it hangs."""
LOCK_S_MAX = PIP_S_MAX + 60
"""Whoever waits for another call's install waits a little longer than that may take."""
LOCK_POLL_S = 0.2
EVIDENCE_CHARS_MAX = 300

ROOT = os.path.dirname(os.path.abspath(__file__))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "xtask-stamp.json")
REFEREES = os.path.join(ROOT, ".venv-referees")
LOCK = os.path.join(ROOT, ".cache", "xtask.lock")


class Trouble(Exception):
    """What stops a command before it starts: a fact, the evidence, the next step."""

    def __init__(self, fact: str, evidence: str, next_step: str) -> None:
        super().__init__(fact)
        self.lines = (f"xtask: {fact}", f"  {evidence[:EVIDENCE_CHARS_MAX]}", f"  next: {next_step}")


# The environment ------------------------------------------------------------------------------------------------------


def require_python() -> None:
    """Refuse a Python that cannot run the project, naming one on this machine that can."""
    if sys.version_info[:2] >= PYTHON_MIN:
        return
    wanted = ".".join(str(part) for part in PYTHON_MIN)
    names = [f"python3.{minor}" for minor in range(PYTHON_MIN[1], PYTHON_MIN[1] + 8)]
    found = next((path for path in map(shutil.which, names) if path), None)
    raise Trouble(
        f"Python {wanted} or newer is needed",
        f"this is {sys.executable}, Python {sys.version.split()[0]}",
        f"{found} {os.path.join(ROOT, 'xtask.py')} …" if found else f"install Python {wanted} or newer, then repeat",
    )


def development_packages(pyproject: dict[str, Any], group: str = "dev") -> list[str]:
    """Return a dependency group's requirements, included groups unfolded.

    A fresh venv's pip may be too old to know `--group`.
    """
    requirements: list[str] = []
    for entry in pyproject["dependency-groups"][group]:
        if isinstance(entry, str):
            requirements.append(entry)
        else:
            requirements += development_packages(pyproject, entry["include-group"])
    return requirements


def read_pyproject() -> dict[str, Any]:
    import tomllib  # not at the top: an old Python has to reach its message first

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        return tomllib.load(file)


GROUPS = ("dev", "test", "")
"""Groups of dependencies; each has all of those after it."""


def wanted_stamp(pyproject: dict[str, Any]) -> dict[str, Any]:
    """Return what `.venv` must have been made from; a linter's settings are not part of it."""
    names = ("build-system", "project", "dependency-groups")
    parts: dict[str, Any] = {name: pyproject.get(name) for name in names}
    parts["hatch"] = pyproject.get("tool", {}).get("hatch")
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return {"needs_sha256": digest, "root": ROOT, "group": "dev"}


def read_stamp() -> dict[str, Any]:
    """Return the stamp of the `.venv` that is there, empty when it is absent or broken."""
    if not os.access(PYTHON, os.X_OK):
        return {}
    try:
        with open(STAMP, encoding="utf-8") as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def environment(group: str = "dev") -> str:
    """Return the path of `.venv`'s Python, made or brought up to date where needed.

    Args:
        group: of dependencies beyond the project's own: `dev`, the smaller `test`, or "" for none.
    """
    pyproject = read_pyproject()
    wanted = wanted_stamp(pyproject)
    enough = [{**wanted, "group": name} for name in GROUPS[: GROUPS.index(group) + 1]]
    if read_stamp() in enough:
        return PYTHON
    with exclusive():
        if read_stamp() not in enough:  # another call may have done it while this one waited
            set_up(pyproject, enough[-1])
    return PYTHON


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Hold the lock that keeps two calls from installing into one `.venv`; it ends with its process."""
    import fcntl

    os.makedirs(os.path.dirname(LOCK), exist_ok=True)
    with open(LOCK, "a", encoding="utf-8") as file:
        deadline = time.monotonic() + LOCK_S_MAX
        said = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise Trouble(
                        "another xtask call does not end", f"it holds {LOCK}", "end it, then repeat"
                    ) from None
                if not said:
                    tell("another call is setting up .venv, waiting for it")
                    said = True
                time.sleep(LOCK_POLL_S)
        yield


def set_up(pyproject: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Make `.venv` if it does not work, install the project and its tools if wanted, write the stamp last."""
    began = time.monotonic()
    # Scripts and the editable install hold absolute paths, so a moved tree starts anew.
    moved = read_stamp().get("root", ROOT) != ROOT
    if moved or not has_pip():
        tell("making .venv (once, " + ("about a minute)" if wanted["group"] == "dev" else "some 20 seconds)"))
        make_venv()
    else:
        tell("installing what pyproject.toml names")
    command = [PYTHON, "-I", "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--retries", "2", "--timeout", "20", "--editable", ROOT]
    command += development_packages(pyproject, wanted["group"]) if wanted["group"] else []
    done = run_quietly(command, env={**os.environ, "PIP_USER": "0"})
    if done.returncode != 0:
        raise Trouble(
            "the packages could not be installed",
            last_words(done),
            f"check the network and pip's index settings ({PYTHON} -m pip config list), then repeat",
        )
    temporary = f"{STAMP}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(wanted, file)
    os.replace(temporary, STAMP)
    tell(f".venv is ready after {time.monotonic() - began:.0f} s")


def has_pip() -> bool:
    return os.access(PYTHON, os.X_OK) and run_quietly([PYTHON, "-I", "-m", "pip", "--version"]).returncode == 0


def make_venv() -> None:
    """Make an empty `.venv` with pip in it, by the Python that runs this file."""
    missing = [name for name in ("venv", "ensurepip") if importlib.util.find_spec(name) is None]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    fix = f"install {version}-venv (Debian, Ubuntu: apt-get install {version}-venv), or use another Python"
    if missing:
        evidence = f"{sys.executable} has no module {' and no module '.join(missing)}"
        raise Trouble("this Python cannot make a virtual environment", evidence, fix)
    # Called by .venv's own Python, that Python's base has to make the new one.
    base = getattr(sys, "_base_executable", None) or sys.executable
    done = run_quietly([base, "-I", "-m", "venv", "--clear", VENV])
    if done.returncode != 0:
        raise Trouble("the virtual environment could not be made", last_words(done), fix)


def run_quietly(command: Sequence[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a tool of the set-up to its end, its words kept for an error message."""
    try:
        return subprocess.run(
            command, env=env, text=True, errors="replace", timeout=PIP_S_MAX, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, str(error))


def last_words(done: subprocess.CompletedProcess[str]) -> str:
    """Return the line of a tool's output that says most about why it failed."""
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    # A build's own exception says more than pip's summary of it; pip's warnings say why an index was not reached.
    raised = [line for line in lines if re.match(r"(\w+\.)*\w+(Error|Exception): ", line)]
    unreached = [line for line in lines if line.startswith("WARNING: Retrying")]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (raised or unreached or errors or lines or [f"exit code {done.returncode}, no output"])[-1]


def tell(text: str) -> None:
    print(f"xtask: {text}", file=sys.stderr, flush=True)


# The commands ---------------------------------------------------------------------------------------------------------


def become(*command: str) -> NoReturn:
    """Go on as another program, so that signals and the exit code are that program's own."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)


def demo(args: list[str]) -> NoReturn:
    become(environment(""), "-P", "-m", "backplane", "demo", *args)


def test(args: list[str]) -> NoReturn:
    """Run the core, everything with `--all`, or pytest with the arguments that are given."""
    files = [word for word in args if word.startswith("tests/")]
    is_core = not args or (files and not any(word.startswith("tests/all") for word in files))
    python = environment("test" if is_core else "dev")
    os.chdir(ROOT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # Or each of thousands of processes compiles the same files.
    if args == ["--all"]:
        become(python, os.path.join("tests", "suite.py"))
    become(python, "-m", "pytest", *(args or ["tests", "--ignore=tests/all", *IN_PARALLEL]))


IN_PARALLEL = ("-q", f"--numprocesses={2 * (os.cpu_count() or 1)}", "--dist=worksteal")
"""Two workers a core: much of the suite waits for a deadline or a child."""


def bench(args: list[str]) -> NoReturn:
    os.chdir(ROOT)
    become(environment(), "-m", *(("bench.scale", *args[1:]) if args[:1] == ["scale"] else ("bench.table", *args)))


def faults(args: list[str]) -> NoReturn:
    """Run the fault catalogue, at full size with `--long`."""
    python = environment()
    os.chdir(ROOT)
    os.environ["BACKPLANE_FAULTS"] = "long" if "--long" in args else "usual"
    rest = [word for word in args if word != "--long"]
    become(python, "-m", "pytest", "-q", *FAULTS, *rest)


FAULTS = (
    "tests/all/faults",
    "tests/all/scale/test_queue_faults.py",
    "tests/test_claims.py::test_honest_runs_raise_no_alarm",
    "tests/test_routing.py::test_the_choice_is_that_of_the_page_for_every_strategy",
)
"""The catalogue, and what else has a full size."""


def schema(args: list[str]) -> NoReturn:
    become(environment(), "-P", "-m", "backplane.schemas", *args)


def pictures(args: list[str]) -> NoReturn:
    become(environment(), os.path.join(ROOT, "tests", "pictures.py"), *args)


def docs(args: list[str]) -> NoReturn:
    become(environment(), os.path.join(ROOT, "docs", "build.py"), *args)


def prices(args: list[str]) -> NoReturn:
    become(environment(), os.path.join(ROOT, "docs", "prices.py"), *args)


def stats(args: list[str]) -> NoReturn:
    """Count lines, doubles and lengths; with `--walk` the way of an order and an event through the package, too."""
    python = environment() if "--walk" in args else sys.executable
    become(python, os.path.join(ROOT, "tests", "stats.py"), *args)


def referees(args: list[str]) -> NoReturn:
    """Judge translations and the scripted model by the vendors' SDKs, which stand in an environment of their own."""
    pyproject = read_pyproject()
    packages = development_packages(pyproject, "referees")
    python = os.path.join(REFEREES, "bin", "python")
    stamp = os.path.join(REFEREES, "xtask-packages.json")
    wanted = json.dumps([ROOT, pyproject["project"]["dependencies"], packages])
    with exclusive():
        if not os.access(python, os.X_OK) or not os.path.exists(stamp) or read_text(stamp) != wanted:
            tell("making .venv-referees with the vendors' SDKs (once, about a minute)")
            base = getattr(sys, "_base_executable", None) or sys.executable
            install = [python, "-I", "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
            for command in ([base, "-I", "-m", "venv", "--clear", REFEREES], [*install, "--editable", ROOT, *packages]):
                done = run_quietly(command)
                if done.returncode != 0:
                    raise Trouble("the referees could not be installed", last_words(done), "check the network, repeat")
            with open(stamp, "w", encoding="utf-8") as file:
                file.write(wanted)
    os.chdir(ROOT)
    subprocess.run([python, "-m", "tests.dialects.measures"], check=False)
    names = (
        "dialects/test_measures",
        "test_model_server_sdks",
        "test_model_server_ours",
        "gateway/test_gateway_sdks",
        "gateway/test_gateway_kept",
        "gateway/test_gateway_more_cases",
    )
    judges = [os.path.join("tests", f"{name}.py") for name in names]
    become(python, "-m", "pytest", "-q", *judges, *args)


def vendors(args: list[str]) -> NoReturn:
    if args == ["--table"]:
        become(environment(), "-m", "tests.all.vendors.table")
    become(environment(), "-P", os.path.join(ROOT, "tests", "all", "vendors", "install.py"), *args)


def read_text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()


CHECKS = (
    ("format", "-m ruff format --check .", ".venv/bin/ruff format"),
    ("lint", "-m ruff check .", ".venv/bin/ruff check --fix"),
    ("types", "-m mypy", ""),
    ("architecture", "-m pytest -q tests/test_architecture.py", ""),
    ("schemas", "-P -m backplane.schemas --check", "python3 xtask.py schema"),
    ("documents", "docs/build.py --links", ""),
)
"""Name, arguments of `.venv`'s Python, and what repairs it."""


def check(args: list[str]) -> int:
    """Run every check, also after one has failed; a failing one shows its output."""
    if args:
        raise Trouble("check takes no arguments", f"got {' '.join(args)}", "python3 xtask.py check")
    python = environment()
    os.chdir(ROOT)
    failed = []
    for name, arguments, repair in CHECKS:
        began = time.monotonic()
        done = run_quietly([python, *arguments.split()])
        good = done.returncode == 0
        print(f"{'ok  ' if good else 'FAIL'}  {name:<13} {time.monotonic() - began:5.1f} s", flush=True)
        if not good:
            failed.append(name)
            print(done.stdout.rstrip())
            if repair:
                print(f"      repair: {repair}", flush=True)
    print(
        f"check: {len(CHECKS) - len(failed)} of {len(CHECKS)} good"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "demo": (demo, "run an order to its receipt with the built-in backend, and show it"),
    "test": (
        test,
        "pass the core, some minutes; --all: agents, clients, faults, browsers, coverage, too; or pytest's arguments",
    ),
    "check": (check, "formatting, lint, types, architecture, fresh schemas, links of the documents"),
    "bench": (bench, "print the benchmark table; --against REV: beside another commit; scale [ORDERS]: the queue"),
    "faults": (faults, "try the fault catalogue; --long: at full size; or pytest's arguments"),
    "schema": (schema, "write schemas/; --check only compares"),
    "referees": (referees, "judge the translations by the vendors' SDKs, in an environment of their own"),
    "vendors": (
        vendors,
        "install the real agents that tests drive: all, or those named; --table: what each does",
    ),
    "pictures": (pictures, "draw docs/pictures/ anew, by Debian's chromium"),
    "docs": (docs, "make the site of README, guide, contracts, examples and docstrings in .cache/site/, by mkdocs"),
    "prices": (prices, "write the table of list prices anew from the package genai-prices"),
    "stats": (stats, "the shape of the code in numbers; --walk follows an order through it"),
}


def usage() -> str:
    lines = ["usage: python3 xtask.py COMMAND [ARGUMENT…]", ""]
    return "\n".join(lines + [f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items()])


def main(argv: list[str]) -> int:
    """Run one command; 0 done, 1 failed, 2 usage, 130 interrupted."""
    if argv and argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if not argv or argv[0] not in COMMANDS:
        print(usage() if not argv else f"xtask: no command {argv[0]!r}\n{usage()}", file=sys.stderr)
        return 2
    try:
        require_python()
        return COMMANDS[argv[0]][0](argv[1:])
    except Trouble as trouble:
        print("\n".join(trouble.lines), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
