"""Orders in a queue: one receipt each whatever happens to their workers, and the same record as a local run's."""

from __future__ import annotations

import base64
import json
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio
import pytest
from msgspec.structs import replace

from backplane.cli import main
from backplane.contract.work import PolicyProfile, RuntimeConfig, WorkOrder, WorkspaceSpec
from backplane.errors import BackplaneError
from backplane.receipts.store import Store
from backplane.scale.content import ContentServer, ContentStore, open_contents
from backplane.scale.engine import Event, Job, OrderResult, Status, default_on_lost
from backplane.scale.orders import keep, make_job
from backplane.workspace import Quota
from backplane.workspace.pack import without_facts

pytest.importorskip("dbos")
from backplane.scale import ledger
from backplane.scale.durable import DurableEngine
from tests.queues import needs_queue
from tests.runs import HELLO, PRELUDE

LEASE_S = 4.0
QUOTA = Quota(bytes_max=1 << 20, files_max=100)
ROOT = Path(__file__).resolve().parent.parent


class Queue:
    """A queue in a folder of the test's own, with workers as real processes."""

    def __init__(self, folder: Path, url: str | None = None, lease_s: float = LEASE_S) -> None:
        self.folder = folder
        self.url = url or f"sqlite:///{folder / 'queue.sqlite'}"
        self.home = folder / "home"
        self.content = ContentStore(folder / "content")
        self.lease_s = lease_s
        self.engine = DurableEngine(self.url, lease_s=lease_s)
        self.workers: list[subprocess.Popen[bytes]] = []

    def command(self, *words: str) -> list[str]:
        shared = ["--engine", self.url]
        if words[0] != "queue" or words[1] == "show" or "--follow" in words:
            shared += ["--content", str(self.content.folder)]
        return [sys.executable, "-m", "backplane", *words, *shared]

    def env(self, home: Path, **more: str) -> dict[str, str]:
        return {**os.environ, "BACKPLANE_HOME": str(home), "PYTHONPATH": str(ROOT), **more}

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=self.env(self.home), cwd=self.folder, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip

    def worker(self, *words: str, **more: str) -> subprocess.Popen[bytes]:
        home, log = self.folder / f"worker{len(self.workers)}", self.folder / f"worker{len(self.workers)}.log"
        words = ("worker", "--lease", str(self.lease_s), "--poll", "0.2", *words)
        with log.open("wb") as file:
            started = subprocess.Popen(self.command(*words), env=self.env(home, **more), stdout=file, stderr=file)
        self.workers.append(started)
        return started

    def job(self, task: str, **given: object) -> Job:
        root = self.folder / "workspace"
        root.mkdir(exist_ok=True)
        (root / "calc.py").write_text("a - b\n")
        abp = {name: value for name, value in given.items() if value is not None}
        order = WorkOrder(task, workspace=WorkspaceSpec(root=str(root)), config=RuntimeConfig(vendor={"abp": abp}))
        return make_job(order, self.content, self.home, QUOTA, backend="shell")

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait(10)
        self.engine.close()


@contextmanager
def a_queue(folder: Path, url: str | None = None, lease_s: float = LEASE_S) -> Iterator[Queue]:
    if url is None:
        needs_queue()
    queue = Queue(folder, url, lease_s)
    try:
        yield queue
    finally:
        queue.close()


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Queue]:
    with a_queue(tmp_path) as opened:
        yield opened


async def followed(engine: DurableEngine, order_id: str) -> Sequence[Event]:
    return [event async for event in engine.events(order_id)]


def check_events(events: Sequence[Event], winner: str) -> None:
    """The winner's events are all there, once, in order, and last."""
    assert events[-1].attempt == winner
    for attempt in {event.attempt for event in events}:
        numbers = [event.seq for event in events if event.attempt == attempt]
        assert numbers == list(range(1, len(numbers) + 1))


def until(true: object, limit_s: float = 100.0) -> None:
    ends = time.monotonic() + limit_s
    while not true():  # type: ignore[operator]
        assert time.monotonic() < ends, "it did not come to pass"
        time.sleep(0.05)


# Without any process --------------------------------------------------------------------------------------------------


def test_only_a_closed_network_allows_another_attempt_by_itself() -> None:
    closed = PolicyProfile(deny_network=("*",))
    assert default_on_lost(WorkOrder("t")) == "fail"
    assert default_on_lost(WorkOrder("t", policy=closed)) == "rerun"
    assert default_on_lost(WorkOrder("t", policy=closed, workspace=WorkspaceSpec(mode="pass_through"))) == "fail"
    assert default_on_lost(WorkOrder("t", policy=closed).with_abp("mcp_servers", [{"name": "x"}])) == "fail"


@pytest.mark.parametrize(
    "config",
    [
        RuntimeConfig(env={"KEY": "hunter2-hunter2"}),
        RuntimeConfig(vendor={"abp": {"mcp_servers": [{"name": "m", "headers": {"Auth": "hunter2-hunter2"}}]}}),
        RuntimeConfig(vendor={"abp": {"secrets": ["not a name"]}}),
    ],
)
def test_values_of_secrets_never_go_into_the_queue(config: RuntimeConfig, tmp_path: Path) -> None:
    with pytest.raises(BackplaneError) as caught:
        make_job(WorkOrder("t", config=config), ContentStore(tmp_path / "c"), tmp_path / "h", QUOTA)
    assert caught.value.code == "config_invalid"
    assert "hunter2" not in f"{caught.value} {caught.value.hint}"


def test_a_content_that_was_changed_is_refused(tmp_path: Path) -> None:
    store = ContentStore(tmp_path / "c")
    name = store.put(iter((b"as it was",)))
    (store.folder / name).write_bytes(b"as it is")
    with pytest.raises(BackplaneError, match="is not what its name says"):
        store.fetch(name, tmp_path / "out")


class _Keeper(BaseHTTPRequestHandler):
    """A server of contents: it takes PUT, gives GET, and wants a token."""

    kept: dict[str, bytes]
    token: str | None = None

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self._may():
            self.kept[self.path] = body
            self._say(201)

    def do_GET(self) -> None:
        if self._may():
            self._say(200 if self.path in self.kept else 404, self.kept.get(self.path, b""))

    def _may(self) -> bool:
        may = self.token is None or self.headers["Authorization"] == f"Bearer {self.token}"
        if not may:
            self._say(401)
        return may

    def _say(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def a_content_server(token: str | None = None) -> Iterator[tuple[str, dict[str, bytes]]]:
    """A server of contents on loopback: its URL, and what it keeps by path."""
    kept: dict[str, bytes] = {}
    handler = type("Keeper", (_Keeper,), {"kept": kept, "token": token})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/contents", kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def test_contents_travel_by_a_server_bounded_and_checked(tmp_path: Path) -> None:
    with a_content_server("secret-of-the-server") as (url, kept):
        store = open_contents(f"{url}/", {"BACKPLANE_CONTENT_TOKEN": "secret-of-the-server"})
        name = store.put(iter((b"as it", b" was")))
        assert kept == {f"/contents/{name}": b"as it was"}
        store.fetch(name, tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == b"as it was"
        for bad, why in (
            (open_contents(url, {}), "answers 401"),
            (ContentServer(url, "secret-of-the-server", 3), "3 bytes"),
        ):
            with pytest.raises(BackplaneError, match=why):
                bad.fetch(name, tmp_path / why)
            with pytest.raises(BackplaneError, match=why):
                bad.put(iter((b"as it was",)))
        with pytest.raises(BackplaneError, match="answers 404"):
            store.fetch("0" * 64, tmp_path / "none")
        kept[f"/contents/{name}"] = b"as it is"
        with pytest.raises(BackplaneError, match="is not what its name says"):
            store.fetch(name, tmp_path / "changed")
        with pytest.raises(BackplaneError, match="is no name of a content"):
            store.fetch("../calc.py", tmp_path / "odd")
    with pytest.raises(BackplaneError, match="cannot be used for contents") as caught:
        store.put(iter((b"x",)))
    assert "secret-of-the-server" not in f"{caught.value} {caught.value.hint}"


def test_a_place_for_contents_is_a_folder_or_a_url_without_a_password(tmp_path: Path) -> None:
    store = open_contents((tmp_path / "a b").as_uri(), {})
    name = store.put(iter((b"x",)))
    assert (tmp_path / "a b" / name).read_bytes() == b"x"
    for bad in ("ftp://host/x", "file://host/x", "http:///x", "http://host/x?y", "http://[/x", "https://me:pw@host/x"):
        with pytest.raises(BackplaneError) as caught:
            open_contents(bad, {})
        assert caught.value.code == "config_invalid"
        assert caught.value.hint
        assert "pw" not in f"{caught.value} {caught.value.hint}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A queue's URL, for commands in this process; its folder is the present one."""
    needs_queue()
    monkeypatch.setenv("BACKPLANE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return f"sqlite:///{tmp_path / 'q.sqlite'}"


@pytest.mark.parametrize("action", ["list", "status", "limit", "prune", "show", "events", "cancel"])
def test_a_queue_that_is_not_there_is_not_made_by_who_looks(
    here: str, action: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    order = ["an-order"] if action in ("show", "events", "cancel") else []
    assert main(["queue", action, *order, "--engine", here]) == 2
    assert f"config_invalid: there is no queue at {tmp_path / 'q.sqlite'}" in capfd.readouterr().err
    for nameless in ("sqlite:///", ""):
        assert main(["queue", action, *order, "--engine", nameless]) == 2
        assert capfd.readouterr().err.startswith("config_invalid: ''" if not nameless else "config_invalid: 'sqlite")
    empty = action in ("list", "status")  # Of one's own queue nobody has to know whether it was made yet.
    assert main(["queue", action, *order]) == (0 if empty else 2)
    said = capfd.readouterr()
    assert ("no orders" in said.err or "waiting  0" in said.out) is empty
    assert (f"there is no queue at {tmp_path / 'home' / 'queue.sqlite'}" in said.err) is not empty
    assert not list(tmp_path.rglob("*.sqlite*"))


def test_a_new_queue_is_told_and_no_folder_is_made_for_it(
    here: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["submit", "true", "--engine", here]
    for wrong in (["--engine", f"sqlite:///{tmp_path}/typo/q.sqlite"], ["--content", str(tmp_path / "typo" / "c")]):
        assert main([*words, *wrong]) == 2
        assert f"there is no folder {tmp_path}/typo" in capfd.readouterr().err
    assert not (tmp_path / "typo").exists()
    assert not (tmp_path / "q.sqlite").exists()
    assert main(words) == 0
    assert capfd.readouterr().err == f"the queue {tmp_path / 'q.sqlite'} is new\n"
    assert main(words) == 0
    assert capfd.readouterr().err == ""
    assert main(["queue", "show", "x", "--engine", here, "--content", "typo"]) == 2
    assert "there is no folder typo" in capfd.readouterr().err


def test_a_label_chooses_what_is_listed_and_counted(here: str, capfd: pytest.CaptureFixture[str]) -> None:
    ids = {}
    for label in ("gpu", "other"):
        assert main(["submit", "true", "--engine", here, "--label", label]) == 0
        ids[label] = capfd.readouterr().out.strip()
    for label, counted in (("gpu", 1), ("none", 0)):
        assert main(["queue", "list", "--engine", here, "--label", label]) == 0
        assert [row.split()[0] for row in capfd.readouterr().out.splitlines()] == [ids["gpu"]] * counted
        assert main(["queue", "status", "--engine", here, "--label", label]) == 0
        assert f"waiting  {counted}" in capfd.readouterr().out
    assert main(["queue", "status", "--engine", here]) == 0
    assert "waiting  2" in capfd.readouterr().out


def test_a_budget_is_kept_and_shown_to_the_millionth(here: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "true", "--engine", here]) == 0
    for given, shown in (
        ("0.000001", "$0.000001"),
        ("50", "$50.00"),
        ("1234567.891", "$1234567.891"),
        ("off", "no limit"),
    ):
        capfd.readouterr()
        assert main(["queue", "limit", "--engine", here, "--budget-usd", given]) == 0
        assert capfd.readouterr().out.endswith(f"$0.00 spent, {shown if given == 'off' else 'of ' + shown}\n")


def test_a_limit_set_before_the_first_order_makes_the_queue_and_holds(
    here: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["queue", "limit", "--engine", here]) == 2
    assert "`queue limit` make a new one" in capfd.readouterr().err
    words = ["queue", "limit", "--engine", here, "--label", "gpu"]
    assert main([*words, "--budget-usd", "1.5", "--concurrency", "2", "--rate", "3/60"]) == 0
    assert main(["submit", "true", "--engine", here, "--label", "gpu"]) == 0
    capfd.readouterr()
    assert main(words) == 0
    found = capfd.readouterr().out
    assert ("concurrency  2" in found, "3 in 60 s" in found, "of $1.50" in found) == (True, True, True)


def test_an_order_submitted_again_later_is_the_same_one(
    here: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    for name in ("kept", "sub/kept"):
        (root / name).write_text(name)
    (root / "link").symlink_to("kept")
    order = {"id": "4a1f8f0e-9f0c-4f6e-8a55-0d8bb1c1a001", "task": "true", "workspace": {"root": "root"}}
    (tmp_path / "o.json").write_text(json.dumps(order))
    words = ["submit", "--engine", here, "--order", "o.json"]
    assert main(words) == 0
    time.sleep(1.1)  # An archive counts seconds.
    for name in ("kept", "sub/kept"):
        (root / name).touch()
    assert main(words) == 0, capfd.readouterr().err
    assert f"{order['id']} was submitted before" in capfd.readouterr().err
    (root / "kept").write_text("another")
    assert main(words) == 2
    assert "another order has the id" in capfd.readouterr().err


def test_git_takes_an_index_that_came_without_times(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout

    root, odd = tmp_path / "root", "a name with ü"
    root.mkdir()
    git("init", "-q")
    for name in ("x", odd, "seven77"):
        (root / name).write_text(name)
    git("add", ".")
    index = (root / ".git/index").read_bytes()
    (root / ".git/index").write_bytes(without_facts(index))
    assert git("ls-files", "-z").split("\0")[:-1] == sorted(("x", odd, "seven77"))
    assert git("diff", "--stat") == ""


def test_ignored_files_do_not_travel(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    for name, text in ((".gitignore", "*.key\n"), ("service.key", "hunter2-hunter2"), ("kept", "x")):
        (root / name).write_text(text)
    content = ContentStore(tmp_path / "c")
    job = make_job(WorkOrder("t", workspace=WorkspaceSpec(root=str(root))), content, tmp_path / "h", QUOTA)
    packed = (content.folder / str(job.tree)).read_bytes()
    assert b"hunter2" not in packed
    assert b"kept" in packed


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("worker", "--lease", "nan"), "--lease nan\n  1 to 3600"),
        (("worker", "--poll", "0"), "--poll 0\n  0.05 to 3600"),
        (("worker", "--slots", "0"), "--slots 0\n  1 to 1024"),
        (("queue", "prune", "--keep", "-1"), "--keep -1\n  0 to 10000"),
        (("queue", "list", "--limit", "0"), "--limit 0\n  1 to 10000"),
        (("queue", "events", "x", "--after", "-1"), "--after -1\n  0 or more"),
        (("queue", "limit", "--rate", "5/0.0005"), "--rate 0.0005\n  the smallest part of it is 0.001"),
        (("queue", "limit", "--budget-usd", "1e-7"), "--budget-usd 1e-7\n  the smallest part of it is 0.000001"),
        (("route", "x", "--max-cost-usd", "1e-7"), "--max-cost-usd 1e-07\n  the smallest part of it is 0.000001"),
        (("route", "x", "--max-latency", "0.0001"), "--max-latency 0.0001\n  the smallest part of it is 0.001"),
        (("queue", "limit", "--rate", "5"), "--rate 5\n  for example 10/60"),
        (("serve", "--engine", "sqlite:///x", "--label", "a b"), "'a b' is no label\n  letters, digits"),
        (("serve", "--engine", "sqlite:///x", "--priority", "0"), "the priority is 0\n  1 goes first"),
        (("submit", "x", "--content", "ftp://host/x"), "ftp://host is no place for contents\n  a folder, file:"),
    ],
)
def test_what_a_queue_cannot_do_is_refused_before_anything_is_opened(
    words: tuple[str, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("BACKPLANE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert main(list(words)) == 2
    code = "usage_invalid" if told.startswith("--") else "config_invalid"
    assert capfd.readouterr().err.startswith(f"{code}: {told}")
    assert not list(tmp_path.rglob("*.sqlite"))


# With workers ---------------------------------------------------------------------------------------------------------


def test_an_order_comes_back_verified_with_its_patch(queue: Queue) -> None:
    queue.worker("--slots", "2")
    done = queue.cli("submit", "sed -i 's/-/+/' calc.py", "--backend", "shell", "--root", ".", "--wait")
    assert done.returncode == 1, done  # There is no calc.py in this folder.
    queue.job("true")  # Makes the workspace.
    done = queue.cli("submit", "sed -i 's/-/+/' calc.py", "--backend", "shell", "--root", "workspace", "--wait")
    assert (done.returncode, done.stderr) == (0, "")
    order_id = done.stdout.split()[0]
    assert "complete\nrun " in queue.cli("queue", "show", order_id).stdout
    assert '"seq":1' in queue.cli("queue", "events", order_id, "--follow").stdout
    assert "done     2" in queue.cli("queue", "status").stdout
    shown = json.loads(queue.cli("queue", "show", order_id, "--json").stdout)
    assert (shown["order"]["state"], shown["holds"], shown["outcome"]) == ("done", None, "complete")
    assert f"run {shown['run_id']}  receipt {shown['receipt_sha256']}\n" in done.stdout
    (worker,) = json.loads(queue.cli("queue", "status", "--json").stdout)["workers"]
    assert worker["slots"] == 2
    with Store.open(queue.home) as store:
        row = next(row for row in store.list() if row.outcome == "complete")
        receipt = store.load(row.run_id)
        assert receipt.backplane["queue"] == {
            "attempt": 1, "lost": [], "on_lost_worker": "fail", "label": "default",
        }  # fmt: skip
        patch = store.patch(row)
        assert patch is not None
        assert b"+a + b" in patch.read_bytes()
        assert not store.verify_all().findings
    for told, root in ((done.stdout, queue.folder / "workspace"), (queue.cli("queue", "show", order_id).stdout, "DIR")):
        assert told.endswith(f"patch {patch}  (backplane apply {row.run_id[:8]} --root {root})\n")


def test_a_worker_without_the_secret_says_so_and_one_with_it_gives_it(queue: Queue) -> None:
    async def main() -> tuple[OrderResult, OrderResult]:
        poor, rich = queue.job('test -n "$KEY"', secrets=["KEY"]), queue.job('test "$KEY" = abcdefgh', secrets=["KEY"])
        await queue.engine.submit(poor)
        first = queue.worker()
        ended = await queue.engine.result(poor.order.id, timeout_s=100)
        first.send_signal(signal.SIGTERM)
        assert first.wait(20) == 0
        queue.worker(KEY="abcdefgh")
        await queue.engine.submit(rich)
        return ended, await queue.engine.result(rich.order.id, timeout_s=100)

    missing, given = anyio.run(main)
    assert "this worker does not have it" in str(missing.receipt)
    assert '"outcome":"complete"' in str(given.receipt)


def mock_worker(queue: Queue, name: str) -> None:
    """Start a worker that has the host `mock` as a backend of this name."""
    config = queue.folder / "worker.toml"
    command = [sys.executable, "-E", "-s", str(ROOT / "hosts" / "mock.py")]
    config.write_text(f"[backends.{name}]\ncommand = {json.dumps(command)}\n")
    queue.worker("--config", str(config))


def test_an_order_without_a_backend_gets_the_choice_of_its_workers_router(queue: Queue) -> None:
    mock_worker(queue, "thinks")
    route = ("--param", 'abp.route={"type":"simple_query","seed":3}')
    done = queue.cli("submit", "hello", "--root", ".", *route, "--wait")
    assert done.returncode == 0, done
    with Store.open(queue.home) as store:
        told = store.load(store.list()[0].run_id).backplane["route"]
    assert (told["chosen"]["backend"], told["seed"]) == ("thinks", 3)


@pytest.mark.parametrize("rule", ["rerun", "fail"])
def test_orders_of_a_killed_worker_are_taken_over_or_failed(queue: Queue, rule: str) -> None:
    async def main() -> None:
        job = queue.job("for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.25; done", on_lost_worker=rule)
        await queue.engine.submit(job)
        worker = queue.worker()
        with anyio.fail_after(100):
            while len((await queue.engine.status(job.order.id)).attempts) < 1:
                await anyio.sleep(0.1)
        await anyio.sleep(0.5)
        worker.kill()
        queue.worker()
        result = await queue.engine.result(job.order.id, timeout_s=100)
        assert len(result.attempts) == 2
        with Store.open(queue.home) as store:
            row = await anyio.to_thread.run_sync(keep, store, job.order.id, result, queue.content)
            receipt = store.load(row.run_id)
        assert receipt.backplane["queue"]["lost"] == [result.attempts[0]]
        if rule == "rerun":
            assert receipt.outcome == "complete"
            check_events(await followed(queue.engine, job.order.id), result.attempts[-1])
        else:
            assert receipt.outcome == "failed"
            assert receipt.backplane["error"]["code"] == "backend_crashed"
            assert "lost worker" in receipt.backplane["error"]["message"]

    anyio.run(main)


USES = """
hello()
run = take()
given = run["work_order"]["config"]["vendor"]["abp"]["budget_tokens"]
if run["work_order"]["task"] == "reports":
    usage = {"input_tokens": 29, "output_tokens": 1}
    body = {"ts": "2026-01-15T12:00:00Z", "type": "warning", "message": "usage", "ext": {"usage": usage}}
    put({"t": "event", "ref_id": run["id"], "event": body})
put(event(run, f"may use {given}"))
if given == 100:
    time.sleep(60)
put(final(run))
end()
"""


@pytest.mark.parametrize(("task", "found"), [("reports", "may use 70"), ("is silent", "policy_denied")])
def test_an_order_spends_its_budget_once_over_lost_workers(queue: Queue, task: str, found: str) -> None:
    (queue.folder / "uses.py").write_text(PRELUDE.format(hello=json.dumps(HELLO)) + USES)
    config = queue.folder / "worker.toml"
    config.write_text(f'[backends.uses]\ncommand = ["{sys.executable}", "{queue.folder / "uses.py"}"]\n')

    async def main() -> str:
        job = replace(queue.job(task, on_lost_worker="rerun", budget_tokens=100), backend="uses")
        await queue.engine.submit(job)
        worker = queue.worker("--config", str(config))
        with anyio.fail_after(100):
            while not (await queue.engine.status(job.order.id)).attempts or not await queue.engine.told(job.order.id):
                await anyio.sleep(0.1)
        worker.kill()
        queue.worker("--config", str(config))
        return str((await queue.engine.result(job.order.id, timeout_s=100)).receipt)

    assert found in anyio.run(main)


def test_a_stopped_worker_and_its_children_are_killed_before_others_take_over(queue: Queue) -> None:
    marks = queue.folder / "marks"
    line = f"for i in $(seq 60); do echo $$ $(date +%s%N) >> {marks}; sleep 0.1; done"

    async def main() -> None:
        job = queue.job(line, on_lost_worker="rerun", isolation="off")
        await queue.engine.submit(job)
        # The marks lie outside of the workspace, where a contained host could not write.
        worker = queue.worker(BACKPLANE_ISOLATION="off")
        await anyio.to_thread.run_sync(until, marks.exists)
        worker.send_signal(signal.SIGSTOP)
        queue.worker(BACKPLANE_ISOLATION="off")
        result = await queue.engine.result(job.order.id, timeout_s=100)
        assert worker.wait(5) == -signal.SIGKILL
        assert len(result.attempts) == 2

    anyio.run(main)
    lines = [row.split() for row in marks.read_text().splitlines()]
    first, second = lines[0][0], lines[-1][0]
    assert first != second
    # Not one line of the first attempt after the second has begun.
    assert max(int(when) for who, when in lines if who == first) < min(
        int(when) for who, when in lines if who == second
    )


def test_a_cancelled_order_has_a_cancelled_receipt(queue: Queue) -> None:
    async def main() -> None:
        running, waiting = queue.job("sleep 60"), queue.job("sleep 60")
        await queue.engine.submit(running)
        queue.worker()
        with anyio.fail_after(100):
            while (await queue.engine.status(running.order.id)).state != "running":
                await anyio.sleep(0.1)
        await queue.engine.submit(waiting)
        for job in (waiting, running):
            await queue.engine.cancel(job.order.id, "not needed")
        for job in (running, waiting):
            result = await queue.engine.result(job.order.id, timeout_s=100)
            assert '"cancel_reason":"not needed"' in str(result.receipt)

    anyio.run(main)


def test_a_pickled_row_is_never_read(queue: Queue) -> None:
    mark = queue.folder / "mark"

    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (mark,))

    async def main() -> None:
        planted, other = queue.job("true"), queue.job("true")
        await queue.engine.submit(planted)
        row = base64.b64encode(pickle.dumps(Evil())).decode()
        with closing(sqlite3.connect(queue.folder / "queue.sqlite")) as connection, connection:
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            for table in tables:
                columns = {column[1] for column in connection.execute(f"PRAGMA table_info({table})")}
                for column in {"inputs", "input"} & columns:
                    connection.execute(f"UPDATE {table} SET {column} = ?", (row,))
                if "serialization" in columns:
                    connection.execute(f"UPDATE {table} SET serialization = 'py_pickle'")
        await queue.engine.submit(other)
        queue.worker("--slots", "2")
        result = await queue.engine.result(other.order.id, timeout_s=100)
        assert '"outcome":"complete"' in str(result.receipt)

    anyio.run(main)
    assert not mark.exists()


def test_an_answer_or_a_cancel_without_an_object_is_refused(queue: Queue) -> None:
    mock_worker(queue, "acts")
    scenario = ("--param", 'mock.scenario=[{"ask":{"question":"which colour?"}}]')
    order_id = queue.cli("submit", "t", "-b", "acts", "--root", ".", *scenario, "--asks").stdout.strip()
    until(lambda: "which colour?" in str(anyio.run(queue.engine.told, order_id)))

    def refused(*words: str) -> str:
        done = queue.cli("queue", *words)
        assert (done.returncode, done.stdout) == (2, ""), done
        return done.stderr

    told = refused("answer", order_id, "ask-9", "allow")
    assert told.startswith("config_invalid: no open question has the id 'ask-9'\n  open questions: ")
    ask = told.split()[-1]
    assert "wants an answer in words\n  --text WORDS" in refused("answer", order_id, ask, "allow")
    shown = queue.cli("queue", "show", order_id).stdout
    assert "it waits for your answer: asks: which colour?" in shown
    assert f"backplane queue answer {order_id} {ask} allow --text WORDS" in shown
    done = queue.cli("queue", "answer", order_id, ask, "allow", "--text", "green")
    assert (done.returncode, done.stdout, done.stderr) == (0, "allow: asks: which colour?\n", "")
    until(lambda: anyio.run(queue.engine.status, order_id).state == "done")
    assert "is done and waits for no answer" in refused("answer", order_id, ask, "deny")
    assert f"order {order_id} has ended: it is done\n  backplane queue show {order_id}" in refused("cancel", order_id)
    waiting = queue.cli("submit", "true", "-b", "shell", "--root", ".", "--label", "other").stdout.strip()
    done = queue.cli("queue", "cancel", waiting)
    assert (done.returncode, done.stdout) == (0, "cancelled: it ends in order, with its receipt\n")
    shown = queue.cli("queue", "show", waiting).stdout
    assert "it was cancelled (cancelled), and ends once a worker takes it: no worker of the label other" in shown


def here_cli(queue: Queue, *words: str) -> subprocess.CompletedProcess[str]:
    """A command that knows nothing of the queue."""
    command, env = [sys.executable, "-m", "backplane", *words], queue.env(queue.home)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def a_follower(queue: Queue, order_id: str) -> subprocess.Popen[bytes]:
    command = queue.command("queue", "events", order_id, "--follow")
    queue.workers.append(subprocess.Popen(command, env=queue.env(queue.home), stdout=subprocess.DEVNULL))
    return queue.workers[-1]


def test_a_mirrored_run_is_answered_and_cancelled_like_one_of_this_machine(queue: Queue) -> None:
    mock_worker(queue, "acts")
    scenario = ("--param", 'mock.scenario=[{"ask":{"question":"which colour?"}},{"sleep_s":60}]')
    order_id = queue.cli("submit", "paint it", "-b", "acts", "--root", ".", *scenario, "--asks").stdout.strip()
    follower = a_follower(queue, order_id)
    until(lambda: "which colour?" in str(anyio.run(queue.engine.told, order_id)))
    until(lambda: "acts" in here_cli(queue, "runs", "list", "--live").stdout)
    until(lambda: here_cli(queue, "answer", "last", "nosuch", "allow").stderr.count("open questions: "))
    ask = here_cli(queue, "answer", "last", "nosuch", "allow").stderr.split()[-1]
    done = here_cli(queue, "answer", "last", ask, "allow", "--text", "green")
    assert (done.returncode, done.stdout, done.stderr) == (0, "allow: asks: which colour?\n", "")
    assert "nobody there stops a turn alone\n  backplane queue cancel " in here_cli(queue, "interrupt", "last").stderr
    until(lambda: "green" in str(anyio.run(queue.engine.told, order_id)))
    assert here_cli(queue, "cancel", "last", "--reason", "enough").returncode == 0
    assert follower.wait(60) == 0
    with Store.open(queue.home) as store:
        said = store.load(store.list()[0].run_id).backplane["cancel_reason"]
    assert str(said).startswith("enough (from process ")


def test_a_mirrored_run_whose_follower_was_killed_says_how_to_go_on(queue: Queue) -> None:
    mock_worker(queue, "acts")
    scenario = ("--param", 'mock.scenario=[{"ask":{"question":"which colour?"}}]')
    order_id = queue.cli("submit", "paint it", "-b", "acts", "--root", ".", *scenario, "--asks").stdout.strip()
    follower = a_follower(queue, order_id)
    until(lambda: "acts" in here_cli(queue, "runs", "list", "--live").stdout)
    follower.kill()
    follower.wait(10)
    step = f"backplane queue events {order_id} --follow"
    listed = here_cli(queue, "runs").stdout
    assert f"unfollowed   acts        {'?':>8}  paint it — nobody follows it here any more: {step}" in listed
    assert f"  next: {step} [--engine URL]\n" in here_cli(queue, "why", "last").stdout
    assert here_cli(queue, "watch", "last").stdout.endswith(f"unfollowed here: {step} [--engine URL]\n")
    refused = here_cli(queue, "answer", "last", "a-1", "allow")
    assert (refused.returncode, refused.stderr.splitlines()[1]) == (
        2,
        f"  backplane queue answer {order_id} a-1 allow [--engine URL]",
    )
    assert "the next run here removes the copy" in here_cli(queue, "receipts").stderr
    assert "which colour?" in queue.cli("queue", "show", order_id).stdout


def test_an_order_is_named_by_the_beginning_of_its_id(queue: Queue) -> None:
    first, second = (queue.cli("submit", "true", "--root", ".", "-b", "shell").stdout.strip() for _ in range(2))
    assert first in queue.cli("queue", "show", first[:8]).stdout
    assert queue.cli("queue", "cancel", second[:8]).returncode == 0
    for name, fact in (("zzzz", "the queue has no order"), (first[:3], "the queue has no order")):
        refused = queue.cli("queue", "show", name)
        assert (refused.returncode, fact in refused.stderr) == (2, True), refused
    for words in (("watch", first), ("cancel", first), ("answer", first, "ask-1", "allow")):
        assert "an order that waits in a queue: backplane queue list" in here_cli(queue, *words).stderr


def test_submit_refuses_what_no_run_would_begin_with(queue: Queue) -> None:
    (queue.folder / "order.json").write_text('{"task": "true", "policy": {"deny_write": ["[z"]}}')
    refused = queue.cli("submit", "--order", "order.json", "-b", "shell")
    assert (refused.returncode, refused.stderr.partition(":")[0]) == (4, "policy_invalid"), refused


def test_a_second_signal_ends_a_worker_with_that_signals_code(queue: Queue) -> None:
    order_id = queue.cli("submit", "sleep 60", "--root", ".", "-b", "shell").stdout.strip()
    worker = queue.worker()
    until(lambda: anyio.run(queue.engine.status, order_id).state == "running")
    worker.terminate()
    until(lambda: b"no more orders" in (queue.folder / "worker0.log").read_bytes())
    worker.terminate()
    assert worker.wait(30) == 128 + signal.SIGTERM


@pytest.mark.parametrize("named", [True, False])
def test_an_order_that_ended_before_its_host_began_is_a_run_with_its_task(queue: Queue, named: bool) -> None:
    backend = ["--backend", "shell"] if named else ["--require", "nosuch"]
    words = ["submit", "paint it", "--root", ".", *backend]
    order_id = queue.cli(*words).stdout.strip()
    if named:
        queue.cli("queue", "cancel", order_id)
    queue.worker()
    until(lambda: anyio.run(queue.engine.status, order_id).state == "done")
    shown = queue.cli("queue", "show", order_id)
    assert shown.returncode == (1 if named else 4), "as `run` would end"
    assert shown.stderr.partition(":")[0] == ("" if named else "capability_unsupported")
    run = json.loads(here_cli(queue, "runs", "show", order_id, "--json").stdout)
    assert (run["task"], run["root"], run["queued"]) == ("paint it", None, order_id)
    assert run["backend"] == ("shell" if named else "sidecar:none"), run


def test_a_worker_of_the_same_state_folder_takes_answers_at_the_door(queue: Queue) -> None:
    config = queue.folder / "worker.toml"
    command = [sys.executable, "-E", "-s", str(ROOT / "hosts" / "mock.py")]
    config.write_text(f"[backends.acts]\ncommand = {json.dumps(command)}\n")
    queue.worker("--config", str(config), BACKPLANE_HOME=str(queue.home))
    scenario = ("--param", 'mock.scenario=[{"ask":{"question":"which colour?"}}]')
    order_id = queue.cli("submit", "paint it", "-b", "acts", "--root", ".", *scenario, "--asks").stdout.strip()
    until(lambda: "which colour?" in str(anyio.run(queue.engine.told, order_id)))
    ask = here_cli(queue, "answer", "last", "nosuch", "allow").stderr.split()[-1]
    assert here_cli(queue, "answer", "last", ask, "allow", "--text", "green").stdout == "allow: asks: which colour?\n"
    until(lambda: anyio.run(queue.engine.status, order_id).state == "done")


def test_a_worker_logs_what_it_takes_and_how_it_ended_and_so_does_the_list(queue: Queue) -> None:
    words = ("--root", ".", "-b", "shell")
    good, bad = (queue.cli("submit", task, *words).stdout.strip() for task in ("true", "exit 3"))
    worker = queue.worker()
    until(lambda: all(anyio.run(queue.engine.status, one).state == "done" for one in (good, bad)))
    worker.terminate()
    assert worker.wait(30) == 0
    lines = (queue.folder / "worker0.log").read_text().splitlines()
    assert lines[0] == "takes orders of the label default, 1 slot; a signal ends it in order"
    listed = queue.cli("queue", "list").stdout
    assert f"{good}  complete " in listed
    assert f"{bad}  failed " in listed, "and not `done` alone"
    for order_id, end in ((good, "complete"), (bad, "failed (execution_tool_failed)")):
        begins, ended = (line.partition("Z  ") for line in lines if order_id in line)
        assert abs(time.time() - datetime.fromisoformat(begins[0] + "+00:00").timestamp()) < 300
        assert begins[2].startswith(f"{order_id}  begins, attempt 1: run ")
        assert ended[2] == f"{order_id}  {end}"


def test_a_result_that_cannot_be_kept_yet_is_tried_again(queue: Queue) -> None:
    job = queue.job("head -c 1500000 /dev/urandom | base64 > big; sleep 8")
    order_id = job.order.id
    assert anyio.run(queue.engine.submit, job)
    queue.worker()
    log = queue.folder / "worker0.log"
    until(lambda: len(anyio.run(queue.engine.told, order_id)) > 0)
    queue.content.folder.rename(queue.folder / "away")
    queue.content.folder.touch()
    until(lambda: log.exists() and "its result cannot be kept, and is tried again" in log.read_text(), 60)
    assert anyio.run(queue.engine.status, order_id).state == "running"
    shown = queue.cli("queue", "status").stdout
    assert shown.rstrip().endswith(f"runs {order_id[:8]}")
    told = json.loads(queue.cli("queue", "status", "--json").stdout)
    assert [one["orders"] for one in told["workers"]] == [[order_id]]
    assert f"{order_id}  complete" not in log.read_text()
    queue.content.folder.unlink()
    (queue.folder / "away").rename(queue.content.folder)
    until(lambda: anyio.run(queue.engine.status, order_id).state == "done")
    until(lambda: f"{order_id}  complete" in log.read_text())


def test_a_worker_says_that_its_database_was_away(tmp_path: Path) -> None:
    needs_queue()
    said: list[str] = []

    def change(old: str, new: str) -> None:
        with closing(sqlite3.connect(tmp_path / "q.sqlite")) as connection, connection:
            connection.execute(f"ALTER TABLE {old} RENAME TO {new}")

    async def main() -> None:
        engine = DurableEngine(f"sqlite:///{tmp_path / 'q.sqlite'}", beat_s=0.1)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(engine.serve, _nothing, slots=1, say=said.append))
            with anyio.fail_after(60):
                while not await engine.workers():
                    await anyio.sleep(0.1)
                for place, (old, new) in enumerate((("backplane_worker", "gone"), ("gone", "backplane_worker"))):
                    await anyio.to_thread.run_sync(change, old, new)
                    while len(said) <= place:
                        await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()

    anyio.run(main)
    assert said[0].startswith("the database cannot be reached: no such table")
    assert said[1].startswith("the database is back after ")


@pytest.mark.parametrize(
    ("ahead_ms", "said"),
    [(11_430_000, "3 h 10 min behind"), (-7_830_000, "2 h 10 min ahead of"), (30_000, ""), (0, "")],
)
def test_clocks_that_differ_are_named(
    here: str, ahead_ms: int, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["submit", "true", "--engine", here]) == 0
    clock = ledger._CLOCKS["sqlite"]
    monkeypatch.setitem(ledger._CLOCKS, "sqlite", f"({clock} + {ahead_ms})")
    capfd.readouterr()
    assert main(["queue", "status", "--engine", here]) == 0
    shown = capfd.readouterr().err
    assert (f"this machine's clock is {said} the database's" in shown) if said else not shown


@pytest.mark.parametrize("ahead_s", [0, 7_830, -7_830])
def test_ages_are_by_the_database_s_clock(here: str, ahead_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = DurableEngine(here)

    async def aged() -> tuple[Status, Status]:
        ids = [Job(WorkOrder(task), "rerun") for task in ("ends", "waits")]
        for job in ids:
            await engine.submit(job)
        with closing(sqlite3.connect(here.removeprefix("sqlite:///"))) as connection, connection:
            connection.execute("UPDATE workflow_status SET created_at = created_at - 3600000")
            connection.execute(
                "UPDATE workflow_status SET status = 'ERROR', completed_at = created_at + 1800000 "
                "WHERE workflow_uuid = ?", [ids[0].order.id],
            )  # fmt: skip
        true_time, true_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: true_time() + ahead_s)
        monkeypatch.setattr(time, "time_ns", lambda: true_ns() + ahead_s * 10**9)
        return await engine.status(ids[0].order.id), await engine.status(ids[1].order.id)

    ended, waits = anyio.run(aged)
    depths = engine.depths()
    engine.close()
    assert waits.waiting_ms // 60_000 == 60
    assert (ended.waiting_ms // 60_000, (ended.ended_ms_ago or 0) // 60_000) == (60, 30)
    assert depths.keys() == {"default"}
    assert (depths["default"][0], depths["default"][1] // 60_000) == (1, 60)


async def _nothing(*_: object) -> OrderResult:
    raise AssertionError


def test_many_orders_are_submitted_at_once(here: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [{"task": f"echo {number}", "id": f"4a1f8f0e-9f0c-4f6e-8a55-0d8bb1c1a00{number}"} for number in range(3)]
    (tmp_path / "orders").write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    words = ["submit", "--engine", here, "--root", str(tmp_path / "root"), "--label", "gpu", "--jsonl"]
    (tmp_path / "root").mkdir()
    assert main([*words, str(tmp_path / "orders")]) == 0
    assert capfd.readouterr().out.split() == [one["id"] for one in lines]
    assert main(["queue", "list", "--engine", here, "--json"]) == 0
    listed = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [one["label"] for one in listed] == ["gpu"] * 3
    (tmp_path / "orders").write_text('{"task": "a"}\n{"task": 1}\n')
    assert main([*words, str(tmp_path / "orders")]) == 2
    assert "line 2" in capfd.readouterr().err
    assert main(["queue", "status", "--engine", here]) == 0
    assert "waiting  3" in capfd.readouterr().out, "none of them, where one cannot be read"
    for wrong in (["a task"], ["--wait"], ["--order", "o.json"]):
        assert main([*words, "orders", *wrong]) == 2


def test_a_worker_without_its_database_takes_nothing(tmp_path: Path) -> None:
    needs_queue()
    (tmp_path / "q.sqlite").write_bytes(b"no database" * 100)
    with a_queue(tmp_path, f"sqlite:///{tmp_path / 'q.sqlite'}") as queue:
        assert queue.worker().wait(30) == 1
        log = (queue.folder / "worker0.log").read_text()
    assert log.startswith("receipt_store_failed: the queue's database cannot be used"), log


def test_an_age_is_told_in_units_that_people_read(queue: Queue) -> None:
    queue.cli("submit", "true", "--root", ".", "-b", "shell")
    with closing(sqlite3.connect(queue.folder / "queue.sqlite")) as connection, connection:
        connection.execute("UPDATE workflow_status SET created_at = created_at - 7800000")
    assert "  2 h 10 min" in queue.cli("queue", "list").stdout
    assert "oldest 2 h 10 min" in queue.cli("queue", "status").stdout


@pytest.mark.parametrize("follows", ["submit", "events"])
def test_who_follows_an_order_hears_what_it_waits_for_and_how_it_goes_on(queue: Queue, follows: str) -> None:
    words = ["submit", "true", "--root", ".", "-b", "shell", "--label", "gpuu"]
    words = (
        [*words, "--wait"] if follows == "submit" else ["queue", "events", "--follow", queue.cli(*words).stdout[:36]]
    )
    log = queue.folder / "follower.log"
    with log.open("wb") as file:
        command, env = queue.command(*words), queue.env(queue.home)
        follower = subprocess.Popen(command, env=env, cwd=queue.folder, stdout=file, stderr=file)
    try:
        until(lambda: "no worker of the label gpuu is there: backplane worker --label gpuu\n" in log.read_text())
        follower.send_signal(signal.SIGINT)
        assert follower.wait(30) == 128 + signal.SIGINT
    finally:
        follower.kill()
        follower.wait(10)
    assert log.read_text().count("it waits in the queue until a worker takes it") == 1
    assert "\nthe order goes on: backplane queue show " in log.read_text()


def test_an_order_whose_worker_is_dead_says_so(queue: Queue) -> None:
    worker = queue.worker()
    order_id = queue.cli("submit", "sleep 60", "-b", "shell", "--root", ".").stdout.strip()
    until(lambda: anyio.run(queue.engine.status, order_id).state == "running")
    worker.kill()
    worker.wait(10)
    with closing(sqlite3.connect(queue.folder / "queue.sqlite")) as connection, connection:
        connection.execute("UPDATE backplane_worker SET beat_ms = beat_ms - 3600000")
    told = queue.cli("queue", "show", order_id).stdout
    assert "its worker is dead: " in told
    assert "(its lease is 20 s); no other is there: backplane worker --label default" in told
    command = [sys.executable, "-m", "backplane", "why", order_id, "--engine", queue.url]
    env = queue.env(queue.home)
    told = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "its worker is dead" in told
