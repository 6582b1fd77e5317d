"""A whole run for the eyes: a sample with a real bug goes in, a verified receipt and a working sample come out.

The sample lies in a temporary folder, which goes at the end; the run is kept in a state folder of the demo's own,
to be looked at. The embedded host, no key, no network. Each step is checked; the first thing that is not as it should
be ends it with exit code 1.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import anyio

import backplane
from backplane import config
from backplane.cli import options as add
from backplane.cli.command import Args, Parser
from backplane.cli.ended import diff
from backplane.cli.streams import one_line
from backplane.config import Limits, Settings, child_environment
from backplane.contract import events as kinds
from backplane.contract.events import AgentEvent
from backplane.contract.receipt import Receipt
from backplane.errors import BackplaneError
from backplane.process.tool import Finished, run_tool
from backplane.receipts.pieces import canonical_chunks
from backplane.receipts.store import Store
from backplane.runtime.run import Run
from backplane.view.console import Look
from backplane.workspace import apply_patch

SAMPLE: Final = Path(__file__).resolve().parent / "sample"
"""The sample's files, each with `.txt` behind its name, so that nobody takes them for ours."""

REPAIR: Final = "repair.py.txt"
"""The script that is the order's task; not part of the sample's repository."""

BROKEN: Final = "pager.py"
"""The one file that has a bug."""

TOOL_S_MAX: Final = 60.0
"""For git and the sample's test: they take milliseconds, and a minute on a machine that swaps."""

RUN_S_MAX: Final = 120.0
"""For the whole run, which takes a second or two."""

_CHARS_MAX: Final = 100
_GIT_ENV: Final = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "demo",
    "GIT_AUTHOR_EMAIL": "demo@localhost",
    "GIT_COMMITTER_NAME": "demo",
    "GIT_COMMITTER_EMAIL": "demo@localhost",
}
_TEST_ARGV: Final = (sys.executable, "-E", "-s", "-B", "-m", "unittest")
_LOOK: Final = Look(terminal=False)


class NotAsItShould(Exception):
    """A step of the demo did not give what it must; the text says what."""


HELP = "Run an order on a small sample with a bug: staged, fixed, tested, sealed, verified, applied."
EXAMPLE = "backplane demo"


def options(p: Parser) -> None:
    add.flag(p, "--keep", help="leave the sample's folder for a look around")


def run(args: Args) -> int:
    """Run the demo; 0 when every step held, 1 when one did not, 130 when interrupted."""
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="backplane-demo-"))
    run = None
    try:
        home = config.home(os.environ | {"BACKPLANE_HOME": str(config.home_path(os.environ) / "demo")})
        run = _demo(folder, home)
    except NotAsItShould as fault:
        print(f"\ndemo failed: {fault}", file=sys.stderr)
        return 1
    except BackplaneError as error:
        hint = f"\n  next: {error.hint}" if error.hint else ""
        print(f"\ndemo failed: {error.code}: {one_line(error.message)}{hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as fault:  # The outermost edge: whatever it was, the demo did not do what it promises.
        print(f"\ndemo failed: {type(fault).__name__}: {one_line(fault)}", file=sys.stderr)
        return 1
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(
        f"\ndemo: every step held, {time.monotonic() - began:.1f} s"
        + (f"; the sample is in {folder}" if args.keep else "")
    )
    _say_where(home, run)
    return 0


def _say_where(home: Path, run: Run) -> None:
    """Name the folder that has the run, and the commands that show it."""
    print(f"\nThe run is kept in {one_line(home)}; look at it:\n\n  export BACKPLANE_HOME={shlex.quote(str(home))}")
    name = "backplane" if shutil.which("backplane") else f"{shlex.quote(sys.executable)} -m backplane"
    for words in ("show", "receipts verify", "why", "report"):
        print(f"  {name} {words} {run.id[:8]}" + (" > run.html" if words == "report" else ""))


def _demo(folder: Path, home: Path) -> Run:
    sample = folder / "sample"
    _step("A sample project with a bug")
    _make_sample(sample)
    _require(not _test(sample), "the sample's test passes although the sample has a bug")
    before = _fingerprint(sample)

    _step("A work order for the backend 'shell': repair it, in a staged copy")
    run = anyio.run(_run, sample, home)
    receipt = _require_complete(run)
    _require(not (home / "stage" / run.id).exists(), "the staged copy was not removed")

    _step("What came of it: a patch")
    _show_patch(run, receipt)

    _step("The receipt, read back from the store and verified anew")
    _verify(home, receipt)
    _require(_fingerprint(sample) == before, "the original changed although the order was patch_first")
    _say("the original, its .git included, is untouched")

    _step("Apply the patch to the original and test again")
    applied = apply_patch(home / "runs" / run.id)
    _require(applied.files == (BROKEN,), f"the patch was applied to {applied.files}, not to {BROKEN} alone")
    _say(f"applied to {', '.join(applied.files)}")
    _require(_test(sample), "the sample's test still fails with the patch applied")
    return run


# Steps ----------------------------------------------------------------------------------------------------------------


def _make_sample(sample: Path) -> None:
    sample.mkdir()
    for source in sorted(SAMPLE.glob("*.txt")):
        if source.name != REPAIR:
            shutil.copyfile(source, sample / source.name.removesuffix(".txt"))
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "A pager")):
        done = _tool(("git", *arguments), sample, _GIT_ENV)
        words = one_line(done.stderr.decode("utf-8", "replace"))
        _require(done.code == 0, f"git {arguments[0]} failed: {words}")
    _say(f"{sample}: {', '.join(sorted(path.name for path in sample.iterdir()))}")


def _test(sample: Path) -> bool:
    """Run the sample's own test as a child and show its verdict; whether it passed."""
    done = _tool(_TEST_ARGV, sample, {})
    lines = done.stderr.decode("utf-8", "replace").splitlines()
    for line in lines:
        if line.startswith(("FAIL: ", "ERROR: ", "AssertionError", "Ran ", "OK", "FAILED")):
            _say(one_line(line, _CHARS_MAX))
    _require(any(line.startswith("Ran 4 tests") for line in lines), "the sample's tests did not run")
    return done.code == 0


async def _run(sample: Path, home: Path) -> Run:
    """The order through the public door, its events shown as they come."""
    script = (SAMPLE / REPAIR).read_text(encoding="utf-8")
    order = backplane.WorkOrder(shlex.join([sys.executable, "-E", "-s", "-B", "-c", script]))
    began = time.monotonic()
    async with backplane.start(order, backend="shell", root=sample, settings=_settings(), home=home) as run:
        async for event in run:
            print(f"  {(time.monotonic() - began) * 1000:6.0f} ms  {_brief(event)}", flush=True)
    return run


def _settings() -> Settings:
    """The usual ones, whatever the user's file says, with an end to the run: a demo never hangs."""
    return Settings(limits=Limits(run_s=RUN_S_MAX))


def _require_complete(run: Run) -> Receipt:
    if not run.is_sealed:
        raise NotAsItShould("the run left no receipt")
    receipt = run.receipt
    if run.error is not None:
        raise NotAsItShould(f"the run ended with {run.error.code}: {one_line(run.error.message)}")
    _require(receipt.outcome == "complete", f"the run's outcome is {receipt.outcome}, not complete")
    _require(receipt.verification.harness_ok, "the control plane did not see all of the run through")
    return receipt


def _show_patch(run: Run, receipt: Receipt) -> None:
    _require(run.patch is not None and run.patch.is_file(), "the run left no patch")
    assert run.patch is not None
    for line in diff(run.patch, _LOOK):
        print(f"  {line}", end="", flush=True)
    status = receipt.verification.git_status or ""
    _require(status.split() == ["M", BROKEN], f"the patch should change {BROKEN} alone, but says {one_line(status)!r}")


def _verify(home: Path, sealed: Receipt) -> None:
    """The stored receipt against the sealed one: by the store's own check, and by plain bytes and a hash."""
    with Store.open(home, readonly=True) as store:
        findings = store.verify(sealed.meta.run_id)
        _require(not findings, "the store finds a fault: " + "; ".join(finding.fact for finding in findings))
        stored = store.load(sealed.meta.run_id)
        whole = b"".join(canonical_chunks(stored))
        events = len(stored.trace)
    for name, value in _main_lines(stored, events):
        print(f"  {name:<10}{one_line(value, _CHARS_MAX)}", flush=True)
    said = (sealed.receipt_sha256 or "").encode()
    bare = whole.replace(b'"receipt_sha256":"' + said + b'"', b'"receipt_sha256":null', 1)
    computed = hashlib.sha256(bare).hexdigest().encode()
    _require(bare != whole and computed == said, "the stored receipt's bytes do not give its hash")
    _say(f"the store finds nothing wrong, and {len(whole)} canonical bytes hash to the same")


def _main_lines(receipt: Receipt, events: int) -> tuple[tuple[str, object], ...]:
    end = receipt.backplane.get("end", {})
    return (
        ("run", receipt.meta.run_id),
        ("outcome", f"{receipt.outcome} ({end.get('reason')}), harness_ok {receipt.verification.harness_ok}"),
        ("backend", receipt.backend.id),
        ("time", f"{receipt.meta.started_at}, {receipt.meta.duration_ms} ms"),
        ("trace", f"{events} events"),
        ("patch", receipt.backplane.get("patch", {}).get("sha256")),
        ("sha256", receipt.receipt_sha256),
    )


# Small things ---------------------------------------------------------------------------------------------------------


def _tool(argv: tuple[str, ...], cwd: Path, env: dict[str, str]) -> Finished:
    return run_tool(argv, env=child_environment(env, {}, os.environ), cwd=str(cwd), timeout_s=TOOL_S_MAX)


def _fingerprint(folder: Path) -> dict[str, tuple[int, str]]:
    """Mode and hash of every file below a folder, `.git` included."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mode, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


_BRIEF: Final[dict[type[Any], Callable[[Any], str]]] = {
    kinds.ToolCall: lambda event: f"{event.tool_name}: {event.input.get('command')}",
    kinds.ToolResult: lambda event: f"{event.tool_name} {'failed' if event.is_error else 'done'}",
    kinds.CommandExecuted: lambda event: event.ending,
    kinds.FileChanged: lambda event: f"{event.path} {event.summary}",
    kinds.OutputReported: lambda event: event.body.get("text", "").strip(),
    kinds.AssistantMessage: lambda event: event.text,
    kinds.AssistantDelta: lambda event: event.text,
}


def _brief(event: AgentEvent) -> str:
    make = _BRIEF.get(type(event), _message)
    return f"{type(event).__name__:<16} {one_line(make(event).replace(sys.executable, 'python'), _CHARS_MAX)}"


def _message(event: Any) -> str:
    return str(event.message)


def _step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def _say(text: str) -> None:
    print(f"  {text}", flush=True)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise NotAsItShould(otherwise)
