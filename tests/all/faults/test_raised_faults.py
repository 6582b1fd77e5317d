"""An exception that nobody foresaw, raised at every call of a run in turn: the run fails with `internal`, once, whole.

A place is a function of the package and the function that called it. A first run notes the places; then each of them
raises once, in a run of its own.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import multiprocessing
import os
import pkgutil
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

import backplane
from backplane import Decision, Hook, HookCall
from backplane.config import Settings
from backplane.contract import canonical
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError
from backplane.receipts.store import Store
from backplane.runtime.backends import MemoryBackend
from backplane.runtime.plane import ControlPlane
from backplane.runtime.run import Run
from tests import closed
from tests.all.faults import raising, sizes
from tests.all.faults.raising import WORDS, Probe, probing
from tests.runs import HELLO, PRELUDE, QUICK

SECRET = "hunter2-hunter2-hunter2"
TIME = "2026-01-15T12:00:00Z"

EDGES = frozenset(
    {
        "runtime/plane.py:ControlPlane.__aenter__ < …",
        "runtime/plane.py:ControlPlane.start < …",
        "runtime/plane.py:ControlPlane.__aexit__ < …",
        "runtime/plane.py:ControlPlane._end < runtime/plane.py:ControlPlane.start",
        "runtime/run.py:Run.leave < runtime/plane.py:ControlPlane._end",
        "runtime/run.py:Run.batches < …",
        "runtime/run.py:_RunReader.__init__ < runtime/run.py:Run.batches",
        "process/aio.py:TaskRef.__init__ < runtime/run.py:_RunReader.__init__",
        "process/aio.py:asyncio_task < process/aio.py:TaskRef.__init__",
        "runtime/run.py:_Batches.__aiter__ < …",
        "runtime/run.py:_Batches.__anext__ < …",
        "runtime/run.py:Run._next_batch < runtime/run.py:_Batches.__anext__",
        "runtime/run.py:Run._pull < runtime/run.py:Run._next_batch",
        "protocol/messages.py:Events.records < …",
        "runtime/run.py:Run._guarded < …",
        "runtime/backends.py:_MemoryLink.run < …",
        "runtime/hook_calls.py:call_function < runtime/hook_calls.py:_function",
        "runtime/hook_calls.py:call_function < runtime/inbound.py:Inbound._ask_caller",
        "process/aio.py:Readable._on_readable < …",
        "process/aio.py:Readable._unregister < process/aio.py:Readable._on_readable",
        "process/aio.py:OwnTask.__aexit__ < runtime/run.py:Run.leave",
    }
)
"""Where the program or the loop itself calls, a flag of two lines is set, or a block is left: no frame of ours is
around what raises, or nobody could leave that block a second time; or what raises is a function of the caller's."""

COMMAND_S = 60.0
"""For one command; it takes half a second on a quiet machine."""

REAPS_MAX, REAP_POLL_S = 100, 0.02
"""Two seconds: a trial takes some ten milliseconds."""

BY_SQLITE = "receipts/database.py:_allow"
"""Called by SQLite, to which an exception is a refusal: the store fails, and says so."""


# A run that comes to as many places as can be -------------------------------------------------------------------------


def said(ref_id: str) -> list[dict[str, Any]]:
    """The events of the host, before and after its ask, in the order in which they are kept."""
    bodies: list[dict[str, Any]] = [
        {"type": "assistant_delta", "text": "one "},
        {"type": "assistant_delta", "text": "two"},
        {"type": "assistant_message", "text": f"one two, and {SECRET}"},
        {"type": "command_executed", "command": "ls", "exit_code": 0, "stray": 1},
        {"type": {}},
        {"type": "warning", "message": "used", "ext": {"usage": {"input_tokens": 3, "estimated_cost_usd": 0.25}}},
    ]
    return [{"t": "event", "ref_id": ref_id, "event": {"ts": TIME, **body}} for body in bodies]


async def serve(stdin: int, stdout: int) -> None:
    """A host that uses nothing of the package, so that only the control plane's own calls raise."""
    rest = b""

    def put(*messages: dict[str, Any] | bytes) -> None:
        lines = [message if isinstance(message, bytes) else json.dumps(message).encode() for message in messages]
        os.write(stdout, b"\n".join(lines) + b"\n")

    async def take() -> dict[str, Any]:
        nonlocal rest
        while b"\n" not in rest:
            await anyio.wait_readable(stdin)
            data = os.read(stdin, 65536)
            if not data:
                raise EOFError
            rest += data
        line, _, rest = rest.partition(b"\n")
        taken: dict[str, Any] = json.loads(line)
        return taken

    put(b"a banner", {
        "t": "hello", "contract_version": "abp/v0.1", "backend": {"id": "plain"},
        "capabilities": {"streaming": "native", "tool_use": "native"}, "extensions": ["ask/1", "cancel/1"],
    })  # fmt: skip
    try:
        run = await take()
        ref_id, order = run["id"], run["work_order"]
        Path(order["workspace"]["root"], "made.txt").write_text("made\n")  # noqa: ASYNC240
        put(*said(ref_id), {"t": "strange", "ref_id": ref_id})
        deploying = {"to": "prod"}  # The answer to the ask counts for the call with the same input.
        for number, (name, wanted) in enumerate((("deploy", deploying), ("peek", {}))):
            put({"t": "ask", "ref_id": ref_id, "id": f"a{number}", "kind": "tool", "name": name, "input": wanted})
            await take()
        call = {"type": "tool_call", "tool_name": "deploy", "input": deploying}
        result = {"type": "tool_result", "tool_name": "deploy", "output": "done", "is_error": False}
        changed = {"type": "file_changed", "path": "made.txt", "summary": "made"}
        put(*({"t": "event", "ref_id": ref_id, "event": {"ts": TIME, **body}} for body in (call, result, changed)))
        meta = {"run_id": ref_id, "work_order_id": order["id"], "contract_version": "abp/v0.1",
                "started_at": TIME, "finished_at": TIME, "duration_ms": 0}  # fmt: skip
        put({"t": "final", "ref_id": ref_id, "receipt": {
            "meta": meta, "backend": {"id": "plain"}, "capabilities": {}, "usage_raw": {}, "usage": {}, "trace": [],
            "artifacts": [], "verification": {"harness_ok": True}, "outcome": "complete",
        }})  # fmt: skip
        while True:
            await take()
    except (EOFError, BrokenPipeError):
        return


def work_order(root: Path) -> WorkOrder:
    return msgspec.structs.replace(
        WorkOrder("do it"),
        workspace=WorkspaceSpec(root=str(root)),
        lane="workspace_first",
        policy=PolicyProfile(deny_write=("*.key",), require_approval_for=("deploy",)),
        config=RuntimeConfig(env={"TOKEN": SECRET}),
    )


async def on_ask(_: object) -> Decision:
    return Decision(decision="allow")


def hook(call: HookCall) -> Decision | None:
    return None


class Seen(msgspec.Struct):
    """What became of one run."""

    run: Run | None = None
    records: list[bytes] = []
    error: BaseException | None = None
    """What came out of the block."""
    problems: tuple[str, ...] = ()


async def go(home: Path, root: Path, probe: Probe) -> Seen:
    """Run the order as a program that uses the API does."""
    seen = Seen(records=[])
    backend = MemoryBackend(id="plain", serve=serve)
    plane = ControlPlane(Settings(limits=QUICK, isolation="off"), home, {})
    order = work_order(root)
    pre = Hook("pre_tool", hook, tools=("deploy",))
    with probing(probe):
        try:
            with anyio.fail_after(20):
                async with plane, plane.start(order, backend, on_ask=on_ask, hooks=(pre,)) as seen.run:
                    async for batch in seen.run.batches():
                        seen.records += batch.records
        except BaseException as error:  # Judged by whoever looks.
            seen.error = error
    seen.problems = plane.state_folder.problems
    return seen


def faults_of(seen: Seen, home: Path, place: str) -> Iterator[str]:
    """What does not hold of a run in which something was raised."""
    run, error = seen.run, seen.error
    if BY_SQLITE in place and run is not None and run.error is not None:
        if run.error.code not in ("internal", "receipt_store_failed"):
            yield f"the error is {run.error!r}"
        yield from stored_faults(home, run.id)
        return
    if run is None:
        if not isinstance(error, BackplaneError) or error.code != "internal":
            yield f"start raises {error!r}"
        return
    its_own = isinstance(error, BackplaneError) and error.code == "internal"  # Of the control plane that is closed.
    if error is not None and not its_own:
        yield f"the block raises {error!r}"
    if not run.is_sealed:
        yield f"no receipt; {run.error!r}"
        return
    with Store.open(home, readonly=True) as store:
        rows = [row for row in store.scan() if row.run_id == run.id]
        if len(rows) != 1:
            yield f"{len(rows)} receipts"
            return
        if store.verify(run.id):
            yield f"the receipt does not verify: {store.verify(run.id)}"
        stored = store.load(run.id)
        kept = [canonical.encode(event) for event in stored.trace]
        if stored.receipt_sha256 != run.receipt.receipt_sha256:
            yield "another receipt is stored"
    read = closed.read(b"".join(run.receipt_chunks()))
    if kept != seen.records:
        yield f"{len(seen.records)} events were handed on, {len(kept)} are kept"
    if SECRET in str(read) or SECRET in str(run.error):
        yield "a secret is in it"
    if run.end_error is None and read["outcome"] == "complete":
        if not its_own and not any(WORDS in line for line in seen.problems):
            yield "the exception is told nowhere"
        return
    if run.end_error is None or run.end_error.code != "internal":
        yield f"the error is {run.error!r}"
    end = read["usage_raw"]["backplane"]["end"]
    if end != {"reason": "failed", "code": "internal"}:
        yield f"the end is {end}"
    if read["outcome"] == "complete" or read["verification"]["harness_ok"]:
        yield f"outcome {read['outcome']}, harness_ok {read['verification']['harness_ok']}"


def stored_faults(home: Path, run_id: str) -> Iterator[str]:
    """What does not hold of the one receipt there is in the end, by the next start at the latest."""
    with Store.open(home) as store:
        store.recover()
        rows = [row for row in store.scan() if row.run_id == run_id]
        if len(rows) != 1 or store.verify(run_id):
            yield f"{len(rows)} receipts"


# The cases ------------------------------------------------------------------------------------------------------------


def run_one(loop: str, folder: Path, probe: Probe) -> tuple[Seen, Path]:
    home, root = folder / "home", folder / "root"
    home.mkdir(parents=True)
    root.mkdir()
    (root / "there.txt").write_text("there\n")
    return anyio.run(go, home, root, probe, backend=loop), home


def noted_places(loop: str, folder: Path) -> list[str]:
    run_one(loop, folder / "warm", Probe())  # What is loaded once is no part of a run.
    noted = Probe()
    seen, _ = run_one(loop, folder / "noted", noted)
    assert seen.error is None
    assert seen.run is not None
    assert seen.run.end_error is None
    return list(noted.places)


def trial(loop: str, folder: Path, place: str) -> list[str] | None:
    """What does not hold where this place raises; None where the run did not come to it."""
    probe = Probe(place)
    seen, home = run_one(loop, folder, probe)
    return list(faults_of(seen, home, place)) if probe.raised else None


def forked(work: Callable[[], Any]) -> Any:
    """Do this in a process of its own: what an exception leaves behind there ends with it."""
    context = multiprocessing.get_context("fork")
    theirs, ours = context.Pipe()
    child = context.Process(target=lambda: ours.send(work()))
    child.start()
    ours.close()
    try:
        return theirs.recv() if theirs.poll(60) else ["hangs"]
    except EOFError:
        return ["the trial itself failed"]
    finally:
        child.kill()
        child.join()
        child.close()
        theirs.close()
        with suppress(ChildProcessError):  # What it had started and not waited for is ours now.
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def sample(places: list[str], size: int, start: int = 0) -> list[str]:
    """So many of them, from everywhere in the run."""
    tried = [place for place in places if place not in EDGES]
    step = max(1, len(tried) // size)
    return tried[start % step :: step]


def qualified(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """The names that the code objects of a file have."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield prefix + node.name
            yield from qualified(node, f"{prefix}{node.name}.<locals>.")
        else:
            yield from qualified(node, f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix)


def test_every_function_that_is_left_out_is_there() -> None:
    for file, name in {tuple(place.split(":")) for edge in EDGES for place in edge.split(" < ") if place != "…"}:
        assert name in qualified(ast.parse(Path(raising.PACKAGE + file).read_text(encoding="utf-8"))), file


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_an_exception_at_any_call_fails_the_run_with_internal(loop: str, tmp_path: Path, figure: Any) -> None:
    places = forked(lambda: noted_places(loop, tmp_path))
    bad: dict[str, list[str]] = {}
    tried = 0
    for number, place in enumerate(sample(places, sizes.of(60, 1 << 20), len(loop))):
        faults = forked(functools.partial(trial, loop, tmp_path / str(number), place))
        tried += faults is not None
        if faults:
            bad[place] = faults
    figure("raised", tried, door=loop)
    assert not bad
    assert tried > 10


# Through the command and through `serve` ------------------------------------------------------------------------------

HOST = (
    PRELUDE.format(hello=json.dumps(HELLO))
    + """
put(b"a banner\\n")
hello()
run = take()
open(run["work_order"]["workspace"]["root"] + "/made.txt", "w").write("made")
put(event(run, "one"), event(run, "two"), event(run, type={}), final(run))
end()
"""
)


def load_all() -> None:
    """Load all of the package that can be loaded: a fork then needs no time for it, and raises in no import."""
    for module in pkgutil.walk_packages(backplane.__path__, "backplane."):
        if not module.name.endswith("__main__"):
            with suppress(ImportError):  # Of an extra that is not here.
                importlib.import_module(module.name)


def command(folder: Path, place: str, words: list[str], stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Be the command in a fork of this process."""
    source, sink = os.pipe()
    os.write(sink, stdin)
    files = [os.open(folder / name, os.O_CREAT | os.O_RDWR) for name in ("out", "err")]
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            warnings.simplefilter("ignore")  # The suite makes errors of them.
            os.close(sink)
            for number, file in enumerate((source, *files)):
                os.dup2(file, number)
            sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "r" if not number else "w") for number in range(3))
            os.environ["BACKPLANE_HOME"] = str(folder / "home")
            os.chdir(folder)
            code = raising.main(str(folder / "noted"), place, words)
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)
    for file in (source, sink, *files):
        os.close(file)
    ends_at, ended = time.monotonic() + COMMAND_S, (0, 0)
    while ended[0] == 0:
        assert time.monotonic() < ends_at, "it hangs"
        time.sleep(REAP_POLL_S)
        ended = os.waitpid(child, os.WNOHANG)
    said = [(folder / name).read_bytes() for name in ("out", "err")]
    return subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(ended[1]), *said)


def run_words(folder: Path) -> tuple[list[str], bytes]:
    words = ["run", "do it", "--json", "--root", str(folder / "root"), "--lane", "workspace_first"]
    return [*words, "--env", f"TOKEN={SECRET}", "--sidecar", f"{sys.executable} -I -S {folder / 'host.py'}"], b""


def serve_words(folder: Path) -> tuple[list[str], bytes]:
    (folder / "backplane.toml").write_text(
        f'[backends.plain]\ncommand = ["{sys.executable}", "-I", "-S", "{folder / "host.py"}"]\n'
    )
    order = json.loads(msgspec.json.encode(work_order(folder / "root")))
    order["config"]["vendor"] = {"abp": {"backend": "plain"}}
    run = {"t": "run", "id": RUN_ID, "work_order": order, "extensions": ["stage/1"]}
    return ["--config", str(folder / "backplane.toml"), "serve"], json.dumps(run).encode() + b"\n"


def routed_words(folder: Path) -> tuple[list[str], bytes]:
    serve_words(folder)
    words, _ = run_words(folder)
    return ["--config", str(folder / "backplane.toml"), *words[: words.index("--sidecar")], "--prefer", "speed"], b""


def earlier(folder: Path) -> str:
    """The id of the run that was there before; of none where there is none yet."""
    return next(iter(sorted(path.name for path in (folder / "home" / "runs").glob("*-*"))), RUN_ID)


def child_words(folder: Path) -> tuple[list[str], bytes]:
    words, _ = run_words(folder)
    return [*words, "--max-budget-usd", "0.5", "--param", f'abp.parent="{earlier(folder)}"'], b""


def replay_words(folder: Path) -> tuple[list[str], bytes]:
    return ["run", "again", "--json", "--root", str(folder / "root"), "--backend", f"replay:{earlier(folder)}"], b""


DOORS = (run_words, serve_words, routed_words, child_words, replay_words)
CHILDREN = ("--param", "abp.children_budget_usd_micros=5000000")
AFTER_ONE = (child_words, replay_words)
"""These are about a run that was there before."""

RUN_ID = "0192f0c1-2345-7abc-8def-0123456789ab"


def messages(said: bytes) -> Iterator[dict[str, Any]]:
    for line in said.splitlines():
        with suppress(ValueError):  # Half a line is no message.
            yield json.loads(line)


def door_faults(done: subprocess.CompletedProcess[bytes], folder: Path, place: str, before: str = "") -> Iterator[str]:
    """What does not hold of a command in which something was raised at this place.

    Args:
        before: the run that was there before.
    """
    said = done.stdout + done.stderr
    if SECRET.encode() in said:
        yield "a secret is in it"
    if b"Traceback" in done.stderr and "host/" not in place:  # The kit prints one for its host's author.
        yield "a traceback"
    lines = list(messages(done.stdout))
    ends = [line for line in lines if line["t"] in ("final", "fatal") and line.get("ref_id")]
    begun = [path.name for path in (folder / "home" / "runs").glob("*-*") if path.name != before]
    if not begun:
        # One that was cancelled before it began has nothing to keep; it is told as failed.
        if ends and ends[0]["t"] == "final" and ends[0]["receipt"]["outcome"] != "failed":
            yield f"a final without a run, {list((folder / 'home').rglob('*'))}"
        return
    if BY_SQLITE in place:
        yield from stored_faults(folder / "home", begun[0])
        return
    with Store.open(folder / "home") as store:
        rows = [row for row in store.scan() if row.run_id != before]
        if len(rows) != 1 or store.verify(rows[0].run_id):
            yield f"{len(rows)} receipts"
            return
        receipt = store.load(rows[0].run_id)
    if len(ends) != 1:
        yield f"{len(ends)} last messages"
        return
    good = receipt.outcome == "complete"
    if good and (WORDS.encode() in said or ends[0]["t"] == "final"):
        return
    end, codes = receipt.backplane["end"], ["internal"]
    crashed = bool(before) and end["reason"] == "host_exit"
    if crashed:  # The host of a replay is in this process: what it raises is a host's end.
        codes += ["backend_crashed", "protocol_handshake_failed"]
    if end.get("code") not in codes or receipt.outcome == "complete":
        yield f"the end is {end}, outcome {receipt.outcome}"
    if receipt.verification.harness_ok and not crashed:
        yield f"the end is {end}, harness_ok {receipt.verification.harness_ok}"
    if ends[0]["t"] != "fatal" or ends[0]["error_code"] not in codes:
        yield f"the last message is {ends[0]['t']}"
    if ends[0].get("receipt", {}).get("receipt_sha256") != receipt.receipt_sha256:
        yield "its receipt is not the one that is kept"


def reap_trials() -> None:
    """Wait for trials of bubblewrap: not tied to who began them, they go to their own end, here below a subreaper."""
    with suppress(ChildProcessError):
        for _ in range(REAPS_MAX):
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(REAP_POLL_S)


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("door", DOORS)
def test_an_exception_at_any_call_is_one_fatal_with_its_receipt_at_every_door(
    door: Any, tmp_path: Path, figure: Any
) -> None:
    def go(name: str, place: str, door: Any = door) -> tuple[subprocess.CompletedProcess[bytes], Path]:
        folder = tmp_path / name
        (folder / "root").mkdir(parents=True)
        (folder / "host.py").write_text(HOST)
        if before:
            shutil.copytree(tmp_path / "before" / "home", folder / "home", symlinks=True)
        words, stdin = door(folder)
        return command(folder, place, words, stdin), folder

    load_all()
    before = ""
    if door in AFTER_ONE:
        done, folder = go("before", "-", lambda folder: ([*run_words(folder)[0], *CHILDREN], b""))
        before = earlier(folder)
    done, folder = go("noted", "-")
    assert done.returncode == 0, done.stderr
    places = (folder / "noted").read_text().splitlines()
    begins = next(number for number, place in enumerate(places) if "Run.__init__" in place)
    bad: dict[str, list[str]] = {}
    tried, wanted = 0, sizes.of(12, 400)
    for number, place in enumerate(sample(places[begins:], 3 * wanted)):
        if tried == wanted:
            break  # Not every place is passed again: which thread was first differs from run to run.
        done, folder = go(str(number), place)
        raised = (folder / "noted").exists() is False or (folder / "noted").read_text() == "True"
        # A generator was closed: nobody can raise there.
        raised = raised and not (b"Exception ignored in" in done.stderr and WORDS.encode() in done.stderr)
        tried += raised
        if raised and (faults := list(door_faults(done, folder, place, before))):
            bad[place] = [*faults, f"exit {done.returncode}", done.stderr.decode()[-300:]]
    figure("raised", tried, door=door.__name__)
    reap_trials()
    assert not bad
    assert tried > wanted // 3, done.stderr
